"""Recurrences from the last token of each sequence to the first."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def in_order(
    run: Callable,
    tokens: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`run(tokens, initial_state, cu_seqlens)`, which gives `(o, final_state)`, from the first token to the last or the
    other way round."""
    if not reverse:
        return run(tokens, initial_state, cu_seqlens)
    tokens = tuple(None if x is None else x.flip(1) for x in tokens)
    if cu_seqlens is None:
        o, final_state = run(tokens, initial_state, None)
        return o.flip(1), final_state
    # Packed sequences change places, too.
    offsets = tokens[0].shape[1] - cu_seqlens.flip(0)
    o, final_state = run(tokens, None if initial_state is None else initial_state.flip(0), offsets)
    return o.flip(1), None if final_state is None else final_state.flip(0)
