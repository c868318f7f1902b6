"""How an operator of the library becomes a differentiable function of PyTorch.

An operator with the stem `name` has three entries: `name_forward` and `name_differentiable`, which compute the same,
and `name_backward`. The first knows nothing of autograd, which saves the time that a Python function at the autograd
key would cost a decoding step; the second has that function. The arguments of both are the inputs (tensors, None where
absent), then the options. Those of the backward are the gradients of the outputs, what the forward saved, as many of
the options as the backward has, and a mask: bit i asks for the gradient of input i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from ._library import library, operators, translated


def needs_gradient(tensors) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def run(operator, *arguments):
    """Calls an operator; its errors get their class."""
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise translated(error, operator._opname) from None


def with_dense_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient on CUDA whose rows do not lie together, such as that of a sum, in one piece.

    Some kernels take no others, and which of them runs should not depend on how a gradient came about.
    """
    if x is None or not x.is_cuda:
        return x
    has_gaps = x.stride(-1) != 1 or any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
    return x.contiguous() if has_gaps else x


def differentiable(
    name: str,
    *,
    num_inputs: int,
    num_backward_options: int,
    num_output_gradients: int,
    saved: Callable = lambda inputs, options, outputs: inputs,
) -> Callable:
    """The function (inputs, options) -> outputs. Outputs from `num_output_gradients` on have no gradient."""
    forward_operator = getattr(operators, f"{name}_forward").default
    differentiable_operator = getattr(operators, f"{name}_differentiable").default
    backward_operator = getattr(operators, f"{name}_backward").default

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            inputs, options = arguments[:num_inputs], arguments[num_inputs:]
            result = forward_operator(*arguments)
            outputs = result if isinstance(result, tuple) else (result,)
            ctx.dtypes = [None if x is None else x.dtype for x in inputs]
            ctx.options = options
            ctx.save_for_backward(*saved(inputs, options, outputs))
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(x for x in outputs[num_output_gradients:] if x is not None))
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx, *output_gradients):
            output_gradients = [with_dense_rows(x) for x in output_gradients[:num_output_gradients]]
            if all(x is None for x in output_gradients):
                return (None,) * (num_inputs + len(ctx.options))
            mask = sum(needed << index for index, needed in enumerate(ctx.needs_input_grad[:num_inputs]))
            options = ctx.options[:num_backward_options]
            gradients = run(backward_operator, *output_gradients, *ctx.saved_tensors, *options, mask)
            if isinstance(gradients, torch.Tensor):
                gradients = (gradients,)
            cast = [None if x is None else x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=False)]
            return (*cast, *(None for _ in range(num_inputs - len(cast) + len(ctx.options))))

    library.impl(f"{name}_differentiable", Function.apply, "Autograd")

    def call(inputs: tuple, options: tuple):
        return run(differentiable_operator if needs_gradient(inputs) else forward_operator, *inputs, *options)

    return call


def fake_gradients(inputs: tuple, dtypes: tuple, mask: int) -> tuple:
    """What a backward returns for these inputs, without values."""
    return tuple(
        x.new_empty(x.shape, dtype=dtype) if x is not None and mask >> index & 1 else None
        for index, (x, dtype) in enumerate(zip(inputs, dtypes, strict=True))
    )
