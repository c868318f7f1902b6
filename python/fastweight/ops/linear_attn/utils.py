"""The denominator of normalised linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gla._forward import forward

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
    """`o_t / (scale q_t . z_t + 1e-10)` with `z_t` the sum of the keys up to t, or from t on in reverse, on the CPU,
    with gradients. The sum is the state of linear attention with values that are 1, and runs on it.

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
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = [N, 1, *k.shape[2:]]
    if z_init is not None and list(z_init.shape) != expected:
        raise ValueError(f"z_init: expected shape {expected}, got {list(z_init.shape)}")
    wide = torch.promote_types(q.dtype, torch.float32)
    ones = q.new_ones((*k.shape[:3], 1), dtype=wide)
    start = None if z_init is None else z_init.permute(0, 2, 3, 1)
    products, z = forward(q.to(wide), k.to(wide), ones, None, None, scale, start, True, False, cu_seqlens, reverse)
    return (o.to(wide) / (products + _EPS)).to(o.dtype), z.permute(0, 3, 1, 2).to(k.dtype)
