"""The WY factors of the delta rule's chunks, and their gradients. No function here records gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _wy
from ..common import chunk_scaled_dot_kkt_fwd
from ..utils import solve_tril


@torch.no_grad()
def prepare_wy_repr_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(w, u, A)`: the factors, and the inverse `[B, T, H, C]` in the type of k that they are products with. The
    arguments are those of `recompute_w_u_fwd`."""
    A = chunk_scaled_dot_kkt_fwd(k, None, beta, cu_seqlens, chunk_size)
    A = solve_tril(A, cu_seqlens, output_dtype=k.dtype)
    return *recompute_w_u_fwd(k, v, beta, A, cu_seqlens), A


def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`w = A (beta * k)` and `u = A (beta * v)` for every chunk.

    Args:
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        beta: `[B, T, H]`.
        A: `[B, T, H, C]`, C = 16, 32 or 64, the inverse of `solve_tril`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.

    Returns:
        w `[B, T, H, K]` in the type of k, u `[B, T, H, V]` in the type of v.
    """
    return _wy.factors(k, v, beta, None, A, cu_seqlens)


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dk, dv, dbeta)` of `prepare_wy_repr_fwd`, whose A is given, from dw `[B, T, H, K]` and du `[B, T, H, V]`."""
    return _wy.whole_gradients(k, v, beta, None, A, dw, du, cu_seqlens)[:3]


fwd_prepare_wy_repr = prepare_wy_repr_fwd
bwd_prepare_wy_repr = prepare_wy_repr_bwd
fwd_recompute_w_u = recompute_w_u_fwd
