"""The building blocks inside PyTorch. The schemas follow from src/core/blocks_fields.h (python/bindings/blocks.cc)."""

from __future__ import annotations

import torch

from ._autograd import differentiable, fake_gradients

# (x, cu_seqlens), (chunk_size, reverse, dtype) -> y
chunk_local_cumsum = differentiable(
    "chunk_local_cumsum",
    num_inputs=2,
    num_backward_options=2,
    num_output_gradients=1,
    saved=lambda inputs, options, outputs: inputs[1:],
)
# (A, cu_seqlens), (dtype,) -> J
solve_tril = differentiable(
    "solve_tril",
    num_inputs=2,
    num_backward_options=0,
    num_output_gradients=1,
    saved=lambda inputs, options, outputs: (outputs[0], inputs[1]),
)
# (x,), (eps, dtype) -> (y, rstd)
l2norm = differentiable(
    "l2norm",
    num_inputs=1,
    num_backward_options=0,
    num_output_gradients=1,
    saved=lambda inputs, options, outputs: outputs,
)
# (x, A_log, dt_bias, cu_seqlens), (lower_bound, chunk_size, dtype) -> g
gate_activation = differentiable("gate_activation", num_inputs=4, num_backward_options=2, num_output_gradients=1)


def _fake_like_first(x, *rest):
    """Of the first argument's shape and the type that stands last."""
    return x.new_empty(x.shape, dtype=rest[-1])


def _fake_l2norm(x, eps, dtype):
    rstd = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=rstd)


for _suffix in ("forward", "differentiable"):
    for _name in ("chunk_local_cumsum", "solve_tril", "gate_activation"):
        torch.library.register_fake(f"fastweight::{_name}_{_suffix}", _fake_like_first)
    torch.library.register_fake(f"fastweight::l2norm_{_suffix}", _fake_l2norm)


@torch.library.register_fake("fastweight::chunk_local_cumsum_backward")
def _(dy, *rest):
    return dy.new_empty(dy.shape)


@torch.library.register_fake("fastweight::solve_tril_backward")
def _(dJ, J, *rest):
    return J.new_empty(J.shape, dtype=torch.float64 if J.dtype == torch.float64 else torch.float32)


@torch.library.register_fake("fastweight::l2norm_backward")
def _(dy, y, *rest):
    return y.new_empty(y.shape)


@torch.library.register_fake("fastweight::gate_activation_backward")
def _(dg, x, A_log, dt_bias, *rest):
    inputs = (x, A_log, dt_bias)
    return fake_gradients(inputs, tuple(None if value is None else value.dtype for value in inputs), rest[-1])
