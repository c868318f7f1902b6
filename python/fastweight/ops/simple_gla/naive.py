"""Plain references of simple GLA."""

from __future__ import annotations

import torch
from torch import Tensor

from .._naive import in_double, recurrence
from .chunk import chunk_simple_gla
from .parallel import scores


def naive_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA in fp64. The arguments are those of `chunk_simple_gla`; o has the type of q, the state is in fp32."""

    def run(tokens, state):
        return chunk_simple_gla(*tokens, scale=scale, initial_state=state, output_final_state=True)

    return recurrence(run, (q, k, v, g), initial_state, q.dtype, output_final_state)


def naive_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`naive_recurrent_simple_gla` with o in fp32: chunks change nothing in fp64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    o, state = naive_recurrent_simple_gla(q.to(wide), k, v, g, scale, initial_state, output_final_state)
    return o, state


def naive_parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`(o, scores)` of simple GLA, o `[B, T, H, V]` and the scores `[B, H, T, T]` in fp32."""

    def run(q, k, v, g):
        attentions = scores(q, k, g, scale)
        return torch.einsum("bhij,bjhv->bihv", attentions, v), attentions

    wide = torch.promote_types(q.dtype, torch.float32)
    return tuple(x.to(wide) for x in in_double(run, q, k, v, g))
