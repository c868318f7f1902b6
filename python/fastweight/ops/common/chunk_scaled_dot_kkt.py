"""The matrix of the keys that the chunk form inverts."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _blocks
from .._wy import natural


@torch.no_grad()
def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """`A_ij = beta_i (k_i . k_j) 2^(g_i - g_j)` for the tokens j before i of its chunk, 0 elsewhere. No gradients.

    Args:
        k: `[B, T, H, K]`.
        g: the decays, summed within chunks and to base 2 (`chunk_local_cumsum` with a scale of 1 / ln 2), `[B, T, HV]`,
            or `[B, T, HV, K]`: then one factor per channel, inside the product. None: no decay.
        beta: `[B, T, HV]`; None: 1.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_size: 16, 32 or 64.
        output_dtype: any floating type.
        chunk_indices: accepted and not needed.

    Returns:
        `[B, T, HV, C]`: row t is the row of its chunk's matrix.
    """
    if beta is not None and beta.dim() != 3:
        raise ValueError(f"beta: expected rank 3, got shape {list(beta.shape)}")
    return _blocks.scaled_dot_kkt((k, beta, natural(g), cu_seqlens), chunk_size).to(output_dtype)
