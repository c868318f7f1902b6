"""The short convolution under fla's second path."""

from .conv import ShortConvolution, causal_conv1d, causal_conv1d_update

__all__ = ["ShortConvolution", "causal_conv1d", "causal_conv1d_update"]
