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
    _checks.offsets(cu_seqlens)
    _check_shape("x", x.shape, cu_seqlens, x.shape[2:])
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
    _checks.offsets(cu_seqlens, x.shape[0])
    if desired_shape is None:
        desired_shape = (cu_seqlens.shape[0] - 1, int(prepare_lens(cu_seqlens).max()), *x.shape[1:])
    _check_shape("desired_shape", desired_shape, cu_seqlens, x.shape[1:])
    return x.new_zeros(desired_shape).index_put(_places(cu_seqlens, desired_shape[1], padding_side), x)


def _check(x: Tensor, padding_side: str) -> None:
    _checks.require(padding_side in ("left", "right"), f"padding_side: expected left or right, got {padding_side!r}")
    _checks.require(x.dim() >= 2, f"x: expected at least 2 dimensions, got {x.dim()}")


def _check_shape(name: str, shape: tuple, cu_seqlens: Tensor, rest: tuple) -> None:
    """Of a padded batch: `[N, S, ..]` with room for every sequence."""
    count = cu_seqlens.shape[0] - 1
    _checks.require(
        shape[0] == count and tuple(shape[2:]) == tuple(rest),
        f"{name}: expected [{', '.join(map(str, (count, 'S', *rest)))}], got {list(shape)}",
    )
    if count > 0 and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        longest = int(prepare_lens(cu_seqlens).max())
        _checks.require(longest <= shape[1], f"{name}: expected room for {longest} tokens, got {list(shape)}")


def _places(cu_seqlens: Tensor, width: int, padding_side: str) -> tuple[Tensor, Tensor]:
    """Row and column of every token in the padded batch."""
    row, column = prepare_token_indices(cu_seqlens).long().unbind(1)
    if padding_side == "left":
        column = column + (width - prepare_lens(cu_seqlens).long())[row]
    return row, column
