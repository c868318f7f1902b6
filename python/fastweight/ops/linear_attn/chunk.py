"""Linear attention, with or without its denominator.

For each sequence and head, with the state S a K x V matrix:

    S_t = S_{t-1} + k_t^T v_t
    o_t = scale q_t S_t                     normalised: divided by scale q_t . (k_1 + .. + k_t)
"""

from __future__ import annotations

from torch import Tensor

from ..gla._forward import forward
from .utils import normalize_with_z_state


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | tuple | None]:
    """Linear attention over whole sequences, on the CPU, with gradients.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or fp64 (slow); of different types all count as the widest.
        v: `[B, T, H, V]`.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, H, K, V]`; normalised also `(state, z)` with z `[N, 1, H, K]`, the sum of earlier keys.
            None: zeros.
        output_final_state: whether to return the state after the last token.
        normalize: whether to divide by the denominator.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.

    Returns:
        `(o, final_state)`: o `[B, T, H, V]` in the type of q; the final state `[N, H, K, V]` in fp32, or None.
        Normalised, `(o, (final_state, z))`, whether or not the state was asked for.
    """
    return linear_attention(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def linear_attention(q, k, v, scale, initial_state, output_final_state, reverse, normalize, cu_seqlens):
    """What the forms share."""
    z = None
    if normalize and isinstance(initial_state, tuple):
        initial_state, z = initial_state
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = forward(q, k, v, None, None, scale, initial_state, output_final_state, False, cu_seqlens, reverse)
    if not normalize:
        return o, state
    o, z = normalize_with_z_state(o, q, k, scale, z, reverse, cu_seqlens)
    return o, (state, z)
