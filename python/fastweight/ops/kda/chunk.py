"""Kimi Delta Attention (KDA): one decay per key channel, head and token.

For each sequence and value head, with the state S a K x V matrix:

    Sd_t = diag(exp(g_t)) S_{t-1}
    S_t  = Sd_t + k_t^T beta_t (v_t - k_t Sd_t)
    o_t  = scale q_t S_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import _checks, _cp, _delta_rule


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Any, ...]:
    """KDA over whole sequences.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow); one type for q, k and v. K is at most 256.
        v: `[B, T, HV, V]`, HV a multiple of H: value head h reads query and key head `h // (HV // H)`.
        g: `[B, T, HV, K]`, the logarithm of the decay; any floating type. With `use_gate_in_kernel` a raw value x: the
            decay's logarithm is then `-exp(A_log) * softplus(x + dt_bias)`, or with a lower bound
            `lower_bound * sigmoid(exp(A_log) * (x + dt_bias))`.
        beta: `[B, T, HV]`, the step size; any floating type. With `use_beta_sigmoid_in_kernel` its logit.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`) fp32; None: zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(sum(x * x) + 1e-6)`.
        use_gate_in_kernel: see g.
        use_beta_sigmoid_in_kernel: `beta = sigmoid(beta)`.
        allow_neg_eigval: with `use_beta_sigmoid_in_kernel`, `beta = 2 * sigmoid(beta)`.
        safe_gate: a promise that `g >= -5`. With `use_gate_in_kernel` a lower bound in [-5, 0) has to keep it. No
            kernel needs it: results are the same with and without.
        lower_bound: below 0, with `use_gate_in_kernel`; A_log may then be None, and the factor exp(A_log) is 1.
        disable_recompute: keep the fp32 states at the start of every chunk for the backward: more memory, less work. On
            CUDA the backward of a 16-bit problem has these states in any case, in the type of q; what it then keeps is
            all that the forward makes of the chunks, with K = V = 128 as much memory as q, k, v and o, instead of a
            sixth of that.
        return_intermediate_states: also return these states, in the type of k; only without gradient recording.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU; on CUDA it tells how many intermediate states there are.
        cp_context: of `fastweight.ops.cp.build_cp_context`: the tokens are those of this rank, N counts the sequences
            that have a token here, and cu_seqlens is left out. See docs/context-parallel.md.
        A_log: `[HV]`, with `use_gate_in_kernel`.
        dt_bias: `[HV * K]` or `[HV, K]`, with `use_gate_in_kernel`; None: zeros.
        chunk_size: 32 or 64: where intermediate states stand and a sequence may be cut without changing a bit. On CUDA
            16-bit problems are computed in 64 rows per chunk, so that 32 costs more there.
        transpose_state_layout: the old name of `state_v_first`.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with intermediate states: o `[B, T, HV, V]` in the type of q; the
        final state `[N, HV, K, V]` in fp32, or None; h `[B, NT, HV, K, V]`, where NT is `ceil(T / chunk_size)`, or the
        sum of that over the packed sequences. On CUDA lengths are not read back: with cu_seqlens and no cu_seqlens_cpu
        the second axis of h is `min(T, T // chunk_size + N)`, at least NT, and h is 0 from NT on.
    """
    state_v_first = _checks.v_first(state_v_first, transpose_state_layout)
    _checks.four_axes(q=q, k=k, v=v)
    if cp_context is not None:
        cu_seqlens = _cp.local_offsets(cp_context, "q", q, cu_seqlens)
    _checks.sequences(q, initial_state, cu_seqlens)
    if initial_state is not None:
        _checks.require(
            initial_state.dtype == _delta_rule.state_dtype(q),
            f"initial_state: expected {_delta_rule.state_dtype(q)}, got {initial_state.dtype}",
        )
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    elif A_log is None and lower_bound is None:
        raise ValueError("A_log: expected a tensor with use_gate_in_kernel and no lower_bound, got None")
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64, got {chunk_size}")
    if safe_gate and use_gate_in_kernel:
        if lower_bound is None:
            raise ValueError("lower_bound: expected a number with safe_gate and use_gate_in_kernel, got None")
        if not -5 <= lower_bound < 0:
            raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {lower_bound}")
    _checks.beta_from_logits(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    _checks.require(q.shape == k.shape, f"k: expected shape {list(q.shape)}, got {list(k.shape)}")
    B, T, H, K = q.shape
    HV = v.shape[2]
    _checks.require(K <= 256, f"q: expected a head width of at most 256, got {K}")
    _checks.require(H == 0 or HV % H == 0, f"v: expected a multiple of the {H} heads of q, got {HV}")
    _checks.require(g.shape == (B, T, HV, K), f"g: expected shape {[B, T, HV, K]}, got {list(g.shape)}")
    _checks.require(beta.shape == (B, T, HV), f"beta: expected shape {[B, T, HV]}, got {list(beta.shape)}")
    if return_intermediate_states:
        _checks.no_gradients()
        _checks.require(not disable_recompute, "disable_recompute: expected False with return_intermediate_states")
    q, k, v = _checks.one_dtype(q, k, v, ValueError)
    gate = _delta_rule.PER_CHANNEL | (_delta_rule.SAFE_GATE if safe_gate else 0)
    bits = _delta_rule.bits(
        gate, chunk_size, state_v_first, use_qk_l2norm_in_kernel, output_final_state, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, use_gate_in_kernel,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    if cp_context is not None:
        if return_intermediate_states:
            raise NotImplementedError("return_intermediate_states: not supported together with cp_context")
        return _cp.delta_rule(cp_context, inputs[:-1], bits, scale, lower_bound, disable_recompute)
    if return_intermediate_states:
        host_offsets = _checks.host_offsets(cu_seqlens, cu_seqlens_cpu)
        return _delta_rule.forward_with_states(inputs, bits, scale, lower_bound, host_offsets)
    return _delta_rule.forward(inputs, bits, scale, lower_bound, disable_recompute)
