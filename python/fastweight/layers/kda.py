"""The Kimi Delta Attention (KDA) layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import ops
from ..modules import FusedRMSNormGated
from .mixer import (
    TokenMixer,
    gate_parameter,
    heads,
    in_place,
    initial_dt_bias,
    value_heads,
    value_width,
    warn_without_convolution,
)


class KimiDeltaAttention(TokenMixer):
    """q, k, v: projection, short convolution, silu, heads; KDA with step sizes `sigmoid(b_proj(x))` and one decay per
    key channel, `-exp(A_log) * softplus(f_proj(x) + dt_bias)`, q and k l2-normalised; a norm per head, gated by
    `sigmoid(g_proj(x))`; output projection. `f_proj` and `g_proj` are products of two narrow matrices.

    Args:
        hidden_size: width of the input and the output.
        expand_v: width of a value head over `head_dim`.
        head_dim: width of a query or key head.
        num_heads: query and key heads.
        num_v_heads: value heads, a multiple of `num_heads`; None: as many.
        mode: `chunk` or `fused_recurrent`. In evaluation short calls take the recurrent form in either.
        use_short_conv, conv_size, conv_bias: the convolutions.
        allow_neg_eigval: step sizes up to 2.
        safe_gate: A_log starts at 0, and the lower bound has to lie in [-5, 0). No kernel relies on it.
        lower_bound: the decays' logarithms are `lower_bound * sigmoid(exp(A_log) * (f_proj(x) + dt_bias))` instead.
        layer_idx: the index of this layer in a cache.
        norm_eps: of the output norm.
        kwargs: accepted and ignored, as in fla.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden_size, layer_idx, mode)
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound: expected a number below 0, got {lower_bound}")
        if safe_gate and (lower_bound is None or lower_bound < -5):
            raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {lower_bound}")
        self.expand_v = expand_v
        self.head_dim = head_dim
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.num_heads = num_heads
        self.num_v_heads = value_heads(num_heads, num_v_heads)
        self.head_k_dim = head_dim
        self.head_v_dim = value_width(head_dim, expand_v)
        self.key_dim = num_heads * head_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.gate_dim = self.num_v_heads * head_dim
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self._make_convolutions(
                {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}, conv_size, conv_bias,
                {"q": "silu", "k": "silu", "v": "silu"},
            )  # fmt: skip
        else:
            warn_without_convolution()
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.gate_dim, bias=False)
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        A = torch.ones(self.num_v_heads) if safe_gate else torch.empty(self.num_v_heads).uniform_(1, 16)
        self.A_log = gate_parameter(torch.log(A))
        self.dt_bias = initial_dt_bias(self.gate_dim)
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.value_dim)
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _mix(self, x, entry, keep_state, cu_seqlens, recurrent, cp_context):
        (q, k, v), conv_state = self._project(x, entry, keep_state, cu_seqlens, (True, True, True), cp_context)
        q, k, v = heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim)
        options = {
            "g": heads(self.f_proj(x), self.head_k_dim),
            "beta": self.b_proj(x),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
            "cu_seqlens": cu_seqlens,
        }
        state = None if entry is None else entry["recurrent_state"]
        if recurrent and in_place(entry):
            o = ops.delta_rule_step(q, k, v, state, **options)
        elif recurrent:
            o, state = ops.fused_recurrent_kda(q, k, v, initial_state=state, output_final_state=keep_state, **options)
        else:
            o, state = ops.chunk_kda(
                q, k, v, initial_state=state, output_final_state=keep_state, safe_gate=self.safe_gate,
                cp_context=cp_context, **options,
            )  # fmt: skip
        o = self.o_norm(o, heads(self.g_proj(x), self.head_v_dim))
        return self.o_proj(o.flatten(-2)), {"recurrent_state": state, "conv_state": conv_state}
