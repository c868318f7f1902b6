"""The short causal convolution in front of the delta rule: each channel is filtered on its own over the last W tokens.

z_t = bias + sum_i weight_i x_{t-W+1+i},   y_t = activation(z_t) + residual_t
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import _checks, _cp, _short_conv


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """The short convolution over whole sequences, with gradients.

    Args:
        x: `[B, T, D]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow); or `[B, T, ..]` with D elements for each token.
        weight: `[D, W]`, W from 1 to 16; any floating type, as all that follows. Its last column meets the current
            token. None: ones, as wide as the initial state.
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
        `(y, final_state)`: y in the shape of x and the final state `[N, D, W]`, or None, both in the type of x.
    """
    if cp_context is not None:
        cu_seqlens = _cp.local_offsets(cp_context, "x", x, cu_seqlens)
    _checks.sequences(x, initial_state, cu_seqlens)
    weight, shape = _weight(weight, initial_state, "initial_state"), x.shape
    x, residual = (_rows(rows, weight) for rows in (x, residual))
    if cp_context is not None:
        initial_state = _cp.conv_states(cp_context, (x,), weight.shape[1], initial_state)
    y, final_state = _short_conv.forward(
        (x, weight, bias, initial_state, cu_seqlens), _activation(activation), residual, bool(output_final_state)
    )
    return y.view(shape), final_state


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
        x: `[B, T, D]`, or with one token for each sequence `[N, D]` or, where the cache has N slots, `[1, N, D]`. Also
            `[B, T, ..]` with D elements for each token.
        cache: `[slots, D, W]` in the type of x or fp32, read and written.
        weight: `[D, W]`; None: ones.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        state_indices: `[N]` int32 or int64, the slot of each sequence; -1 skips a sequence: no state changes and its y
            is 0. No slot twice: on the CPU that is a ValueError; on CUDA, where the contents are not read back, it is
            the caller's promise, and a slot that two sequences write at once is undefined. None: sequence n has slot
            n, and `slots` is N.

    The other arguments are those of `causal_conv1d`.

    Returns:
        `(y, cache)`: y in the shape and type of x, and the cache that was given.
    """
    weight, shape = _weight(weight, cache, "cache"), x.shape
    packed = x.dim() > 2 and x.shape[0] == 1 and x.shape[1] == cache.shape[0] and cu_seqlens is None
    if x.dim() == 2 and x.shape[1] != weight.shape[0]:
        raise ValueError(f"x: expected {weight.shape[0]} channels, got shape {list(x.shape)}")
    if x.dim() == 2 or (packed and state_indices is None):
        x, residual = (None if rows is None else rows.reshape(-1, 1, weight.shape[0]) for rows in (x, residual))
    x, residual = (_rows(rows, weight) for rows in (x, residual))
    inputs = (x, weight, bias, None, cu_seqlens)
    y = _short_conv.step(cache, state_indices, inputs, _activation(activation), residual)
    return y.view(shape), cache


def _weight(weight: Tensor | None, state: Tensor | None, name: str) -> Tensor:
    """Ones where there is none: the sum over the window."""
    if weight is not None:
        return weight
    if state is None:
        raise ValueError(f"weight: expected a tensor without {name}, which would tell the width, got None")
    return state.new_ones(state.shape[1:])


def _rows(x: Tensor | None, weight: Tensor) -> Tensor | None:
    """`[B, T, ..]` as `[B, T, D]`."""
    if x is None or x.dim() <= 3 or x.shape[-1] == weight.shape[0]:
        return x
    return x.flatten(2)


def _activation(name: str | None) -> int:
    _checks.require(name in _short_conv.ACTIVATIONS, f"activation: expected silu, swish or None, got {name!r}")
    return _short_conv.ACTIVATIONS[name]
