"""Token mixers over the operators. DeltaNet, GatedDeltaNet and KimiDeltaAttention have the parameters of
flash-linear-attention's layers: its checkpoints load."""

from ..modules import FusedRMSNormGated as RMSNormGated
from ..modules import RMSNorm, ShortConvolution
from .cache import Cache
from .delta_net import DeltaNet
from .gated_deltanet import GatedDeltaNet
from .kda import KimiDeltaAttention
from .ttt_linear import TTTLinear

__all__ = [
    "Cache",
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "RMSNorm",
    "RMSNormGated",
    "ShortConvolution",
    "TTTLinear",
]
