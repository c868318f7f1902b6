"""The short convolution as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import _checks
from ..._cp_context import CPContext
from .causal_conv1d import causal_conv1d, causal_conv1d_update


class ShortConvolution(nn.Conv1d):
    """A filter of the last `kernel_size` tokens per channel, `[B, T, D]` to `[B, T, D]`. It is a depthwise `nn.Conv1d`
    with respect to its parameters: `weight` `[D, 1, W]` and optionally `bias` `[D]`. `backend` is accepted and not
    needed."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation: expected silu, swish or None, got {activation!r}")
        super().__init__(
            hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.hidden_size = hidden_size
        self.activation = activation

    @property
    def state_size(self) -> int:
        """The elements of one sequence's state."""
        return self.hidden_size * self.kernel_size[0]

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        cp_context: CPContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`(y, state)`, None for the state without `output_final_state`.

        Args:
            x, residual: `[B, T, D]`.
            mask: `[B, T]`, 0 for tokens that count as zeros; not with cu_seqlens.
            cache: `[N, D, W]`, the inputs before x. Where no gradient is recorded, one token for each sequence advances
                it in place, and so do more with `output_final_state`.
            output_final_state: whether to return the last W inputs, in the cache where that is advanced.
            cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
            chunk_indices: accepted and not needed.
            cp_context: x holds the tokens of this rank, and nothing is advanced in place.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: expected none with cu_seqlens, got a tensor")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        weight = self.weight.squeeze(1)
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if cache is not None and cp_context is None:
            advances = output_final_state or x.shape[0] * x.shape[1] == N
            if advances and not torch.is_grad_enabled():
                y, cache = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation, cu_seqlens)
                return y, cache if output_final_state else None
            _checks.shape("cache", cache, (N, self.hidden_size, self.kernel_size[0]))
        return causal_conv1d(
            x, weight, self.bias, residual, cache, output_final_state, self.activation, cu_seqlens=cu_seqlens,
            cp_context=cp_context,
        )  # fmt: skip

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`(y, cache)` of one token for each sequence, `[N, 1, D]` or `[1, N, D]`. The cache is advanced in place; None
        stands for zeros. No gradients."""
        N, shape = x.shape[0] * x.shape[1], x.shape
        if cache is None:
            cache = x.new_zeros(N, self.hidden_size, self.kernel_size[0])
        rows = (None if r is None else r.reshape(N, 1, -1) for r in (x, residual))
        y, cache = causal_conv1d_update(
            next(rows), cache, next(rows), self.weight.squeeze(1), self.bias, self.activation
        )
        return y.view(shape), cache if output_final_state else None

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size[0]}, activation={self.activation}"
