"""fastweight next to flash-linear-attention on a CUDA device: forward, training and decoding, side by side in one run.

    python bench/compare_cuda.py [--peers fla,flashinfer,flashqla,cudnn,chunk_16bit | none] [--fla FOLDER]
                                 [--fla-unchecked] [--ops gdn,kda,..]
                                 [--modes forward,saves,train,step,eager,first_step]
                                 [--shape B=1,T=8192,H=96,D=128] [--sweep] [--rounds N] [--seconds S] [--json FILE]

flash-linear-attention is used where it is installed, or from the source folder `--fla`. It compiles and tunes its
kernels at the first call of every shape, half a minute to a minute each, for a backward as long again: hence few
shapes.
`flashinfer`, `flashqla` and `cudnn` are FlashInfer (forward of GDN with decays given), FlashQLA (GDN) and cuDNN's
frontend (KDA with gates given), where they can be imported. `chunk_16bit` is fastweight's forward of that name, where
another one would run.

`forward`: o of B sequences of T tokens, bf16, no state in or out. `saves`: the same with what a backward wants kept.
`train`: the forward and the gradients of all inputs from a gradient of o; next to the time stands the peak of memory on
top of the inputs, results included. `step`: one token for each of B states in fp32; ours advance them in place, fla's
functions return new ones. In all four, calls are captured in a CUDA graph that goes around several copies of the
inputs, together larger than the L2 cache; the time is that of a replay over the number of calls. What cannot be
captured is timed without a graph, and says so. `eager`: what a decoding step of one sequence costs the host, without a
graph, next to torch.mul of two small tensors. `first_step`: the first training step of a new process with empty caches
of compiled code, from inputs on the device to gradients, and that process from start to end.

`--sweep`: training of one sequence of 4096 to 524288 tokens, H = 8, to see that time and memory grow as T does.

All libraries get the same inputs through functions of the same names: q and k are l2-normalised inside, GDN's log decay
is log sigmoid(N(0,1)) / 16, KDA's gate is computed inside with a lower bound of -5 (`safe_gate`), beta is
sigmoid(N(0,1)). `kda_kept`: the same with `disable_recompute`. `kda_unbounded`: KDA's gate without a lower bound.
`gdn_given` and `kda_given`: q and k are normalised before, the log decay is given in fp32. Before the timing their
answers are compared with fastweight's: relative RMS error, of the gradients the largest. Then they take turns,
`--rounds` times; the table has the median, the 10th and 90th percentile, and the median over fastweight's. The records
are written after every case, so that a run that is cut short leaves what it has measured.

On Hopper with Triton 3.4 to 3.7.0 flash-linear-attention refuses the backward of GDN, because that compiler makes wrong
code of it. `--fla-unchecked` removes the check; such records are marked.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata

import torch
import torch.nn.functional as F

import fastweight
from fastweight import ops

OPERATORS = ("gdn", "gdn_given", "kda", "kda_kept", "kda_unbounded", "kda_given", "delta_rule", "ttt")
DEFAULT_OPERATORS = ("gdn", "kda", "delta_rule", "ttt")
MODES = ("forward", "saves", "train", "step", "eager", "first_step")
DEFAULT_MODES = ("forward", "step", "eager")
PEERS = ("fla", "flashinfer", "flashqla", "cudnn", "chunk_16bit")
WIDE, LONG = {"B": 1, "T": 8192, "H": 96, "D": 128}, {"B": 2, "T": 16384, "H": 16, "D": 128}
ONE, MANY = {"B": 1, "T": 1, "H": 32, "D": 128}, {"B": 256, "T": 1, "H": 32, "D": 128}
GROUPED = {"B": 1, "T": 32768, "H": 16, "HV": 64, "D": 128}
SHORT, FEW, TWELVE = {"B": 4, "T": 2048, "H": 16, "D": 128}, WIDE | {"H": 8}, WIDE | {"H": 12}
TTT = {"B": 4, "T": 4096, "H": 32, "D": 64}
SHAPES = {
    "forward": {"gdn": (WIDE, LONG, GROUPED, SHORT, FEW), "kda": (WIDE, LONG, TWELVE), "ttt": (TTT,)},
    "train": {"gdn": (WIDE, LONG, GROUPED), "kda": (WIDE, TWELVE), "ttt": (TTT,)},
    "first_step": {"ttt": (TTT,)},
    "step": {"ttt": ({"B": 1, "T": 1, "H": 32, "D": 64}, {"B": 256, "T": 1, "H": 32, "D": 64})},
    "eager": {"ttt": ({"B": 1, "T": 1, "H": 32, "D": 64},)},
}
DEFAULT_SHAPES = {
    "forward": (WIDE, LONG),
    "saves": (WIDE,),
    "train": (WIDE,),
    "step": (ONE, MANY),
    "eager": (ONE,),
    "first_step": (WIDE,),
}
SWEEP = tuple({"B": 1, "T": 4096 << i, "H": 8, "D": 128} for i in range(8))
SECONDS_OF_FIRST_STEP = 150  # after which a process is not waited for
MAX_COPIES = 8
MAX_CALLS = 64  # in a graph
EAGER_CALLS = 500

DEVICE = "cuda"

Inputs = dict[str, torch.Tensor]
Function = Callable[[Inputs], torch.Tensor | tuple[torch.Tensor, ...]]


def draw(op: str, shape: dict[str, int], seed: int) -> Inputs:
    B, T, H, D = (shape[name] for name in "BTHD")
    HV = shape.get("HV", H)
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=dtype, generator=generator)

    x = {name: randn(B, T, HV if name == "v" else H, D, dtype=torch.bfloat16) for name in "qkv"}
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
    if op.endswith("_given"):
        x["q"], x["k"] = F.normalize(x["q"], dim=-1), F.normalize(x["k"], dim=-1)
    if op in ("gdn", "gdn_given"):
        x["g"] = F.logsigmoid(randn(B, T, HV)) / 16
    if op in ("kda", "kda_kept", "kda_unbounded"):
        x |= {"g": randn(B, T, HV, D, dtype=torch.bfloat16), "A_log": randn(HV).abs(), "dt_bias": 0.1 * randn(HV * D)}
    if op == "kda_given":
        x["g"] = F.logsigmoid(randn(B, T, HV, D)) / 16
    x |= {"beta": randn(B, T, HV).sigmoid(), "state": randn(B, HV, D, D)}
    return x


# One function of the inputs per library, operator and mode -----------------------------------------------------------

L2NORM = {"use_qk_l2norm_in_kernel": True}
KDA_GATE = {"use_gate_in_kernel": True, "lower_bound": -5.0}


def pick(x: Inputs, *names: str) -> Inputs:
    return {name: x[name] for name in names if name in x}


# What an operator reads in a forward: the inputs whose gradients training asks for.
NAMES = {
    "gdn": (*"qkv", "g", "beta"),
    "gdn_given": (*"qkv", "g", "beta"),
    "kda": (*"qkv", "g", "beta", "A_log", "dt_bias"),
    "kda_kept": (*"qkv", "g", "beta", "A_log", "dt_bias"),
    "kda_unbounded": (*"qkv", "g", "beta", "A_log", "dt_bias"),
    "kda_given": (*"qkv", "g", "beta"),
    "delta_rule": (*"qkv", "beta"),
    "ttt": (*"qkvwb", "eta"),
}


def forward(library, op: str) -> Function:
    """`library`: an object with the functions of fastweight.ops and fla.ops."""
    names = NAMES[op]
    if op == "ttt":
        return lambda x: library.chunk_ttt_linear(**pick(x, *names), chunk_size=16)[0]
    if op == "kda_unbounded":
        return lambda x: library.chunk_kda(**pick(x, *names), **L2NORM, use_gate_in_kernel=True)[0]
    if op in ("kda", "kda_kept", "kda_given"):
        options = {"safe_gate": True} | (L2NORM | KDA_GATE if op != "kda_given" else {})
        if op == "kda_kept":
            options["disable_recompute"] = True
        rule = library.chunk_kda
        return lambda x: rule(**pick(x, *names), **options)[0]
    rule = library.chunk_delta_rule if op == "delta_rule" else library.chunk_gated_delta_rule
    options = {} if op == "gdn_given" else L2NORM
    return lambda x: rule(**pick(x, *names), **options)[0]


def recorded(library, op: str) -> Callable[[Inputs], tuple[torch.Tensor, list[torch.Tensor]]]:
    """The forward with what its backward wants: o, and everything that the operator reads."""
    one, names = forward(library, op), NAMES[op]

    def run(x: Inputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.enable_grad():
            leaves = {name: x[name].detach().requires_grad_() for name in names}
            return one(leaves), list(leaves.values())

    return run


def saving(library, op: str) -> Function:
    run = recorded(library, op)
    return lambda x: run(x)[0].detach()


def training(library, op: str) -> Function:
    """Forward and backward: the gradients of everything that the operator reads."""
    run = recorded(library, op)

    def step(x: Inputs) -> tuple[torch.Tensor, ...]:
        o, leaves = run(x)
        return torch.autograd.grad(o, leaves, x["v"])  # v stands in for the gradient of o

    return step


def recurrent(library, op: str) -> Function:
    """One token, from a state to a new one."""
    options, names = dict(L2NORM), [*"qkv", "g", "beta"]
    if op == "kda":
        options |= KDA_GATE
        names += ["A_log", "dt_bias"]
    functions = {"gdn": "fused_recurrent_gated_delta_rule", "kda": "fused_recurrent_kda"}
    rule = getattr(library, functions.get(op, "fused_recurrent_delta_rule"))
    return lambda x: rule(**pick(x, *names), initial_state=x["state"], output_final_state=True, **options)[0]


def step_in_place(op: str) -> Function:
    if op == "ttt":
        return lambda x: ops.ttt_linear_step(**x, chunk_size=16)
    options = L2NORM | (KDA_GATE if op == "kda" else {})
    return lambda x: ops.delta_rule_step(**x, **options)


class Fla:
    """The functions that are compared, wherever fla keeps them."""

    MODULES = ("gated_delta_rule", "kda", "delta_rule", "ttt")

    def __init__(self, unchecked: bool = False) -> None:
        self.modules = [importlib.import_module(f"fla.ops.{name}") for name in self.MODULES]
        if unchecked:
            importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True

    def __getattr__(self, name: str):
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


class FlashQla:
    def __init__(self) -> None:
        self.chunk_gated_delta_rule = importlib.import_module("flash_qla").chunk_gated_delta_rule


class Packed:
    """The offsets of B sequences of T tokens in one row. Made once: a graph would have to copy them from the host."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.offsets = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        B, T = x.shape[:2]
        if (B, T) not in self.offsets:
            self.offsets[B, T] = torch.arange(0, B * T + 1, T, dtype=self.dtype, device=x.device)
        return self.offsets[B, T]


class FlashInfer:
    """GDN of FlashInfer, which takes decays, not their logarithms, and rows that are normalised."""

    def __init__(self) -> None:
        self.function = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
        self.offsets = Packed(torch.int64)
        self.decays = {}  # of the gates that were seen: making them is not a part of the operator

    def chunk_gated_delta_rule(self, q, k, v, g, beta):
        if g.data_ptr() not in self.decays:
            self.decays[g.data_ptr()] = g.exp().flatten(0, 1)
        q, k, v, beta = (x.flatten(0, 1) for x in (q, k, v, beta))
        o = self.function(q, k, v, self.decays[g.data_ptr()], beta, cu_seqlens=self.offsets(g))
        return (o.unflatten(0, g.shape[:2]),)


class Cudnn:
    """KDA of cuDNN's frontend, whose training on Hopper takes log gates in fp32 and rows that are normalised."""

    def __init__(self) -> None:
        self.function = importlib.import_module("cudnn.linear_attention").kimi_delta_attention
        self.offsets = Packed(torch.int32)

    def chunk_kda(self, q, k, v, g, beta, safe_gate):
        flat = (x.flatten(0, 1) for x in (q, k, v, g, beta))
        return (self.function(*flat, self.offsets(q))[0].unflatten(0, q.shape[:2]),)


class Chunk16bit:
    """Ours by this name. Of forwards alone: a backward runs when the name counts no more."""

    NAME = "chunk_16bit"

    def __getattr__(self, name: str):
        def run(*arguments, **options):
            with fastweight.using(self.NAME, family="delta_rule"):
                return getattr(ops, name)(*arguments, **options)

        return run


# What of it is compared.
PEER_CASES = {
    "flashinfer": {("gdn_given", "forward")},
    "flashqla": {("gdn", "forward"), ("gdn", "train")},
    "cudnn": {("kda_given", "forward"), ("kda_given", "train")},
    "chunk_16bit": {(op, "forward") for op in OPERATORS if op != "ttt"},
}


PEER_CLASSES = {"flashinfer": FlashInfer, "flashqla": FlashQla, "cudnn": Cudnn, "chunk_16bit": Chunk16bit}


def load_peers(names: list[str], unchecked: bool) -> dict[str, object]:
    found = {}
    for name in names:
        try:
            found[name] = Fla(unchecked) if name == "fla" else PEER_CLASSES[name]()
        except ImportError as problem:
            print(f"without {name}: {problem}")
    return found


def runners(op: str, mode: str, peers: dict[str, object]) -> dict[str, Function]:
    if mode in ("forward", "saves", "train"):
        make = {"forward": forward, "saves": saving, "train": training}[mode]
        taking = {n: p for n, p in peers.items() if n not in PEER_CASES or (op, mode) in PEER_CASES[n]}
        return {"fastweight": make(ops, op)} | {name: make(peer, op) for name, peer in taking.items()}
    found = {"fastweight": step_in_place(op)}
    if op != "ttt":
        if mode == "eager":
            found["fastweight, new state"] = recurrent(ops, op)
        if "fla" in peers:
            found["fla"] = recurrent(peers["fla"], op)
    return found


# Timing ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Graph:
    """Several calls on rotating inputs."""

    function: Function
    copies: list[Inputs]
    calls: int
    graph = True

    def __post_init__(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for x in self.copies:  # compiles, tunes, and fills the allocator before the capture
                self.function(x)
        stream.synchronize()
        self.captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.captured, stream=stream):
            for index in range(self.calls):
                self.function(self.copies[index % len(self.copies)])
        self.captured.replay()
        torch.cuda.synchronize()

    def milliseconds(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.captured.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.calls


@dataclasses.dataclass
class Queue:
    """As in a graph, without one: the launches of a long kernel are there before it begins."""

    function: Function
    copies: list[Inputs]
    calls: int
    graph = False

    def milliseconds(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for index in range(self.calls):
            self.function(self.copies[index % len(self.copies)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.calls


@dataclasses.dataclass
class Eager:
    """Calls of the host one after the other. A kernel of this size is done before the next one is launched."""

    function: Function
    copies: list[Inputs]
    graph = False

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


def largest_error(a, b) -> float:
    if isinstance(a, torch.Tensor):
        return error(a, b)
    return max(error(x, y) for x, y in zip(a, b, strict=True))


def peak_memory(function: Function, x: Inputs) -> int:
    """Bytes on top of the inputs, results included. The call before has loaded and tuned what there is."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timer(mode: str, function: Function, copies: list[Inputs], calls: int):
    if mode == "eager":
        return Eager(function, copies)
    try:
        return Graph(function, copies, calls)
    except RuntimeError:
        if mode != "train":
            raise
        torch.cuda.synchronize()
        return Queue(function, copies, calls)


def timers(mode: str, functions: dict, copies: list[Inputs], calls: int) -> tuple[dict, dict, dict]:
    """Timers, what is known besides the time, and the messages of those that do not run."""
    ready, notes, failures, expected = {}, {}, {}, None
    for name, function in functions.items():
        try:
            answer = function(clone(copies[0]))
            expected = answer if expected is None else expected
            notes[name] = {"error": None if name == "fastweight" else largest_error(answer, expected)}
            if mode == "train":
                notes[name]["peak_bytes"] = peak_memory(function, copies[0])
            own = copies if mode in ("forward", "saves", "train") else [clone(x) for x in copies]  # steps write
            ready[name] = timer(mode, function, own, calls)
            notes[name]["graph"] = ready[name].graph
        except Exception as problem:  # the other library still has its turn
            failures[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
    if mode == "eager":
        small = torch.ones(32, 128, device=DEVICE, dtype=torch.bfloat16)
        ready["torch.mul"] = Eager(lambda x: torch.mul(small, small), copies)
    return ready, notes, failures


@torch.no_grad()
def compare(
    op: str, mode: str, shape: dict[str, int], peers: dict[str, object], rounds: int, seconds: float
) -> list[dict]:
    first = draw(op, shape, 0)
    count = 1 if mode == "eager" else min(MAX_COPIES, max(2, math.ceil(2 * l2_bytes() / nbytes(first)) + 1))
    copies = [first, *(draw(op, shape, seed) for seed in range(1, count))]
    calls = count * max(1, min(MAX_CALLS // count, {"forward": 4, "saves": 4, "train": 1}.get(mode, MAX_CALLS)))
    ready, notes, failures = timers(mode, runners(op, mode, peers), copies, calls)
    samples = {name: [] for name in ready}
    for _ in range(rounds):
        for name, one in ready.items():
            begin = time.perf_counter()
            one.milliseconds()  # warms up after the one before
            while True:
                samples[name].append(one.milliseconds())
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
                "error": None,
            }
            | notes.get(name, {})
        )
    return records + [base | {"library": name, "failed": text} for name, text in failures.items()]


# The first training step of a process --------------------------------------------------------------------------------


def take_first_step(library: str, op: str, shape: dict[str, int], unchecked: bool) -> float:
    """Milliseconds from the inputs on the device to all gradients."""
    function = training(ops if library == "fastweight" else load_peers([library], unchecked)[library], op)
    x = draw(op, shape, 0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function(x)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def first_steps(op: str, shape: dict[str, int], peers: dict[str, object], arguments: argparse.Namespace) -> list[dict]:
    """Of every library in a new process, whose caches of compiled code are empty."""
    records = []
    for library in runners(op, "train", peers):
        sizes = ",".join(f"{name}={value}" for name, value in shape.items())
        command = [sys.executable, __file__, "--first-step-of", library, "--ops", op, "--shape", sizes]
        command += ["--fla", str(arguments.fla)] if arguments.fla else []
        command += ["--fla-unchecked"] if arguments.fla_unchecked else []
        base = {"op": op, "mode": "first_step", "dtype": "bf16", **shape, "library": library}
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": folder, "TILELANG_CACHE_DIR": folder, "FLA_CACHE_DIR": folder}
            begin = time.perf_counter()
            try:
                child = subprocess.run(
                    command, env=os.environ | caches, capture_output=True, text=True, timeout=SECONDS_OF_FIRST_STEP
                )
            except subprocess.TimeoutExpired:
                records.append(base | {"failed": f"not done after {SECONDS_OF_FIRST_STEP} s"})
                continue
            process = 1e3 * (time.perf_counter() - begin)
        if child.returncode != 0:
            records.append(base | {"failed": (child.stderr.strip().splitlines() or ["no message"])[-1][:200]})
            continue
        median = float(child.stdout.split()[-1])
        ours = next((r["median_ms"] for r in records if r["library"] == "fastweight" and "failed" not in r), None)
        ours = median if library == "fastweight" else ours
        records.append(
            base
            | {"median_ms": median, "p10_ms": median, "p90_ms": median, "process_ms": process, "samples": 1}
            | {"over_fastweight": None if ours is None else median / ours, "error": None}
        )
    return records


# What ran where -------------------------------------------------------------------------------------------------------


def version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def commit(folder: pathlib.Path | None) -> str | None:
    if folder is None or not (folder / ".git").exists():  # a plain folder may lie in another project's clone
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
    shape = " ".join(f"{name}={record[name]}" for name in ("B", "T", "H", "HV", "D") if name in record)
    head = f"{record['op']:11}{record['mode']:11}{shape:30}{record['library']:23}"
    if "failed" in record:
        return head + record["failed"]
    unit, factor = ("us", 1e3) if record["median_ms"] < 1 else ("ms", 1)
    median, low, high = (f"{factor * record[name]:.3f}" for name in ("median_ms", "p10_ms", "p90_ms"))
    ratio = "" if record["over_fastweight"] is None else f"{record['over_fastweight']:.2f}"
    same = "" if record["error"] is None else f"{record['error']:.1e}"
    notes = [] if record["mode"] != "train" or record["graph"] else ["no graph"]
    if "peak_bytes" in record:
        notes.append(f"{record['peak_bytes'] / 2**30:.2f} GiB")
        notes.append(f"{1e6 * record['median_ms'] / (record['B'] * record['T']):.1f} ns per token")
    if "process_ms" in record:
        notes.append(f"process {1e-3 * record['process_ms']:.1f} s")
    if record.get("unchecked"):
        notes.append("unchecked")
    return f"{head}{median:>10} {unit}{f'{low} .. {high}':>22}{ratio:>7}{same:>9}  {', '.join(notes)}".rstrip()


def parse_shape(text: str) -> dict[str, int]:
    shape = {"B": 1, "T": 1} | {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    if set(shape) - {"HV"} != set("BTHD"):
        raise ValueError
    return shape


def parse_list(choices: tuple[str, ...], text: str) -> list[str]:
    for name in text.split(","):
        if name not in choices:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(choices)}, got {name}")
    return text.split(",")


def shapes_of(arguments: argparse.Namespace, op: str, mode: str) -> tuple[dict[str, int], ...]:
    if arguments.sweep and mode == "train":
        return SWEEP
    shapes = (arguments.shape,) if arguments.shape else SHAPES[mode].get(op, DEFAULT_SHAPES[mode])
    return tuple(shape | {"T": 1} if mode in ("step", "eager") else shape for shape in shapes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", type=functools.partial(parse_list, (*PEERS, "none")), default=["fla"])
    parser.add_argument("--fla", type=pathlib.Path, help="source folder of flash-linear-attention")
    parser.add_argument("--fla-unchecked", action="store_true", help="remove its check of Triton's version")
    parser.add_argument("--json", type=pathlib.Path, help="file for the records")
    parser.add_argument("--ops", type=functools.partial(parse_list, OPERATORS), default=list(DEFAULT_OPERATORS))
    parser.add_argument("--modes", type=functools.partial(parse_list, MODES), default=list(DEFAULT_MODES))
    parser.add_argument("--shape", type=parse_shape, help="H=..,D=..[,HV=..][,B=..][,T=..] in place of a mode's own")
    parser.add_argument("--sweep", action="store_true", help="training over lengths; implies --modes train")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a library's turn")
    parser.add_argument("--first-step-of", choices=("fastweight", *PEERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "compare_cuda: there is no CUDA device\n")
    if arguments.fla:
        sys.path.insert(0, str(arguments.fla))
    if arguments.first_step_of:
        print(take_first_step(arguments.first_step_of, arguments.ops[0], arguments.shape, arguments.fla_unchecked))
        return

    peers = load_peers([name for name in arguments.peers if name != "none"], arguments.fla_unchecked)
    about = machine(arguments.fla)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':52}{'library':23}{'median':>13}{'10th .. 90th pct.':>22}{'ratio':>7}{'error':>9}")
    records = []
    for mode in ["train"] if arguments.sweep else arguments.modes:
        for op in arguments.ops:
            for shape in shapes_of(arguments, op, mode):
                if mode == "first_step":
                    found = first_steps(op, shape, peers, arguments)
                else:
                    found = compare(op, mode, shape, peers, arguments.rounds, arguments.seconds)
                for record in found:
                    if arguments.fla_unchecked and record["library"] == "fla":
                        record["unchecked"] = True
                    records.append(record | about)
                    print(row(record), flush=True)
                torch.cuda.empty_cache()
                if arguments.json:
                    arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
