"""DPLR token by token, and decoding in place with DPLR and IPLR."""

from __future__ import annotations

from torch import Tensor

from .... import _related
from ...._delta_rule import NONE, PER_CHANNEL
from .._forward import CHUNK_SIZE, forward


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """DPLR for short sequences and decoding, with gradients. The arguments are those of `chunk_dplr_delta_rule`, and
    `reverse`: from the last token of each sequence to the first. o has the type of v."""
    o, final_state = forward(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse)
    return o.to(v.dtype), final_state


def dplr_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    gk: Tensor | None = None,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Decoding in place with DPLR, or IPLR without gk: the T tokens of each sequence advance its state. No gradients.

    Args:
        q, k, a, b: `[B, T, H, K]`; T is 1 for one token per sequence.
        v: `[B, T, H, V]`.
        state: `[slots, H, K, V]` fp32 or bf16, fp64 where q is (`[slots, H, V, K]` with `state_v_first`), read and
            written.
        gk: `[B, T, H, K]`, the logarithm of the decay; None: IPLR.
        state_indices: `[N]` int32 or int64, the slot of each sequence, none twice; -1 skips a sequence: no state
            changes and its o is 0. None: sequence n has slot n, and `slots` is N.

    The other arguments are those of `chunk_dplr_delta_rule`.

    Returns:
        o `[B, T, H, V]` in the type of q.
    """
    options = (NONE if gk is None else PER_CHANNEL, scale, CHUNK_SIZE, state_v_first)
    return _related.dplr.step(state, state_indices, (q, k, v, a, b, gk, None, cu_seqlens), options)
