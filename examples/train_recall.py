"""Trains a small language model of Gated DeltaNet and KDA layers to recall associations, on the CPU in about two
minutes, then generates with its recurrent state.

A sequence shows pairs of a key and a value, then asks for keys in random order; the model has to answer each with its
value. The keys are drawn anew for every sequence, so the answers can only come from the layers' state.

    python examples/train_recall.py [--seconds 120] [--output recall.png]

Needs PyTorch, matplotlib and tqdm.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import fastweight
from fastweight.layers import Cache, GatedDeltaNet, KimiDeltaAttention

KEYS, VALUES, PAIRS = 64, 64, 16
VOCABULARY = KEYS + VALUES


def draw(batch: int, generator: torch.Generator, pairs: int = PAIRS) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[batch, 4 * pairs]`: the pairs, then every key followed by its value; and which of them are answers."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(-1)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(-1)
    shown = torch.stack([keys, values], -1).flatten(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
    answers = torch.zeros(4 * pairs, dtype=torch.bool)
    answers[2 * pairs + 1 :: 2] = True
    return torch.cat([shown, asked], 1), answers


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        x = x + self.mixer(self.norms[0](x), past_key_values=cache)[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        options = {"hidden_size": width, "head_dim": 32, "num_heads": 2, "expand_v": 1}
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            [
                Block(GatedDeltaNet(**options, layer_idx=0), width),
                Block(KimiDeltaAttention(**options, layer_idx=1), width),
            ]
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))


def train(model: Model, seconds: float) -> list[tuple[float, float]]:
    """(loss, recall) of every step. Sequences have 4, 8 or 16 pairs in turn, for the short ones are learned first; then
    all have 16."""
    generator = torch.Generator().manual_seed(0)
    rate = 4e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    history = []
    begin = last = time.perf_counter()
    shape = "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}"
    interval = 0.1 if sys.stderr.isatty() else 10  # a log is not a terminal
    with tqdm(total=round(seconds), unit="s", bar_format=shape, mininterval=interval) as bar:
        while last - begin < seconds:
            knows_short_ones = len(history) > 30 and sum(r for _, r in history[-30:]) > 0.9 * 30
            pairs = PAIRS if knows_short_ones else PAIRS >> (2 - len(history) % 3)
            tokens, answers = draw(16 * PAIRS // pairs, generator, pairs)
            logits = model(tokens[:, :-1])[:, answers[1:]]
            wanted = tokens[:, answers]
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = rate * (1 - 0.9 * (last - begin) / seconds)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recall = (logits.argmax(-1) == wanted).float().mean()
            history.append((loss.item(), recall.item()))
            now = time.perf_counter()
            bar.set_postfix_str(f"step {len(history)}, loss {loss:.3f}, recall {recall:.0%}", refresh=False)
            bar.update(min(now - last, seconds - (last - begin)))
            last = now
            if len(history) >= 50 and min(r for _, r in history[-50:]) > 0.995:
                break
    return history


@torch.no_grad()
def recall_on_new_sequences(model: Model) -> float:
    tokens, answers = draw(500, torch.Generator().manual_seed(1))
    answered = model(tokens[:, :-1]).argmax(-1)[:, answers[1:]]
    return float((answered == tokens[:, answers]).float().mean())


@torch.no_grad()
def answer(model: Model) -> None:
    """Shows one sequence to the model and asks it token by token, with nothing but the state of the layers."""
    tokens, _ = draw(1, torch.Generator().manual_seed(2))
    shown, asked = tokens[:, : 2 * PAIRS], tokens[0, 2 * PAIRS :].view(PAIRS, 2)
    cache = Cache()
    model(shown, cache)
    right = 0
    for key, value in asked.tolist():
        found = int(model(torch.tensor([[key]]), cache)[0, -1].argmax())
        model(torch.tensor([[found]]), cache)
        right += found == value
    print(f"asked {PAIRS} keys of a new sequence one by one, from the recurrent state alone: {right} right")


@torch.no_grad()
def tokens_per_second(model, seconds: float, cache_of, step) -> float:
    """Greedy generation of 8 sequences at once."""
    cache = cache_of()
    token = step(model, torch.arange(1, 65).expand(8, -1), cache)
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        token = step(model, token, cache)
        count += token.numel()
    return count / elapsed


def compare_generation(model: Model) -> None:
    """Our layers, and a model of transformers with and without `fastweight.accelerate()`."""
    speed = tokens_per_second(model, 2, Cache, lambda m, t, c: m(t, c)[:, -1:].argmax(-1))
    print(f"generating 8 sequences with this model: {speed:,.0f} tokens/s")
    try:
        from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM, logging
    except ImportError:
        print("transformers is not installed: no comparison with its PyTorch code")
        return
    logging.set_verbosity_error()
    config = Qwen3NextConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=8, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, num_experts=0, mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    qwen = Qwen3NextForCausalLM(config).eval()

    def step(m, token, cache):
        return m(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    def prefill(m):
        tokens = torch.randint(1024, (1, 1024))
        begin = time.perf_counter()
        with torch.no_grad():
            m(input_ids=tokens, use_cache=False)
        return 1024 / (time.perf_counter() - begin)

    rows = []
    for accelerated in (False, True):
        if accelerated:
            fastweight.accelerate()
        prefill(qwen)  # warm up
        speed = max(prefill(qwen) for _ in range(3))
        rows.append((speed, tokens_per_second(qwen, 3, lambda: DynamicCache(config=config), step)))
    fastweight.restore()
    print("transformers' Qwen3-Next (4 layers, hidden 512, random weights), tokens/s:")
    print(f"{'':25}{'reading 1 sequence':>20}{'generating 8':>15}")
    for name, (reading, generating) in zip(("PyTorch fallback", "fastweight.accelerate()"), rows, strict=True):
        print(f"  {name:23}{reading:20,.0f}{generating:15,.0f}")


def plot(history: list[tuple[float, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = min(30, len(history))  # of the moving average
    smooth = [[sum(v[i : i + window]) / window for i in range(len(v) - window + 1)] for v in zip(*history, strict=True)]
    losses, recalls = smooth
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(losses, color="tab:blue", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color="tab:blue")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.plot([100 * r for r in recalls], color="tab:orange", linewidth=1.2)
    right.set_ylabel("recall, %", color="tab:orange")
    right.set_ylim(0, 102)
    axes.set_title(f"Recall of up to {PAIRS} pairs: Gated DeltaNet and KDA")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"loss and recall: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="train at most this long (default: 120)")
    parser.add_argument("--output", default="recall.png", help="where the plot goes (default: recall.png)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    print(f"a model of {sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads")
    history = train(model, arguments.seconds)
    model.eval()
    print(f"recall on new sequences: {recall_on_new_sequences(model):.1%} (guessing: {1 / VALUES:.1%})")
    answer(model)
    plot(history, arguments.output)
    compare_generation(model)


if __name__ == "__main__":
    main()
