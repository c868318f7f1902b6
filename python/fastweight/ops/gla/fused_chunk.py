"""A name that fla keeps for a form that it no longer has."""


def fused_chunk_gla(**kwargs):
    """Raises NotImplementedError, as in fla: use `chunk_gla`."""
    raise NotImplementedError("fused_chunk_gla: use chunk_gla")
