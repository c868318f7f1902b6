"""The operators of TTT-Linear inside PyTorch.

The schemas follow from the tables in src/core/ttt_linear_fields.h (python/bindings/ttt_linear.cc): inputs (q, k, v, w,
b, eta, .., cu_seqlens), options (scale, eps, mini_batch), for a forward then (output_final_state).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._delta_rule import state_dtype
from ._library import argument_names, operators

_ARGUMENTS = argument_names("ttt_linear_forward")
_NUM_INPUTS = _ARGUMENTS.index("scale")

# (inputs, options) -> (o, final_state, final_state_bias), None for what was not asked for.
forward = differentiable("ttt_linear", num_inputs=_NUM_INPUTS, num_backward_options=3, num_output_gradients=3)


def step(states: tuple, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
    """Advances `states` (state, state_bias, gradient, gradient_bias, position) in place and returns o."""
    if needs_gradient((*states, *inputs)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    return run(operators.ttt_linear_step.default, *states, state_indices, *inputs, *options)


def _fake_forward(*arguments):
    x = SimpleNamespace(**dict(zip(_ARGUMENTS, arguments, strict=True)))
    B, T, H, D = x.q.shape
    final_state = final_state_bias = None
    if x.output_final_state:
        N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        final_state = x.q.new_empty((N, H, D, D), dtype=state_dtype(x.q))
        final_state_bias = x.q.new_empty((N, H, 1, D), dtype=state_dtype(x.q))
    return x.q.new_empty((B, T, H, D)), final_state, final_state_bias


torch.library.register_fake("fastweight::ttt_linear_forward", _fake_forward)
torch.library.register_fake("fastweight::ttt_linear_differentiable", _fake_forward)


@torch.library.register_fake("fastweight::ttt_linear_backward")
def _(d_o, d_final_state, d_final_state_bias, *rest):
    inputs, mask = rest[: _NUM_INPUTS - 1], rest[-1]
    state = state_dtype(inputs[0])
    return fake_gradients(inputs, (*(x.dtype for x in inputs[:-2]), state, state), mask)


@torch.library.register_fake("fastweight::ttt_linear_step")
def _(state, state_bias, gradient, gradient_bias, position, state_indices, q, *rest):
    return q.new_empty(q.shape)
