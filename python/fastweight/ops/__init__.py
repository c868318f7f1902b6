"""The operators, with the names and arguments that flash-linear-attention gave them.

Everything that is named here stands in a module under fla's path too, with the pieces and references beside it:
`fastweight.ops.gated_delta_rule`, `fastweight.ops.kda.gate`, `fastweight.ops.delta_rule.naive` and so on.
"""

from ..modules.conv.causal_conv1d import causal_conv1d, causal_conv1d_update
from ..modules.l2norm import l2norm
from . import cp as cp
from .comba import chunk_comba, comba_step, fused_recurrent_comba
from .common import chunk_scaled_dot_kkt_fwd
from .delta_rule import chunk_delta_rule, delta_rule_step, fused_chunk_delta_rule, fused_recurrent_delta_rule
from .delta_rule_map import delta_rule_map, delta_rule_map_backward
from .gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from .gated_delta_rule.gate import fused_gdn_gate, gdn_gate_chunk_cumsum
from .generalized_delta_rule import (
    chunk_dplr_delta_rule,
    chunk_iplr_delta_rule,
    dplr_step,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_iplr_delta_rule,
)
from .gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla, gla_step
from .kda import chunk_kda, fused_recurrent_kda
from .kda.gate import fused_kda_gate, kda_gate_chunk_cumsum
from .linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
from .simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)
from .ttt import chunk_ttt_linear, fused_chunk_ttt_linear, ttt_linear_step
from .utils import chunk_global_cumsum, chunk_local_cumsum, pack_sequence, solve_tril, unpack_sequence

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_global_cumsum",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "chunk_simple_gla",
    "chunk_ttt_linear",
    "comba_step",
    "delta_rule_map",
    "delta_rule_map_backward",
    "delta_rule_step",
    "dplr_step",
    "fused_chunk_delta_rule",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_simple_gla",
    "fused_chunk_ttt_linear",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_simple_gla",
    "gdn_gate_chunk_cumsum",
    "gla_step",
    "kda_gate_chunk_cumsum",
    "l2norm",
    "pack_sequence",
    "parallel_simple_gla",
    "solve_tril",
    "ttt_linear_step",
    "unpack_sequence",
]
