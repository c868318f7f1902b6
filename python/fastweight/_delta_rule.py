"""The operators of the delta-rule family inside PyTorch.

The schemas stand in python/bindings/delta_rule.cc: inputs (q, k, v, g, beta, A_log, dt_bias, initial_state,
cu_seqlens), options (gate, scale, chunk_size, state_v_first, qk_l2norm, beta_sigmoid, allow_neg_eigval,
gate_in_kernel, safe_gate, lower_bound), for a forward then (output_final_state, chunk_states_dtype).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._library import operators

NONE, PER_HEAD, PER_CHANNEL = 0, 1, 2  # Gate in fastweight/delta_rule.h

_NUM_INPUTS = 9
_NUM_OPTIONS = 10


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _saved(inputs, options, outputs):
    """Chunk states in another type are a result; in this one they spare the backward the work of finding them again."""
    return (outputs[2] if options[-1] == state_dtype(inputs[0]) else None, *inputs)


# (inputs, options) -> (o, final_state, chunk_states), None for what was not asked for.
forward = differentiable(
    "delta_rule",
    num_inputs=_NUM_INPUTS,
    num_backward_options=_NUM_OPTIONS,
    num_output_gradients=2,
    saved=_saved,
)


def step(state: Tensor, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
    """Advances `state` in place and returns o."""
    if needs_gradient((state, *inputs)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    return run(operators.delta_rule_step.default, state, state_indices, *inputs, *options)


def _fake_forward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options):
    chunk_size, state_v_first, output_final_state, chunk_states_dtype = options[2], options[3], *options[_NUM_OPTIONS:]
    B, T, HV, V = v.shape
    state = (HV, V, q.shape[3]) if state_v_first else (HV, q.shape[3], V)
    final_state = chunk_states = None
    if output_final_state:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final_state = q.new_empty((N, *state), dtype=state_dtype(q))
    if chunk_states_dtype is not None:
        if cu_seqlens is None:
            NT = (T + chunk_size - 1) // chunk_size
        else:
            NT = torch.library.get_ctx().new_dynamic_size()
        chunk_states = q.new_empty((B, NT, *state), dtype=chunk_states_dtype)
    return q.new_empty((B, T, HV, V)), final_state, chunk_states


torch.library.register_fake("fastweight::delta_rule_forward", _fake_forward)
torch.library.register_fake("fastweight::delta_rule_differentiable", _fake_forward)


@torch.library.register_fake("fastweight::delta_rule_backward")
def _(d_o, d_final_state, chunk_states, *rest):
    inputs, mask = rest[: _NUM_INPUTS - 1], rest[-1]
    dtypes = tuple(None if x is None else x.dtype for x in inputs[:-1])
    return fake_gradients(inputs, (*dtypes, state_dtype(inputs[0])), mask)


@torch.library.register_fake("fastweight::delta_rule_step")
def _(state, state_indices, q, k, v, *rest):
    return q.new_empty(v.shape)
