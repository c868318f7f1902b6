"""Plain references of KDA."""

from __future__ import annotations

from torch import Tensor

from .._naive import recurrence
from .chunk import chunk_kda


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA in fp64.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV, K]`.
        beta: `[B, T, HV]`.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[B, HV, K, V]`; None: zeros.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the type of v, and the state `[B, HV, K, V]` in fp32, or None.
    """

    def run(tokens, state):
        return chunk_kda(*tokens, scale=scale, initial_state=state, output_final_state=True)

    return recurrence(run, (q, k, v, g, beta), initial_state, v.dtype, output_final_state)


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """The same as `naive_recurrent_kda`: chunks change nothing in fp64. Any length will do."""
    return naive_recurrent_kda(q, k, v, g, beta, scale, initial_state, output_final_state)
