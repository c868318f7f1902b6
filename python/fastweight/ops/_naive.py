"""The plain references: the library's own in double precision, with gradients.

They take what fla's functions of these names take, and compute in fp64 on the CPU, where tensors of other devices go
and come back from. Slow, and meant for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_double(function: Callable, *tensors: Tensor | None):
    """function(*tensors) in fp64 on the CPU, its results on the device of the first."""
    device = tensors[0].device
    results = function(*(None if x is None else x.to("cpu", torch.float64) for x in tensors))
    if isinstance(results, Tensor):
        return results.to(device)
    return tuple(None if x is None else x.to(device) for x in results)


def for_all_rows(state: Tensor | None, batch: int, name: str = "initial_state") -> Tensor | None:
    """An initial state `[B, H, K, V]`. As in fla, one without the axis of the batch belongs to every row of it."""
    if state is None:
        return None
    if state.dim() not in (3, 4) or (state.dim() == 4 and state.shape[0] not in (1, batch)):
        raise ValueError(f"{name}: expected [{batch}, H, ..] or [H, ..] of rank 4 or 3, got shape {list(state.shape)}")
    return state.expand(batch, *state.shape[-3:])


def recurrence(
    function: Callable,
    tokens: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    dtype: torch.dtype,
    output_final_state: bool,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`(o, final_state)` of `function(tokens, initial_state)`: o in `dtype`, the state in fp32 unless asked in fp64.

    heads_first: tokens and o are `[B, H, T, ..]`. An initial state may do without the axis of the batch.
    """

    def run(initial_state, *tokens):
        if heads_first:
            tokens = tuple(None if x is None else x.transpose(1, 2) for x in tokens)
        o, state = function(tokens, initial_state)
        return (o.transpose(1, 2).contiguous() if heads_first else o), state

    device = tokens[0].device
    wide = torch.promote_types(tokens[0].dtype, torch.float32)
    initial_state = for_all_rows(initial_state, tokens[0].shape[0])
    host = [None if x is None else x.to("cpu", torch.float64) for x in (initial_state, *tokens)]
    o, state = run(*host)
    return o.to(device, dtype), state.to(device, wide) if output_final_state else None
