"""Pieces of the chunk form."""

from .chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd

__all__ = ["chunk_scaled_dot_kkt_fwd"]
