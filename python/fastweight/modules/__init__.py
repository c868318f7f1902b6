"""Modules around the operators, under flash-linear-attention's paths and with its constructors."""

from .convolution import ShortConvolution
from .fused_norm_gate import FusedRMSNormGated, FusedRMSNormSwishGate
from .l2norm import L2Norm, l2norm
from .layernorm import RMSNorm

__all__ = ["FusedRMSNormGated", "FusedRMSNormSwishGate", "L2Norm", "RMSNorm", "ShortConvolution", "l2norm"]
