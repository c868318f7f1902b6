"""Simple GLA token by token."""

from __future__ import annotations

from torch import Tensor

from ... import _checks
from ..gla._forward import forward


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA for short sequences and decoding, with gradients. The arguments are those of `chunk_simple_gla`, and:

    Args:
        reverse: from the last token of each sequence to the first.
        transpose_state_layout: the old name of `state_v_first`.
    """
    state_v_first = _checks.v_first(state_v_first, transpose_state_layout)
    if g is not None and g.dim() != 3:
        raise ValueError(f"g: expected shape {list(q.shape[:3])}, got {list(g.shape)}")
    return forward(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse)
