"""IPLR: the state's transition is the identity plus a matrix of rank one.

For each sequence and head, with the state S a K x V matrix:

    S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
    o_t = scale q_t S_t
"""

from __future__ import annotations

from torch import Tensor

from .... import _checks
from .._forward import forward


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """IPLR over whole sequences, on the CPU, with gradients, which fla's chunk form does not have. The arguments are
    those of `chunk_dplr_delta_rule`, without a decay."""
    _checks.no_head_first(head_first)
    _checks.power_of_two(chunk_size)
    return forward(q, k, v, a, b, None, scale, initial_state, output_final_state, cu_seqlens)
