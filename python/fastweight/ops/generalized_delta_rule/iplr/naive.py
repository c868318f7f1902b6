"""Plain references of IPLR, with tensors `[B, H, T, ..]` as in fla."""

from __future__ import annotations

from torch import Tensor

from ..dplr.naive import dplr_recurrence


def iplr_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """IPLR in fp64. The arguments are those of `dplr_recurrence`, without a decay."""
    return dplr_recurrence(q, k, v, alpha, beta, None, initial_state, output_final_state)


def iplr_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 32,
) -> tuple[Tensor, Tensor | None]:
    """The same as `iplr_recurrence`: chunks change nothing in fp64. Any length will do."""
    return iplr_recurrence(q, k, v, alpha, beta, initial_state, output_final_state)
