"""Pieces of the chunk form one by one: sums of gates, the triangular inverse, the l2 norm and the gates.

docs/blocks.md has the equations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _blocks
from . import _checks


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    chunk_indices: Tensor | None = None,
    *,
    head_first: bool | None = None,
) -> Tensor:
    """The sum of g over the tokens of its chunk up to each token, or from it on in reverse; differentiable.

    Args:
        g: `[B, T, H]` or `[B, T, H, D]`.
        chunk_size: 16, 32 or 64.
        scale: factor of the result.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        output_dtype: fp32 or the type of g; None: the type of g.
        chunk_indices: accepted and not needed.
        head_first: no longer exists.
    """
    _checks.no_head_first(head_first)
    if cu_seqlens is not None:
        _checks.require(g.shape[0] == 1, f"cu_seqlens: expected a batch of 1, got {g.shape[0]}")
    if g.dim() not in (3, 4):
        raise ValueError(f"g: expected [B, T, H] or [B, T, H, D], got shape {list(g.shape)}")
    y = _blocks.chunk_local_cumsum((g, cu_seqlens), (chunk_size, reverse, output_dtype or g.dtype))
    return y if scale is None else y * scale


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`(I + A)^-1` for every chunk, A strictly lower triangular; differentiable.

    Args:
        A: `[B, T, H, C]`, C = 16, 32 or 64: row t is the row of its chunk's matrix. What is read is the part
            below the diagonal.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.
        output_dtype: any floating type.

    Returns:
        `[B, T, H, C]`.
    """
    _checks.require(A.shape[-1] in (16, 32, 64), f"A: expected 16, 32 or 64 columns, got {A.shape[-1]}")
    return _blocks.solve_tril((A, cu_seqlens), (output_dtype,))


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(sum(x * x) + eps)` over the last axis; differentiable.

    Args:
        x: `[.., D]`.
        output_dtype: fp32 or the type of x; None: the type of x.
    """
    rows = x if 2 <= x.dim() <= 5 else x.reshape(-1, x.shape[-1])
    y, _ = _blocks.l2norm((rows,), (eps, output_dtype or x.dtype))
    return y if rows is x else y.reshape(x.shape)


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The gate of the gated delta rule, `-exp(A_log) * softplus(g + dt_bias)`; differentiable.

    Args:
        g: `[.., HV]`.
        A_log, dt_bias: `[HV]`.
        output_dtype: fp32 or the type of g.
    """
    rows = g.reshape(1, -1, g.shape[-1])
    return _blocks.gate_activation((rows, A_log, dt_bias, None), (None, 0, output_dtype)).reshape(g.shape)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gate of KDA, `-exp(A_log) * softplus(g + dt_bias)`, or with a lower bound
    `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`; differentiable.

    Args:
        g: `[.., HV, K]`.
        A_log: `[HV]`; None with a lower bound: the factor exp(A_log) is 1.
        dt_bias: `[HV * K]` or `[HV, K]`; None: zeros.
        lower_bound: below 0.
        output_dtype: fp32 or the type of g.
    """
    rows = g.reshape(1, -1, *g.shape[-2:])
    return _blocks.gate_activation((rows, A_log, dt_bias, None), (lower_bound, 0, output_dtype)).reshape(g.shape)
