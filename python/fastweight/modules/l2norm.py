"""The l2 norm over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _blocks


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(sum(x * x) + eps)` over the last axis; differentiable.

    Args:
        x: `[.., D]`.
        output_dtype: any floating type; None: the type of x.
    """
    rows = x if 2 <= x.dim() <= 5 else x.reshape(-1, x.shape[-1])
    dtype = output_dtype or x.dtype
    # The library writes the type of x or fp32.
    computed = dtype if dtype in (x.dtype, torch.float32) else torch.promote_types(x.dtype, torch.float32)
    y, _ = _blocks.l2norm((rows,), (eps, computed))
    return (y if rows is x else y.reshape(x.shape)).to(dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """`l2norm` of `[.., D]` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)
