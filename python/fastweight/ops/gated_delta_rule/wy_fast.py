"""The WY factors of the gated delta rule's chunks, and their gradients. No function here records gradients."""

from __future__ import annotations

from torch import Tensor

from .. import _wy


def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`w = A (beta * 2^g * k)` and `u = A (beta * v)` for every chunk.

    Args:
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        beta: `[B, T, HV]`.
        A: `[B, T, HV, C]`, C = 16, 32 or 64, the inverse of `solve_tril`.
        g: `[B, T, HV]`, the decays, summed within chunks and to base 2; None: no decay.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.

    Returns:
        w `[B, T, HV, K]` in the type of k, u `[B, T, HV, V]` in the type of v.
    """
    return _wy.factors(k, v, beta, g, A, cu_seqlens)


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(dk, dv, dbeta, dg)` of the factors and of the matrix that A is the inverse of, from dw `[B, T, HV, K]` and du
    `[B, T, HV, V]`. dg is the gradient of the sum of natural logarithms, as in fla."""
    return _wy.whole_gradients(k, v, beta, g, A, dw, du, cu_seqlens)


fwd_recompute_w_u = recompute_w_u_fwd
bwd_prepare_wy_repr = prepare_wy_repr_bwd
