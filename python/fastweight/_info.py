"""What this build of the library is and what it found on this machine."""

from __future__ import annotations

import functools
import json
from typing import Any

from ._library import operators


@functools.cache
def _found() -> dict[str, Any]:
    return json.loads(operators.info())


def info() -> dict[str, Any]:
    """What the library was built with, and what it found on this machine.

    Returns:
        `version`; `cpu_target`, the instruction set in use, and `cpu_targets`, all that the build has;
        `built_with_cuda`, the `cuda_architectures` that its kernels were compiled for, and the names of the
        `cuda_devices` here; `implementations`: `{family: {device: {mode: [names]}}}`, from special to general.
    """
    found = dict(_found())
    found["implementations"] = {}
    for family, entries in _found()["implementations"].items():
        devices = found["implementations"].setdefault(family, {})
        for device, mode, name in entries:
            devices.setdefault(device, {}).setdefault(mode, []).append(name)
    return found


@functools.cache
def has(family: str, device: str, mode: str) -> bool:
    """Whether a family has an implementation for a mode (forward, backward, step) on a type of device."""
    return any([device, mode] == entry[:2] for entry in _found()["implementations"][family])
