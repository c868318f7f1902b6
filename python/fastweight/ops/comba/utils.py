"""Sums of Comba's log decays."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.cumsum import chunk_local_cumsum


def chunk_comba_cumsum_scalar_fwd(
    g: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    chunk_indices: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums of g `[B, T, H]` over the tokens of its chunk before each token, and up to it. The arguments are those
    of `chunk_local_cumsum`."""
    wide = torch.promote_types(g.dtype, torch.float32)
    after = chunk_local_cumsum(g, chunk_size, scale=scale, cu_seqlens=cu_seqlens, output_dtype=wide)
    before = after - (g if scale is None else g.to(wide) * scale)
    dtype = output_dtype or g.dtype
    return before.to(dtype), after.to(dtype)
