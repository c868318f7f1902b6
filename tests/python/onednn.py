"""Keeps PyTorch off AMX where a hypervisor shows it and does not let it work.

There bf16 products, such as those of `torch.nn.functional.linear`, end the process with an illegal instruction. oneDNN,
which computes them, stays below AMX when an environment variable says so before its first use.

    python onednn.py COMMAND..    runs a command with the variable set if it is needed
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE, BELOW_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


def avoid_broken_amx(
    probe: Sequence[str] = (sys.executable, "-c", PRODUCT), cpuinfo: Path = Path("/proc/cpuinfo")
) -> None:
    """Sets the variable, for this process and its children, where the probe dies of an illegal instruction."""
    # The probe takes as long as importing PyTorch: it is left out where the processor shows no AMX.
    if VARIABLE in os.environ or not cpuinfo.exists() or " amx_" not in cpuinfo.read_text():
        return
    if subprocess.run(probe, capture_output=True).returncode == -signal.SIGILL:
        os.environ[VARIABLE] = BELOW_AMX
        print(f"AMX does not work on this machine: {VARIABLE}={BELOW_AMX} is set for PyTorch", file=sys.stderr)


if __name__ == "__main__":
    avoid_broken_amx()
    os.execvp(sys.argv[1], sys.argv[1:])
