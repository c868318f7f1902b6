"""Linear attention."""

from .chunk import chunk_linear_attn
from .fused_chunk import fused_chunk_linear_attn
from .fused_recurrent import fused_recurrent_linear_attn

__all__ = ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]
