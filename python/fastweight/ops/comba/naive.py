"""Plain references of Comba."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks
from .._naive import recurrence
from .chunk import chunk_comba


def naive_chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Comba in fp64: chunks change nothing. The arguments are those of `chunk_comba`; results are in fp32."""

    def run(tokens, state):
        return chunk_comba(*tokens, scale=scale, initial_state=state, output_final_state=True)

    wide = torch.promote_types(q.dtype, torch.float32)
    return recurrence(run, (q, k, v, p, g, beta), initial_state, wide, output_final_state)


def naive_recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What fla's function of this name computes, which is not Comba: it predicts from the state after its decay, as
    Comba does with `exp(g) p` in place of p. The arguments are those of `naive_chunk_comba`, but beta stands before
    g."""

    def run(tokens, state):
        q, k, v, p, g, beta = tokens
        _checks.shape("g", g, p.shape[:3])
        p = p * g.exp().unsqueeze(-1)
        return chunk_comba(q, k, v, p, g, beta, scale=scale, initial_state=state, output_final_state=True)

    wide = torch.promote_types(q.dtype, torch.float32)
    return recurrence(run, (q, k, v, p, g, beta), initial_state, wide, output_final_state)
