"""Delta-rule sequence operators (DeltaNet, Gated DeltaNet, KDA, TTT-Linear) for PyTorch."""

from . import layers, ops

__all__ = ["layers", "ops"]
