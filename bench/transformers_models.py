"""What `fastweight.accelerate()` does for models of transformers: times with and without it, side by side.

    python bench/transformers_models.py [--threads N] [--repeat N] [--models qwen3_next,..] [--workloads prefill,..]

Random models of 4 layers, 3 of which are linear: hidden size 1024, 16 heads of 128 x 128 (Kimi-Linear: 8), MLPs of
1024, fp32. `prefill`: one sequence of 2048 tokens; `train`: forward and backward of one of 1024; `decode`: one token
for each of 8 sequences. Runs with and without alternate; the least time of each counts.
"""

import argparse
import importlib
import time

import torch

import fastweight

COMMON = {
    "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "pad_token_id": 0,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
GATED = {
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
MODELS = {
    "qwen3_next": ("Qwen3Next", COMMON | GATED | {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_5": ("Qwen3_5", COMMON | GATED),
    "kimi_linear": (
        "KimiLinear",
        COMMON | {
            "linear_num_heads": 8, "linear_head_dim": 128, "num_key_value_heads": 8, "q_lora_rank": None,
            "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", COMMON | GATED),
}  # fmt: skip


def build(name):
    prefix, options = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}")
    config_class = getattr(module, f"{prefix}TextConfig", None) or getattr(module, f"{prefix}Config")
    torch.manual_seed(0)
    return getattr(module, f"{prefix}ForCausalLM")(config_class(**options)).eval()


def workloads(model):
    from transformers import DynamicCache

    ids = torch.randint(1, 1024, (1, 2048))
    prompts = torch.randint(1, 1024, (8, 64))
    caches = {}

    @torch.no_grad()
    def prefill():
        model(input_ids=ids, use_cache=False)

    def train():
        model.zero_grad()
        model(input_ids=ids[:, :1024], labels=ids[:, :1024], use_cache=False).loss.backward()

    @torch.no_grad()
    def decode():
        if not caches:
            caches[0] = DynamicCache(config=model.config)
            model(input_ids=prompts, past_key_values=caches[0], use_cache=True)
        model(input_ids=prompts[:, :1], past_key_values=caches[0], use_cache=True)

    return {"prefill": prefill, "train": train, "decode": decode}


def least(call, seconds, count):
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min([seconds, *times])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workloads", default="prefill,train,decode")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    import transformers

    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {arguments.threads} threads, least ms")
    print(f"{'model':14}{'':10}{'PyTorch':>10}{'fastweight':>12}{'ratio':>8}")
    for name in arguments.models.split(","):
        model = build(name)
        calls = workloads(model)
        for workload in arguments.workloads.split(","):
            call = calls[workload]
            best = {False: float("inf"), True: float("inf")}
            for _ in range(arguments.repeat):
                for accelerated in (False, True):
                    (fastweight.accelerate if accelerated else fastweight.restore)()
                    best[accelerated] = least(call, best[accelerated], 20 if workload == "decode" else 1)
            fastweight.restore()
            plain, ours = 1e3 * best[False], 1e3 * best[True]
            print(f"{name:14}{workload:10}{plain:10.1f}{ours:12.1f}{plain / ours:8.2f}", flush=True)


if __name__ == "__main__":
    main()
