"""IPLR."""

from .chunk import chunk_iplr_delta_rule
from .fused_recurrent import fused_recurrent_iplr_delta_rule

__all__ = ["chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule"]
