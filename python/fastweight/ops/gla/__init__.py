"""Gated linear attention."""

from .chunk import chunk_gla
from .fused_chunk import fused_chunk_gla
from .fused_recurrent import fused_recurrent_gla, gla_step

__all__ = ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla", "gla_step"]
