"""The plain reference of TTT-Linear."""

from __future__ import annotations

import torch
from torch import Tensor

from .._naive import for_all_rows, in_double
from .chunk import chunk_ttt_linear


def chunk_ttt_linear_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TTT-Linear in fp64. The arguments are those of `chunk_ttt_linear`, with `mini_batch_size` for its chunk size;
    results are in fp32."""
    steps = eta if isinstance(eta, Tensor) else None

    def run(q, k, v, w, b, state, bias, steps):
        rate = eta if steps is None else steps
        return chunk_ttt_linear(q, k, v, w, b, rate, scale, eps, mini_batch_size, state, bias, output_final_state)

    wide = torch.promote_types(q.dtype, torch.float32)
    state = for_all_rows(initial_state, q.shape[0])
    bias = for_all_rows(initial_state_bias, q.shape[0], "initial_state_bias")
    results = in_double(run, q, k, v, w, b, state, bias, steps)
    return tuple(None if x is None else x.to(wide) for x in results)
