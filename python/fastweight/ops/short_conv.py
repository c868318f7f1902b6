"""The short causal convolution in front of the delta rule: each channel is filtered on its own over the last W tokens.

z_t = bias + sum_i weight_i x_{t-W+1+i},   y_t = activation(z_t) + residual_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _cp, _short_conv
from . import _checks


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """The short convolution over whole sequences, with gradients.

    Args:
        x: `[B, T, D]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow).
        weight: `[D, W]`, W from 1 to 16; any floating type, as all that follows. Its last column meets the current
            token.
        bias: `[D]`; None: zeros.
        residual: `[B, T, D]`, added after the activation.
        initial_state: `[N, D, W]`, the W inputs before the first token, oldest first; None: zeros.
        output_final_state: whether to return the last W inputs.
        activation: `"silu"`, its other name `"swish"`, or None.
        backend, cu_seqlens_cpu, chunk_indices: accepted and not needed.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cp_context: of `fastweight.ops.cp.build_cp_context`: the tokens are those of this rank, N counts the sequences
            that have a token here, and cu_seqlens is left out. See docs/context-parallel.md.

    Returns:
        `(y, final_state)`: y `[B, T, D]` and the final state `[N, D, W]`, or None, both in the type of x.
    """
    if cp_context is not None:
        cu_seqlens = _cp.local_offsets(cp_context, "x", x, cu_seqlens)
    _checks.sequences(x, initial_state, cu_seqlens)
    if cp_context is not None:
        initial_state = _cp.conv_states(cp_context, (x,), weight.shape[1], initial_state)
    return _short_conv.forward(
        (x, weight, bias, initial_state, cu_seqlens), _activation(activation), residual, bool(output_final_state)
    )


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decoding in place: the tokens of each sequence enter its state. No gradients.

    Args:
        x: `[B, T, D]`, or `[N, D]`, one token for each sequence.
        cache: `[slots, D, W]` in the type of x or fp32, read and written.
        weight: `[D, W]`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        state_indices: `[N]` int32 or int64, the slot of each sequence; -1 skips a sequence: no state changes and its y
            is 0. No slot twice: on the CPU that is a ValueError; on CUDA, where the contents are not read back, it is
            the caller's promise, and a slot that two sequences write at once is undefined. None: sequence n has slot
            n, and `slots` is N.

    The other arguments are those of `causal_conv1d`.

    Returns:
        `(y, cache)`: y in the shape and type of x, and the cache that was given.
    """
    if weight is None:
        raise ValueError("weight: expected a tensor, got None")
    flat = x.dim() == 2
    if flat:
        x, residual = x.unsqueeze(1), None if residual is None else residual.unsqueeze(1)
    inputs = (x, weight, bias, None, cu_seqlens)
    y = _short_conv.step(cache, state_indices, inputs, _activation(activation), residual)
    return y.squeeze(1) if flat else y, cache


def _activation(name: str | None) -> int:
    _checks.require(name in _short_conv.ACTIVATIONS, f"activation: expected silu, swish or None, got {name!r}")
    return _short_conv.ACTIVATIONS[name]
