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
    monkeypatch.setattr(module, "peak_memory", lambda function, x: 2**30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module


@pytest.mark.parametrize("mode", ["forward", "saves", "train", "step", "eager"])
@pytest.mark.parametrize("op", ["gdn", "kda", "delta_rule", "ttt"])
def test_every_case(bench, op, mode):
    sequences = mode in ("forward", "saves", "train")
    shape = {"B": 2, "T": 32 if sequences else 1, "H": 2, "D": 16}
    records = bench.compare(op, mode, shape, {"fla": ops}, rounds=1, seconds=0)
    libraries = [record["library"] for record in records]
    assert libraries[0] == "fastweight"
    assert ("fla" in libraries) == (sequences or op != "ttt")
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
    ours, broken = bench.compare("gdn", "forward", shape, {"fla": Broken()}, rounds=1, seconds=0)
    assert ours["median_ms"] > 0
    assert broken["failed"] == "RuntimeError: no such kernel"
    assert "no such kernel" in bench.row(broken)


def test_training_of_grouped_heads(bench):
    """The gradients of all inputs, and those of another library beside them."""
    shape = {"B": 1, "T": 40, "H": 2, "HV": 4, "D": 16}
    x = bench.draw("gdn", shape, 0)
    gradients = bench.training(ops, "gdn")(x)
    assert [g.shape for g in gradients] == [x[name].shape for name in ("q", "k", "v", "g", "beta")]

    class Wrong:
        def chunk_gated_delta_rule(self, q, k, v, g, beta, use_qk_l2norm_in_kernel):
            return ops.chunk_gated_delta_rule(q, k, v, 2 * g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    same, other = (bench.compare("gdn", "train", shape, {"fla": y}, 1, 0)[1] for y in (ops, Wrong()))
    assert same["error"] == 0 < other["error"]
    assert "1.00 GiB" in bench.row(same)
    assert "HV=4" in bench.row(same)


def test_peers_are_asked_for_what_they_have(bench):
    class Cudnn(bench.Cudnn):
        def __init__(self):
            self.offsets = bench.Packed(torch.int32)

        def function(self, q, k, v, g, beta, cu_seqlens):
            return ops.chunk_kda(*(x[None] for x in (q, k, v, g, beta)), cu_seqlens=cu_seqlens)[0]

    class FlashInfer(bench.FlashInfer):
        def __init__(self):
            self.offsets, self.decays = bench.Packed(torch.int64), {}

        def function(self, q, k, v, decays, beta, cu_seqlens):
            x = (y[None] for y in (q, k, v, decays.log(), beta))
            return ops.chunk_gated_delta_rule(*x, cu_seqlens=cu_seqlens)[0][0]

    class ByName(bench.Chunk16bit):
        NAME = "chunk"  # there is no other on the CPU

    peers = {"fla": ops, "flashinfer": FlashInfer(), "flashqla": ops, "cudnn": Cudnn(), "chunk_16bit": ByName()}
    assert list(bench.runners("gdn", "train", peers)) == ["fastweight", "fla", "flashqla"]
    assert list(bench.runners("kda", "train", peers)) == ["fastweight", "fla"]
    assert list(bench.runners("kda_given", "train", peers)) == ["fastweight", "fla", "cudnn"]
    assert list(bench.runners("gdn_given", "forward", peers)) == ["fastweight", "fla", "flashinfer", "chunk_16bit"]
    records = bench.compare("kda_unbounded", "forward", {"B": 1, "T": 30, "H": 2, "D": 16}, peers, 1, 0)
    assert [record["library"] for record in records] == ["fastweight", "fla", "chunk_16bit"]
    assert records[2]["error"] == 0
    records = bench.compare("gdn_given", "forward", {"B": 2, "T": 30, "H": 2, "D": 16}, peers, 1, 0)
    assert records[2]["error"] < 1e-3
    records = bench.compare("kda_given", "train", {"B": 2, "T": 30, "H": 2, "D": 16}, peers, 1, 0)
    assert [record["library"] for record in records] == ["fastweight", "fla", "cudnn"]
    assert records[2]["error"] < 1e-3


def test_what_cannot_be_captured_is_timed_without_a_graph(bench, monkeypatch):
    def refuse(function, copies, calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    class Event:
        def __init__(self, enable_timing):
            pass

        record = synchronize = lambda self: None

        def elapsed_time(self, end):
            return 3.0

    monkeypatch.setattr(bench, "Graph", refuse)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    (record,) = bench.compare("gdn", "train", {"B": 1, "T": 20, "H": 1, "D": 16}, {}, rounds=1, seconds=0)
    assert record["graph"] is False
    assert "no graph" in bench.row(record)


def test_shapes(bench):
    assert bench.parse_shape("H=2,D=64") == {"B": 1, "T": 1, "H": 2, "D": 64}
    assert bench.parse_shape("H=2,HV=4,D=64,T=9")["HV"] == 4
    with pytest.raises(ValueError):
        bench.parse_shape("H=2,K=64")
    lengths = [shape["T"] for shape in bench.SWEEP]
    assert lengths[0] == 4096
    assert lengths[-1] == 512 * 1024
