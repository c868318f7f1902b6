"""Simple GLA under the name of fla's parallel form."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks
from .chunk import chunk_simple_gla


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` without states. The arguments are those, and:

    Args:
        output_attentions: also return the scores that the output is a product of, from PyTorch; not with cu_seqlens.

    Returns:
        `(o, attentions)`: o `[B, T, H, V]` in the type of q; the scores `[B, H, T, T]` in fp32, or None.
    """
    _checks.require(
        not output_attentions or cu_seqlens is None, "output_attentions: expected False with cu_seqlens, got True"
    )
    o, _ = chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens, head_first=head_first)
    return o, scores(q, k, g, scale) if output_attentions else None


def scores(q: Tensor, k: Tensor, g: Tensor | None, scale: float | None) -> Tensor:
    """`scale (q_i . k_j) exp(g_{j+1} + .. + g_i)` for j <= i and 0 for the rest, `[B, H, T, T]`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = scale * torch.einsum("bihk,bjhk->bhij", q.to(wide), k.to(wide))
    if g is not None:
        gamma = g.to(torch.float64).cumsum(1).transpose(1, 2)
        products = products * (gamma.unsqueeze(-1) - gamma.unsqueeze(-2)).tril().exp().to(wide)
    return products.tril()
