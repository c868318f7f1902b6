"""TTT-Linear under the name of fla's second form."""

from __future__ import annotations

from torch import Tensor

from .chunk import chunk_ttt_linear


def fused_chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same function as `chunk_ttt_linear`, with the same arguments."""
    return chunk_ttt_linear(
        q, k, v, w, b, eta, scale, eps, chunk_size, initial_state, initial_state_bias, output_final_state, cu_seqlens,
        head_first=head_first,
    )  # fmt: skip
