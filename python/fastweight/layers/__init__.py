"""Token mixers over the operators, with the parameters of flash-linear-attention's layers: their checkpoints load."""

from .cache import Cache
from .conv import ShortConvolution
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .kda import KimiDeltaAttention
from .norm import RMSNorm, RMSNormGated

__all__ = [
    "Cache",
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "RMSNorm",
    "RMSNormGated",
    "ShortConvolution",
]
