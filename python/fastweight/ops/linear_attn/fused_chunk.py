"""Linear attention under the name of fla's second form."""

from __future__ import annotations

from .chunk import chunk_linear_attn

fused_chunk_linear_attn = chunk_linear_attn
