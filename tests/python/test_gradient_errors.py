"""The table of errors of gradients, as far as it can be made without a CUDA device."""

import importlib
import pathlib

import pytest
import torch

from fastweight import ops

BENCH = pathlib.Path(__file__).parents[2] / "bench"
SHAPE = {"B": 1, "T": 40, "H": 2, "D": 16}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("gradient_errors")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


class Rough:
    """Ours, with v rounded to fewer bits."""

    def __getattr__(self, name):
        def function(q, k, v, *arguments, **options):
            return getattr(ops, name)(q, k, v + (v.to(torch.float8_e4m3fn).to(v.dtype) - v).detach(), **options)

        return function


@pytest.mark.parametrize("op", ["gdn", "kda", "delta_rule", "ttt"])
def test_every_operator(bench, op):
    ours, theirs = bench.measure(op, SHAPE, {"fla": Rough()})
    assert ours["errors"].keys() == bench.draw(op, SHAPE, torch.bfloat16, 0)[0].keys()
    assert all(0 < value < 0.02 for value in ours["errors"].values())
    assert theirs["errors"]["q"] > 2 * ours["errors"]["q"]
    lines = bench.table([ours, theirs]).splitlines()
    assert len(lines) == 2 + len(ours["errors"])
    assert lines[2].startswith(f"| {bench.NAMES[op]} | 16 | dq | ")
    assert float(lines[2].split("|")[-2]) < 0.5


def test_one_that_fails(bench):
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("no such kernel")

    ours, broken = bench.measure("gdn", SHAPE, {"fla": Broken()})
    assert broken["failed"] == "RuntimeError: no such kernel"
    assert "no result" in bench.table([ours, broken])


def test_several_draws(bench):
    """The root mean square of their errors, which differ."""
    each = [bench.measure_draw("gdn", SHAPE, {}, torch.bfloat16, seed)[0]["errors"]["q"] for seed in range(3)]
    together = bench.measure("gdn", SHAPE, {}, draws=3)[0]
    assert together["draws"] == 3
    assert min(each) < together["errors"]["q"] < max(each)
    assert together["errors"]["q"] == pytest.approx(sum(x**2 for x in each) ** 0.5 / 3**0.5)
