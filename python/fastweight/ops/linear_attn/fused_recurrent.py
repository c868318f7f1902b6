"""Linear attention token by token."""

from __future__ import annotations

from torch import Tensor

from .chunk import linear_attention


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | tuple | None]:
    """Linear attention for short sequences and decoding, with gradients. The arguments are those of
    `chunk_linear_attn`, and `reverse`: from the last token of each sequence to the first."""
    return linear_attention(q, k, v, scale, initial_state, output_final_state, reverse, normalize, cu_seqlens)
