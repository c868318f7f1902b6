"""What the package says about its build, and CUDA where there is none."""

import shutil
import subprocess
import sys
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
        assert _info.has(family, "cpu", "backward")
    assert not _info.has("delta_rule", "mps", "forward")
    info["implementations"].clear()
    assert fastweight.info()["implementations"]  # the caller's copy


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc, with which the package would have CUDA kernels")
def test_built_with_cuda():
    info = fastweight.info()
    assert info["built_with_cuda"]
    assert {"forward", "step"} <= info["implementations"]["delta_rule"]["cuda"].keys()
    assert _info.has("delta_rule", "cuda", "forward")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device():
    """The kernels are in the package, their driver is not: it loads nothing of CUDA, and finds no device."""
    script = (
        "import fastweight; assert fastweight.info()['cuda_devices'] == []; "
        "maps = open('/proc/self/maps').read(); assert 'libcudart' not in maps and 'libcuda.so' not in maps"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    with pytest.raises((AssertionError, RuntimeError), match="(?i)cuda|driver"):
        fastweight.ops.l2norm(torch.ones(2, 4).cuda())
