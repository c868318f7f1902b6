"""Plain references of linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .._naive import recurrence
from .chunk import chunk_linear_attn


def naive_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    output_final_state: bool = False,
    normalize: bool = False,
) -> tuple[Tensor, Tensor | tuple | None]:
    """Linear attention in fp64. The arguments are those of `chunk_linear_attn`; o has the type of q, states are in
    fp32."""
    z = None
    if normalize and isinstance(initial_state, tuple):
        initial_state, z = initial_state
    last = []

    def run(tokens, state):
        q, k, v, z = tokens
        start = (state, z) if normalize else state
        o, end = chunk_linear_attn(q, k, v, scale, start, True, normalize)
        if normalize:
            end, z = end
            last.append(z)
        return o, end

    o, state = recurrence(run, (q, k, v, z), initial_state, q.dtype, output_final_state)
    if normalize and output_final_state:
        return o, (state, last[0].to(q.device, torch.promote_types(q.dtype, torch.float32)))
    return o, state


def naive_chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, normalize: bool = False
) -> Tensor:
    """The o of `naive_recurrent_linear_attn`: chunks change nothing in fp64. Any length will do."""
    return naive_recurrent_linear_attn(q, k, v, scale, normalize=normalize)[0]
