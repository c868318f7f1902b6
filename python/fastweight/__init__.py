"""Delta-rule sequence operators (DeltaNet, Gated DeltaNet, KDA, TTT-Linear and their relatives) for PyTorch."""

from . import layers, modules, ops
from ._accelerate import accelerate, restore
from ._info import info
from ._observe import last_implementation, using

__version__: str = info()["version"]

__all__ = ["accelerate", "info", "last_implementation", "layers", "modules", "ops", "restore", "using"]
