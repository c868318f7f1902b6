"""The comparison on CUDA devices, as far as it can run without one: ours against ours, without graphs."""

import importlib.util
import pathlib

import pytest
import torch

from fastweight import ops

PATH = pathlib.Path(__file__).parents[2] / "bench" / "compare_cuda.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare_cuda", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "EAGER_CALLS", 3)
    monkeypatch.setattr(module, "l2_bytes", lambda: 1)
    monkeypatch.setattr(module, "Graph", lambda function, copies, calls: module.Eager(function, copies))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module


@pytest.mark.parametrize("mode", ["forward", "step", "eager"])
@pytest.mark.parametrize("op", ["gdn", "kda", "delta_rule", "ttt"])
def test_every_case(bench, op, mode):
    shape = {"B": 2, "T": 32 if mode == "forward" else 1, "H": 2, "D": 16}
    records = bench.compare(op, mode, shape, ops, rounds=1, seconds=0)
    libraries = [record["library"] for record in records]
    assert libraries[0] == "fastweight"
    assert ("fla" in libraries) == (mode == "forward" or op != "ttt")
    assert ("torch.mul" in libraries) == (mode == "eager")
    for record in records:
        assert "failed" not in record, record
        assert bench.row(record)
        assert record["median_ms"] > 0
        if record["error"] is not None:
            assert record["error"] < 1e-2


def test_a_library_that_fails_is_reported(bench):
    class Broken:
        def __getattr__(self, name):
            def fail(*arguments, **options):
                raise RuntimeError("no such kernel")

            return fail

    shape = {"B": 1, "T": 16, "H": 1, "D": 16}
    ours, broken = bench.compare("gdn", "forward", shape, Broken(), rounds=1, seconds=0)
    assert ours["median_ms"] > 0
    assert broken["failed"] == "RuntimeError: no such kernel"
    assert "no such kernel" in bench.row(broken)
