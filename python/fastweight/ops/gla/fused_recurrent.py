"""GLA token by token, and decoding in place."""

from __future__ import annotations

from torch import Tensor

from ... import _checks, _related
from ._forward import CHUNK_SIZE, forward, gate_of, one_gate


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """GLA for short sequences and decoding, with gradients. The arguments are those of `chunk_gla`, except:

    Args:
        gk: `[B, T, H, K]`, the logarithm of the decay; None: no decay.
        gv: a decay per value channel, not supported.
        initial_state: may have any floating type.
        reverse: from the last token of each sequence to the first.
        transpose_state_layout: the old name of `state_v_first`.
    """
    state_v_first = _checks.v_first(state_v_first, transpose_state_layout)
    _checks.no_value_gate(gv)
    if gk is not None and gk.shape != q.shape:
        raise ValueError(f"gk: expected shape {list(q.shape)}, got {list(gk.shape)}")
    if gk is not None and not gk.is_floating_point():
        raise ValueError(f"gk: expected a floating type, got {gk.dtype}")
    return forward(q, k, v, gk, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse)


def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Decoding in place with linear attention, simple GLA or GLA: the T tokens of each sequence advance its state, and
    nothing but o is allocated. No gradients.

    Args:
        q, k: `[B, T, H, K]`; T is 1 for one token per sequence.
        v: `[B, T, H, V]`.
        state: `[slots, H, K, V]` fp32 or bf16, fp64 where q is (`[slots, H, V, K]` with `state_v_first`), read and
            written.
        g: None: linear attention. `[B, T, H]`: simple GLA. `[B, T, H, K]`: GLA. The logarithm of the decay.
        g_gamma: `[H]`, simple GLA too: the logarithm of a decay that all tokens share, on top of g.
        scale: factor of the output; None: `K ** -0.5`.
        state_indices: `[N]` int32 or int64, the slot of each sequence, none twice; -1 skips a sequence: no state
            changes and its o is 0. None: sequence n has slot n, and `slots` is N.
        cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; None: N = B.

    Returns:
        o `[B, T, H, V]` in the type of q.
    """
    g, g_gamma = one_gate(g, g_gamma)
    options = (gate_of(g, g_gamma), scale, CHUNK_SIZE, state_v_first)
    return _related.gla.step(state, state_indices, (q, k, v, g, None, g_gamma, cu_seqlens), options)
