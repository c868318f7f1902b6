"""Runs flash-linear-attention's own tests of the operators that are here, with our functions in place of its.

    python tools/fla_tests.py CHECKOUT [TEST_FILE ..] [--ours] [--tokens N] [--limit SECONDS] [--json FILE] [pytest's ..]

CHECKOUT is a clone of fla, of which the tests and the plain references (`naive.py`) are read; everything else that a
test imports from `fla` comes from `fastweight` under the same path. What is not there raises `Absent` when it is
called. With `--ours` the plain references are ours, too. The tests run on the GPU where there is one, else on the CPU;
one that takes longer than the limit has failed, and `--tokens` makes long sequences shorter. It prints a table of what each file did and the reasons of the failures.
Needs pytest and einops in the interpreter that has fastweight.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.abc
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import re
import signal
import sys
import types

import pytest
import torch

FILES = [
    *(
        f"tests/ops/test_{name}.py"
        for name in (
            "delta", "gdn", "gdn_kernels", "kda", "ttt", "linear_attn", "simple_gla", "gla", "comba", "iplr_delta",
            "dplr_delta", "solve_tril", "utils/test_cumsum", "utils/test_index", "utils/test_pack",
        )
    ),
    *(f"tests/modules/test_{name}.py" for name in ("conv", "l2norm", "layernorm", "layernorm_gated")),
    "tests/layers/test_gated_deltanet.py",
]  # fmt: skip
FILES = [name.replace("test_utils/", "utils/") for name in FILES]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Absent(NotImplementedError):
    """A function of fla's that is not here has been called."""


class Missing:
    """Stands where a test has imported what is not here."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args, **kwargs):
        raise Absent(f"{self._path} is not here")

    def __getattr__(self, name: str):
        raise Absent(f"{self._path} is not here")


def utilities(checkout: pathlib.Path) -> dict:
    """What tests take from `fla.utils`: its comparison, and what it says of the device."""
    package = types.ModuleType("fla_testing")
    package.__path__ = [str(checkout / "fla" / "utils")]
    sys.modules["fla_testing"] = package
    names = dict.fromkeys(
        ("IS_INTEL", "IS_INTEL_ALCHEMIST", "IS_NPU", "IS_AMD", "IS_NVIDIA_BLACKWELL", "IS_NVIDIA_HOPPER"), False
    )
    return names | {
        "assert_close": importlib.import_module("fla_testing._testing").assert_close,
        "device": DEVICE,
        "device_platform": "nvidia" if DEVICE == "cuda" else DEVICE,
        "device_torch_lib": getattr(torch, DEVICE),
        "check_shared_mem": lambda *args, **kwargs: True,
        "IS_NVIDIA": DEVICE == "cuda",
    }


class FlaFromFastweight(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `fla.x.y` from `fastweight.x.y`."""

    def __init__(self, checkout: pathlib.Path, own_references: bool) -> None:
        self._checkout, self._own_references = checkout, own_references

    def find_spec(self, name, path=None, target=None):
        if name == "fla" or name.startswith("fla."):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def exec_module(self, module) -> None:
        name = module.__name__
        module.__getattr__ = lambda attribute: self._missing(name, attribute)
        if name == "fla.ops.utils.cache":
            module.FLA_CACHE_MODE = types.SimpleNamespace(uses_default_config=lambda: False)
        elif name == "fla.utils":
            vars(module).update(utilities(self._checkout))
        elif name.endswith(".naive") and not self._own_references:
            path = self._checkout / (name.replace(".", "/") + ".py")
            exec(compile(path.read_text(), str(path), "exec"), vars(module))
        else:
            ours = name.replace("fla", "fastweight", 1)
            try:
                found = vars(importlib.import_module(ours))
            except ModuleNotFoundError as error:
                if not ours.startswith(error.name):
                    raise
                found = {}
            vars(module).update({key: value for key, value in found.items() if not key.startswith("__")})

    @staticmethod
    def _missing(module: str, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{module}.{attribute}")


def stand_in_for_triton() -> None:
    """Tests take arithmetic on integers from it. PyTorch, which would take more, has looked for it before."""
    if importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._inductor.compile_fx")
        triton = types.ModuleType("triton")
        triton.__version__ = "0"
        triton.cdiv = lambda a, b: -(-a // b)
        triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
        sys.modules["triton"] = triton


def shortened(length: int, most: int) -> int:
    """A length of about `most` that ends a chunk where the longer one does."""
    return length if length <= most else most // 64 * 64 + length % 64


class Results:
    """What became of every test, with limits on its time and its lengths."""

    def __init__(self, limit: int, tokens: int | None) -> None:
        self._limit, self._tokens = limit, tokens
        self.outcomes = {}  # test: (outcome, reason)

    def pytest_collection_modifyitems(self, items):
        for item in items if self._tokens else []:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if isinstance(params.get("T"), int):
                params["T"] = shortened(params["T"], self._tokens)
            if isinstance(params.get("cu_seqlens"), list):
                lengths = (shortened(b - a, self._tokens) for a, b in itertools.pairwise(params["cu_seqlens"]))
                params["cu_seqlens"] = list(itertools.accumulate(lengths, initial=0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        def stop(number, frame):
            raise TimeoutError(f"took longer than {self._limit} s")

        torch.manual_seed(42)  # some tests set none, and their fp16 gradients overflow now and then
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(self._limit)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.excinfo is not None and not report.skipped:
            absent = call.excinfo.errisinstance(Absent)
            self.outcomes[item.nodeid] = ("absent" if absent else "failed", reason_of(call.excinfo))
        elif report.skipped:
            self.outcomes[item.nodeid] = ("skipped", reason_of(call.excinfo) if call.excinfo else "")
        elif report.when == "call":
            self.outcomes[item.nodeid] = ("passed", "")
        return report

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid] = ("failed", str(report.longrepr).strip().splitlines()[-1])


def reason_of(excinfo) -> str:
    lines = str(excinfo.value).strip().splitlines()
    return f"{excinfo.typename}: {lines[0] if lines else ''}"[:160]


def table(outcomes: dict) -> str:
    kinds = ("passed", "failed", "absent", "skipped")
    counts = collections.defaultdict(collections.Counter)
    for test, (outcome, _) in outcomes.items():
        counts[test.split("::")[0]][outcome] += 1
        counts["all"][outcome] += 1
    rows = [f"{'file':40s}" + "".join(f"{kind:>9s}" for kind in kinds)]
    for name in [*(name for name in counts if name != "all"), "all"]:
        rows.append(f"{name:40s}" + "".join(f"{counts[name][kind]:9d}" for kind in kinds))
    reasons = collections.Counter()
    for test, (outcome, reason) in outcomes.items():
        if outcome != "passed":
            reasons[(outcome, re.sub(r"\[.*", "", test), re.sub(r"\d+(\.\d+)?(e-\d+)?", "..", reason))] += 1
    rows.append("")
    rows += [f"{count:4d} {outcome:8s}{test}: {reason}" for (outcome, test, reason), count in sorted(reasons.items())]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("files", nargs="*", help="of the checkout; without any, all of the operators that are here")
    parser.add_argument("--ours", action="store_true", help="our plain references instead of fla's")
    parser.add_argument("--tokens", type=int, help="the length above which sequences are cut")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    parser.add_argument("--json", type=pathlib.Path)
    arguments, options = parser.parse_known_args()
    checkout = arguments.checkout.resolve()
    stand_in_for_triton()
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # else what fla's other backends lack is skipped
    sys.meta_path.insert(0, FlaFromFastweight(checkout, arguments.ours))
    logging.getLogger("fla_testing").setLevel(logging.WARNING)
    results = Results(arguments.limit, arguments.tokens)
    files = [str(checkout / name) for name in arguments.files or FILES]
    # Its conftest.py fills what fla's kernels are handed with NaN; ours are handed nothing.
    quiet = ["-q", "--noconftest", "--tb=no", "-p", "no:cacheprovider", "-p", "no:warnings", "--rootdir", str(checkout), "-c", "/dev/null"]
    pytest.main([*quiet, *options, *files], plugins=[results])
    print(table(results.outcomes))
    if arguments.json:
        arguments.json.write_text(json.dumps(results.outcomes, indent=1) + "\n")
    return int(any(outcome == "failed" for outcome, _ in results.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
