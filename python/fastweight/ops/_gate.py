"""The gate activations that GDN and KDA share."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _blocks, _checks
from .utils.cumsum import chunk_local_cumsum


def activation(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    output_dtype: torch.dtype | None,
    num_axes: int,
) -> Tensor:
    """g `[..]` with `num_axes` axes of heads and channels behind its tokens."""
    rows = g.reshape(1, -1, *g.shape[-num_axes:])
    dtype = output_dtype or g.dtype
    y = _blocks.gate_activation((rows, A_log, dt_bias, None), (lower_bound, 0, _computed(g, dtype)))
    return y.reshape(g.shape).to(dtype)


def adjoint(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    dyg: Tensor | None,
    num_axes: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of g, A_log and dt_bias, None where there is none of these, from that of the gate."""
    if dyg is None or dyg.shape != g.shape:
        raise ValueError(f"dyg: expected shape {list(g.shape)}, got {None if dyg is None else list(dyg.shape)}")
    shape = (1, -1, *g.shape[-num_axes:])
    inputs = (g.reshape(shape), A_log, dt_bias, None)
    dg, *rest = _blocks.gate_activation_backward(dyg.reshape(shape), inputs, lower_bound)
    return dg.reshape(g.shape), *rest


def summed(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    scale: float | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    output_dtype: torch.dtype | None,
    lower_bound: float | None = None,
) -> Tensor:
    """The gate `[B, T, ..]`, summed within chunks."""
    if cu_seqlens is not None:
        _checks.require(g.shape[0] == 1, f"cu_seqlens: expected a batch of 1, got {g.shape[0]}")
    dtype = output_dtype or g.dtype
    wide = torch.promote_types(g.dtype, torch.float32)
    if chunk_size in (16, 32, 64):
        y = _blocks.gate_activation((g, A_log, dt_bias, cu_seqlens), (lower_bound, chunk_size, wide))
    else:
        y = _blocks.gate_activation((g, A_log, dt_bias, None), (lower_bound, 0, wide))
        y = chunk_local_cumsum(y, chunk_size, cu_seqlens=cu_seqlens, output_dtype=wide)
    return (y if scale is None else y * scale).to(dtype)


def _computed(g: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What the library writes: the type of g or fp32."""
    return dtype if dtype in (g.dtype, torch.float32) else torch.promote_types(g.dtype, torch.float32)
