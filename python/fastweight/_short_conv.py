"""The operators of the short convolution inside PyTorch.

The schemas follow from the tables in src/core/short_conv_fields.h (python/bindings/short_conv.cc): inputs (x, w, bias,
initial_state, cu_seqlens), options (activation), for a forward then (residual, output_final_state).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._library import argument_names, operators

ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}  # Activation in fastweight/short_conv.h

_ARGUMENTS = argument_names("short_conv_forward")
_NUM_INPUTS = _ARGUMENTS.index("activation")

_forward = differentiable("short_conv", num_inputs=_NUM_INPUTS, num_backward_options=1, num_output_gradients=2)


def forward(inputs: tuple, activation: int, residual: Tensor | None, output_final_state: bool):
    """(y, final_state), None where it was not asked for."""
    if residual is None or not needs_gradient((*inputs, residual)):
        return _forward(inputs, (activation, residual, output_final_state))
    # The gradient of a residual is dy itself, which PyTorch hands through without a copy.
    y, final_state = _forward(inputs, (activation, None, output_final_state))
    return y + residual.to(y.dtype), final_state


def step(
    state: Tensor, state_indices: Tensor | None, inputs: tuple, activation: int, residual: Tensor | None
) -> Tensor:
    """Advances `state` in place and returns y."""
    if needs_gradient((*inputs, residual, state)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    return run(operators.short_conv_step.default, residual, state, state_indices, *inputs, activation)


def _fake_forward(*arguments):
    at = SimpleNamespace(**dict(zip(_ARGUMENTS, arguments, strict=True)))
    final_state = None
    if at.output_final_state:
        N = at.x.shape[0] if at.cu_seqlens is None else at.cu_seqlens.shape[0] - 1
        final_state = at.x.new_empty((N, at.x.shape[2], at.w.shape[1]))
    return at.x.new_empty(at.x.shape), final_state


torch.library.register_fake("fastweight::short_conv_forward", _fake_forward)
torch.library.register_fake("fastweight::short_conv_differentiable", _fake_forward)


@torch.library.register_fake("fastweight::short_conv_backward")
def _(dy, d_final_state, *rest):
    inputs, mask = rest[: _NUM_INPUTS - 1], rest[-1]
    return fake_gradients(inputs, tuple(None if x is None else x.dtype for x in inputs), mask)


@torch.library.register_fake("fastweight::short_conv_step")
def _(residual, state, state_indices, x, *rest):
    return x.new_empty(x.shape)
