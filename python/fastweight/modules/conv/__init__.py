"""The short convolution."""

from .causal_conv1d import causal_conv1d, causal_conv1d_update
from .short_conv import ShortConvolution

__all__ = ["ShortConvolution", "causal_conv1d", "causal_conv1d_update"]
