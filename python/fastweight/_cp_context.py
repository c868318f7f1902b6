"""Which tokens of which sequences the ranks of a group hold, and what follows from it for the states between them.

All of it is arithmetic on two lists that every rank has, the offsets of the sequences and those of the ranks: no rank
asks another one who has what.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

MODES = ("affine", "in_order")

# What forward and backward together cost over those of one device, per token of a middle rank with K = V: the products
# of a map beside the 24 of the operator itself (docs/context-parallel.md), in the arithmetic of the operator. With two
# ranks to a sequence nobody needs M.
_AFFINE_COST = {2: 34 / 24, 3: 38 / 24}


@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens of one rank."""

    start: int
    end: int
    cu_seqlens: tuple[int, ...]  # of the sequences that have a token here, from `start` on
    before: tuple[int, ...]  # the ranks that hold earlier tokens of the first sequence here, in order
    after: tuple[int, ...]  # the ranks that hold later tokens of the last sequence here, in order
    halo: int  # how many tokens of the first sequence are on earlier ranks

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def is_interior(self) -> bool:
        """Whether the rank holds the middle of one sequence and nothing else: the one case in which the effect on a
        state that comes from outside is asked for, the matrix M."""
        return bool(self.before and self.after) and self.num_sequences == 1


def cut(cu_seqlens: Sequence[int], world_size: int, align: int) -> list[int]:
    """The first token of every rank, and the end: equal shares, each cut moved down to a multiple of `align` tokens
    from the start of the sequence that it cuts."""
    total = cu_seqlens[-1]
    offsets = []
    for rank in range(world_size):
        at = rank * total // world_size
        offsets.append(at - _position(cu_seqlens, at) % align)
    return [*offsets, total]


def _position(cu_seqlens: Sequence[int], token: int) -> int:
    """Of a token in its sequence."""
    return token - cu_seqlens[bisect.bisect_right(cu_seqlens, token) - 1]


def spans_of(cu_seqlens: Sequence[int], offsets: Sequence[int]) -> tuple[Span, ...]:
    """The spans of ranks whose first tokens are these, and the end. Sequences without tokens are nowhere."""
    cu_seqlens = sorted(set(cu_seqlens))
    ranks = list(itertools.pairwise(offsets))

    def holders(token: int) -> list[int]:
        """The ranks with a token of its sequence."""
        at = bisect.bisect_right(cu_seqlens, token)
        begin, end = cu_seqlens[at - 1], cu_seqlens[at]
        return [rank for rank, (low, high) in enumerate(ranks) if max(low, begin) < min(high, end)]

    spans = []
    for rank, (start, end) in enumerate(ranks):
        if start == end:
            spans.append(Span(start, end, (0,), (), (), 0))
            continue
        inside = cu_seqlens[bisect.bisect_right(cu_seqlens, start) : bisect.bisect_left(cu_seqlens, end)]
        before = tuple(other for other in holders(start) if other < rank)
        after = tuple(other for other in holders(end - 1) if other > rank)
        halo = _position(cu_seqlens, start)
        spans.append(Span(start, end, (0, *(at - start for at in inside), end - start), before, after, halo))
    return tuple(spans)


@dataclasses.dataclass(eq=False)
class CPContext:
    """What `build_cp_context` returns, to be handed to operators and layers as `cp_context`. The attributes that
    flash-linear-attention's context has are of the same names."""

    group: dist.ProcessGroup
    cu_seqlens: Tensor  # [N + 1] int32, the offsets of the sequences on this rank
    cu_seqlens_cpu: Tensor
    conv1d_kernel_size: int | None
    rank: int
    mode: str | None
    threads: int  # of the rank with the most
    global_cu_seqlens: tuple[int, ...]
    spans: tuple[Span, ...]  # of every rank

    @property
    def span(self) -> Span:
        return self.spans[self.rank]

    @property
    def world_size(self) -> int:
        return len(self.spans)

    @property
    def num_tokens(self) -> int:
        """On this rank."""
        return self.span.end - self.span.start

    @property
    def num_seqs(self) -> int:
        return self.span.num_sequences

    @property
    def is_cp_enabled(self) -> bool:
        return True

    @property
    def pre_num_ranks(self) -> int:
        return self.rank - self.span.before[0] if self.span.before else 0

    @property
    def post_num_ranks(self) -> int:
        return self.span.after[-1] - self.rank if self.span.after else 0

    @property
    def is_first_rank(self) -> bool:
        """Whether the first sequence here begins here."""
        return not self.span.before

    @property
    def is_last_rank(self) -> bool:
        """Whether the last sequence here ends here."""
        return not self.span.after

    @property
    def pre_num_conv_tokens(self) -> int:
        return self.span.halo

    @functools.cached_property
    def longest_chain(self) -> int:
        """The most ranks that one sequence is on."""
        return max(1 + len(span.after) for span in self.spans)

    def copy_for_backward(self) -> CPContext:
        return copy.copy(self)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of this rank out of those of all ranks."""
        if x.shape[dim] != self.global_cu_seqlens[-1]:
            raise ValueError(f"x: expected all {self.global_cu_seqlens[-1]} tokens, got {x.shape[dim]}")
        return x.narrow(dim, self.span.start, self.num_tokens)

    def heads_per_stage(self, device: torch.device, num_heads: int, group: int) -> int:
        """In how large steps states are passed on in order: as few key heads as keep every thread busy. A CUDA device
        works on all heads at once."""
        return num_heads if device.type != "cpu" else min(num_heads, -(-self.threads // group))

    def mode_for(self, device: torch.device, num_heads: int, group: int) -> str:
        """The mode that was asked for, or the one with the lower cost: passing states on leaves the later ranks idle
        until the first stage has come to them."""
        if self.mode is not None:
            return self.mode
        stages = -(-num_heads // self.heads_per_stage(device, num_heads, group))
        in_order = 1 + (self.longest_chain - 1) / stages
        affine = _AFFINE_COST[min(max(self.longest_chain, 2), 3)]
        return "in_order" if in_order <= affine else "affine"


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    mode: str | None = None,
    align: int = 1,
    tokens_per_rank: Sequence[int] | None = None,
) -> CPContext:
    """Splits the tokens of packed sequences over the ranks of a group. Every rank calls it with the same arguments;
    where they differ, or a rank refuses them, all ranks raise an error.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, the offsets of all sequences, before the split. The context's offsets are
            on its device.
        group: the ranks; None: all of them.
        conv1d_kernel_size: of the short convolutions that will take the context, which then check it; None: any.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU, which spares reading it back from a device.
        mode: how states cross the ranks. `"affine"`: every rank computes what its tokens do to any state, and the ranks
            compose these maps after one exchange. `"in_order"`: states are passed from rank to rank, a few heads at a
            time, with the bits of one device where the cuts are multiples of the chunk size. None: the one that costs
            less. TTT-Linear always passes its states in order.
        align: cuts inside a sequence are moved down to a multiple of so many tokens from its start. TTT-Linear asks for
            its chunk size, and the bits of one device for that of the operators.
        tokens_per_rank: how many tokens each rank holds; None: `total // ranks`, with the remainder spread.

    Returns:
        The context of this rank: `shard(x)` has its tokens of x.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group: expected one that this process is in, got another")
    error, offsets, bounds = None, None, []
    try:
        offsets = _checked_offsets(cu_seqlens, cu_seqlens_cpu)
        bounds = _checked_bounds(offsets, world_size, conv1d_kernel_size, mode, align, tokens_per_rank)
    except (TypeError, ValueError) as refused:
        error = refused
    arguments = {
        "cu_seqlens": offsets,
        "conv1d_kernel_size": conv1d_kernel_size,
        "mode": mode,
        "align": align,
        "tokens_per_rank": None if tokens_per_rank is None else list(tokens_per_rank),
    }
    threads = _agree(group, error, arguments)
    spans = spans_of(offsets, bounds)
    local = torch.tensor(spans[rank].cu_seqlens, dtype=torch.int32)
    return CPContext(
        group=dist.group.WORLD if group is None else group,
        cu_seqlens=local.to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=local,
        conv1d_kernel_size=conv1d_kernel_size,
        rank=rank,
        mode=mode,
        threads=threads,
        global_cu_seqlens=tuple(offsets),
        spans=spans,
    )


def _checked_offsets(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> list[int]:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: expected two or more offsets of int32 or int64, got shape {list(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if source.shape != cu_seqlens.shape:
        raise ValueError(f"cu_seqlens_cpu: expected shape {list(cu_seqlens.shape)}, got {list(source.shape)}")
    offsets = source.tolist()
    if offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens: expected offsets that start at 0 and do not decrease, got {offsets}")
    return offsets


def _checked_bounds(offsets, world_size, conv1d_kernel_size, mode, align, tokens_per_rank) -> list[int]:
    if conv1d_kernel_size is not None and not 1 <= conv1d_kernel_size <= 16:
        raise ValueError(f"conv1d_kernel_size: expected a number from 1 to 16, got {conv1d_kernel_size}")
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)} or None, got {mode!r}")
    if align < 1:
        raise ValueError(f"align: expected 1 or more tokens, got {align}")
    if tokens_per_rank is None:
        return cut(offsets, world_size, align)
    tokens = list(tokens_per_rank)
    if len(tokens) != world_size or min(tokens) < 0 or sum(tokens) != offsets[-1]:
        raise ValueError(
            f"tokens_per_rank: expected {world_size} numbers that add up to {offsets[-1]} tokens, got {tokens}"
        )
    bounds = [0, *itertools.accumulate(tokens)]
    for at in bounds[1:-1]:
        if _position(offsets, at) % align != 0:
            raise ValueError(
                f"tokens_per_rank: expected cuts at multiples of {align} tokens from the start of a sequence, got one "
                f"after {_position(offsets, at)}"
            )
    return bounds


def _agree(group: dist.ProcessGroup | None, error: Exception | None, arguments: dict) -> int:
    """One exchange of a few numbers: whether each rank accepts its arguments, how many threads it has, and digests of
    the arguments. Returns the most threads."""

    def digest(value) -> int:
        return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big", signed=True)

    row = [int(error is not None), torch.get_num_threads(), *(digest(value) for value in arguments.values())]
    rows = all_gather(torch.tensor(row), group).wait().tolist()
    if error is not None:
        raise error
    refused = [rank for rank, other in enumerate(rows) if other[0]]
    if refused:
        raise ValueError(f"build_cp_context: expected every rank to accept its arguments, got a refusal of {refused}")
    for index, name in enumerate(arguments, start=2):
        different = [rank for rank, other in enumerate(rows) if other[index] != rows[0][index]]
        if different:
            raise ValueError(f"{name}: expected the same on every rank, got another on {different} than on rank 0")
    return max(other[1] for other in rows)


class Gathered:
    """An all-gather under way. `wait` returns `[ranks, ..]` where the message was."""

    def __init__(self, parts: Tensor, work, device: torch.device) -> None:
        self._parts, self._work, self._device = parts, work, device

    def wait(self) -> Tensor:
        self._work.wait()
        return self._parts.to(self._device)


def all_gather(message: Tensor, group: dist.ProcessGroup | None) -> Gathered:
    """The messages of all ranks, which have one shape. A backend without the message's device gets a copy."""
    sent = message.contiguous().to(_device_of(group, message.device))
    parts = sent.new_empty((dist.get_world_size(group), *sent.shape))
    work = dist.all_gather(list(parts.unbind(0)), sent, group=group, async_op=True)
    return Gathered(parts, work, message.device)


def _device_of(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where a message has to be: on its device, unless the group has no backend there."""
    backend = str(dist.get_backend_config(group))
    if "nccl" in backend and device.type == "cpu" and "cpu:" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and "nccl" not in backend:
        return torch.device("cpu")
    return device


def send(message: Tensor, rank: int, group: dist.ProcessGroup):
    """Returns what has to be kept until the message has been received, and what to wait for."""
    sent = message.contiguous().to(_device_of(group, message.device))
    return sent, dist.isend(sent, group=group, group_dst=rank)


class Received:
    """A message under way from another rank."""

    def __init__(self, shape: Sequence[int], like: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        self._device = like.device
        self._message = like.new_empty(shape, device=_device_of(group, like.device))
        self._work = dist.irecv(self._message, group=group, group_src=rank)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._message.to(self._device)
