"""The delta rule (DeltaNet) token by token."""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _delta_rule
from .chunk import inputs_of


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
        q, k, v: may have different types, which then all count as the widest; o has that of q.
        beta: may be None: 1. May be `[B, T, H, V]`: one step size per value channel.
        scale: above 0.
    """
    if cu_seqlens is not None:
        _checks.sequences(q, initial_state, cu_seqlens)
    if scale is not None:
        _checks.require(scale > 0, f"scale: expected a number above 0, got {scale}")
    dtype = q.dtype
    q, k, v = _checks.any_dtype(q, k, v)
    bits = _delta_rule.bits(_delta_rule.TOKEN_BY_TOKEN, 64, False, use_qk_l2norm_in_kernel, output_final_state)
    o, final_state = _delta_rule.forward(inputs_of(q, k, v, beta, initial_state, cu_seqlens), bits, scale)
    return o.to(dtype), final_state
