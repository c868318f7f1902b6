"""Between padded batches and packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks
from .index import prepare_lens, prepare_token_indices


def pack_sequence(x: Tensor, cu_seqlens: Tensor, padding_side: str = "left") -> Tensor:
    """The tokens `[T, ..]` of a padded batch `[N, S, ..]` without the padding; differentiable.

    Args:
        cu_seqlens: `[N + 1]`, the offsets of the sequences in the result.
        padding_side: where x is padded, `"left"` or `"right"`.
    """
    _check(x, padding_side)
    return x[_places(cu_seqlens, x.shape[1], padding_side)]


def unpack_sequence(
    x: Tensor, cu_seqlens: Tensor, padding_side: str = "left", desired_shape: torch.Size | None = None
) -> Tensor:
    """The padded batch `[N, S, ..]` of packed tokens `[T, ..]`, zeros where there is none; differentiable.

    Args:
        cu_seqlens: `[N + 1]`, the offsets of the sequences in x.
        padding_side: where the result is padded, `"left"` or `"right"`.
        desired_shape: of the result; None: S is the longest of the lengths.
    """
    _check(x, padding_side)
    count = cu_seqlens.shape[0] - 1
    if desired_shape is None:
        desired_shape = (count, int(prepare_lens(cu_seqlens).max()), *x.shape[1:])
    _checks.require(
        desired_shape[0] == count and tuple(desired_shape[2:]) == tuple(x.shape[1:]),
        f"desired_shape: expected [{count}, S, {', '.join(map(str, x.shape[1:]))}], got {list(desired_shape)}",
    )
    return x.new_zeros(desired_shape).index_put(_places(cu_seqlens, desired_shape[1], padding_side), x)


def _check(x: Tensor, padding_side: str) -> None:
    _checks.require(padding_side in ("left", "right"), f"padding_side: expected left or right, got {padding_side!r}")
    _checks.require(x.dim() >= 2, f"x: expected at least 2 dimensions, got {x.dim()}")


def _places(cu_seqlens: Tensor, width: int, padding_side: str) -> tuple[Tensor, Tensor]:
    """Row and column of every token in the padded batch."""
    row, column = prepare_token_indices(cu_seqlens).long().unbind(1)
    if padding_side == "left":
        column = column + (width - prepare_lens(cu_seqlens).long())[row]
    return row, column
