"""The gated delta rule (GDN): one decay per head and token.

For each sequence and value head, with the state S a K x V matrix:

    Sd_t = exp(g_t) S_{t-1}
    S_t  = Sd_t + k_t^T beta_t (v_t - k_t Sd_t)
    o_t  = scale q_t S_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import _checks, _cp, _delta_rule


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    return_intermediate_states: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
) -> tuple[Any, ...]:
    """The gated delta rule over whole sequences.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow); one type for q, k and v. K is at most 256.
        v: `[B, T, HV, V]`, HV a multiple of H: value head h reads query and key head `h // (HV // H)`.
        g: `[B, T, HV]`, the logarithm of the decay; any floating type. With `use_gate_in_kernel` a raw value x:
            the decay's logarithm is then `-exp(A_log) * softplus(x + dt_bias)`.
        beta: `[B, T, HV]`, the step size; any floating type. With `use_beta_sigmoid_in_kernel` its logit.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`); None: zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(sum(x * x) + 1e-6)`.
        use_beta_sigmoid_in_kernel: `beta = sigmoid(beta)`.
        allow_neg_eigval: with `use_beta_sigmoid_in_kernel`, `beta = 2 * sigmoid(beta)`.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU; on CUDA it tells how many intermediate states there are.
        chunk_indices: accepted and not needed.
        cp_context: of `fastweight.ops.cp.build_cp_context`: the tokens are those of this rank, N counts the sequences
            that have a token here, and cu_seqlens is left out. See docs/context-parallel.md.
        return_intermediate_states: also return the states before every chunk, see `chunk_kda`; only without gradient
            recording.
        use_gate_in_kernel: see g.
        A_log, dt_bias: `[HV]`, with `use_gate_in_kernel`; dt_bias may be None.
        chunk_size: 16, 32 or 64: where a sequence may be cut without changing a bit. On CUDA 16-bit problems are
            computed in 64 rows per chunk, so that smaller chunks cost more there.
        transpose_state_layout: the old name of `state_v_first`.
        head_first: no longer exists.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with intermediate states: o `[B, T, HV, V]` in the type of q; the
        final state `[N, HV, K, V]` in fp32, or None; h `[B, NT, HV, K, V]` in the type of k.
    """
    state_v_first = _checks.v_first(state_v_first, transpose_state_layout)
    _checks.four_axes(q=q, k=k, v=v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k: expected the {q.shape[2]} heads of q, got {k.shape[2]}")
    if q.shape[2] != 0 and v.shape[2] % q.shape[2] != 0:
        raise ValueError(f"v: expected a multiple of the {q.shape[2]} heads of q, got {v.shape[2]}")
    _checks.no_head_first(head_first)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {chunk_size}")
    if cp_context is not None:
        cu_seqlens = _cp.local_offsets(cp_context, "q", q, cu_seqlens)
    _checks.sequences(q, initial_state, cu_seqlens)
    if use_gate_in_kernel:
        _checks.require(A_log is not None, "A_log: expected a tensor with use_gate_in_kernel, got None")
    _checks.beta_from_logits(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    _checks.require(q.shape[3] <= 256, f"q: expected a head width of at most 256, got {q.shape[3]}")
    q, k, v = _checks.one_dtype(q, k, v, ValueError)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    bits = _delta_rule.bits(
        _delta_rule.PER_HEAD, chunk_size, state_v_first, use_qk_l2norm_in_kernel, output_final_state,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    if cp_context is not None:
        if return_intermediate_states:
            raise NotImplementedError("return_intermediate_states: not supported together with cp_context")
        return _cp.delta_rule(cp_context, inputs[:-1], bits, scale)
    if return_intermediate_states:
        _checks.no_gradients()
        host_offsets = _checks.host_offsets(cu_seqlens, cu_seqlens_cpu)
        return _delta_rule.forward_with_states(inputs, bits, scale, None, host_offsets)
    return _delta_rule.forward(inputs, bits, scale)


chunk_gdn = chunk_gated_delta_rule
