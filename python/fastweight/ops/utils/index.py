"""What can be read off the offsets of packed sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """The lengths `[N]` of the sequences with the offsets `[N + 1]`."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """The number of ones `[N]` int32 in each row of a mask `[N, T]`."""
    return mask.sum(dim=-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """The offsets `[N + 1]` of sequences with these lengths `[N]`."""
    return F.pad(lens.cumsum(dim=0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """The offsets `[N + 1]` of the sequences that a mask `[N, T]` leaves."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_split_cu_seqlens(
    batch_size: int | None = None,
    seq_len: int | None = None,
    split_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = torch.int32,
    device: torch.device | None = torch.device("cpu"),  # noqa: B008
) -> Tensor:
    """The offsets `[M + 1]` of M pieces of at most `split_size` tokens: of the sequences with offsets `cu_seqlens`, or
    of `batch_size` sequences of `seq_len` tokens."""
    if split_size is None:
        raise TypeError("split_size: expected a number, got None")
    if cu_seqlens is None:
        if batch_size is None or seq_len is None:
            raise TypeError("cu_seqlens: expected offsets, or else batch_size and seq_len, got none of them")
        offsets = [n * seq_len for n in range(batch_size + 1)]
    else:
        offsets = cu_seqlens.tolist()
    starts = [t for begin, end in zip(offsets[:-1], offsets[1:], strict=True) for t in range(begin, end, split_size)]
    return torch.tensor([*starts, offsets[-1]], dtype=dtype, device=device)


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The place `[T]` of every token in its sequence."""
    return _pieces(prepare_lens(_host(cu_seqlens, cu_seqlens_cpu)))[1].to(cu_seqlens)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The sequence `[T]` of every token. Empty sequences keep their numbers, where fla leaves them out."""
    return _pieces(prepare_lens(_host(cu_seqlens, cu_seqlens_cpu)))[0].to(cu_seqlens)


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Sequence and place `[T, 2]` of every token."""
    return torch.stack(_pieces(prepare_lens(_host(cu_seqlens, cu_seqlens_cpu))), 1).to(cu_seqlens)


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Sequence and place in it `[NT, 2]` of every chunk."""
    return torch.stack(_pieces(_counts(_host(cu_seqlens, cu_seqlens_cpu), chunk_size)), 1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """The number `[N + 1]` of chunks before each sequence, and of all."""
    return F.pad(_counts(cu_seqlens, chunk_size).cumsum(0), (1, 0))


def get_max_num_splits(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> int:
    """The chunks of the longest of the sequences with the offsets `[N + 1]`."""
    return int(_counts(_host(cu_seqlens, cu_seqlens_cpu), chunk_size).max())


def _host(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> Tensor:
    """The copy on the CPU, where there is one: nothing then waits for the device."""
    return cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu


def _counts(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (prepare_lens(cu_seqlens) + chunk_size - 1) // chunk_size


def _pieces(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For as many pieces as the counts have in sum: whose they are, and which of its pieces each is."""
    owner = torch.arange(counts.shape[0], dtype=counts.dtype, device=counts.device).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(owner.shape[0], dtype=counts.dtype, device=counts.device) - first[owner]
