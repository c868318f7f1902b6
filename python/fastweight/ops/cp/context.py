"""The context, under fla's path."""

from . import CPContext, FLACPContext, build_cp_context

__all__ = ["CPContext", "FLACPContext", "build_cp_context"]
