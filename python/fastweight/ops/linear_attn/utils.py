"""The denominator of normalised linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.cumsum import chunk_global_cumsum
from ..utils.index import prepare_sequence_ids

_EPS = 1e-10


def normalize_with_z_state(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    scale: float,
    z_init: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`o_t / (scale q_t . z_t + 1e-10)` with `z_t` the sum of the keys up to t, or from t on in reverse, with
    gradients.

    Args:
        o: `[B, T, H, V]`.
        q, k: `[B, T, H, K]`.
        z_init: `[N, 1, H, K]`, the sum to begin with; None: zeros.
        reverse: sums go from the last token to the first.
        cu_seqlens: `[N + 1]`, offsets of N packed sequences, then B is 1; None: N = B.

    Returns:
        `(o, z)`: o in its type, and the sums after the last token (in reverse: the first) `[N, 1, H, K]` in the type of
        k. An empty sequence keeps its z_init, or zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    z = chunk_global_cumsum(k, reverse=reverse, cu_seqlens=cu_seqlens, output_dtype=wide)
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    start = z.new_zeros(N, 1, *k.shape[2:]) if z_init is None else z_init.to(wide)
    if cu_seqlens is None:
        z = z + start
        last = (z[:, :1] if reverse else z[:, -1:]) if z.shape[1] > 0 else start
    else:
        z = z + start[prepare_sequence_ids(cu_seqlens).long()].transpose(0, 1)
        offsets = cu_seqlens.long()
        is_empty = offsets[1:] == offsets[:-1]
        at = (offsets[:-1] if reverse else offsets[1:] - 1).clamp(0, max(z.shape[1] - 1, 0))
        last = start
        if z.shape[1] > 0:
            last = torch.where(is_empty[:, None, None, None], start, z[0, at].unsqueeze(1))
    denominator = (scale * q.to(wide) * z).sum(-1, keepdim=True) + _EPS
    return (o.to(wide) / denominator).to(o.dtype), last.to(k.dtype)
