"""The search for AMX that does not work, with children that do what PyTorch would."""

import os
import sys

import pytest

import onednn

FINE = (sys.executable, "-c", "pass")
DIES = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
FAILS = (sys.executable, "-c", "import sys; sys.exit(1)")


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    """A processor that shows AMX, in surroundings that say nothing of it."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != onednn.VARIABLE})
    path = tmp_path / "cpuinfo"
    path.write_text("model : 207\nflags : fpu avx512_bf16 amx_bf16 amx_tile\n")
    return path


def test_sets_the_variable_where_the_probe_dies(cpuinfo, capfd):
    onednn.avoid_broken_amx(DIES, cpuinfo)
    assert os.environ[onednn.VARIABLE] == onednn.BELOW_AMX
    said = capfd.readouterr().err
    assert f"{onednn.VARIABLE}={onednn.BELOW_AMX}" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("probe", [FINE, FAILS], ids=["fine", "fails"])
def test_does_nothing_where_amx_works_or_something_else_fails(cpuinfo, capfd, probe):
    onednn.avoid_broken_amx(probe, cpuinfo)
    assert onednn.VARIABLE not in os.environ
    assert capfd.readouterr().err == ""


def test_does_not_probe_without_amx(cpuinfo):
    cpuinfo.write_text("flags : fpu avx512_bf16\n")
    onednn.avoid_broken_amx(DIES, cpuinfo)
    onednn.avoid_broken_amx(DIES, cpuinfo.with_name("missing"))
    assert onednn.VARIABLE not in os.environ


def test_leaves_the_users_choice(cpuinfo):
    os.environ[onednn.VARIABLE] = "AVX2"
    onednn.avoid_broken_amx(DIES, cpuinfo)
    assert os.environ[onednn.VARIABLE] == "AVX2"


def test_product_of_the_probe():
    exec(onednn.PRODUCT, {})
