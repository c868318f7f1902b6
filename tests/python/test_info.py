"""What the package says about its build, and CUDA where there is none."""

import shutil
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest
import torch

import fastweight
from fastweight import _info


def test_build():
    info = fastweight.info()
    assert info["version"] == metadata.version("fastweight")
    assert info["cpu_target"] in info["cpu_targets"]
    assert bool(info["cuda_architectures"]) == info["built_with_cuda"]
    for family in ("delta_rule", "ttt_linear", "short_conv"):
        cpu = info["implementations"][family]["cpu"]
        assert all(cpu[mode][-1] == "reference" for mode in ("forward", "backward", "step"))
        assert "cpu" in _info.devices(family, "backward")
    for block in ("chunk_local_cumsum", "solve_tril", "l2norm", "gate_activation"):
        assert info["implementations"][block]["cpu"]["forward"][-1] == "reference"
    info["implementations"].clear()
    assert fastweight.info()["implementations"]  # the caller's copy


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc, with which the package would have CUDA kernels")
def test_built_with_cuda():
    info = fastweight.info()
    assert info["built_with_cuda"]
    for family in ("delta_rule", "ttt_linear"):
        assert {"forward", "backward", "step"} <= info["implementations"][family]["cuda"].keys()
        for mode in ("forward", "backward"):
            assert _info.devices(family, mode) == {"cpu", "cuda"}


def test_importing_leaves_cuda_and_the_compiler_alone():
    """The kernels are in the package, CUDA's driver is not: a process that imports it has loaded nothing of CUDA on our
    behalf, and may still fork. Nor has it waited for PyTorch's compiler, which takes as long as PyTorch."""
    script = """
        import sys, torch
        before = {line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line}
        import fastweight
        fastweight.info()
        x = torch.rand(1, 20, 2, 8, requires_grad=True)
        fastweight.ops.chunk_delta_rule(x, x, x, x[..., 0])[0].sum().backward()
        assert "torch._dynamo" not in sys.modules
        assert {line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line} == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device():
    with pytest.raises((AssertionError, RuntimeError), match="(?i)cuda|driver"):
        fastweight.ops.l2norm(torch.ones(2, 4).cuda())
    meta = torch.empty(1, 20, 2, 16, device="meta")
    assert fastweight.ops.l2norm(meta).shape == meta.shape
