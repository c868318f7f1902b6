"""The WY factors of a chunk, with the conventions of fla's inner functions.

There a gate is summed within its chunk and to base 2, while its gradient is that of the natural sum. No function here
records gradients: each has its backward beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _blocks

_WIDEST = 256  # values that the library takes at a time


def natural(g: Tensor | None) -> Tensor | None:
    """From sums to base 2."""
    return None if g is None else g * math.log(2)


@torch.no_grad()
def factors(
    k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None, A: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`w = A (beta * 2^g * k)` and `u = A (beta * v)` for every chunk."""
    gamma = natural(g)
    parts = [_blocks.wy((k, x.to(k.dtype), beta, gamma, A, cu_seqlens)) for x in v.split(_WIDEST, -1)]
    return parts[0][0], torch.cat([u for _, u in parts], -1).to(v.dtype)


@torch.no_grad()
def gradients(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """`(dk, dv, dbeta, dgamma, dA)` of `factors` at a fixed A, and what reaches the matrix that A is the inverse of."""
    gamma, dv, sums = natural(g), [], None
    for index, (x, d) in enumerate(zip(v.split(_WIDEST, -1), du.split(_WIDEST, -1), strict=True)):
        inputs = (k, x.to(k.dtype), beta, gamma, A, cu_seqlens)
        dk, dx, *rest = _blocks.wy_backward(dw if index == 0 else None, d, inputs)
        dv.append(dx)
        shares = (dk, *rest)
        if sums is not None:
            shares = tuple(None if a is None else a + b for a, b in zip(sums, shares, strict=True))
        sums = shares
    dk, dbeta, dgamma, dA = sums
    return dk, torch.cat(dv, -1).to(v.dtype), dbeta, dgamma, dA


@torch.no_grad()
def whole_gradients(k, v, beta, g, A, dw, du, cu_seqlens) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(dk, dv, dbeta, dgamma)` of the factors and of the matrix that A is the inverse of."""
    dk, dv, dbeta, dgamma, dA = gradients(k, v, beta, g, A, dw, du, cu_seqlens)
    more = _blocks.scaled_dot_kkt_backward(dA, (k, beta, natural(g), cu_seqlens))
    dk, dbeta = dk + more[0], dbeta + more[1]
    return dk, dv, dbeta, None if g is None else dgamma + more[2]
