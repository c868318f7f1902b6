"""What DPLR and IPLR share."""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _related
from ..._delta_rule import NONE, PER_CHANNEL
from .._reverse import in_order

CHUNK_SIZE = 64


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    disable_recompute: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state); o in the type of q."""
    _checks.sequences(q, initial_state, cu_seqlens)
    dtype = q.dtype
    q, k, v, a, b = _checks.any_dtype(q, k, v, a, b)
    options = (NONE if g is None else PER_CHANNEL, scale, CHUNK_SIZE, False)

    def run(tokens, initial_state, cu_seqlens):
        inputs = (*tokens, initial_state, cu_seqlens)
        return _related.dplr.forward(inputs, options, output_final_state, disable_recompute)

    o, final_state = in_order(run, (q, k, v, a, b, g), initial_state, cu_seqlens, reverse)
    return o.to(dtype), final_state
