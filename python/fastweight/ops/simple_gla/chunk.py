"""Simple GLA: one decay per head and token, or per head alone.

For each sequence and head, with the state S a K x V matrix:

    S_t = exp(g_t) S_{t-1} + k_t^T v_t
    o_t = scale q_t S_t
"""

from __future__ import annotations

from torch import Tensor

from ... import _checks
from ..gla._forward import forward


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA over whole sequences, on the CPU, with gradients; linear attention without g and g_gamma.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or fp64 (slow); of different types all count as the widest.
        v: `[B, T, H, V]`.
        g: `[B, T, H]`, the logarithm of the decay; any floating type.
        g_gamma: `[H]`, the logarithm of a decay that all tokens share, on top of g. It has no gradient.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, H, K, V]` (`[N, H, V, K]` with `state_v_first`); None: zeros.
        output_final_state: whether to return the state after the last token.
        state_v_first: states are `[N, H, V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: accepted and not needed.
        chunk_size: a power of two, accepted and not needed.
        head_first: no longer exists.

    Returns:
        `(o, final_state)`: o `[B, T, H, V]` in the type of q; the final state `[N, H, K, V]` in fp32, or None.
    """
    _checks.no_head_first(head_first)
    _checks.power_of_two(chunk_size)
    if g is not None and g.dim() != 3:
        raise ValueError(f"g: expected shape {list(q.shape[:3])}, got {list(g.shape)}")
    return forward(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
