"""Trains a language model of Gated DeltaNet, KDA and attention layers on one GPU, or a tiny one on the CPU.

    python examples/train_lm.py                        # 27 million parameters, 300 steps of 32768 tokens, bf16
    python examples/train_lm.py --device cpu --steps 3
    python examples/train_lm.py --text FILE            # on the bytes of a file of yours

Without a file the text is made up, from a seed: stories of people who walk between places, pick things up and put them
down, with questions in between. Which words go together is grammar; who has what is drawn anew in every story, so that
the answers can only come from what the model remembers of it. After the training it answers questions of new stories.

    python examples/train_lm.py --compare fla [--fla FOLDER] [--fla-unchecked] --json FILE

trains the same model a second time, from the same seed and on the same text, with flash-linear-attention's
`chunk_gated_delta_rule` and `chunk_kda` in place of ours, each in a process of its own. `bench/training.py` draws the
curves and writes the table. On Hopper with Triton 3.4 to 3.7.0 flash-linear-attention refuses its backward of GDN,
because that compiler makes wrong code of it; `--fla-unchecked` removes the check and runs it all the same.

Needs PyTorch alone.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastweight
from fastweight.layers import GatedDeltaNet, KimiDeltaAttention

# The text -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Text:
    tokens: Tensor
    words: list[str]  # what the tokens stand for
    separator: str  # between two words


class Stories:
    """Stories of a small world, as words. Its people, places and things, and which places are next to each other, are
    the same in all stories; who is where and what colour a thing has is not."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        names = [a + b for a in "ba de fi go hu ka le mi no pu".split() for b in "ra ste vi lo nu me".split()]
        self.draw.shuffle(names)
        self.people, self.places, self.things = names[:20], names[20:36], names[36:]
        self.colours = "red green blue white black yellow grey brown".split()
        self.next_to = {place: self.draw.sample(self.places, 3) for place in self.places}

    def words(self) -> list[str]:
        grammar = "<story> is in the walks to takes puts down where who has what colour nobody ? .".split()
        return grammar + self.people + self.places + self.things + self.colours

    def story(self) -> list[str]:
        draw = self.draw
        place = {person: draw.choice(self.places) for person in draw.sample(self.people, 4)}
        things = draw.sample(self.things, 5)
        colour = {thing: draw.choice(self.colours) for thing in things}
        owner: dict[str, str | None] = dict.fromkeys(things)
        told = ["<story>"]
        for person in place:
            told += [person, "is", "in", place[person], "."]
        for thing in things:
            told += ["the", thing, "is", colour[thing], "."]
        for _ in range(30):
            person, thing = draw.choice(list(place)), draw.choice(things)
            kind = draw.randrange(6)
            if kind == 0:
                place[person] = draw.choice(self.next_to[place[person]])
                told += [person, "walks", "to", place[person], "."]
            elif kind == 1 and owner[thing] is None:
                owner[thing] = person
                told += [person, "takes", "the", colour[thing], thing, "."]
            elif kind == 2 and owner[thing] is not None:
                told += [owner[thing], "puts", "down", "the", thing, "."]
                owner[thing] = None
            elif kind == 3:
                told += ["where", "is", person, "?", place[person], "."]
            elif kind == 4:
                told += ["who", "has", "the", thing, "?", owner[thing] or "nobody", "."]
            else:
                told += ["what", "colour", "has", "the", thing, "?", colour[thing], "."]
        return told

    def text(self, count: int) -> Text:
        words = self.words()
        number = {word: i for i, word in enumerate(words)}
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += [number[word] for word in self.story()]
        return Text(torch.tensor(tokens[:count]), words, " ")


def read_file(path: pathlib.Path) -> Text:
    """A file by bytes."""
    return Text(torch.tensor(list(path.read_bytes())), [chr(i) for i in range(256)], "")


# The model ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sizes:
    width: int
    heads: int
    blocks: int  # of mixer and MLP; a multiple of 4
    batch: int
    length: int


SIZES = {"cuda": Sizes(width=512, heads=4, blocks=8, batch=16, length=2048), "cpu": Sizes(64, 2, 4, 2, 128)}


class Attention(nn.Module):
    """Softmax attention. It needs no positions: the layers before it know the order of the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [B, T, H, D] each
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


def mixer(index: int, sizes: Sizes) -> nn.Module:
    """Of four blocks two have a gated delta rule, one has KDA and one attention."""
    options = {"hidden_size": sizes.width, "head_dim": sizes.width // sizes.heads, "num_heads": sizes.heads}
    if index % 4 == 3:
        return Attention(sizes.width, sizes.heads)
    if index % 4 == 1:
        return KimiDeltaAttention(**options, safe_gate=True, lower_bound=-5.0)
    return GatedDeltaNet(**options, expand_v=1)


class Block(nn.Module):
    def __init__(self, index: int, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.width * 11 // 4
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mixer = mixer(index, sizes)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer(self.norms[0](x))
        x = x + (y[0] if isinstance(y, tuple) else y)  # our layers also return a cache
        a, b = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Model(nn.Module):
    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(index, sizes) for index in range(sizes.blocks))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Training -------------------------------------------------------------------------------------------------------------

RATE, WARM_UP, WEIGHT_DECAY = 1e-3, 20, 0.1


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices, none for norms, gates and biases."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)


def rate(step: int, steps: int) -> float:
    """A linear rise, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    return RATE * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1)))


def batches(text: Text, sizes: Sizes, steps: int, seed: int, device: str):
    """[batch, length + 1] tokens from random places of the text, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(sizes.length + 1)
    for _ in range(steps):
        starts = torch.randint(len(text.tokens) - sizes.length, (sizes.batch, 1), generator=generator)
        yield text.tokens[starts + offsets].to(device, non_blocking=True)


class Bar:
    """A line on the terminal that is written over and over; in a log, a line every 50 steps."""

    WIDTH = 30

    def __init__(self, total: int) -> None:
        self.total, self.live = total, sys.stderr.isatty()

    def show(self, done: int, message: str) -> None:
        if not self.live and done % 50 and done != self.total:
            return
        full = self.WIDTH * done // self.total
        bar = "#" * full + "." * (self.WIDTH - full)
        print(f"\r[{bar}] {done}/{self.total}  {message}", end="" if self.live else "\n", file=sys.stderr, flush=True)
        if self.live and done == self.total:
            print(file=sys.stderr)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def autocast(device: str):
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def train(model: nn.Module, text: Text, sizes: Sizes, steps: int, seed: int, device: str) -> dict:
    """Losses, tokens per second, seconds of the first step, and the most memory that was in use."""
    optimizer = optimizer_of(model)
    bar, losses, speeds = Bar(steps), [], []
    interval = 10  # steps between two looks at the clock, for which the device has to be done
    synchronize(device)
    begin = last = time.perf_counter()
    first_step = math.nan
    for step, tokens in enumerate(batches(text, sizes, steps, seed, device)):
        with autocast(device):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        done = step + 1
        if done == 1 or done % interval == 0 or done == steps:
            message = f"loss {losses[-1].item():.3f}"  # waits
            now = time.perf_counter()
            if done == 1:
                first_step = now - begin
            elif done % interval == 0 and done > interval:
                speeds.append(interval * sizes.batch * sizes.length / (now - last))
                message += f", {speeds[-1]:,.0f} tokens/s"
            last = now
            bar.show(done, message)
    return {
        "losses": [round(float(x), 6) for x in losses],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "first_step_seconds": first_step,
        "total_seconds": time.perf_counter() - begin,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


@torch.no_grad()
def answers(model: nn.Module, seed: int, sizes: Sizes, words: list[str], device: str) -> tuple[int, int]:
    """Questions of stories that were not in the text: how many answers are right, of how many."""
    stories = Stories(seed)  # the same world,
    stories.draw.seed(seed + 1)  # other stories
    tokens = stories.text(sizes.batch * sizes.length).tokens.view(sizes.batch, sizes.length).to(device)
    with autocast(device):
        expected = model(tokens[:, :-1]).argmax(-1)
    asked = tokens[:, :-1] == words.index("?")
    right = (expected == tokens[:, 1:])[asked]
    return int(right.sum()), right.numel()


# flash-linear-attention's operators in place of ours ----------------------------------------------------------------


def use_fla(folder: pathlib.Path | None, unchecked: bool) -> str:
    """Puts its two functions where our layers look for theirs, and returns its version."""
    if folder:
        sys.path.insert(0, str(folder))
    gdn = importlib.import_module("fla.ops.gated_delta_rule")
    kda = importlib.import_module("fla.ops.kda")
    fastweight.ops.chunk_gated_delta_rule = gdn.chunk_gated_delta_rule
    fastweight.ops.chunk_kda = kda.chunk_kda
    if unchecked:
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return importlib.import_module("fla").__version__


def fla_refuses(error: RuntimeError) -> bool:
    return "produces incorrect results" in str(error)


def run(arguments: argparse.Namespace) -> dict:
    """One training, with the operators that were asked for."""
    device, sizes, steps, seed = arguments.device, arguments.sizes, arguments.steps, arguments.seed
    version, warm = fastweight.info()["version"], False
    if arguments.operators == "fla":
        cache = pathlib.Path(os.environ.get("TRITON_CACHE_DIR", pathlib.Path.home() / ".triton" / "cache"))
        warm = cache.is_dir() and any(cache.iterdir())
        version = use_fla(arguments.fla, arguments.fla_unchecked)
    if arguments.text:
        text = read_file(arguments.text)
    else:
        text = Stories(seed).text(min(steps * sizes.batch * sizes.length, 4_000_000) + sizes.length + 1)
    torch.manual_seed(seed)
    model = Model(len(text.words), sizes).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {sizes}, {len(text.tokens):,} tokens of text, {arguments.operators} {version}")
    compiled = torch.compile(model, fullgraph=True) if arguments.compile else model
    try:
        result = train(compiled, text, sizes, steps, seed, device)
    except RuntimeError as error:
        if arguments.operators == "fla" and fla_refuses(error):
            sys.exit(
                f"flash-linear-attention: {error}\n--fla-unchecked removes this check; its gradients may be wrong."
            )
        raise
    speed = result["tokens_per_second"]
    print(
        f"loss {result['losses'][-1]:.4f}, first step {result['first_step_seconds']:.2f} s"
        + (f", {speed:,.0f} tokens/s" if speed else "")
        + (f", peak memory {result['peak_memory_bytes'] / 2**30:.2f} GiB" if device == "cuda" else "")
    )
    if not arguments.text:
        right, asked = answers(model, seed, sizes, text.words, device)
        result |= {"answers_right": right, "answers_asked": asked}
        print(f"answers to questions of new stories: {right} of {asked} right")
    return result | {
        "library": arguments.operators,
        "unchecked": arguments.fla_unchecked and arguments.operators == "fla",
        "warm_cache": warm,
        "version": version,
        "parameters": parameters,
        "steps": steps,
        "seed": seed,
        **dataclasses.asdict(sizes),
        "text": "stories" if not arguments.text else "a file",
        "compiled": arguments.compile,
        "dtype": "bf16 autocast" if device == "cuda" else "fp32",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def compare(arguments: argparse.Namespace, argv: list[str]) -> list[dict]:
    """Both libraries, each in a new process."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for library in ("fastweight", arguments.compare):
            part = pathlib.Path(folder) / f"{library}.json"
            command = [sys.executable, __file__, *argv, "--operators", library, "--compare", "none", "--json", part]
            if subprocess.run(command).returncode == 0:
                results += json.loads(part.read_text())
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=list(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=pathlib.Path, help="train on the bytes of this file")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    parser.add_argument("--json", type=pathlib.Path, help="file for losses and times")
    parser.add_argument("--operators", choices=["fastweight", "fla"], default="fastweight")
    parser.add_argument("--compare", choices=["none", "fla"], default="none")
    parser.add_argument("--fla", type=pathlib.Path, help="source folder of flash-linear-attention")
    parser.add_argument("--fla-unchecked", action="store_true", help="remove its check of Triton's version")
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    given = {name: value for name in ("batch", "length") if (value := getattr(arguments, name)) is not None}
    arguments.sizes = dataclasses.replace(SIZES[arguments.device], **given)
    results = [run(arguments)] if arguments.compare == "none" else compare(arguments, argv)
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")
    if arguments.compare != "none" and len(results) < 2:
        sys.exit("not every library has trained")


if __name__ == "__main__":
    main()
