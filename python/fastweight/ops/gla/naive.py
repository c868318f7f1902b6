"""The plain reference of GLA."""

from __future__ import annotations

from torch import Tensor

from .._naive import recurrence
from .chunk import chunk_gla


def naive_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """GLA in fp64. The arguments are those of `chunk_gla`; o has the type of q, the state is in fp32."""

    def run(tokens, state):
        return chunk_gla(*tokens, initial_state=state, output_final_state=True)

    return recurrence(run, (q, k, v, gk), initial_state, q.dtype, output_final_state)
