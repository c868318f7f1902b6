"""The building blocks inside PyTorch. The schemas follow from src/core/blocks_fields.h (python/bindings/blocks.cc)."""

from __future__ import annotations

import torch

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._library import operators

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
# (x, gate, weight), (eps, activation) -> y
rms_norm = differentiable("rms_norm", num_inputs=3, num_backward_options=2, num_output_gradients=1)
NORM_GATES = {"silu": 0, "swish": 0, "sigmoid": 1}  # NormGate in fastweight/blocks.h


def rms_norm_in_place(inputs: tuple, options: tuple) -> None:
    """Writes y over x."""
    if needs_gradient(inputs):
        raise NotImplementedError("a norm in place has no gradient: call it under torch.no_grad()")
    run(operators.rms_norm_in_place.default, *inputs, *options)


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


for _suffix in ("forward", "differentiable"):
    torch.library.register_fake(f"fastweight::rms_norm_{_suffix}", lambda x, *rest: x.new_empty(x.shape))


@torch.library.register_fake("fastweight::rms_norm_in_place")
def _(x, *rest):
    return None


@torch.library.register_fake("fastweight::rms_norm_backward")
def _(dy, x, gate, weight, *rest):
    inputs = (x, gate, weight)
    return fake_gradients(inputs, tuple(None if value is None else value.dtype for value in inputs), rest[-1])


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


# Inner functions, which record no gradient ----------------------------------------------------------------------------


def gate_activation_backward(dg: torch.Tensor, inputs: tuple, lower_bound: float | None) -> tuple:
    """(dx, dA_log, ddt_bias) of gates that are not summed, None where there is no input."""
    return run(operators.gate_activation_backward.default, dg, *inputs, lower_bound, 0, 0b111)


def scaled_dot_kkt(inputs: tuple, chunk_size: int) -> torch.Tensor:
    """(k, beta, gamma, cu_seqlens) -> A"""
    return run(operators.scaled_dot_kkt_forward.default, *inputs, chunk_size)


def scaled_dot_kkt_backward(dA: torch.Tensor, inputs: tuple) -> tuple:
    """(dk, dbeta, dgamma), None where there is no input."""
    return run(operators.scaled_dot_kkt_backward.default, dA, *inputs, 0b111)


def wy(inputs: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v, beta, gamma, J, cu_seqlens) -> (w, u)"""
    return run(operators.wy_forward.default, *inputs)


def wy_backward(dw: torch.Tensor | None, du: torch.Tensor | None, inputs: tuple) -> tuple:
    """(dk, dv, dbeta, dgamma, dA), None where there is no input."""
    return run(operators.wy_backward.default, dw, du, *inputs, 0b1111)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("fastweight::scaled_dot_kkt_forward")
def _(k, beta, gamma, cu_seqlens, chunk_size):
    heads = next(x for x in (beta, gamma, k) if x is not None).shape[2]
    return k.new_empty((*k.shape[:2], heads, chunk_size), dtype=_wide(k.dtype))


@torch.library.register_fake("fastweight::scaled_dot_kkt_backward")
def _(dA, k, beta, gamma, cu_seqlens, mask):
    inputs = (k, beta, gamma)
    return fake_gradients(inputs, tuple(None if x is None else x.dtype for x in inputs), mask)


@torch.library.register_fake("fastweight::wy_forward")
def _(k, v, beta, gamma, J, cu_seqlens):
    return k.new_empty((*v.shape[:3], k.shape[3])), v.new_empty(v.shape, dtype=k.dtype)


@torch.library.register_fake("fastweight::wy_backward")
def _(dw, du, k, v, beta, gamma, J, cu_seqlens, mask):
    inputs = (k, v, beta, gamma)
    gradients = fake_gradients(inputs, tuple(None if x is None else x.dtype for x in inputs), mask)
    return *gradients, J.new_empty(J.shape, dtype=_wide(k.dtype))
