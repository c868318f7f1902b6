"""The RMS norm with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _blocks
from .layernorm import GATES, RMSNorm, normalised


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | Any:
    """`(weight * x / sqrt(mean(x^2) + eps) + bias) * activation(g)` over the last axis, in the type of x.

    Args:
        x, g: `[.., D]`.
        weight, bias: `[D]`, or None.
        activation: `"silu"`, its other name `"swish"`, or `"sigmoid"`.
        residual: `[.., D]`, added to x before the norm.
        prenorm: also return the sum of x and the residual.
        residual_in_fp32: without a residual, x comes back in fp32. A sum has the type of its residual, as in fla.
    """
    _check(activation)
    return normalised(x, weight, bias, residual, eps, prenorm, residual_in_fp32, g, activation)


def rms_norm_gated_(
    x: Tensor, g: Tensor | None, weight: Tensor | None, activation: str = "swish", eps: float = 1e-6
) -> Tensor:
    """`rms_norm_gated` in place: y is written over x, which is returned. No gradients.

    Args:
        x: `[.., D]`, two to five axes.
        g: like x; None: no gate.
        weight: `[D]`, or None.
    """
    _check(activation)
    _blocks.rms_norm_in_place((x, g, weight), (eps, GATES[activation]))
    return x


class FusedRMSNormGated(RMSNorm):
    """`y = weight * x / sqrt(mean(x^2) + eps) * activation(g)` over the last axis of x and g `[.., D]`; activation:
    silu, swish or sigmoid."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(activation)
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | Any:
        """The arguments are those of `rms_norm_gated`."""
        return normalised(x, self.weight, None, residual, self.eps, prenorm, residual_in_fp32, g, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """`FusedRMSNormGated` with silu, by its older name."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, device=device, dtype=dtype)


def _check(activation: str) -> None:
    if activation not in GATES:
        raise ValueError(f"activation: expected one of {', '.join(GATES)}, got {activation!r}")
