"""The plain reference of GLA."""

from __future__ import annotations

from torch import Tensor

from .._naive import recurrence
from .fused_recurrent import fused_recurrent_gla


def naive_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """GLA in fp64. The arguments are those of `fused_recurrent_gla`; o has the type of q, the state is in fp32."""

    def run(tokens, state):
        return fused_recurrent_gla(*tokens, initial_state=state, output_final_state=True)

    return recurrence(run, (q, k, v, gk), initial_state, q.dtype, output_final_state)
