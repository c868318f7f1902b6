"""DPLR."""

from .chunk import chunk_dplr_delta_rule
from .fused_recurrent import dplr_step, fused_recurrent_dplr_delta_rule

__all__ = ["chunk_dplr_delta_rule", "dplr_step", "fused_recurrent_dplr_delta_rule"]
