"""fastweight next to flash-linear-attention on a CUDA device: forward and decoding, timed side by side in one run.

    python bench/compare_cuda.py [--fla FOLDER] [--json FILE] [--ops gdn,kda,..] [--modes forward,step,eager]
                                 [--shape B=1,T=8192,H=96,D=128] [--rounds N] [--seconds S]

flash-linear-attention is used where it is installed, or from the source folder `--fla`. It compiles and tunes its
kernels at the first call of every shape, half a minute to a minute each: hence few shapes.

`forward`: o of B sequences of T tokens, bf16, no state in or out. `step`: one token for each of B states in fp32; ours
advance them in place, fla's functions return new ones. In both, calls are captured in a CUDA graph that goes around
several copies of the inputs, together larger than the L2 cache; the time is that of a replay over the number of calls.
`eager`: what a decoding step of one sequence costs the host, without a graph, next to torch.mul of two small tensors.

Both libraries get the same inputs through functions of the same names: q and k are l2-normalised inside, GDN's log
decay is log sigmoid(N(0,1)) / 16, KDA's gate is computed inside with a lower bound of -5 (`safe_gate`), beta is
sigmoid(N(0,1)). Before the timing their answers are compared: relative RMS error. Then they take turns, `--rounds`
times; the table has the median, the 10th and 90th percentile, and the median over fastweight's. The records are
written after every case, so that a run that is cut short leaves what it has measured.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata

import torch
import torch.nn.functional as F

import fastweight
from fastweight import ops

OPERATORS = ("gdn", "kda", "delta_rule", "ttt")
MODES = ("forward", "step", "eager")
WIDE, LONG = {"B": 1, "T": 8192, "H": 96, "D": 128}, {"B": 2, "T": 16384, "H": 16, "D": 128}
ONE, MANY = {"B": 1, "T": 1, "H": 32, "D": 128}, {"B": 256, "T": 1, "H": 32, "D": 128}
SHAPES = {
    "forward": {"ttt": ({"B": 4, "T": 4096, "H": 32, "D": 64},)},
    "step": {"ttt": ({"B": 1, "T": 1, "H": 32, "D": 64}, {"B": 256, "T": 1, "H": 32, "D": 64})},
    "eager": {"ttt": ({"B": 1, "T": 1, "H": 32, "D": 64},)},
}
DEFAULT_SHAPES = {"forward": (WIDE, LONG), "step": (ONE, MANY), "eager": (ONE,)}
MAX_COPIES = 8
MAX_CALLS = 64  # in a graph
EAGER_CALLS = 500

DEVICE = "cuda"

Inputs = dict[str, torch.Tensor]


def draw(op: str, shape: dict[str, int], seed: int) -> Inputs:
    B, T, H, D = (shape[name] for name in "BTHD")
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=dtype, generator=generator)

    x = {name: randn(B, T, H, D, dtype=torch.bfloat16) for name in "qkv"}
    if op == "ttt":
        x["q"], x["k"] = F.normalize(x["q"], dim=-1), F.normalize(x["k"], dim=-1)
        x |= {"w": 1 + 0.1 * randn(H, D), "b": 0.1 * randn(H, D), "eta": randn(B, T, H, 1).sigmoid() / D}
        x |= {name: x[name].bfloat16() for name in ("w", "b", "eta")}
        x |= {"state": 0.02 * randn(B, H, D, D), "state_bias": 0.02 * randn(B, H, 1, D)}
        x |= {
            "gradient": torch.zeros(B, H, D, D, device=DEVICE),
            "gradient_bias": torch.zeros(B, H, 1, D, device=DEVICE),
        }
        x["position"] = torch.zeros(B, dtype=torch.int32, device=DEVICE)
        return x
    if op == "gdn":
        x["g"] = F.logsigmoid(randn(B, T, H)) / 16
    if op == "kda":
        x |= {"g": randn(B, T, H, D, dtype=torch.bfloat16), "A_log": randn(H).abs(), "dt_bias": 0.1 * randn(H * D)}
    x |= {"beta": randn(B, T, H).sigmoid(), "state": randn(B, H, D, D)}
    return x


# One function of the inputs per library, operator and mode -----------------------------------------------------------

L2NORM = {"use_qk_l2norm_in_kernel": True}
KDA_GATE = {"use_gate_in_kernel": True, "lower_bound": -5.0}


def pick(x: Inputs, *names: str) -> Inputs:
    return {name: x[name] for name in names if name in x}


def forward(library, op: str) -> Callable[[Inputs], torch.Tensor]:
    """`library`: an object with the functions of fastweight.ops and fla.ops."""
    if op == "ttt":
        return lambda x: library.chunk_ttt_linear(**pick(x, *"qkvwb", "eta"), chunk_size=16)[0]
    if op == "kda":
        options = L2NORM | KDA_GATE | {"safe_gate": True}
        return lambda x: library.chunk_kda(**pick(x, *"qkv", "g", "beta", "A_log", "dt_bias"), **options)[0]
    rule = library.chunk_gated_delta_rule if op == "gdn" else library.chunk_delta_rule
    return lambda x: rule(**pick(x, *"qkv", "g", "beta"), **L2NORM)[0]


def recurrent(library, op: str) -> Callable[[Inputs], torch.Tensor]:
    """One token, from a state to a new one."""
    options, names = dict(L2NORM), [*"qkv", "g", "beta"]
    if op == "kda":
        options |= KDA_GATE
        names += ["A_log", "dt_bias"]
    functions = {"gdn": "fused_recurrent_gated_delta_rule", "kda": "fused_recurrent_kda"}
    rule = getattr(library, functions.get(op, "fused_recurrent_delta_rule"))
    return lambda x: rule(**pick(x, *names), initial_state=x["state"], output_final_state=True, **options)[0]


def step_in_place(op: str) -> Callable[[Inputs], torch.Tensor]:
    if op == "ttt":
        return lambda x: ops.ttt_linear_step(**x, chunk_size=16)
    options = L2NORM | (KDA_GATE if op == "kda" else {})
    return lambda x: ops.delta_rule_step(**x, **options)


class Fla:
    """The functions that are compared, wherever fla keeps them."""

    MODULES = ("gated_delta_rule", "kda", "delta_rule", "ttt")

    def __init__(self) -> None:
        self.modules = [importlib.import_module(f"fla.ops.{name}") for name in self.MODULES]

    def __getattr__(self, name: str):
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


def runners(op: str, mode: str, fla: Fla | None) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    if mode == "forward":
        return {"fastweight": forward(ops, op)} | ({"fla": forward(fla, op)} if fla else {})
    found = {"fastweight": step_in_place(op)}
    if op != "ttt":
        if mode == "eager":
            found["fastweight, new state"] = recurrent(ops, op)
        if fla:
            found["fla"] = recurrent(fla, op)
    return found


# Timing ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Graph:
    """Several calls on rotating inputs."""

    function: Callable[[Inputs], torch.Tensor]
    copies: list[Inputs]
    calls: int

    def __post_init__(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for x in self.copies:  # compiles, tunes, and fills the allocator before the capture
                self.function(x)
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for index in range(self.calls):
                self.function(self.copies[index % len(self.copies)])
        self.graph.replay()
        torch.cuda.synchronize()

    def milliseconds(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.calls


@dataclasses.dataclass
class Eager:
    """Calls of the host one after the other. A kernel of this size is done before the next one is launched."""

    function: Callable[[Inputs], torch.Tensor]
    copies: list[Inputs]

    def __post_init__(self) -> None:
        for _ in range(100):
            self.function(self.copies[0])
        torch.cuda.synchronize()

    def milliseconds(self) -> float:
        x, function = self.copies[0], self.function
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(EAGER_CALLS):
            function(x)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / EAGER_CALLS


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def clone(x: Inputs) -> Inputs:
    return {name: tensor.clone() for name, tensor in x.items()}


def nbytes(x: Inputs) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in x.values())


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """sqrt(mean((a - b)^2)) / sqrt(mean(b^2))"""
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt())


def timers(mode: str, functions: dict, copies: list[Inputs], calls: int) -> tuple[dict, dict, dict]:
    """Timers, errors against fastweight, and the messages of those that do not run."""
    ready, errors, failures, expected = {}, {}, {}, None
    for name, function in functions.items():
        try:
            answer = function(clone(copies[0]))
            expected = answer if expected is None else expected
            errors[name] = error(answer, expected)
            own = [clone(x) for x in copies] if mode != "forward" else copies  # steps write
            ready[name] = Eager(function, own) if mode == "eager" else Graph(function, own, calls)
        except Exception as problem:  # the other library still has its turn
            failures[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
    if mode == "eager":
        small = torch.ones(32, 128, device=DEVICE, dtype=torch.bfloat16)
        ready["torch.mul"] = Eager(lambda x: torch.mul(small, small), copies)
    return ready, errors, failures


@torch.no_grad()
def compare(op: str, mode: str, shape: dict[str, int], fla: Fla | None, rounds: int, seconds: float) -> list[dict]:
    first = draw(op, shape, 0)
    count = 1 if mode == "eager" else min(MAX_COPIES, max(2, math.ceil(2 * l2_bytes() / nbytes(first)) + 1))
    copies = [first, *(draw(op, shape, seed) for seed in range(1, count))]
    calls = count * max(1, min(MAX_CALLS // count, 4 if mode == "forward" else MAX_CALLS))
    ready, errors, failures = timers(mode, runners(op, mode, fla), copies, calls)
    samples = {name: [] for name in ready}
    for _ in range(rounds):
        for name, timer in ready.items():
            begin = time.perf_counter()
            timer.milliseconds()  # warms up after the one before
            while True:
                samples[name].append(timer.milliseconds())
                if time.perf_counter() - begin > seconds:
                    break
    records = []
    base = {"op": op, "mode": mode, "dtype": "bf16", **shape}
    for name, times in samples.items():
        median = statistics.median(times)
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
        ours = statistics.median(samples["fastweight"]) if "fastweight" in samples else None
        records.append(
            base
            | {
                "library": name,
                "copies": count,
                "samples": len(times),
                "calls_per_sample": EAGER_CALLS if mode == "eager" else calls,
                "median_ms": median,
                "min_ms": min(times),
                "p10_ms": deciles[0],
                "p90_ms": deciles[-1],
                "over_fastweight": None if ours is None else median / ours,
                "error": errors.get(name) if name != "fastweight" else None,
            }
        )
    return records + [base | {"library": name, "failed": text} for name, text in failures.items()]


# What ran where -------------------------------------------------------------------------------------------------------


def version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def commit(folder: pathlib.Path | None) -> str | None:
    if folder is None:
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def machine(folder: pathlib.Path | None) -> dict:
    properties = torch.cuda.get_device_properties(0)
    info = fastweight.info()
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "fla": commit(folder) or version("flash-linear-attention"),
        "fastweight": info["version"],
        "architectures": info["cuda_architectures"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def row(record: dict) -> str:
    shape = " ".join(f"{name}={record[name]}" for name in "BTHD")
    head = f"{record['op']:11}{record['mode']:9}{shape:24}{record['library']:23}"
    if "failed" in record:
        return head + record["failed"]
    unit, factor = ("us", 1e3) if record["median_ms"] < 1 else ("ms", 1)
    median, low, high = (f"{factor * record[name]:.3f}" for name in ("median_ms", "p10_ms", "p90_ms"))
    ratio = "" if record["over_fastweight"] is None else f"{record['over_fastweight']:.2f}"
    same = "" if record["error"] is None else f"{record['error']:.1e}"
    return f"{head}{median:>10} {unit}{f'{low} .. {high}':>22}{ratio:>7}{same:>9}"


def parse_shape(text: str) -> dict[str, int]:
    shape = {"B": 1, "T": 1} | {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    if set(shape) != set("BTHD"):
        raise ValueError
    return shape


def parse_list(choices: tuple[str, ...], text: str) -> list[str]:
    for name in text.split(","):
        if name not in choices:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(choices)}, got {name}")
    return text.split(",")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fla", type=pathlib.Path, help="source folder of flash-linear-attention")
    parser.add_argument("--json", type=pathlib.Path, help="file for the records")
    parser.add_argument("--ops", type=functools.partial(parse_list, OPERATORS), default=list(OPERATORS))
    parser.add_argument("--modes", type=functools.partial(parse_list, MODES), default=list(MODES))
    parser.add_argument("--shape", type=parse_shape, help="H=..,D=..[,B=..][,T=..] in place of each mode's own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a library's turn")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "compare_cuda: there is no CUDA device\n")

    if arguments.fla:
        sys.path.insert(0, str(arguments.fla))
    try:
        fla = Fla()
    except ImportError as problem:
        print(f"without flash-linear-attention: {problem}")
        fla = None
    about = machine(arguments.fla)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':44}{'library':23}{'median':>13}{'10th .. 90th pct.':>22}{'ratio':>7}{'error':>9}")
    records = []
    for mode in arguments.modes:
        for op in arguments.ops:
            for shape in (arguments.shape,) if arguments.shape else SHAPES[mode].get(op, DEFAULT_SHAPES[mode]):
                shape = shape if mode == "forward" else shape | {"T": 1}
                for record in compare(op, mode, shape, fla, arguments.rounds, arguments.seconds):
                    records.append(record | about)
                    print(row(record), flush=True)
                torch.cuda.empty_cache()
                if arguments.json:
                    arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
