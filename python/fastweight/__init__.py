"""Delta-rule sequence operators (DeltaNet, Gated DeltaNet, KDA, TTT-Linear) for PyTorch."""

from . import ops

__all__ = ["ops"]
