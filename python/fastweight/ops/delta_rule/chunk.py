"""The delta rule (DeltaNet) over whole sequences.

For each sequence and value head, with the state S a K x V matrix:

    S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1})
    o_t = scale q_t S_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import _checks, _cp, _delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    *,
    return_intermediate_states: bool = False,
    chunk_size: int = 64,
    head_first: bool | None = None,
) -> tuple[Any, ...]:
    """The delta rule over whole sequences.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow); one type for q, k and v. K is at most 256.
        v: `[B, T, H, V]`.
        beta: `[B, T, H]`, the step size; any floating type.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, H, K, V]`; None: zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(sum(x * x) + 1e-6)`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU; on CUDA it tells how many intermediate states there are.
        cp_context: of `fastweight.ops.cp.build_cp_context`: the tokens are those of this rank, N counts the sequences
            that have a token here, and cu_seqlens is left out. See docs/context-parallel.md.
        return_intermediate_states: also return the states before every chunk, see `chunk_kda`; only without gradient
            recording.
        chunk_size: 16, 32 or 64: where a sequence may be cut without changing a bit. On CUDA 16-bit problems are
            computed in 64 rows per chunk, so that smaller chunks cost more there.
        head_first: no longer exists.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with intermediate states: o `[B, T, H, V]` in the type of q; the
        final state `[N, H, K, V]` in fp32, or None; h `[B, NT, H, K, V]` in the type of k.
    """
    q, k, v = _checks.one_dtype(q, k, v, AssertionError)
    _checks.require(beta.dim() == 3, f"beta: expected 3 dimensions, got {beta.dim()}")
    _checks.no_head_first(head_first)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {chunk_size}")
    if cp_context is not None:
        cu_seqlens = _cp.local_offsets(cp_context, "q", q, cu_seqlens)
    _checks.sequences(q, initial_state, cu_seqlens)
    _checks.require(q.shape[-1] <= 256, f"q: expected a head width of at most 256, got {q.shape[-1]}")
    bits = _delta_rule.bits(_delta_rule.NONE, chunk_size, False, use_qk_l2norm_in_kernel, output_final_state)
    inputs = inputs_of(q, k, v, beta, initial_state, cu_seqlens)
    if cp_context is not None:
        if return_intermediate_states:
            raise NotImplementedError("return_intermediate_states: not supported together with cp_context")
        return _cp.delta_rule(cp_context, inputs[:-1], bits, scale)
    if return_intermediate_states:
        _checks.no_gradients()
        host_offsets = _checks.host_offsets(cu_seqlens, cu_seqlens_cpu)
        return _delta_rule.forward_with_states(inputs, bits, scale, None, host_offsets)
    return _delta_rule.forward(inputs, bits, scale)


def inputs_of(q, k, v, beta, initial_state, cu_seqlens) -> tuple:
    """The inputs of the operator, for either form."""
    _checks.four_axes(q=q, v=v)
    if v.shape[2] != q.shape[2]:
        raise ValueError(f"v: expected the {q.shape[2]} heads of q, got {v.shape[2]}")
    return q, k, v, None, beta, None, None, initial_state, cu_seqlens
