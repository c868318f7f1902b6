"""A name that fla keeps for a form that it no longer has."""


def fused_chunk_delta_rule(**kwargs):
    """Raises NotImplementedError, as in fla: use `chunk_delta_rule`."""
    raise NotImplementedError("fused_chunk_delta_rule: use chunk_delta_rule")
