"""Gated linear attention (GLA): one decay per key channel, head and token.

For each sequence and head, with the state S a K x V matrix:

    S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t
    o_t = scale q_t S_t
"""

from __future__ import annotations

from torch import Tensor

from ... import _checks
from ..._delta_rule import state_dtype
from ._forward import forward


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """GLA over whole sequences, on the CPU, with gradients.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or fp64 (slow); of different types all count as the widest.
        v: `[B, T, H, V]`.
        g: `[B, T, H, K]`, the logarithm of the decay; any floating type.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, H, K, V]` (`[N, H, V, K]` with `state_v_first`) fp32; None: zeros.
        output_final_state: whether to return the state after the last token.
        state_v_first: states are `[N, H, V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: accepted and not needed.

    Returns:
        `(o, final_state)`: o `[B, T, H, V]` in the type of q; the final state `[N, H, K, V]` in fp32, or None.
    """
    if initial_state is not None:
        expected = state_dtype(q)
        _checks.require(
            initial_state.dtype == expected, f"initial_state: expected {expected}, got {initial_state.dtype}"
        )
    for name, x in (("k", k), ("g", g)):
        _checks.require(q.shape == x.shape, f"{name}: expected shape {list(q.shape)}, got {list(x.shape)}")
    expected = [*q.shape[:3], v.shape[-1]]
    _checks.require(list(v.shape) == expected, f"v: expected shape {expected}, got {list(v.shape)}")
    return forward(q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
