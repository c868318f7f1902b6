"""What linear attention, simple GLA and GLA share."""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _related
from ..._delta_rule import NONE, PER_CHANNEL, PER_HEAD
from .._reverse import in_order

CHUNK_SIZE = 64  # shows in nothing but where a sequence may be cut without changing a bit


def gate_of(g: Tensor | None, g_gamma: Tensor | None = None) -> int:
    if g is None:
        return NONE if g_gamma is None else PER_HEAD
    return PER_CHANNEL if g.dim() == 4 else PER_HEAD


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
    dtype, gate = q.dtype, gate_of(g, g_gamma)
    q, k, v = _checks.any_dtype(q, k, v)

    def run(tokens, initial_state, cu_seqlens):
        inputs = (*tokens, initial_state, g_gamma, cu_seqlens)
        return _related.gla.forward(inputs, (gate, scale, CHUNK_SIZE, state_v_first), output_final_state)

    o, final_state = in_order(run, (q, k, v, g), initial_state, cu_seqlens, reverse)
    return o.to(dtype), final_state
