"""Decoding with TTT-Linear."""

from __future__ import annotations

from torch import Tensor

from ... import _ttt_linear


def ttt_linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    state: Tensor,
    state_bias: Tensor,
    gradient: Tensor,
    gradient_bias: Tensor,
    position: Tensor,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Decoding in place: the T tokens of each sequence advance what is kept of it. No gradients.

    A sequence begins with everything 0, or with the final state and bias of `chunk_ttt_linear` over a multiple of
    `chunk_size` tokens and the rest 0.

    Args:
        q, k, v: `[B, T, H, D]`; T is 1 for one token per sequence.
        w, b: `[H, D]`.
        eta: `[B, T, H, 1]` or `[B, T, H]`.
        state: `[slots, H, D, D]` fp32, the state at the start of the open mini-batch. Read and written, like the next
            four.
        state_bias: `[slots, H, 1, D]` fp32.
        gradient: `[slots, H, D, D]` fp32, the sum of `k^T n` over the tokens of the open mini-batch.
        gradient_bias: `[slots, H, 1, D]` fp32, the sum of `n`.
        position: `[slots]` int32, how many tokens these are.
        state_indices: `[N]` int32 or int64, the slot of each sequence; -1 skips a sequence: nothing of it changes and
            its o is 0. No slot twice: on the CPU that is a ValueError; on CUDA, where the contents are not read back,
            it is the caller's promise, and a slot that two sequences write at once is undefined. None: sequence n has
            slot n, and `slots` is N.

    The other arguments are those of `chunk_ttt_linear`.

    Returns:
        o `[B, T, H, D]` in the type of q.
    """
    return _ttt_linear.step(
        (state, state_bias, gradient, gradient_bias, position),
        state_indices,
        (q, k, v, w, b, eta, None, None, cu_seqlens),
        (scale, eps, chunk_size),
    )
