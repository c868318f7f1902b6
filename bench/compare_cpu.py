"""fastweight next to its peers on the CPU: forward, training and decoding of GDN and KDA, timed side by side.

    python bench/compare_cpu.py [--llama-cpp BUILD] [--threads N] [--json FILE] [--ops gdn,kda] [--modes forward,..]
                                [--shape B=1,T=2048,H=16,D=128] [--rounds N] [--seconds S] [--calm CORES]

The peers are used where they are installed: the PyTorch fallbacks of Hugging Face transformers (Qwen3-Next's chunk and
recurrent gated delta rule, Kimi-Linear's of KDA), and, with `--llama-cpp`, the operator GATED_DELTA_NET of the ggml CPU
library found under that folder.

`forward`: o and the final state of B sequences of T tokens. `training`: forward and backward, the gradients of q, k, v,
g and beta; llama.cpp has none. `decode`: one token for each of B states. ggml's operator reads a state and writes
another one; `llama.cpp, kept` also copies it back to where the next token looks for it, as llama.cpp does. The others
leave the state ready for the next token.

All get the same fp32 inputs (q and k of norm 1, log decay log sigmoid(N(0,1)) / 16, beta sigmoid(N(0,1))) and the same
number of threads. Before the timing, the answers of each are compared with fastweight's: relative RMS error, the worst
tensor. Then they take turns, `--rounds` times (3 times if a call takes more than 2 s); in its turn a library makes one
call that does not count, then as many as fit into `--seconds`, at least one. The table has the median of all calls,
their 10th and 90th percentile, the median over fastweight's, and how many cores other processes used meanwhile: times
mean little where that is not close to 0, above all the short ones of decoding. On a shared machine `--calm 0.2` waits
until others use less than that many cores, and measures a case again during which they used more.
"""

import argparse
import ctypes
import dataclasses
import datetime
import importlib
import inspect
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import torch
import torch.nn.functional as F

from fastweight import ops

OPERATORS = ("gdn", "kda")
MODES = ("forward", "training", "decode")
LONG, WIDE = {"B": 1, "T": 2048, "H": 16, "D": 128}, {"B": 1, "T": 1024, "H": 32, "D": 128}
ONE, MANY = {"B": 1, "T": 1, "H": 32, "D": 128}, {"B": 64, "T": 1, "H": 32, "D": 128}  # states: 2 MB, 128 MB
SHAPES = {
    ("gdn", "forward"): (LONG, WIDE),
    ("kda", "forward"): (WIDE,),
    ("gdn", "training"): (LONG,),
    ("kda", "training"): (LONG | {"T": 256},),  # Kimi-Linear's fallback keeps D numbers for every pair in a chunk
    ("gdn", "decode"): (ONE, MANY),
    ("kda", "decode"): (ONE, MANY),
}
# A decoding turn starts from the same state and repeats one token: few enough times that no decay becomes denormal.
MAX_CALLS = 50
# What is slower than this many seconds has fewer turns.
SLOW, SLOW_TURNS = 2.0, 3
PATIENCE = 120  # seconds to wait for a calm machine, and to try again


@dataclasses.dataclass
class Case:
    op: str
    mode: str
    shape: dict[str, int]
    inputs: dict[str, torch.Tensor]  # q, k, v, g, beta; state: before the first token, [B, H, K, V]; do: of o


@dataclasses.dataclass
class Runner:
    call: Callable[[], tuple[torch.Tensor, ...]]  # its answers: o and the state after it, or the gradients
    reset: Callable[[], None] = lambda: None  # before each turn


def draw(op: str, mode: str, shape: dict[str, int]) -> Case:
    B, T, H, D = (shape[name] for name in "BTHD")
    torch.manual_seed(0)
    inputs = {name: F.normalize(torch.randn(B, T, H, D), dim=-1) for name in "qk"}
    inputs["v"] = torch.randn(B, T, H, D)
    inputs["g"] = F.logsigmoid(torch.randn((B, T, H, D) if op == "kda" else (B, T, H))) / 16
    inputs["beta"] = torch.randn(B, T, H).sigmoid()
    inputs["state"] = torch.randn(B, H, D, D)
    inputs["do"] = torch.randn(B, T, H, D)
    return Case(op, mode, shape, inputs)


def torch_runner(case: Case, function: Callable) -> Runner:
    """Of a function with the arguments that fastweight, flash-linear-attention and transformers share."""
    x = case.inputs
    arguments = [x[name] for name in ("q", "k", "v", "g", "beta")]
    if case.mode == "training":
        leaves = [tensor.clone().requires_grad_() for tensor in arguments]

        def train():
            o, _ = function(*leaves, initial_state=None, output_final_state=False)
            return torch.autograd.grad(o, leaves, x["do"])

        return Runner(train)
    state = x["state"] if case.mode == "decode" else None

    @torch.no_grad()
    def forward():
        return function(*arguments, initial_state=state, output_final_state=True)

    return Runner(forward)


class Fastweight:
    def __init__(self, threads: int):
        torch.set_num_threads(threads)
        self.versions = {"fastweight": metadata.version("fastweight"), "torch": torch.__version__}

    def runners(self, case: Case) -> dict[str, Runner]:
        if case.mode != "decode":
            chunk = {"gdn": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda}[case.op]
            return {"fastweight": torch_runner(case, chunk)}
        x = case.inputs
        state = x["state"].clone()

        def step():
            return ops.delta_rule_step(x["q"], x["k"], x["v"], state, x["g"], x["beta"]), state

        return {"fastweight": Runner(step, lambda: state.copy_(x["state"]))}


class Transformers:
    FUNCTIONS = {
        ("gdn", "chunk"): ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("gdn", "recurrent"): ("qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("kda", "chunk"): ("kimi_linear", "chunk_kimi_delta_attention"),
        ("kda", "recurrent"): ("kimi_linear", "recurrent_kimi_delta_attention"),
    }

    def __init__(self):
        self.versions = {"transformers": importlib.import_module("transformers").__version__}

    def runners(self, case: Case) -> dict[str, Runner]:
        form = "recurrent" if case.mode == "decode" else "chunk"
        model, name = self.FUNCTIONS[case.op, form]
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        # The name may stand for a kernel of another package; the PyTorch function lies beneath.
        return {"transformers": torch_runner(case, inspect.unwrap(getattr(module, name)))}


class GgmlInitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class LlamaCpp:
    """ggml through its C interface. A ggml shape lists the innermost dimension first, so q, k, v, g and beta are the
    same memory as here; the log decay has 1 or D channels; a state is [B, H, V, K]; the scale is D ** -0.5. The result
    is one buffer: o [B, T, H, V], then the states after the last token."""

    POINTER, SIZE, INT64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    F32 = 0  # GGML_TYPE_F32
    BASE = {
        "ggml_version": (ctypes.c_char_p, []),
        "ggml_commit": (ctypes.c_char_p, []),
        "ggml_init": (POINTER, [GgmlInitParams]),
        "ggml_free": (None, [POINTER]),
        "ggml_tensor_overhead": (SIZE, []),
        "ggml_graph_overhead": (SIZE, []),
        "ggml_new_tensor_4d": (POINTER, [POINTER, ctypes.c_int, INT64, INT64, INT64, INT64]),
        "ggml_view_4d": (POINTER, [POINTER, POINTER, INT64, INT64, INT64, INT64, SIZE, SIZE, SIZE, SIZE]),
        "ggml_gated_delta_net": (POINTER, [POINTER] * 7 + [INT64]),
        "ggml_cpy": (POINTER, [POINTER] * 3),
        "ggml_get_data": (POINTER, [POINTER]),
        "ggml_new_graph": (POINTER, [POINTER]),
        "ggml_build_forward_expand": (None, [POINTER, POINTER]),
        "ggml_backend_graph_compute": (ctypes.c_int, [POINTER, POINTER]),
    }
    CPU = {
        "ggml_backend_cpu_init": (POINTER, []),
        "ggml_backend_cpu_set_n_threads": (None, [POINTER, ctypes.c_int]),
    }

    def __init__(self, folder: pathlib.Path, threads: int):
        base = self._load(folder, "ggml-base", self.BASE)
        cpu = self._load(folder, "ggml-cpu", self.CPU)
        # Without OpenMP every graph starts and joins threads of its own, which no program that decodes would do.
        if not (hasattr(cpu, "GOMP_parallel") or hasattr(cpu, "__kmpc_fork_call")):
            raise SystemExit(f"{folder}: expected ggml built with OpenMP (GGML_OPENMP=ON, its default)")
        self.base = base
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.versions = {"ggml": base.ggml_version().decode(), "ggml_commit": base.ggml_commit().decode()}

    @staticmethod
    def _load(folder: pathlib.Path, name: str, functions: dict) -> ctypes.CDLL:
        found = sorted(folder.rglob(f"lib{name}.so"))
        if not found:
            raise SystemExit(f"{folder}: expected lib{name}.so in it or below it, found none")
        library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        for function, (result, arguments) in functions.items():
            if not hasattr(library, function):
                raise SystemExit(f"{found[0]}: expected the function {function}, which is not there")
            getattr(library, function).restype, getattr(library, function).argtypes = result, arguments
        return library

    def runners(self, case: Case) -> dict[str, Runner]:
        if case.mode == "training":
            return {}
        result = {"llama.cpp": self._runner(case, keep=False)}
        if case.mode == "decode":
            result["llama.cpp, kept"] = self._runner(case, keep=True)
        return result

    def _runner(self, case: Case, keep: bool) -> Runner:
        ggml, x = self.base, case.inputs
        B, T, H, D = (case.shape[name] for name in "BTHD")
        num_o, num_state = B * T * H * D, B * H * D * D
        v_first = x["state"].mT if case.mode == "decode" else torch.zeros(B, H, D, D)
        given = [x["q"], x["k"], x["v"], x["g"].view(B, T, H, -1), x["beta"].view(B, T, H, 1), v_first]
        floats = sum(tensor.numel() for tensor in given) + num_o + num_state
        size = 4 * floats + 32 * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
        # The context's memory is a tensor of ours: PyTorch sees what ggml reads and writes, and allocates for both.
        arena = torch.zeros(size, dtype=torch.uint8)
        context = ggml.ggml_init(GgmlInitParams(size, arena.data_ptr(), False))

        def view(tensor, offset, *shape):
            begin = ggml.ggml_get_data(tensor) - arena.data_ptr() + 4 * offset
            return arena[begin : begin + 4 * torch.Size(shape).numel()].view(torch.float32).view(shape)

        tensors = [ggml.ggml_new_tensor_4d(context, self.F32, *reversed(tensor.shape)) for tensor in given]

        def reset():
            for tensor, values in zip(tensors, given, strict=True):
                view(tensor, 0, *values.shape).copy_(values)

        result = ggml.ggml_gated_delta_net(context, *tensors, 1)
        graph = ggml.ggml_new_graph(context)
        if keep:
            strides = (4 * D, 4 * D * D, 4 * D * D * H, 4 * num_o)
            state = ggml.ggml_view_4d(context, result, D, D, H, B, *strides)
            ggml.ggml_build_forward_expand(graph, ggml.ggml_cpy(context, state, tensors[-1]))
        else:
            ggml.ggml_build_forward_expand(graph, result)
        o = view(result, 0, B, T, H, D)
        state = (view(tensors[-1], 0, B, H, D, D) if keep else view(result, num_o, B, H, D, D)).mT

        def call():
            status = ggml.ggml_backend_graph_compute(self.backend, graph)
            if status != 0:
                raise RuntimeError(f"ggml_backend_graph_compute: expected status 0, got {status}")
            return o, state

        return Runner(call, reset)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """sqrt(mean((a - b)^2)) / sqrt(mean(b^2))"""
    return float((a - b).double().square().mean().sqrt() / b.double().square().mean().sqrt())


def timed(runner: Runner) -> float:
    begin = time.perf_counter()
    runner.call()
    return time.perf_counter() - begin


class Others:
    """How many cores other processes, and other machines of the host, used since the beginning; None where unknown."""

    def __init__(self):
        self.begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float] | None:
        try:
            with open("/proc/stat") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except OSError:
            return None
        busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and waiting for input
        own = os.times()
        return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system, own.elapsed

    def cores(self) -> float | None:
        end = self._now()
        if self.begin is None or end is None:
            return None
        return max(0.0, (end[0] - self.begin[0]) / max(end[1] - self.begin[1], 1e-3))


def turn(runner: Runner, seconds: float) -> list[float]:
    runner.reset()
    times = [timed(runner)]
    if times[0] < seconds:  # what takes longer than a turn needs no call to warm up
        times.clear()
    while not times or (sum(times) < seconds and len(times) < MAX_CALLS):
        times.append(timed(runner))
    return times


def compare(case: Case, libraries: list, rounds: int, seconds: float) -> list[dict]:
    """The records of one case, fastweight's first."""
    runners = {name: runner for library in libraries for name, runner in library.runners(case).items()}
    answers = {}
    for name, runner in runners.items():
        runner.reset()
        answers[name] = [tensor.detach().clone() for tensor in runner.call()]
    errors = {
        name: max(error(*pair) for pair in zip(answers[name], answers["fastweight"], strict=True)) for name in runners
    }
    del answers
    samples, others = {name: [] for name in runners}, Others()
    for index in range(rounds):
        for name, runner in runners.items():
            if index >= SLOW_TURNS and min(samples[name]) > SLOW:
                continue
            time.sleep(0.01)  # threads of the one before stop waiting for more work
            samples[name] += turn(runner, seconds)
    cores_of_others = others.cores()
    records = []
    for name, times in samples.items():
        median = statistics.median(times)
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
        records.append(
            {
                "op": case.op,
                "mode": case.mode,
                "library": name,
                "dtype": "fp32",
                **case.shape,
                "calls": len(times),
                "median_ms": 1e3 * median,
                "min_ms": 1e3 * min(times),
                "p10_ms": 1e3 * deciles[0],
                "p90_ms": 1e3 * deciles[-1],
                "over_fastweight": median / statistics.median(samples["fastweight"]),
                "error": None if name == "fastweight" else errors[name],
                "others_cores": cores_of_others,
            }  # fmt: skip
        )
    return records


def compare_calmly(calm: float, *arguments) -> list[dict]:
    """`compare` at a time when other processes use less than `calm` cores, repeated if they did not stay that calm. The
    calmest try counts when PATIENCE is over; its times play no part in the choice."""
    best, end = None, time.monotonic() + PATIENCE
    while best is None or time.monotonic() < end:
        others = Others()
        time.sleep(0.5)
        before = others.cores()
        if before is not None and before >= calm and time.monotonic() < end:
            continue
        records = compare(*arguments)
        if best is None or records[0]["others_cores"] < best[0]["others_cores"]:
            best = records
        if best[0]["others_cores"] is None or best[0]["others_cores"] < calm:
            break
    return best


def machine() -> dict:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def row(record: dict) -> str:
    shape = " ".join(f"{name}={record[name]}" for name in "BTHD")
    spread = f"{record['p10_ms']:.3f} .. {record['p90_ms']:.3f}"
    same = "" if record["error"] is None else f"{record['error']:.1e}"
    others = "" if record["others_cores"] is None else f"{record['others_cores']:.2f}"
    return (
        f"{record['op']:4}{record['mode']:10}{shape:24}{record['library']:16}{record['median_ms']:11.3f}{spread:>24}"
        f"{record['over_fastweight']:8.2f}{same:>10}{others:>8}"
    )


def parse_shape(text: str) -> dict[str, int]:
    shape = {"B": 1, "T": 1} | {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    if set(shape) != set("BTHD"):
        raise ValueError
    return shape


def parse_list(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in choices:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(choices)}, got {name}")
        return text.split(",")

    return parse


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--llama-cpp", type=pathlib.Path, help="folder of a build of llama.cpp with shared libraries")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=pathlib.Path, help="file for the records")
    parser.add_argument("--ops", type=parse_list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--modes", type=parse_list(MODES), default=list(MODES))
    parser.add_argument("--shape", type=parse_shape, help="H=..,D=..[,B=..][,T=..] in place of each mode's own")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a library's turn")
    parser.add_argument("--calm", type=float, help="cores that others may use: wait for it, and try again")
    arguments = parser.parse_args(argv)

    libraries = [Fastweight(arguments.threads), Transformers()]
    if arguments.llama_cpp:
        libraries.append(LlamaCpp(arguments.llama_cpp, arguments.threads))
    about = {"threads": arguments.threads, "rounds": arguments.rounds, **machine()}
    for library in libraries:
        about |= library.versions
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':38}{'library':16}{'median ms':>11}{'10th .. 90th pct.':>24}{'ratio':>8}{'error':>10}{'others':>8}")
    records = []
    for op in arguments.ops:
        for mode in arguments.modes:
            for shape in (arguments.shape,) if arguments.shape else SHAPES[op, mode]:
                if mode == "decode":
                    shape = shape | {"T": 1}
                work = (draw(op, mode, shape), libraries, arguments.rounds, arguments.seconds)
                found = compare(*work) if arguments.calm is None else compare_calmly(arguments.calm, *work)
                for record in found:
                    records.append(record | about)
                    print(row(record), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
