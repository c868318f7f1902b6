"""Context parallelism: one sequence over the ranks of a process group. docs/context-parallel.md has the whole picture.

Every rank calls `build_cp_context` with the offsets of all sequences, takes its tokens with `context.shard(x)`, and
gives the context to operators and layers as `cp_context`; models of other packages get it from `context_parallel`.
"""

from ..._cp import context_parallel
from ..._cp_context import CPContext, build_cp_context

FLACPContext = CPContext  # as fla names it

__all__ = ["CPContext", "FLACPContext", "build_cp_context", "context_parallel"]
