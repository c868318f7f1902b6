"""Context parallelism next to one rank with the same total of threads, or on one CUDA device.

    python bench/context_parallel.py                                   # CPU: 2 ranks of 1 thread, 1 rank of 2 threads
    python bench/context_parallel.py --ranks 4 --threads 4 --tokens 65536
    python bench/context_parallel.py --cuda --ranks 2 4 --json out.json  # all on one device, gloo over host copies

Every rank set runs in processes of its own. A time is that of forward and backward of the operator on one sequence, the
median of the repetitions; between two of them the ranks wait for each other. The CPU time is that of all ranks
together, which says what is computed twice also where others use the machine. Outputs and gradients are compared with
one rank. The model's factor is the cost model of docs/context-parallel.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

from fastweight import info, using
from fastweight.ops import chunk_gated_delta_rule, chunk_kda
from fastweight.ops.cp import build_cp_context

RULES = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}


def inputs_of(arguments: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    T, H, D = arguments.tokens, arguments.heads, arguments.width
    dtype = torch.bfloat16 if arguments.cuda else torch.float32
    gates = (1, T, H, D) if arguments.rule == "kda" else (1, T, H)
    x = {name: torch.randn(1, T, H, D, generator=generator) for name in ("q", "k", "v")}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x = {name: value.to(dtype) for name, value in x.items()}
    x["g"] = torch.nn.functional.logsigmoid(torch.randn(gates, generator=generator)) / 16
    x["beta"] = torch.rand(1, T, H, generator=generator)
    return {name: value.to(device) for name, value in x.items()}


def on_a_rank(rank: int, ranks: int, threads: int, mode: str | None, arguments, store, results) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if arguments.cuda else torch.device("cpu")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=10)
    )
    context = build_cp_context(torch.tensor([0, arguments.tokens], device=device), mode=mode, align=64)
    x = {name: context.shard(value).clone() for name, value in inputs_of(arguments, device).items()}
    generator = torch.Generator().manual_seed(1)
    shape = (1, arguments.tokens, arguments.heads, arguments.width)
    d_o = context.shard(torch.randn(shape, generator=generator)).to(device, x["q"].dtype)
    leaves = [value.requires_grad_() for value in x.values()]

    def once() -> tuple[tuple[float, float], torch.Tensor, tuple]:
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        o, _ = RULES[arguments.rule](**x, cp_context=context)
        gradients = torch.autograd.grad(o, leaves, d_o)
        if arguments.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start, time.process_time() - start_cpu), o, gradients

    with using(arguments.maps, family="delta_rule_map"):
        _, o, gradients = once()
        times = [once()[0] for _ in range(arguments.repetitions)]
    sums = [context.span.start, *(float(y.detach().double().square().sum()) for y in (o, *gradients))]
    results.put((rank, times, sums, context.mode_for(device, arguments.heads, 1)))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, threads: int, mode: str | None, arguments: argparse.Namespace) -> dict:
    """The slowest rank of every repetition counts."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder) / "store"
        processes = [
            context.Process(target=on_a_rank, args=(rank, ranks, threads, mode, arguments, store, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
    moments = list(zip(*(times for _, times, _, _ in found), strict=True))
    times = [max(wall for wall, _ in moment) for moment in moments]
    work = [sum(cpu for _, cpu in moment) for moment in moments]
    squares = [sum(column) for column in zip(*(sums[1:] for _, _, sums, _ in found), strict=True)]
    return {
        "ms": 1e3 * statistics.median(times),
        "fastest_ms": 1e3 * min(times),
        "cpu_ms": 1e3 * statistics.median(work),
        "mode": found[0][3],
        "squares": squares,
    }


def model_of(mode: str, ranks: int, heads: int, threads: int) -> float:
    """What forward and backward cost over one rank with all threads, see docs/context-parallel.md."""
    if ranks == 1:
        return 1.0
    if mode == "affine":
        return 34 / 24 if ranks == 2 else 38 / 24
    stages = -(-heads // threads)
    return 1 + (ranks - 1) / stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rule", choices=RULES, default="gdn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together, CPU")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cuda", action="store_true", help="every rank on device 0, in bf16")
    parser.add_argument("--maps", help="the implementation that makes the maps, such as chunk_fp32")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    one = measure(1, arguments.threads, None, arguments)
    where = torch.cuda.get_device_name() if arguments.cuda else f"{info()['cpu_target']}, {arguments.threads} threads"
    print(f"{arguments.rule}, T={arguments.tokens}, H={arguments.heads}, K=V={arguments.width}, {where}")
    print("ranks  mode      median ms  fastest ms  CPU ms  overhead  model")
    print(f"    1  -         {one['ms']:9.1f}  {one['fastest_ms']:10.1f}  {one['cpu_ms']:6.0f}")
    rows = [{"ranks": 1, **one}]
    for ranks in arguments.ranks:
        threads = max(1, arguments.threads // ranks)
        for mode in ("affine", "in_order"):
            row = {"ranks": ranks, **measure(ranks, threads, mode, arguments)}
            row["overhead"] = row["ms"] / one["ms"] - 1
            row["model"] = model_of(mode, ranks, arguments.heads if not arguments.cuda else 1, threads)
            row["difference"] = max(abs(a - b) / b for a, b in zip(row["squares"], one["squares"], strict=True))
            rows.append(row)
            print(
                f"{ranks:5d}  {mode:8s}  {row['ms']:9.1f}  {row['fastest_ms']:10.1f}  {row['cpu_ms']:6.0f}  "
                f"{row['overhead']:7.1%}  {row['model'] - 1:5.0%}   sums of squares differ by {row['difference']:.1e}"
            )
            if row["difference"] > (2e-2 if arguments.cuda else 1e-4):
                raise SystemExit("the ranks have computed something else than one of them")
    if arguments.json:
        record = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "where": where, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
