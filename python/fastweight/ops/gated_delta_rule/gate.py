"""The gate of the gated delta rule, `-exp(A_log) * softplus(g + dt_bias)`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _gate
from .._naive import in_double


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype | None = torch.float32
) -> Tensor:
    """The gate of the gated delta rule; differentiable.

    Args:
        g: `[.., HV]`.
        A_log, dt_bias: `[HV]`.
        output_dtype: any floating type; None: the type of g.
    """
    return _gate.activation(g, A_log, dt_bias, None, output_dtype, 1)


@torch.no_grad()
def gdn_gate_fwd(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`fused_gdn_gate` without a gradient."""
    return fused_gdn_gate(g, A_log, dt_bias, output_dtype)


def gdn_gate_bwd(g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dyg: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of g, A_log and dt_bias (None without it) from that of the gate, dyg `[.., HV]`."""
    return _gate.adjoint(g, A_log, dt_bias, None, dyg, 1)


def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """The gate, summed over the tokens of its chunk up to each token; differentiable.

    Args:
        g: `[B, T, HV]`.
        A_log, dt_bias: `[HV]`.
        chunk_size: a power of two.
        scale: factor of the result.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.
        output_dtype: any floating type; None: the type of g.
    """
    return _gate.summed(g, A_log, chunk_size, scale, dt_bias, cu_seqlens, output_dtype)


def naive_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`fused_gdn_gate` in fp64, rounded once."""
    return in_double(lambda g, A_log, dt_bias: fused_gdn_gate(g, A_log, dt_bias, None), g, A_log, dt_bias).to(
        output_dtype
    )
