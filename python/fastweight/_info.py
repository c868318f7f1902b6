"""What this build of the library is."""

from __future__ import annotations

import copy
import json
from typing import Any

from ._library import operators


def _read() -> dict[str, Any]:
    found = json.loads(operators.info())
    implementations = {}
    for family, entries in found["implementations"].items():
        devices = implementations[family] = {}
        for device, mode, name in entries:
            devices.setdefault(device, {}).setdefault(mode, []).append(name)
    return {**found, "implementations": implementations}


_INFO = _read()
DELTA_RULE_SWITCHES = _INFO.pop("delta_rule_switches")  # for _delta_rule.py


def info() -> dict[str, Any]:
    """What the library was built with.

    Returns:
        `version`; `cpu_target`, the instruction set in use, and `cpu_targets`, all that the build has;
        `built_with_cuda`, and the `cuda_architectures` that its kernels were compiled for; `implementations`:
        `{family: {device: {mode: [names]}}}`, from special to general.
    """
    return copy.deepcopy(_INFO)


def devices(family: str, mode: str) -> frozenset[str]:
    """The types of devices that a family has an implementation for, of a mode (forward, backward, step)."""
    return frozenset(device for device, modes in _INFO["implementations"][family].items() if mode in modes)
