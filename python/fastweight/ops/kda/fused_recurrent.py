"""KDA token by token."""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _delta_rule


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA for short sequences and decoding, with gradients. The arguments are those of `chunk_kda`; the initial state
    may have any floating type, beta may be `[B, T, HV, V]`, and q, k and v may have different types, which then all
    count as the widest: o has that of v."""
    if transpose_state_layout is not None:
        state_v_first = _checks.v_first(state_v_first, transpose_state_layout)
    if cu_seqlens is not None:
        _checks.sequences(q, initial_state, cu_seqlens)
    if allow_neg_eigval:
        _checks.beta_from_logits(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    dtype = v.dtype
    q, k, v = _checks.any_dtype(q, k, v)
    bits = _delta_rule.bits(
        _delta_rule.PER_CHANNEL | _delta_rule.TOKEN_BY_TOKEN, 64, state_v_first, use_qk_l2norm_in_kernel,
        output_final_state, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    o, final_state = _delta_rule.forward(inputs, bits, scale, lower_bound)
    return o.to(dtype), final_state
