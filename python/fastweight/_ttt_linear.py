"""The operators of TTT-Linear inside PyTorch.

The schemas follow from the tables in src/core/ttt_linear_fields.h (python/bindings/ttt_linear.cc): inputs (q, k, v, w,
b, eta, .., cu_seqlens), options (scale, eps, mini_batch), for a forward then (output_final_state, kept_words).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._compiler import constant_result
from ._delta_rule import state_dtype
from ._library import argument_names, operators

_ARGUMENTS = argument_names("ttt_linear_forward")
_NUM_INPUTS = _ARGUMENTS.index("scale")


def _saved(inputs, options, outputs):
    """States that were kept spare the backward the work of making them again."""
    return (outputs[3], *inputs)


_forward = differentiable(
    "ttt_linear", num_inputs=_NUM_INPUTS, num_backward_options=3, num_output_gradients=3, saved=_saved
)


@constant_result
def _kept_words(device: int, mini_batch: int, dtype: torch.dtype, head_dim: int) -> int:
    return operators.ttt_linear_kept_words(device, mini_batch, dtype, head_dim)


def _words_of_kept_states(q: Tensor, mini_batch: int) -> int:
    """How many words a forward whose gradient will be asked for keeps of the state before every mini-batch, for each
    head; 0: none, and the backward walks through the tokens once more.

    With D = 64 and 16 tokens to a mini-batch they are as much as q, k, v and o have themselves, and are kept; with
    D = 128 twice as much, and are not.
    """
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return 0
    D = q.shape[3]
    index = q.device.index if q.device.index is not None else torch.cuda.current_device()
    words = _kept_words(index, mini_batch, q.dtype, D)
    return words if 4 * words <= 1.25 * (4 * 2 * mini_batch * D) else 0


def forward(inputs: tuple, options: tuple) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final_state, final_state_bias), None for what was not asked for; options are those before kept_words."""
    words = _words_of_kept_states(inputs[0], options[2]) if needs_gradient(inputs) else 0
    o, final_state, final_state_bias, _ = _forward(inputs, (*options, words))
    return o, final_state, final_state_bias


def step(states: tuple, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
    """Advances `states` (state, state_bias, gradient, gradient_bias, position) in place and returns o."""
    if needs_gradient((*states, *inputs)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    return run(operators.ttt_linear_step.default, *states, state_indices, *inputs, *options)


def _fake_forward(*arguments):
    x = SimpleNamespace(**dict(zip(_ARGUMENTS, arguments, strict=True)))
    B, T, H, D = x.q.shape
    final_state = final_state_bias = kept = None
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    if x.output_final_state:
        final_state = x.q.new_empty((N, H, D, D), dtype=state_dtype(x.q))
        final_state_bias = x.q.new_empty((N, H, 1, D), dtype=state_dtype(x.q))
    if x.kept_words > 0:
        C = x.mini_batch
        mini_batches = (T + C - 1) // C if x.cu_seqlens is None else T // C + N
        kept = x.q.new_empty((B, mini_batches, H, x.kept_words), dtype=torch.int32)
    return x.q.new_empty((B, T, H, D)), final_state, final_state_bias, kept


torch.library.register_fake("fastweight::ttt_linear_forward", _fake_forward)
torch.library.register_fake("fastweight::ttt_linear_differentiable", _fake_forward)


@torch.library.register_fake("fastweight::ttt_linear_backward")
def _(d_o, d_final_state, d_final_state_bias, kept, *rest):
    inputs, mask = rest[: _NUM_INPUTS - 1], rest[-1]
    state = state_dtype(inputs[0])
    return fake_gradients(inputs, (*(x.dtype for x in inputs[:-2]), state, state), mask)


@torch.library.register_fake("fastweight::ttt_linear_step")
def _(state, state_bias, gradient, gradient_bias, position, state_indices, q, *rest):
    return q.new_empty(q.shape)
