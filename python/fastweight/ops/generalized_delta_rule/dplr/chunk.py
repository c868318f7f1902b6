"""DPLR: the state's transition is a diagonal plus a matrix of rank one.

For each sequence and head, with the state S a K x V matrix:

    S_t = diag(exp(gk_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
    o_t = scale q_t S_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .... import _checks
from .._forward import forward


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    *,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """DPLR over whole sequences, on the CPU, with gradients.

    Args:
        q, k, a, b: `[B, T, H, K]`, fp32, bf16, fp16 or fp64 (slow); of different types all count as the widest. K is at
            most 256. States stay bounded where a and b point in opposite directions.
        v: `[B, T, H, V]`.
        gk: `[B, T, H, K]`, the logarithm of the decay; any floating type.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, H, K, V]`; None: zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: accepted and not needed.
        safe_gate, lower_bound: promises that no kernel here needs: any gate is safe. A lower bound is below 0.
        chunk_size: a power of two, accepted and not needed.
        disable_recompute: keep the fp32 states at the start of every chunk for the backward: more memory, less work.
        cp_context: context parallelism, not supported.
        head_first: no longer exists.

    Returns:
        `(o, final_state)`: o `[B, T, H, V]` in the type of q; the final state `[N, H, K, V]` in fp32, or None.
    """
    _checks.no_head_first(head_first)
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound: expected a number below 0, got {lower_bound}")
    _checks.power_of_two(chunk_size)
    if cp_context is not None:
        raise NotImplementedError("cp_context: context parallelism of this operator is not supported")
    return forward(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, disable_recompute)
