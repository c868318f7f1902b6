"""The WY factors of KDA's chunks, and their gradients. No function here records gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks
from .. import _wy
from ..utils.index import prepare_token_indices


@torch.no_grad()
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    gk: Tensor,
    q: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`w = A (beta * 2^gk * k)` and `u = A (beta * v)` for every chunk, and the rows that read and write its state.

    Args:
        k, q: `[B, T, H, K]`; q may be None.
        v: `[B, T, HV, V]`.
        beta: `[B, T, HV]`.
        A: `[B, T, HV, C]`, C = 16, 32 or 64, the inverse of `solve_tril`.
        gk: `[B, T, HV, K]`, the decays, summed within chunks and to base 2.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.

    Returns:
        `(w, u, qg, kg)`: w `[B, T, HV, K]`, u `[B, T, HV, V]`, `qg = q * 2^gk` or None, and `kg = k * 2^(last - gk)`
        with the gk of the last token of the chunk, both `[B, T, HV, K]`.
    """
    _check_gates(k, v, gk)
    if q is not None:
        _checks.shape("q", q, k.shape)
    w, u = _wy.factors(k, v, beta, gk, A, cu_seqlens)
    group = v.shape[2] // k.shape[2]
    gates = gk.float()
    rest = torch.exp2(gates[:, _last_tokens(gk, A.shape[-1], cu_seqlens)] - gates)
    kg = (k.repeat_interleave(group, 2) * rest).to(k.dtype)
    qg = None if q is None else (q.repeat_interleave(group, 2) * torch.exp2(gates)).to(k.dtype)
    return w, u, qg, kg


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gk: Tensor,
    A: Tensor,
    dk: Tensor,
    dw: Tensor,
    du: Tensor,
    dg: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(dk, dv, dbeta, dg, dA)` of the factors at a fixed A, added to the dk `[B, T, H, K]` and dg `[B, T, HV, K]` that
    are given; dA is what reaches the matrix that A is the inverse of. dg is the gradient of the sum of natural
    logarithms, as in fla; dk is summed over the value heads that share a key, which fla leaves to its caller."""
    _check_gates(k, v, gk)
    _checks.shape("dk", dk, k.shape)
    _checks.shape("dg", dg, gk.shape)
    more_dk, dv, dbeta, dgamma, dA = _wy.gradients(k, v, beta, gk, A, dw, du, cu_seqlens)
    return dk.float() + more_dk, dv, dbeta.float(), dg.float() + dgamma, dA


def _check_gates(k: Tensor, v: Tensor, gk: Tensor) -> None:
    _checks.four_axes(k=k, v=v)
    _checks.shape("gk", gk, (*v.shape[:3], k.shape[3]))


def _last_tokens(gk: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """For every token the last one `[T]` of its chunk."""
    T = gk.shape[1]
    if cu_seqlens is None:
        place = torch.arange(T, device=gk.device)
        return (place // chunk_size * chunk_size + chunk_size - 1).clamp(max=T - 1)
    sequence, place = prepare_token_indices(cu_seqlens).long().unbind(1)
    offsets = cu_seqlens.long()
    chunk_end = offsets[sequence] + place // chunk_size * chunk_size + chunk_size
    return torch.minimum(chunk_end, offsets[sequence + 1]) - 1
