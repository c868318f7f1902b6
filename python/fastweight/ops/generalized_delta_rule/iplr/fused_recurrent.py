"""IPLR token by token."""

from __future__ import annotations

from torch import Tensor

from .... import _checks
from .._forward import forward


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """IPLR for short sequences and decoding, with gradients. The arguments are those of `chunk_iplr_delta_rule`; the
    scale is above 0, and o has the type of v."""
    if scale is not None:
        _checks.require(scale > 0, f"scale: expected a number above 0, got {scale}")
    o, final_state = forward(q, k, v, a, b, None, scale, initial_state, output_final_state, cu_seqlens)
    return o.to(v.dtype), final_state
