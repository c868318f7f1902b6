"""Errors of gradients on a CUDA device against double precision, tensor by tensor, next to flash-linear-attention's.

    python bench/gradient_errors.py [--peers fla | none] [--fla FOLDER] [--fla-unchecked] [--ops gdn,kda,..]
                                    [--shape B=1,T=512,H=16,D=128] [--draws 4] [--json FILE] [--markdown FILE]

Every library gets the same inputs in bf16 (gates, beta, parameters and states in fp32) and the same gradients of o and
of the final state, through functions of the same names. The exact gradients are those of fastweight's reference on the
CPU in float64, from the inputs as they were rounded. An error is ||a - b|| / ||b|| (Frobenius) over a whole tensor, of
several draws the root mean square: dA_log has only as many numbers as there are heads. The last column of the rows is
fastweight's error over the other's.

q and k are l2-normalised inside; gates come from raw values, with A_log and dt_bias; KDA with a lower bound of -5
(`safe_gate`). flash-linear-attention tunes its kernels first, a minute or two for each operator and width.
"""

import argparse
import functools
import json
import math
import pathlib
import sys

import compare_cuda
import torch
import torch.nn.functional as F
from compare_cuda import KDA_GATE, L2NORM, parse_list, parse_shape

from fastweight import ops

OPERATORS = ("gdn", "kda", "delta_rule", "ttt")
SHAPES = ({"B": 1, "T": 512, "H": 16, "D": 128}, {"B": 1, "T": 512, "H": 16, "D": 64})
NAMES = {"gdn": "GDN", "delta_rule": "DeltaNet", "kda": "KDA", "ttt": "TTT-Linear"}
SYMBOLS = {"initial_state": "dh0", "initial_state_bias": "dhb0"}
FUNCTIONS = {
    "gdn": ("chunk_gated_delta_rule", L2NORM | {"use_gate_in_kernel": True}),
    "kda": ("chunk_kda", L2NORM | KDA_GATE | {"safe_gate": True}),
    "delta_rule": ("chunk_delta_rule", L2NORM),
    "ttt": ("chunk_ttt_linear", {"chunk_size": 16}),
}

DEVICE = "cuda"

Tensors = dict[str, torch.Tensor]


def draw(op: str, shape: dict[str, int], dtype: torch.dtype, seed: int) -> tuple[Tensors, list[torch.Tensor]]:
    """Inputs and gradients of the outputs, on the CPU, rounded to their types."""
    B, T, H, D = (shape[name] for name in "BTHD")
    generator = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    x = {name: randn(B, T, H, D).to(dtype) for name in "qkv"}
    outputs = [randn(B, T, H, D).to(dtype), randn(B, H, D, D)]
    if op == "ttt":
        x["k"] = F.normalize(x["k"].float(), dim=-1).to(dtype)
        x |= {"w": 1 + 0.1 * randn(H, D), "b": 0.1 * randn(H, D), "eta": randn(B, T, H, 1).sigmoid() / D}
        x |= {name: x[name].to(dtype) for name in ("w", "b", "eta")}  # fla's kernels take one type
        x |= {"initial_state": 0.02 * randn(B, H, D, D), "initial_state_bias": 0.02 * randn(B, H, 1, D)}
        return x, [*outputs, randn(B, H, 1, D)]
    if op == "gdn":
        x |= {"g": randn(B, T, H), "A_log": randn(H), "dt_bias": randn(H)}
    if op == "kda":
        x |= {"g": randn(B, T, H, D), "A_log": randn(H), "dt_bias": 0.1 * randn(H * D)}
    return x | {"beta": randn(B, T, H).sigmoid(), "initial_state": randn(B, H, D, D)}, outputs


def gradients(library, op: str, x: Tensors, d_outputs: list[torch.Tensor]) -> Tensors:
    name, options = FUNCTIONS[op]
    leaves = {key: value.detach().clone().requires_grad_() for key, value in x.items()}
    outputs = getattr(library, name)(**leaves, output_final_state=True, **options)
    d_outputs = [d.to(o.dtype) for d, o in zip(d_outputs, outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(leaves.values()), d_outputs)
    return dict(zip(leaves, found, strict=True))


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b).norm() / b.norm())


def measure_draw(op: str, shape: dict[str, int], peers: dict[str, object], dtype: torch.dtype, seed: int) -> list[dict]:
    x, d_outputs = draw(op, shape, dtype, seed)
    exact = gradients(ops, op, {key: value.double() for key, value in x.items()}, [d.double() for d in d_outputs])
    records = []
    for library, functions in {"fastweight": ops, **peers}.items():
        base = {"op": op, "dtype": str(dtype).removeprefix("torch."), **shape, "library": library}
        try:
            placed = {key: value.to(DEVICE) for key, value in x.items()}
            found = gradients(functions, op, placed, [d.to(DEVICE) for d in d_outputs])
        except Exception as problem:  # the other library still has its turn
            records.append(base | {"failed": f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"})
            continue
        records.append(base | {"errors": {key: error(found[key], exact[key]) for key in x}})
    return records


def measure(
    op: str, shape: dict[str, int], peers: dict[str, object], dtype: torch.dtype = torch.bfloat16, draws: int = 1
) -> list[dict]:
    """A record for each library."""
    records = []
    for same_library in zip(*(measure_draw(op, shape, peers, dtype, seed) for seed in range(draws)), strict=True):
        failed = next((record for record in same_library if "failed" in record), None)
        if failed is None:
            each = [record["errors"] for record in same_library]
            mean = {key: math.sqrt(sum(errors[key] ** 2 for errors in each) / draws) for key in each[0]}
            records.append(same_library[0] | {"draws": draws, "errors": mean})
        else:
            records.append(failed | {"draws": draws})
    return records


def table(records: list[dict]) -> str:
    """Rows of tensors, columns of libraries, as Markdown."""
    libraries = list(dict.fromkeys(record["library"] for record in records))
    others = libraries[1:]
    head = ["operator", "D", "gradient", *libraries, *(f"over {name}'s" for name in others)]
    lines = ["| " + " | ".join(head) + " |", "|---|---:|---|" + "---:|" * (len(head) - 3)]
    for op, D in dict.fromkeys((record["op"], record["D"]) for record in records):
        errors = {r["library"]: r.get("errors", {}) for r in records if (r["op"], r["D"]) == (op, D)}
        for key in next((found for found in errors.values() if found), {}):
            values = [errors[name].get(key) for name in libraries]
            cells = ["no result" if value is None else f"{value:.2e}" for value in values]
            cells += [f"{values[0] / v:.2f}" if values[0] is not None and v else "" for v in values[1:]]
            lines.append(f"| {NAMES[op]} | {D} | {SYMBOLS.get(key, 'd' + key)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", type=functools.partial(parse_list, ("fla", "none")), default=["fla"])
    parser.add_argument("--fla", type=pathlib.Path, help="source folder of flash-linear-attention")
    parser.add_argument("--fla-unchecked", action="store_true", help="remove its check of Triton's version")
    parser.add_argument("--ops", type=functools.partial(parse_list, OPERATORS), default=list(OPERATORS))
    parser.add_argument("--shape", type=parse_shape, help="H=..,D=..,T=..[,B=..] in place of both widths")
    parser.add_argument("--draws", type=int, default=1, help="of the inputs")
    parser.add_argument("--json", type=pathlib.Path, help="file for the records")
    parser.add_argument("--markdown", type=pathlib.Path, help="file for the table")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "gradient_errors: there is no CUDA device\n")
    if arguments.fla:
        sys.path.insert(0, str(arguments.fla))
    peers = compare_cuda.load_peers([name for name in arguments.peers if name != "none"], arguments.fla_unchecked)
    about = compare_cuda.machine(arguments.fla) | {"unchecked": arguments.fla_unchecked}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    records = []
    for op in arguments.ops:
        for shape in (arguments.shape,) if arguments.shape else SHAPES:
            for record in measure(op, shape, peers, draws=arguments.draws):
                records.append(record | about)
                shown = {SYMBOLS.get(k, "d" + k): f"{v:.1e}" for k, v in record.get("errors", {}).items()}
                print(op, f"D={shape['D']}", record["library"], record.get("failed", shown), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    text = table(records)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
