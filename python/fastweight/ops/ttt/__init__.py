"""TTT-Linear."""

from .chunk import chunk_ttt_linear
from .fused_chunk import fused_chunk_ttt_linear
from .step import ttt_linear_step

__all__ = ["chunk_ttt_linear", "fused_chunk_ttt_linear", "ttt_linear_step"]
