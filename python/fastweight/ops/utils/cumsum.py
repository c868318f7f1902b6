"""Sums over tokens: within chunks, and over whole sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _blocks, _checks
from .pack import pack_sequence, unpack_sequence


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    chunk_indices: Tensor | None = None,
    *,
    head_first: bool | None = None,
) -> Tensor:
    """The sum of g over the tokens of its chunk up to each token, or from it on in reverse; differentiable.

    Args:
        g: `[B, T, H]` or `[B, T, H, D]`.
        chunk_size: a power of two. 16, 32 and 64 run on the library, others on PyTorch.
        scale: factor of the result.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        output_dtype: any floating type; None: the type of g.
        chunk_indices: accepted and not needed.
        head_first: no longer exists.
    """
    _checks.no_head_first(head_first)
    if cu_seqlens is not None:
        _checks.require(g.shape[0] == 1, f"cu_seqlens: expected a batch of 1, got {g.shape[0]}")
    if g.dim() not in (3, 4):
        raise ValueError(f"g: expected [B, T, H] or [B, T, H, D], got shape {list(g.shape)}")
    _checks.require(
        chunk_size > 0 and chunk_size & (chunk_size - 1) == 0, f"chunk_size: expected a power of two, got {chunk_size}"
    )
    dtype = output_dtype or g.dtype
    if chunk_size in (16, 32, 64):
        wide = g.dtype if dtype == g.dtype and scale is None else torch.promote_types(g.dtype, torch.float32)
        y = _blocks.chunk_local_cumsum((g, cu_seqlens), (chunk_size, reverse, wide))
    else:
        y = _sums(g, chunk_size, reverse, cu_seqlens)
    return (y if scale is None else y * scale).to(dtype)


def chunk_global_cumsum(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    *,
    head_first: bool | None = None,
) -> Tensor:
    """The sum of s over the tokens of its sequence up to each token, or from it on in reverse, added up in fp64 by
    PyTorch; differentiable.

    Args:
        s: `[B, T, H]` or `[B, T, H, D]`.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        scale: factor of the result.
        output_dtype: any floating type; None: the type of s.
        head_first: no longer exists.
    """
    _checks.no_head_first(head_first)
    if cu_seqlens is not None:
        _checks.require(s.shape[0] == 1, f"cu_seqlens: expected a batch of 1, got {s.shape[0]}")
    if s.dim() not in (3, 4):
        raise ValueError(f"s: expected [B, T, H] or [B, T, H, D], got shape {list(s.shape)}")
    y = _sums(s, None, reverse, cu_seqlens)
    return (y if scale is None else y * scale).to(output_dtype or s.dtype)


# fla has a function for each rank. These take both.
chunk_local_cumsum_scalar = chunk_local_cumsum_vector = chunk_local_cumsum
chunk_global_cumsum_scalar = chunk_global_cumsum_vector = chunk_global_cumsum


def _sums(x: Tensor, chunk_size: int | None, reverse: bool, cu_seqlens: Tensor | None) -> Tensor:
    """In fp64; a chunk of None is the whole sequence."""
    if cu_seqlens is not None:
        padded = unpack_sequence(x.squeeze(0), cu_seqlens, "right")
        return pack_sequence(_sums(padded, chunk_size, reverse, None), cu_seqlens, "right").unsqueeze(0)
    T = x.shape[1]
    x = x.double()
    if chunk_size is not None:
        x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, -T % chunk_size)).unflatten(1, (-1, chunk_size))
    axis = 1 if chunk_size is None else 2
    y = x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)
    return y if chunk_size is None else y.flatten(1, 2)[:, :T]
