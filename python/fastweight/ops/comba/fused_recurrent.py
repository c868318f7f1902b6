"""Comba token by token, and decoding in place."""

from __future__ import annotations

from torch import Tensor

from ... import _related
from .chunk import CHUNK_SIZE, chunk_comba


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Comba for short sequences and decoding, with gradients. The arguments are those of `chunk_comba`, but p stands
    before v, as in fla."""
    return chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def comba_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor,
    p: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Decoding in place with Comba: the T tokens of each sequence advance its state. No gradients.

    Args:
        q, k: `[B, T, H, K]`; T is 1 for one token per sequence.
        v: `[B, T, HV, V]`.
        state: `[slots, HV, K, V]` fp32 or bf16, fp64 where q is (`[slots, HV, V, K]` with `state_v_first`), read and
            written.
        state_indices: `[N]` int32 or int64, the slot of each sequence, none twice; -1 skips a sequence: no state
            changes and its o is 0. None: sequence n has slot n, and `slots` is N.

    The other arguments are those of `chunk_comba`.

    Returns:
        o `[B, T, HV, V]` in the type of q.
    """
    options = (scale, CHUNK_SIZE, state_v_first, use_qk_l2norm_in_kernel)
    return _related.comba.step(state, state_indices, (q, k, v, p, g, beta, None, cu_seqlens), options)
