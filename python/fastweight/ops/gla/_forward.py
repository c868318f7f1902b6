"""What linear attention, simple GLA and GLA share."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks, _related
from ..._delta_rule import NONE, PER_CHANNEL, PER_HEAD
from .._reverse import in_order

MOST_KEYS = 256  # channels of a call of the library
CHUNK_SIZE = 64  # shows in nothing but where a sequence may be cut without changing a bit


def gate_of(g: Tensor | None, g_gamma: Tensor | None = None) -> int:
    if g is None:
        return NONE if g_gamma is None else PER_HEAD
    return PER_CHANNEL if g.dim() == 4 else PER_HEAD


def one_gate(g: Tensor | None, g_gamma: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The two decays of simple GLA as one: the library takes either."""
    if g is None or g_gamma is None or g.dim() != 3:
        return g, g_gamma
    if list(g_gamma.shape) != [g.shape[2]]:
        raise ValueError(f"g_gamma: expected shape {[g.shape[2]]}, got {list(g_gamma.shape)}")
    return g + g_gamma.detach().to(torch.promote_types(g.dtype, torch.float32)), None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state); o in the type of q."""
    _checks.sequences(q, initial_state, cu_seqlens)
    g, g_gamma = one_gate(g, g_gamma)
    dtype, gate = q.dtype, gate_of(g, g_gamma)
    if q.shape[-1] > MOST_KEYS:
        return _in_ranges(
            q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse
        )
    q, k, v = _checks.any_dtype(q, k, v)

    def run(tokens, initial_state, cu_seqlens):
        inputs = (*tokens, initial_state, g_gamma, cu_seqlens)
        return _related.gla.forward(inputs, (gate, scale, CHUNK_SIZE, state_v_first), output_final_state)

    o, final_state = in_order(run, (q, k, v, g), initial_state, cu_seqlens, reverse)
    return o.to(dtype), final_state


def _in_ranges(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse):
    """Channels of keys do not touch each other: `forward` of one range of them after the other, whose outputs are added
    before anything is rounded to 16 bits."""
    K, axis = q.shape[-1], -1 if state_v_first else -2
    if k.shape != q.shape:
        raise ValueError(f"k: expected shape {list(q.shape)}, got {list(k.shape)}")
    scale = K**-0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    outputs, states = [], []
    for first in range(0, K, MOST_KEYS):
        count = min(MOST_KEYS, K - first)
        keys = (q.narrow(-1, first, count).to(wide), k.narrow(-1, first, count))
        decay = g.narrow(-1, first, count) if gate_of(g) == PER_CHANNEL else g
        start = None if initial_state is None else initial_state.narrow(axis, first, count)
        o, state = forward(
            *keys, v, decay, g_gamma, scale, start, output_final_state, state_v_first, cu_seqlens, reverse
        )
        outputs.append(o)
        states.append(state)
    return sum(outputs).to(q.dtype), torch.cat(states, axis) if output_final_state else None
