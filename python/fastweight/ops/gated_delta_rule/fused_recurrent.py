"""The gated delta rule token by token."""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _delta_rule
from .gate import fused_gdn_gate


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule for short sequences and decoding, with gradients. The arguments are those of
    `chunk_gated_delta_rule`, except:

    Args:
        q, k, v: may have different types, which then all count as the widest; o has that of v.
        g: may be None: no decay, or that of gk alone.
        gk: `[B, T, HV, K]`, the logarithm of a decay per key channel, on top of g, be that given or made in the kernel.
        gv: a decay per value channel, not supported.
        beta: may be None: 1. May be `[B, T, HV, V]`: one step size per value channel.
    """
    if transpose_state_layout is not None:
        state_v_first = _checks.v_first(state_v_first, transpose_state_layout)
    if cu_seqlens is not None:
        _checks.sequences(q, initial_state, cu_seqlens)
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("A_log: expected a tensor with use_gate_in_kernel, got None")
        if g is None:
            raise ValueError("g: expected a tensor with use_gate_in_kernel, got None")
    else:
        A_log = dt_bias = None
    if allow_neg_eigval:
        _checks.beta_from_logits(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    _checks.no_value_gate(gv)
    gate = _delta_rule.NONE if g is None else _delta_rule.PER_HEAD
    if gk is not None:
        shape = [*v.shape[:3], k.shape[-1]]
        if list(gk.shape) != shape or not gk.is_floating_point():
            raise ValueError(f"gk: expected shape {shape} of a floating type, got {list(gk.shape)} of {gk.dtype}")
        if g is not None and list(g.shape) != shape[:3]:
            raise ValueError(f"g: expected shape {shape[:3]}, got {list(g.shape)}")
        if use_gate_in_kernel:
            g = fused_gdn_gate(g, A_log, dt_bias)
            use_gate_in_kernel, A_log, dt_bias = False, None, None
        gate = _delta_rule.PER_CHANNEL
        g = gk if g is None else g.unsqueeze(-1) + gk
    dtype = v.dtype
    q, k, v = _checks.any_dtype(q, k, v)
    bits = _delta_rule.bits(
        gate | _delta_rule.TOKEN_BY_TOKEN, 64, state_v_first, use_qk_l2norm_in_kernel, output_final_state,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    o, final_state = _delta_rule.forward(inputs, bits, scale)
    return o.to(dtype), final_state


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
