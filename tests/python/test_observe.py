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
