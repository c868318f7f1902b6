"""RMS norms over the last axis. Arithmetic is fp32 whatever the types of input and weight are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _blocks, _checks
from .._info import devices

GATES = _blocks.NORM_GATES
_FUNCTIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}
_DEVICES = devices("rms_norm", "forward") | {"meta"}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | Any:
    """`weight * x / sqrt(mean(x^2) + eps) + bias` over the last axis, in the type of x.

    Args:
        x: `[.., D]`.
        weight, bias: `[D]`, or None.
        residual: `[.., D]`, added to x before the norm.
        prenorm: also return the sum of x and the residual.
        residual_in_fp32: without a residual, x comes back in fp32. A sum has the type of its residual, as in fla.
    """
    return normalised(x, weight, bias, residual, eps, prenorm, residual_in_fp32)


def normalised(x, weight, bias, residual, eps, prenorm, residual_in_fp32, gate=None, activation="silu"):
    """The norm, gated where there is a gate: the library's, but for a bias and for what it has no kernel for."""
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating type, got {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name}: expected shape {list(x.shape[-1:])}, got {list(parameter.shape)}")
    if gate is not None and gate.numel() != x.numel():
        raise ValueError(f"g: expected shape {list(x.shape)}, got {list(gate.shape)}")
    if residual is not None:
        expected = f"residual: expected shape {list(x.shape)}, got {list(residual.shape)}"
        _checks.require(residual.shape == x.shape, expected)
    total = x if residual is None else _wide(x) + _wide(residual)
    if bias is None and total.device.type in _DEVICES and not (x.is_cuda and x.dtype == torch.float64):
        rows = total if 2 <= total.dim() <= 5 else total.reshape(-1, total.shape[-1])
        gate = None if gate is None else gate.reshape(rows.shape)
        y = _blocks.rms_norm((rows, gate, weight), (eps, GATES[activation])).view(x.shape)
    else:
        y = _in_pytorch(_wide(total), weight, bias, eps, gate, activation)
    y = y.to(x.dtype)
    if not prenorm:
        return y
    if residual is not None:
        return y, total.to(residual.dtype)
    return y, total.to(torch.float32) if residual_in_fp32 else total


def _in_pytorch(x, weight, bias, eps, gate, activation):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y if gate is None else y * _FUNCTIONS[activation](_wide(gate))


class RMSNorm(nn.Module):
    """`y = weight * x / sqrt(mean(x^2) + eps) + bias` over the last axis of x `[.., D]`.

    Args:
        hidden_size: the width of that axis.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias beside the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            if bias:
                self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | Any:
        """The arguments are those of `rms_norm`."""
        return normalised(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}" + ("" if self.elementwise_affine else ", elementwise_affine=False")
