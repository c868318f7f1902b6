"""TTT-Linear: a linear model `z -> z h + c` that is trained online, one gradient step per mini-batch of tokens.

docs/ttt_linear.md has the equations.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import _checks, _cp, _ttt_linear


def chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    *,
    head_first: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TTT-Linear over whole sequences.

    Args:
        q, k, v: `[B, T, H, D]`, fp32, bf16, fp16 or, on the CPU, fp64 (slow); one type. D is at most 128.
        w, b: `[H, D]`, weight and bias of the layer norm inside and of the one around the output.
        eta: `[B, T, H, 1]` or `[B, T, H]`, the step size of each token, or one number for all.
        scale: factor of the queries, above 0; None: `D ** -0.5`.
        eps: of the layer norms.
        chunk_size: tokens per mini-batch, 16, 32 or 64. Results depend on it.
        initial_state: `[N, H, D, D]`; None: zeros.
        initial_state_bias: `[N, H, 1, D]`; None: zeros.
        output_final_state: whether to return the state and its bias after the last token. A last mini-batch that is not
            full is extended by tokens of zeros, which move the bias.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.
        cu_seqlens_cpu: accepted and not needed.
        cp_context: of `fastweight.ops.cp.build_cp_context` with `align` a multiple of the chunk size: the tokens are
            those of this rank, N counts the sequences that have a token here, and cu_seqlens is left out. See
            docs/context-parallel.md.
        head_first: no longer exists.

    Returns:
        `(o, final_state, final_state_bias)`: o `[B, T, H, D]` in the type of q; the state `[N, H, D, D]` and its bias
        `[N, H, 1, D]` in fp32, or None.
    """
    q, k, v = _checks.one_dtype(q, k, v, AssertionError)
    D = k.shape[-1]
    _checks.require(D == v.shape[-1], f"v: expected the head width {D} of k, got {v.shape[-1]}")
    if not isinstance(eta, Tensor):
        eta = q.new_full((), eta, dtype=_ttt_linear.state_dtype(q)).expand(q.shape[:3])
    _checks.no_head_first(head_first)
    if cp_context is not None:
        cu_seqlens = _cp.local_offsets(cp_context, "q", q, cu_seqlens)
    _checks.sequences(q, initial_state, cu_seqlens)
    if scale is not None:
        _checks.require(scale > 0, f"scale: expected a number above 0, got {scale}")
    _checks.require(D <= 128, f"k: expected a head width of at most 128, got {D}")
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {chunk_size}")
    if cp_context is not None:
        inputs = (q, k, v, w, b, eta, initial_state, initial_state_bias)
        return _cp.ttt_linear(cp_context, inputs, (scale, eps, chunk_size), output_final_state)
    return _ttt_linear.forward(
        (q, k, v, w, b, eta, initial_state, initial_state_bias, cu_seqlens),
        (scale, eps, chunk_size, output_final_state),
    )
