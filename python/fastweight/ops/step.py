"""The step in place that serves the delta rule, the gated delta rule and KDA."""

from __future__ import annotations

from torch import Tensor

from .. import _delta_rule


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Decoding in place, for engines that keep the states of many sequences in one tensor: the T tokens of each
    sequence advance its state, and nothing but o is allocated. No gradients.

    Args:
        q, k: `[B, T, H, K]`; T is 1 for one token per sequence.
        v: `[B, T, HV, V]`.
        state: `[slots, HV, K, V]` fp32 or bf16, fp64 where q is (`[slots, HV, V, K]` with `state_v_first`), read and
            written.
        g: None: the delta rule. `[B, T, HV]`: the gated delta rule. `[B, T, HV, K]`: KDA. The logarithm of the decay,
            or a raw value with `use_gate_in_kernel`.
        beta: `[B, T, HV]` or `[B, T, HV, V]`; None: 1.
        scale: factor of the output; None: `K ** -0.5`.
        state_indices: `[N]` int32 or int64, the slot of each sequence; -1 skips a sequence: no state changes and its o
            is 0. No slot twice: on the CPU that is a ValueError; on CUDA, where the contents are not read back, it is
            the caller's promise, and a slot that two sequences write at once is undefined. None: sequence n has slot
            n, and `slots` is N.
        lower_bound: KDA's gate with a lower bound, see `chunk_kda`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.

    The other arguments are those of `chunk_gated_delta_rule` and `chunk_kda`.

    Returns:
        o `[B, T, HV, V]` in the type of q.
    """
    if g is None:
        gate = _delta_rule.NONE
    else:
        gate = _delta_rule.PER_CHANNEL if g.dim() == 4 else _delta_rule.PER_HEAD
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    bits = _delta_rule.bits(
        gate, 64, state_v_first, use_qk_l2norm_in_kernel, False, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel,
    )  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, None, cu_seqlens)
    return _delta_rule.step(state, state_indices, inputs, (bits, scale, lower_bound))
