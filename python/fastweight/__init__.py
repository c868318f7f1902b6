"""Delta-rule sequence operators (DeltaNet, Gated DeltaNet, KDA, TTT-Linear) for PyTorch."""

from . import layers, modules, ops
from ._accelerate import accelerate, restore
from ._info import info

__all__ = ["accelerate", "info", "layers", "modules", "ops", "restore"]
