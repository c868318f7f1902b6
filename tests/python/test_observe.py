"""What ran and why: logging, the last implementation, a chosen one, the tool, and the names in errors."""

import logging
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import fastweight
from fastweight import ops
from fastweight.modules.fused_norm_gate import rms_norm_gated, rms_norm_gated_
from helpers import draw, leaves

X = {name: value.float() for name, value in draw("gated_delta_rule", T=40).items()}


def test_last_implementation():
    ops.chunk_gated_delta_rule(**X)
    assert fastweight.last_implementation() == fastweight.last_implementation("delta_rule_forward") == "chunk"
    ops.l2norm(X["q"])
    assert fastweight.last_implementation() == fastweight.last_implementation("l2norm_forward") == "simd"
    assert fastweight.last_implementation("delta_rule_forward") == "chunk"
    ops.chunk_gated_delta_rule(**{name: value.double() for name, value in X.items()})
    assert fastweight.last_implementation("delta_rule_forward") == "reference"
    assert fastweight.last_implementation("nothing") is None


def test_using():
    x = leaves(X)
    with fastweight.using("recurrent"):
        o, _ = ops.chunk_gated_delta_rule(**x)
        assert fastweight.last_implementation() == "recurrent"
        o.sum().backward()
        assert fastweight.last_implementation("delta_rule_backward") == "recurrent"
        with fastweight.using("reference", family="delta_rule"):
            ops.chunk_gated_delta_rule(**X)
            assert fastweight.last_implementation() == "reference"
        ops.chunk_gated_delta_rule(**X)
        assert fastweight.last_implementation() == "recurrent"
        ops.l2norm(X["q"])  # which has none such
        assert fastweight.last_implementation() == "simd"
    ops.chunk_gated_delta_rule(**X)
    assert fastweight.last_implementation() == "chunk"


def test_using_segments():
    from fastweight import _observe

    with fastweight.using(segments=False):
        assert _observe._segments == -1
        with fastweight.using("recurrent", segments=8):
            assert _observe._segments == 8
            ops.chunk_gated_delta_rule(**X)
            assert fastweight.last_implementation() == "recurrent"
        assert _observe._segments == -1
        with fastweight.using(segments=True):
            assert _observe._segments == 0
    assert _observe._segments == 0
    for segments in (0, -1, "few"):
        with pytest.raises(ValueError, match="segments: expected True, False or a number of chunks"):
            fastweight.using(segments=segments).__enter__()


def test_using_what_cannot():
    with fastweight.using("chunk"), pytest.raises(NotImplementedError, match="fp64 tensors run on the reference"):
        ops.chunk_gated_delta_rule(**{name: value.double() for name, value in X.items()})
    ops.chunk_gated_delta_rule(**{name: value.double() for name, value in X.items()})
    with (
        pytest.raises(ValueError, match="implementation: expected one of .*, got 'nonsense'"),
        fastweight.using("nonsense"),
    ):
        pass
    with pytest.raises(ValueError, match="family: expected one of .*, got 'nonsense'"):
        fastweight.using("chunk", family="nonsense").__enter__()
    with pytest.raises(ValueError, match="implementation: expected one of direct, reference, got 'chunk'"):
        fastweight.using("chunk", family="short_conv").__enter__()


def test_logging(caplog):
    logger = logging.getLogger("fastweight")
    with caplog.at_level(logging.DEBUG, "fastweight"):
        assert logger.level == logging.DEBUG
        ops.fused_recurrent_gated_delta_rule(**{n: v if n == "initial_state" else v[:, :2] for n, v in X.items()})
    line = caplog.records[-1].getMessage()
    assert re.match(r"delta_rule_forward B=1 T=2 .* gate per head, fp32: ran recurrent \(chunk: not worthwhile\)", line)
    count = len(caplog.records)
    ops.chunk_gated_delta_rule(**X)
    assert len(caplog.records) == count


def test_environment():
    script = "import torch, fastweight; fastweight.ops.l2norm(torch.ones(2, 4))"
    for value, lines in (("1", 1), ("0", 0)):
        result = subprocess.run(
            [sys.executable, "-c", script], env={"FASTWEIGHT_VERBOSE": value, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        found = [line for line in result.stderr.splitlines() if line.startswith("fastweight: l2norm_forward")]
        assert len(found) == lines
        assert all("ran simd" in line for line in found)


def test_logging_that_was_set_up_before():
    script = """
import logging, sys
logging.basicConfig(stream=sys.stderr)
logging.getLogger("fastweight").setLevel(logging.DEBUG)
import torch, fastweight
fastweight.ops.l2norm(torch.ones(2, 4))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert re.search("DEBUG:fastweight:l2norm_forward .*ran simd", result.stderr)


def test_compiled_calls_are_seen():
    compiled = torch.compile(ops.l2norm, fullgraph=True, backend="aot_eager")
    compiled(X["q"])
    ops.chunk_gated_delta_rule(**X)
    compiled(X["q"])
    assert fastweight.last_implementation() == "simd"


def test_names_in_errors():
    raw = {name: value.float() for name, value in draw("gated_delta_rule", T=10, raw=True).items()}
    with pytest.raises(ValueError, match=r"A_log: expected shape \[2\], got \[3\]"):
        ops.chunk_gated_delta_rule(**raw | {"A_log": torch.zeros(3)}, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match=r"weight: expected shape \[8, 4\], got \[7, 4\]"):
        ops.causal_conv1d(torch.ones(2, 5, 8), torch.ones(7, 4))
    with pytest.raises(ValueError, match=r"cache: expected"):
        ops.causal_conv1d_update(torch.ones(2, 5, 8), torch.ones(3, 8, 4), weight=torch.ones(8, 4))
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"gk: expected shape \[1, 4, 1, 8\], got \[1, 4, 1, 7\]"):
        ops.chunk_dplr_delta_rule(q, q, q, q, q, q[..., :7])
    with pytest.raises(ValueError, match=r"gk: expected shape \[1, 4, 1, 8\], got \[1, 4, 1, 7\]"):
        ops.fused_recurrent_gla(q, q, q, q[..., :7])
    with pytest.raises(ValueError, match="g: expected shape"):
        ops.chunk_scaled_dot_kkt_fwd(q, q[..., 0][:, :3], torch.ones(1, 4, 1))
    with pytest.raises(ValueError, match=r"beta: expected rank 3, got shape \[1, 4\]"):
        ops.chunk_scaled_dot_kkt_fwd(q, beta=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"k: expected rank 4"):
        ops.delta_rule_map(q[0], q[0])
    with pytest.raises(ValueError, match=r"d_o: expected shape \[1, 4, 1, 8\], got \[1, 3, 1, 8\]"):
        ops.delta_rule_map_backward(q, q, q[:, :3])
    with pytest.raises(ValueError, match=r"x: expected 8 channels, got shape \[2, 5\]"):
        ops.causal_conv1d_update(torch.ones(2, 5), torch.ones(2, 8, 4), weight=torch.ones(8, 4))
    for norm in (rms_norm_gated, rms_norm_gated_):
        with pytest.raises(ValueError, match=r"g: expected shape \[1, 4, 1, 8\], got \[1, 3, 1, 8\]"):
            norm(q, q[:, :3], None)
    with pytest.raises(AssertionError, match=r"residual: expected shape \[1, 4, 1, 8\], got \[8\]"):
        rms_norm_gated(q, q, None, residual=q[0, 0, 0])
    for gate in ("g", "gk"):
        x = {"q": q, "k": q, "v": q, "g": q[..., 0], "gk": q}
        with pytest.raises(ValueError, match=rf"{gate}: expected shape"):
            ops.fused_recurrent_gated_delta_rule(**x | {gate: x[gate][:, :3]})


@pytest.mark.parametrize("name", ["chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda"])
def test_ranks_in_errors(name):
    q = torch.zeros(1, 4, 1, 8)
    x = {"q": q, "k": q, "v": q, "beta": q[..., 0]}
    if name != "chunk_delta_rule":
        x["g"] = q if name == "chunk_kda" else q[..., 0]
    for argument in ("q", "v"):
        with pytest.raises(ValueError, match=rf"{argument}: expected rank 4, got shape \[4, 8\]"):
            getattr(ops, name)(**x | {argument: q[0, :, 0]})


@pytest.mark.parametrize("name", ["delta_rule", "kda", "gla", "simple_gla", "linear_attn", "comba", "dplr_delta_rule"])
def test_integers_are_refused(name):
    """Where types may be mixed, too."""
    q = torch.zeros(1, 4, 1, 8)
    extra = {
        "delta_rule": {"beta": q[..., 0]},
        "kda": {"g": q, "beta": q[..., 0]},
        "comba": {"p": q, "g": q[..., 0]},
        "dplr_delta_rule": {"a": q, "b": q, "gk": q},
    }
    for argument in ("q", "k", "v"):
        x = {"q": q, "k": q, "v": q} | extra.get(name, {})
        with pytest.raises(ValueError, match=rf"{argument}: expected .*, got int64"):
            getattr(ops, f"fused_recurrent_{name}")(**x | {argument: x[argument].long()})


def test_version_and_types():
    assert fastweight.__version__ == fastweight.info()["version"]
    assert (pathlib.Path(fastweight.__file__).parent / "py.typed").exists()


def test_the_tool():
    for arguments, text in ((["info"], "delta_rule"), (["check", "--op", "comba"], "all good")):
        result = subprocess.run(
            [sys.executable, "-m", "fastweight", *arguments], env={"PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert text in result.stdout
