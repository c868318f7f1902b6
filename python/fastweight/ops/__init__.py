"""The operators, with the names and arguments that flash-linear-attention gave them."""

from . import cp as cp
from .blocks import chunk_local_cumsum, fused_gdn_gate, fused_kda_gate, l2norm, solve_tril
from .delta_rule import chunk_delta_rule, delta_rule_step, fused_recurrent_delta_rule
from .delta_rule_map import delta_rule_map, delta_rule_map_backward
from .gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from .kda import chunk_kda, fused_recurrent_kda
from .short_conv import causal_conv1d, causal_conv1d_update
from .ttt_linear import chunk_ttt_linear, fused_chunk_ttt_linear, ttt_linear_step

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "chunk_local_cumsum",
    "chunk_ttt_linear",
    "delta_rule_map",
    "delta_rule_map_backward",
    "delta_rule_step",
    "fused_chunk_ttt_linear",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "l2norm",
    "solve_tril",
    "ttt_linear_step",
]
