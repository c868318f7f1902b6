"""Delta-rule sequence operators (DeltaNet, Gated DeltaNet, KDA, TTT-Linear) for PyTorch."""

from . import layers, ops
from ._accelerate import accelerate, restore

__all__ = ["accelerate", "layers", "ops", "restore"]
