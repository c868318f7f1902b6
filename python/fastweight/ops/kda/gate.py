"""The gate of KDA, `-exp(A_log) * softplus(g + dt_bias)`, or with a lower bound
`lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks
from .. import _gate
from .._naive import in_double


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """The gate of KDA; differentiable.

    Args:
        g: `[.., HV, K]`.
        A_log: `[HV]`; None with a lower bound: the factor exp(A_log) is 1.
        dt_bias: `[HV * K]` or `[HV, K]`; None: zeros.
        lower_bound: below 0.
        output_dtype: any floating type; None: the type of g.
    """
    return _gate.activation(g, A_log, dt_bias, lower_bound, output_dtype, 2)


@torch.no_grad()
def kda_gate_fwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`fused_kda_gate` without a gradient."""
    return fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_bwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dyg: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of g, A_log and dt_bias, None where there is none of these, from that of the gate, dyg
    `[.., HV, K]`."""
    return _gate.adjoint(g, A_log, dt_bias, lower_bound, dyg, 2)


def kda_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    chunk_indices: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """The gate, summed over the tokens of its chunk up to each token; differentiable.

    Args:
        g: `[B, T, HV, K]`.
        chunk_size: a power of two.
        scale: factor of the result.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.

    The other arguments are those of `fused_kda_gate`.
    """
    _checks.require(g.dim() == 4, f"g: expected [B, T, HV, K], got shape {list(g.shape)}")
    return _gate.summed(g, A_log, chunk_size, scale, dt_bias, cu_seqlens, output_dtype, lower_bound)


def naive_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`fused_kda_gate` without a lower bound in fp64, rounded once."""
    y = in_double(lambda g, A_log, dt_bias: fused_kda_gate(g, A_log, dt_bias, None, None), g, A_log, dt_bias)
    return y.to(output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`fused_kda_gate` with a lower bound in fp64, rounded once."""
    y = in_double(lambda g, A_log, dt_bias: fused_kda_gate(g, A_log, dt_bias, lower_bound, None), g, A_log, dt_bias)
    return y.to(output_dtype)
