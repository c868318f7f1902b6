"""The operators of the delta-rule family inside PyTorch: shape functions, autograd, and the calls that all of
`fastweight.ops` goes through. The schemas stand in python/bindings/delta_rule.cc.

There are two operators for one computation. `delta_rule_forward` knows nothing of autograd, which saves the time that a
Python function at the autograd key would cost a decoding step. `delta_rule_differentiable` has that function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._library import library, operators, translated

NONE, PER_HEAD, PER_CHANNEL = 0, 1, 2  # Gate in fastweight/delta_rule.h

_NUM_INPUTS = 9  # q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens
_NUM_DIFFERENTIABLE = 8
_INITIAL_STATE = 7

_forward = operators.delta_rule_forward.default
_differentiable = operators.delta_rule_differentiable.default
_backward = operators.delta_rule_backward.default
_step = operators.delta_rule_step.default


def needs_gradient(inputs) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def forward(inputs: tuple, options: tuple, output_final_state: bool, chunk_states_dtype: torch.dtype | None = None):
    """(o, final_state, chunk_states), None for what was not asked for. `inputs` and `options` in the schema's order."""
    operator = _differentiable if needs_gradient(inputs) else _forward
    try:
        return operator(*inputs, *options, output_final_state, chunk_states_dtype)
    except RuntimeError as error:
        raise translated(error) from None


def step(state: Tensor, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
    """Advances `state` in place and returns o."""
    if needs_gradient(inputs) or needs_gradient((state,)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    try:
        return _step(state, state_indices, *inputs, *options)
    except RuntimeError as error:
        raise translated(error) from None


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options):
    chunk_size, state_v_first, output_final_state, chunk_states_dtype = options[2], options[3], *options[-2:]
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
    inputs, gradients = rest[:_NUM_INPUTS], rest[-1]

    def like(index):
        if inputs[index] is None or not gradients >> index & 1:
            return None
        dtype = state_dtype(inputs[0]) if index == _INITIAL_STATE else inputs[index].dtype
        return inputs[index].new_empty(inputs[index].shape, dtype=dtype)

    return tuple(like(index) for index in range(_NUM_DIFFERENTIABLE))


@torch.library.register_fake("fastweight::delta_rule_step")
def _(state, state_indices, q, k, v, *rest):
    return q.new_empty(v.shape)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        inputs, options, chunk_states_dtype = arguments[:_NUM_INPUTS], arguments[_NUM_INPUTS:-2], arguments[-1]
        o, final_state, chunk_states = _forward(*arguments)
        # Chunk states in another type are a result; in this one they spare the backward the work of finding them again.
        saved = chunk_states if chunk_states_dtype == state_dtype(inputs[0]) else None
        ctx.options = options
        ctx.save_for_backward(*inputs, saved)
        ctx.set_materialize_grads(False)
        if chunk_states is not None:
            ctx.mark_non_differentiable(chunk_states)
        return o, final_state, chunk_states

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final_state, _):
        *inputs, chunk_states = ctx.saved_tensors
        mask = sum(needed << index for index, needed in enumerate(ctx.needs_input_grad[:_NUM_DIFFERENTIABLE]))
        gradients = list(_backward(d_o, d_final_state, chunk_states, *inputs, *ctx.options, mask))
        if gradients[_INITIAL_STATE] is not None:
            gradients[_INITIAL_STATE] = gradients[_INITIAL_STATE].to(inputs[_INITIAL_STATE].dtype)
        return (*gradients, *(None for _ in range(1 + len(ctx.options) + 2)))


library.impl("delta_rule_differentiable", _DeltaRule.apply, "Autograd")
