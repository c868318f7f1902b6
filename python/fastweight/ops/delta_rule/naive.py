"""Plain references of the delta rule, with tensors `[B, H, T, ..]` as in fla."""

from __future__ import annotations

from torch import Tensor

from .._naive import recurrence
from .fused_recurrent import fused_recurrent_delta_rule


def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule in fp64.

    Args:
        q, k: `[B, H, T, K]`.
        v: `[B, H, T, V]`.
        beta: `[B, H, T]`, or `[B, H, T, V]`.
        initial_state: `[B, H, K, V]`; None: zeros.

    Returns:
        `(o, final_state)`: o `[B, H, T, V]` in the type of q, the state in fp32.
    """

    def run(tokens, state):
        q, k, v, beta = tokens
        return fused_recurrent_delta_rule(q, k, v, beta, initial_state=state, output_final_state=True)

    return recurrence(run, (q, k, v, beta), initial_state, q.dtype, output_final_state, heads_first=True)


def delta_rule_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32
) -> tuple[Tensor, Tensor | None]:
    """The same as `delta_rule_recurrence`: chunks change nothing in fp64. Any length will do."""
    return delta_rule_recurrence(q, k, v, beta)
