"""Comba: a delta rule that predicts from the state before its decay, with a key of its own.

For each sequence and value head, with the state S a K x V matrix:

    u_t = beta_t (v_t - p_t S_{t-1})
    S_t = exp(g_t) S_{t-1} + k_t^T u_t
    o_t = scale q_t S_t
"""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _related

CHUNK_SIZE = 64


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Comba over whole sequences, on the CPU, with gradients.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or fp64 (slow); of different types all count as the widest. K is at most
            256.
        v: `[B, T, HV, V]`; HV is a multiple of H, and value head h uses q, k and p of head `h // (HV // H)`.
        p: `[B, T, H, K]`; None: k.
        g: `[B, T, HV]`, the logarithm of the decay; any floating type.
        beta: `[B, T, HV]`, the step size, or `[B, T, HV, V]`, one per value channel; any floating type. None: 1.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`; None: zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: q, k and p become `x / sqrt(sum(x * x) + 1e-6)`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: accepted and not needed.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in the type of q; the final state `[N, HV, K, V]` in fp32, or None.
    """
    _checks.sequences(q, initial_state, cu_seqlens)
    dtype = q.dtype
    q, k, v, p = _checks.any_dtype(q, k, v, p)
    inputs = (q, k, v, p, g, beta, initial_state, cu_seqlens)
    options = (scale, CHUNK_SIZE, False, use_qk_l2norm_in_kernel)
    o, final_state = _related.comba.forward(inputs, options, output_final_state)
    return o.to(dtype), final_state
