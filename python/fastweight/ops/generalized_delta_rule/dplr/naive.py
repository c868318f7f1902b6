"""Plain references of DPLR, with tensors `[B, H, T, ..]` as in fla."""

from __future__ import annotations

from torch import Tensor

from .... import _checks
from ..._naive import recurrence
from .._forward import forward


def dplr_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """DPLR in fp64. q, k, alpha (a of `chunk_dplr_delta_rule`), beta (its b) and gk are `[B, H, T, K]`, v is
    `[B, H, T, V]`; o has the type of q, the state is in fp32."""

    def run(tokens, state):
        return forward(*tokens, None, state, True, None)

    for name, x in (("alpha", alpha), ("beta", beta), ("gk", gk)):
        if x is not None:
            _checks.shape(name, x, q.shape)
    tokens = (q, k, v, alpha, beta, gk)
    return recurrence(run, tokens, initial_state, q.dtype, output_final_state, heads_first=True)


def dplr_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 32,
) -> tuple[Tensor, Tensor | None]:
    """The same as `dplr_recurrence`: chunks change nothing in fp64. Any length will do."""
    return dplr_recurrence(q, k, v, alpha, beta, gk, initial_state, output_final_state)
