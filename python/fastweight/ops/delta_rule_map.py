"""The map of a segment: what a run of tokens does to any state of the delta rule, and to the gradient of a state.

    S_out = M S_in + h        G_in = M^T G_out + e

Two segments compose, (M2, h2) after (M1, h1) is (M2 M1, M2 h1 + h2): what `cp_context` does over ranks.

On CUDA the maps of bf16 and fp16 tensors round as the operator itself does; in fp32, as elsewhere, they are made within
`fastweight.using("chunk_fp32", family="delta_rule_map")`.
"""

from __future__ import annotations

from torch import Tensor

from .. import _delta_rule


def delta_rule_map(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each sequence does to a state. No gradients.

    Args:
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: None: the delta rule. `[B, T, HV]`: the gated delta rule. `[B, T, HV, K]`: KDA.
        beta: `[B, T, HV]`; None: 1.
        initial_state: `[N, HV, K, V]`: h is then the state after the sequence from this one; None: zeros.

    The other arguments are those of `chunk_gated_delta_rule` and `chunk_kda`.

    Returns:
        `(M, h)`: `[N, HV, K, K]` and `[N, HV, K, V]` in fp32; of h the last axes change places with `state_v_first`, of
        M they do not.
    """
    options = _options(
        g, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        state_v_first, None,
    )  # fmt: skip
    return _delta_rule.map_forward((k, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens), options)


def delta_rule_map_backward(
    q: Tensor,
    k: Tensor,
    d_o: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    d_final_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each sequence does to the gradient of a state, from its last token to its first. No gradients.

    Args:
        q, k: `[B, T, H, K]`.
        d_o: `[B, T, HV, V]`, the gradient of the output, in the type of q.
        d_final_state: `[N, HV, K, V]`: e is then the gradient of the initial state from this one; None: zeros.

    The other arguments are those of `delta_rule_map`.

    Returns:
        `(Mt, e)`: the transpose of M `[N, HV, K, K]`, and `[N, HV, K, V]`, in fp32.
    """
    options = _options(
        g, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        state_v_first, scale,
    )  # fmt: skip
    inputs = (q, k, d_o, g, beta, A_log, dt_bias, None, cu_seqlens)
    return _delta_rule.map_backward(d_o, d_final_state, inputs, options)


def _options(g, l2norm, gate_in_kernel, beta_sigmoid, allow_neg_eigval, lower_bound, state_v_first, scale) -> tuple:
    gate = _delta_rule.NONE
    if g is not None:
        gate = _delta_rule.PER_CHANNEL if g.dim() == 4 else _delta_rule.PER_HEAD
    bits = _delta_rule.bits(
        gate, 64, state_v_first, l2norm, False, beta_sigmoid, allow_neg_eigval, gate_in_kernel
    )  # fmt: skip
    return bits, scale, lower_bound
