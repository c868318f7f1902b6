"""Plain references of the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from .._naive import recurrence
from .chunk import chunk_gated_delta_rule


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in fp64. beta stands before g, as in fla.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        beta, g: `[B, T, HV]`.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[B, HV, K, V]`; None: zeros.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` and the state `[B, HV, K, V]`, or None, in fp32.
    """

    def run(tokens, state):
        return chunk_gated_delta_rule(*tokens, scale=scale, initial_state=state, output_final_state=True)

    wide = torch.promote_types(q.dtype, torch.float32)
    return recurrence(run, (q, k, v, g, beta), initial_state, wide, output_final_state)


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same as `naive_recurrent_gated_delta_rule`, with g before beta: chunks change nothing in fp64."""
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, initial_state, output_final_state)
