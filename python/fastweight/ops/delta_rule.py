"""The delta rule (DeltaNet), and the step in place that serves its whole family.

For each sequence and value head, with the state S a K x V matrix:

    S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1})
    o_t = scale q_t S_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _cp, _delta_rule
from . import _checks


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
    chunk_size: int = 64,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule over whole sequences.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow); one type for q, k and v. K is at most 256.
        v: `[B, T, H, V]`; V is at most 256.
        beta: `[B, T, H]`, the step size; any floating type.
        scale: factor of the output; None: `K ** -0.5`.
        initial_state: `[N, H, K, V]`; None: zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(sum(x * x) + 1e-6)`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: accepted and not needed.
        cp_context: of `fastweight.ops.cp.build_cp_context`: the tokens are those of this rank, N counts the sequences
            that have a token here, and cu_seqlens is left out. See docs/context-parallel.md.
        chunk_size: 16, 32 or 64: where a sequence may be cut without changing a bit. On CUDA 16-bit problems are
            computed in 64 rows per chunk, so that smaller chunks cost more there.
        head_first: no longer exists.

    Returns:
        `(o, final_state)`: o `[B, T, H, V]` in the type of q; the final state `[N, H, K, V]` in fp32, or None.
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
    return _forward(q, k, v, beta, scale, initial_state, cu_seqlens, bits, cp_context)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule for short sequences and decoding, with gradients. The arguments are those of `chunk_delta_rule`,
    except:

    Args:
        beta: may be None: 1. May be `[B, T, H, V]`: one step size per value channel.
        scale: above 0.
    """
    if cu_seqlens is not None:
        _checks.sequences(q, initial_state, cu_seqlens)
    if scale is not None:
        _checks.require(scale > 0, f"scale: expected a number above 0, got {scale}")
    q, k, v = _checks.one_dtype(q, k, v, ValueError)
    bits = _delta_rule.bits(_delta_rule.TOKEN_BY_TOKEN, 64, False, use_qk_l2norm_in_kernel, output_final_state)
    return _forward(q, k, v, beta, scale, initial_state, cu_seqlens, bits)


def _forward(q, k, v, beta, scale, initial_state, cu_seqlens, bits, cp_context=None):
    if v.shape[2] != q.shape[2]:
        raise ValueError(f"v: expected the {q.shape[2]} heads of q, got {v.shape[2]}")
    inputs = (q, k, v, None, beta, None, None, initial_state, cu_seqlens)
    if cp_context is not None:
        return _cp.delta_rule(cp_context, inputs[:-1], bits, scale)
    return _delta_rule.forward(inputs, bits, scale)


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
