#!/usr/bin/env python3
"""Records the signatures of flash-linear-attention's functions and classes, for tests/python/test_signatures.py.

    tools/fla_signatures.py PATH_TO_FLA_CHECKOUT > tests/python/fla_signatures.json

Reads the source without importing it. The result has facts alone: {module: {name: [[parameter, kind, default]]}}, where a
class has the names Class.__init__ and Class.forward and a default is its source text.
"""

import ast
import json
import pathlib
import sys

# The modules that users of the operators here import from.
MODULES = [
    *(f"ops.{family}.{part}" for family in ("delta_rule", "gated_delta_rule", "kda") for part in
      ("chunk", "fused_recurrent", "naive", "wy_fast")),
    "ops.delta_rule.fused_chunk",
    "ops.gated_delta_rule.gate",
    "ops.kda.gate",
    *(f"ops.ttt.{part}" for part in ("chunk", "fused_chunk", "naive")),
    *(f"ops.gla.{part}" for part in ("chunk", "fused_chunk", "fused_recurrent", "naive")),
    *(f"ops.simple_gla.{part}" for part in ("chunk", "fused_chunk", "fused_recurrent", "naive", "parallel")),
    *(f"ops.comba.{part}" for part in ("chunk", "fused_recurrent", "naive", "utils")),
    *(f"ops.generalized_delta_rule.{rank}.{part}" for rank in ("dplr", "iplr") for part in
      ("chunk", "fused_recurrent", "naive")),
    *(f"ops.linear_attn.{part}" for part in ("chunk", "fused_chunk", "fused_recurrent", "naive", "utils")),
    "ops.common.chunk_scaled_dot_kkt",
    *(f"ops.utils.{part}" for part in ("cumsum", "index", "pack", "solve_tril")),
    "modules.l2norm",
    "modules.layernorm",
    "modules.fused_norm_gate",
    "modules.conv.causal_conv1d",
    "modules.conv.short_conv",
    "modules.conv.triton.ops",
    "layers.delta_net",
    "layers.gated_deltanet",
    "layers.kda",
]  # fmt: skip
METHODS = ("__init__", "forward", "step")


def parameters(function: ast.FunctionDef) -> list[list]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    rows = [[x.arg, "positional", d] for x, d in zip(positional, defaults, strict=True) if x.arg != "self"]
    if arguments.vararg is not None:
        rows.append([arguments.vararg.arg, "any positional", None])
    rows += [[x.arg, "keyword", d] for x, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        rows.append([arguments.kwarg.arg, "any keyword", None])
    return [[name, kind, None if default is None else ast.unparse(default)] for name, kind, default in rows]


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def signatures(tree: ast.Module) -> dict[str, list]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_kernel(node):
            found[node.name] = parameters(node)
        if isinstance(node, ast.ClassDef) and not any("Function" in ast.unparse(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in METHODS:
                    found[f"{node.name}.{method.name}"] = parameters(method)
    return found


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    modules = {}
    for module in MODULES:
        path = root / "fla" / (module.replace(".", "/") + ".py")
        modules[module] = signatures(ast.parse(path.read_text()))
    entries = []
    for module, found in modules.items():
        lines = (f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
        entries.append(f" {json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n }")
    print("{\n" + ",\n".join(entries) + "\n}")


if __name__ == "__main__":
    main()
