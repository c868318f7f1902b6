"""Comba."""

from .chunk import chunk_comba
from .fused_recurrent import comba_step, fused_recurrent_comba
from .naive import naive_chunk_comba, naive_recurrent_comba

__all__ = ["chunk_comba", "comba_step", "fused_recurrent_comba", "naive_chunk_comba", "naive_recurrent_comba"]
