"""Norms over the value channels of a head. Arithmetic is fp32 whatever the types of input and weight are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GATES = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps) * activation(gate)` over the last axis, in the type of x."""
    y = _wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if gate is not None:
        y = y * _GATES[activation](_wide(gate))
    return y.to(x.dtype)


class RMSNorm(nn.Module):
    """`y = weight * x / sqrt(mean(x^2) + eps)` over the last axis."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNormGated(RMSNorm):
    """`y = weight * x / sqrt(mean(x^2) + eps) * activation(gate)` over the last axis; activation: silu or sigmoid."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, activation: str = "silu", dtype: torch.dtype | None = None
    ) -> None:
        if activation not in _GATES:
            raise ValueError(f"activation: expected one of {', '.join(_GATES)}, got {activation!r}")
        super().__init__(hidden_size, eps, dtype)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, gate, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
