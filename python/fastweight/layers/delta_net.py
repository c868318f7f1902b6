"""The DeltaNet layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import ops
from ..modules import FusedRMSNormGated, RMSNorm
from .mixer import TokenMixer, heads, in_place, warn_without_convolution

_ACTIVATIONS = {"silu": None, "relu": torch.relu, "elu": lambda x: F.elu(x) + 1, "identity": None}
_NORMS = ("l2", "sum")


class DeltaNet(TokenMixer):
    """q, k, v: projection, short convolution, activation, heads; the delta rule with step sizes
    `beta = sigmoid(b_proj(x))`; a norm per head, gated by `silu(g_proj(x))` with `use_gate`; output projection.

    Args:
        mode: `chunk` or `fused_recurrent`. In evaluation short calls take the recurrent form in either.
        d_model: another name of `hidden_size`.
        hidden_size: width of the input and the output.
        expand_k, expand_v: width of all keys and of all values over `hidden_size`.
        num_heads: has to divide both widths.
        use_beta: whether step sizes are learned; otherwise they are 1.
        use_gate: whether the output is gated.
        use_short_conv, conv_size, conv_bias: the convolutions.
        allow_neg_eigval: step sizes up to 2.
        layer_idx: the index of this layer in a cache.
        qk_activation: of q and k: `silu`, `relu`, `elu` (+ 1) or `identity`.
        qk_norm: of q and k: `l2`, or `sum`, which divides by the sum of the channels.
        norm_eps: of the output norm.
        kwargs: accepted and ignored, as in fla.
    """

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        hidden_size = hidden_size if d_model is None else d_model
        super().__init__(hidden_size, layer_idx, mode)
        if qk_activation not in _ACTIVATIONS:
            raise ValueError(f"qk_activation: expected one of {', '.join(_ACTIVATIONS)}, got {qk_activation!r}")
        if qk_norm not in _NORMS:
            raise ValueError(f"qk_norm: expected one of {', '.join(_NORMS)}, got {qk_norm!r}")
        self.key_dim = int(hidden_size * expand_k)
        self.value_dim = int(hidden_size * expand_v)
        for name, width in (("expand_k", self.key_dim), ("expand_v", self.value_dim)):
            if width % num_heads != 0:
                raise ValueError(f"{name}: expected a width that the {num_heads} heads divide, got {width}")
        self.expand_k = expand_k
        self.expand_v = expand_v
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.num_heads = num_heads
        self.head_k_dim = self.key_dim // num_heads
        self.head_v_dim = self.value_dim // num_heads
        self.qk_activation = qk_activation
        self.qk_norm = qk_norm
        self.use_beta = use_beta
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        if use_short_conv:
            after = "silu" if qk_activation == "silu" else None
            self._make_convolutions(
                {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}, conv_size, conv_bias,
                {"q": after, "k": after, "v": "silu"},
            )  # fmt: skip
        else:
            warn_without_convolution()
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _mix(self, x, entry, keep_state, cu_seqlens, recurrent, cp_context):
        silu = self.qk_activation == "silu"
        (q, k, v), conv_state = self._project(x, entry, keep_state, cu_seqlens, (silu, silu, True), cp_context)
        q, k, v = heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim)
        activation = _ACTIVATIONS[self.qk_activation]
        if activation is not None:
            q, k = activation(q), activation(k)
        if self.qk_norm == "sum":
            q, k = q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True)
        beta = self.b_proj(x).sigmoid() if self.use_beta else torch.ones_like(q[..., 0])
        if self.allow_neg_eigval:
            beta = beta * 2

        state = None if entry is None else entry["recurrent_state"]
        l2 = self.qk_norm == "l2"
        if recurrent and in_place(entry):
            o = ops.delta_rule_step(q, k, v, state, beta=beta, use_qk_l2norm_in_kernel=l2, cu_seqlens=cu_seqlens)
        else:
            chunk = functools.partial(ops.chunk_delta_rule, cp_context=cp_context)
            rule = ops.fused_recurrent_delta_rule if recurrent else chunk
            o, state = rule(
                q, k, v, beta=beta, initial_state=state, output_final_state=keep_state, use_qk_l2norm_in_kernel=l2,
                cu_seqlens=cu_seqlens,
            )  # fmt: skip
        o = self.o_norm(o, heads(self.g_proj(x), self.head_v_dim)) if self.use_gate else self.o_norm(o)
        return self.o_proj(o.flatten(-2)), {"recurrent_state": state, "conv_state": conv_state}
