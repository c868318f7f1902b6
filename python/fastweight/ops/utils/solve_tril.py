"""The triangular inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _blocks, _checks


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`(I + A)^-1` for every chunk, A strictly lower triangular; differentiable.

    Args:
        A: `[B, T, H, C]`, C = 16, 32 or 64: row t is the row of its chunk's matrix. What is read is the part
            below the diagonal.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1.
        chunk_indices: accepted and not needed.
        output_dtype: any floating type.

    Returns:
        `[B, T, H, C]`.
    """
    _checks.require(A.shape[-1] in (16, 32, 64), f"A: expected 16, 32 or 64 columns, got {A.shape[-1]}")
    return _blocks.solve_tril((A, cu_seqlens), (output_dtype,))
