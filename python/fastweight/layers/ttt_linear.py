"""The TTT-Linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..modules import FusedRMSNormGated, RMSNorm
from .mixer import TokenMixer, heads, warn_without_convolution


class TTTLinear(TokenMixer):
    """q, k, v: projection, short convolution, silu, heads, q and k l2-normalised; TTT-Linear with step sizes
    `base_lr * sigmoid(eta_proj(x)) / head_dim` from a learned initial state; a norm per head, gated by
    `silu(g_proj(x))` with `use_gate`; output projection.

    Args:
        hidden_size: width of the input and the output.
        num_heads: has to divide it; heads are at most 128 wide.
        mini_batch_size: tokens per gradient step of the inner model: 16, 32 or 64.
        base_lr: the largest step size times `head_dim`.
        use_gate: whether the output is gated.
        use_short_conv, conv_size, conv_bias: the convolutions.
        layer_idx: the index of this layer in a cache.
        norm_eps: of the output norm.

    With a cache, tokens behind the last whole mini-batch and packed sequences advance it one token after the other,
    which has no gradient: decode under `torch.no_grad()`.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        mini_batch_size: int = 16,
        base_lr: float = 1.0,
        use_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(hidden_size, layer_idx, "chunk")
        if hidden_size % num_heads != 0:
            raise ValueError(f"num_heads: expected a divisor of the hidden size {hidden_size}, got {num_heads}")
        self.head_dim = hidden_size // num_heads
        if self.head_dim > 128:
            raise ValueError(f"num_heads: expected heads of at most 128 channels, got {self.head_dim}")
        if mini_batch_size not in (16, 32, 64):
            raise ValueError(f"mini_batch_size: expected 16, 32 or 64, got {mini_batch_size}")
        self.num_heads = num_heads
        self.mini_batch_size = mini_batch_size
        self.base_lr = base_lr
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv

        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.eta_proj = nn.Linear(hidden_size, num_heads)
        if use_short_conv:
            self._make_convolutions(
                dict.fromkeys("qkv", hidden_size), conv_size, conv_bias, dict.fromkeys("qkv", "silu")
            )
        else:
            warn_without_convolution()
        # The layer norm inside and around the inner model, and the model before the first token.
        self.norm_weight = nn.Parameter(torch.ones(num_heads, self.head_dim))
        self.norm_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.initial_state = nn.Parameter(0.02 * torch.randn(num_heads, self.head_dim, self.head_dim))
        self.initial_state_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, hidden_size, bias=False)
            self.o_norm = FusedRMSNormGated(self.head_dim, eps=norm_eps)
        else:
            self.o_norm = RMSNorm(self.head_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def _mix(self, x, entry, keep_state, cu_seqlens, recurrent, cp_context):
        (q, k, v), conv_state = self._project(x, entry, keep_state, cu_seqlens, (True, True, True), cp_context)
        q, k, v = heads(q, self.head_dim), heads(k, self.head_dim), heads(v, self.head_dim)
        q, k = (y / torch.sqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        eta = self.eta_proj(x).sigmoid() * (self.base_lr / self.head_dim)
        rows = (q, k, v, eta)
        if keep_state:
            state = self._start(x, cu_seqlens) if entry is None else entry["recurrent_state"]
            o, state = self._advance(rows, state, cu_seqlens, whole=entry is None)
        else:
            o, state = self._forward(rows, *self._start(x, cu_seqlens)[:2], False, cu_seqlens, cp_context)[0], None
        o = self.o_norm(o, heads(self.g_proj(x), self.head_dim)) if self.use_gate else self.o_norm(o)
        return self.o_proj(o.flatten(-2)), {"recurrent_state": state, "conv_state": conv_state}

    def _start(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        """The five tensors of `ttt_linear_step` before the first token."""
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = self.initial_state.float().expand(N, -1, -1, -1)
        bias = self.initial_state_bias.float().expand(N, -1, -1, -1)
        position = torch.zeros(N, dtype=torch.int32, device=x.device)
        return state, bias, torch.zeros_like(state), torch.zeros_like(bias), position

    def _forward(self, rows, state, bias, output_final_state, cu_seqlens, cp_context=None):
        q, k, v, eta = rows
        return ops.chunk_ttt_linear(
            q, k, v, self.norm_weight, self.norm_bias, eta, chunk_size=self.mini_batch_size, initial_state=state,
            initial_state_bias=bias, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
            cp_context=cp_context,
        )  # fmt: skip

    def _advance(self, rows, state, cu_seqlens, whole):
        """`(o, state)`. `whole`: no sequence has an open mini-batch."""
        T = rows[0].shape[1]
        outputs, done = [], 0
        if whole and cu_seqlens is None:
            done = T - T % self.mini_batch_size
            o, h, c = self._forward([r[:, :done] for r in rows], *state[:2], True, None)
            outputs.append(o)
            state = (h, c, *state[2:])
        if done < T:
            state = tuple(s.contiguous() for s in state)
            q, k, v, eta = (r[:, done:] for r in rows)
            outputs.append(
                ops.ttt_linear_step(
                    q, k, v, self.norm_weight, self.norm_bias, eta, *state, chunk_size=self.mini_batch_size,
                    cu_seqlens=cu_seqlens,
                )
            )  # fmt: skip
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state
