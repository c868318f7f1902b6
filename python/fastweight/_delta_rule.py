"""The operators of the delta-rule family inside PyTorch.

The schemas follow from the tables in src/core/delta_rule_fields.h (python/bindings/delta_rule.cc): inputs (q, k, v, g,
beta, .., cu_seqlens), options (bits, scale, lower_bound), for a forward then (chunk_states_dtype, cu_seqlens_cpu). The
bits are a gate, the switches below, `chunk_size << CHUNK_SIZE_SHIFT`, and `total_value_heads << TOTAL_HEADS_SHIFT`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._info import DELTA_RULE_SWITCHES
from ._library import argument_names, operators

NONE, PER_HEAD, PER_CHANNEL = 0, 1, 2  # Gate in fastweight/delta_rule.h
_SWITCHES = {name: 1 << bit for bit, name in enumerate(DELTA_RULE_SWITCHES, start=2)}
STATE_V_FIRST = _SWITCHES["state_v_first"]
QK_L2NORM = _SWITCHES["qk_l2norm"]
BETA_SIGMOID = _SWITCHES["beta_sigmoid"]
ALLOW_NEG_EIGVAL = _SWITCHES["allow_neg_eigval"]
GATE_IN_KERNEL = _SWITCHES["gate_in_kernel"]
SAFE_GATE = _SWITCHES["safe_gate"]
TOKEN_BY_TOKEN = _SWITCHES["token_by_token"]  # on CUDA, where the forms round differently
OUTPUT_FINAL_STATE = _SWITCHES["output_final_state"]
STATES_FOR_BACKWARD = _SWITCHES["states_for_backward"]  # chunk states lie as [.., V, K] in memory and are no result
CHUNK_SIZE_SHIFT = 16
TOTAL_HEADS_SHIFT = 32

_ARGUMENTS = argument_names("delta_rule_forward")
_NUM_INPUTS = _ARGUMENTS.index("options")
_NUM_OPTIONS = 3


def bits(
    gate: int,
    chunk_size: int,
    state_v_first: bool,
    qk_l2norm: bool,
    output_final_state: bool,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    gate_in_kernel: bool = False,
) -> int:
    result = gate | chunk_size << CHUNK_SIZE_SHIFT
    if state_v_first:
        result |= STATE_V_FIRST
    if qk_l2norm:
        result |= QK_L2NORM
    if output_final_state:
        result |= OUTPUT_FINAL_STATE
    if beta_sigmoid:
        result |= BETA_SIGMOID
    if allow_neg_eigval:
        result |= ALLOW_NEG_EIGVAL
    if gate_in_kernel:
        result |= GATE_IN_KERNEL
    return result


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _saved(inputs, options, outputs):
    """Chunk states that are no result spare the backward the work of finding them again."""
    return (outputs[2] if options[0] & STATES_FOR_BACKWARD else None, *inputs)


_forward = differentiable(
    "delta_rule",
    num_inputs=_NUM_INPUTS,
    num_backward_options=_NUM_OPTIONS,
    num_output_gradients=2,
    saved=_saved,
)


def dtype_of_kept_states(q: Tensor, options: int, disable_recompute: bool) -> torch.dtype | None:
    """What a forward whose gradient will be asked for keeps of the states before every chunk; None: nothing, and the
    backward walks through the tokens once more.

    On CUDA chunks of a 16-bit problem keep them in its type, which is what the products of the backward take: with 64
    tokens to a chunk and K = V = 128, half of the memory of q, k, v and o. Everything else keeps them where it is told
    to, in fp32.
    """
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and not options & TOKEN_BY_TOKEN:
        return q.dtype
    return state_dtype(q) if disable_recompute else None


def forward(
    inputs: tuple,
    options: int,
    scale: float | None,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state), None where it was not asked for."""
    dtype = None
    if needs_gradient(inputs):
        dtype = dtype_of_kept_states(inputs[0], options, disable_recompute)
        if dtype is not None:
            options |= STATES_FOR_BACKWARD
    o, final_state, _ = _forward(inputs, (options, scale, lower_bound, dtype, None))
    return o, final_state


def forward_with_states(
    inputs: tuple, options: int, scale: float | None, lower_bound: float | None, cu_seqlens_cpu: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(o, final_state, chunk_states), the states before every chunk in the type of k. No gradients."""
    return _forward(inputs, (options, scale, lower_bound, inputs[1].dtype, cu_seqlens_cpu))


_step_operator = operators.delta_rule_step.default


def step(state: Tensor, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
    """Advances `state` in place and returns o."""
    if needs_gradient((state, *inputs)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    return run(_step_operator, state, state_indices, *inputs, *options)


MAP_SQUARE, MAP_STATE = 1, 2  # the results of a map that are wanted


def map_forward(inputs: tuple, options: tuple, wanted: int = MAP_SQUARE | MAP_STATE) -> tuple:
    """(M, h), None for what is not wanted."""
    return run(operators.delta_rule_map_forward.default, *inputs, *options, wanted)


def map_backward(
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    inputs: tuple,
    options: tuple,
    wanted: int = MAP_SQUARE | MAP_STATE,
) -> tuple:
    """(the transpose of M, e), None for what is not wanted."""
    return run(operators.delta_rule_map_backward.default, d_o, d_final_state, *inputs, *options, wanted)


def _fake_forward(*arguments):
    x = SimpleNamespace(**dict(zip(_ARGUMENTS, arguments, strict=True)))
    chunk_size = x.options >> CHUNK_SIZE_SHIFT & 0xFFFF
    B, T, HV, V = x.v.shape
    K = x.q.shape[3]
    state = (HV, V, K) if x.options & STATE_V_FIRST else (HV, K, V)
    final_state = chunk_states = None
    if x.options & OUTPUT_FINAL_STATE:
        N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        final_state = x.q.new_empty((N, *state), dtype=state_dtype(x.q))
    if x.chunk_states_dtype is not None:
        if x.cu_seqlens is None:
            NT = (T + chunk_size - 1) // chunk_size
        elif x.cu_seqlens.device.type == "cuda" and x.cu_seqlens_cpu is None:  # the most that there can be
            NT = torch.sym_min(T, T // chunk_size + x.cu_seqlens.shape[0] - 1)
        else:
            NT = torch.library.get_ctx().new_dynamic_size()
        if x.options & STATES_FOR_BACKWARD:
            chunk_states = x.q.new_empty((B, NT, HV, V, K), dtype=x.chunk_states_dtype)
            chunk_states = chunk_states if x.options & STATE_V_FIRST else chunk_states.transpose(-1, -2)
        else:
            chunk_states = x.q.new_empty((B, NT, *state), dtype=x.chunk_states_dtype)
    return x.q.new_empty((B, T, HV, V)), final_state, chunk_states


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


def _fake_map(inputs: tuple, options: int, wanted: int) -> tuple:
    q, v, cu_seqlens = inputs[0], inputs[2], inputs[8]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    state = (V, K) if options & STATE_V_FIRST else (K, V)
    shapes = ((N, HV, K, K), (N, HV, *state))
    return tuple(
        q.new_empty(shape, dtype=state_dtype(q)) if wanted >> bit & 1 else None for bit, shape in enumerate(shapes)
    )


@torch.library.register_fake("fastweight::delta_rule_map_forward")
def _(*arguments):
    return _fake_map(arguments[:_NUM_INPUTS], arguments[_NUM_INPUTS], arguments[-1])


@torch.library.register_fake("fastweight::delta_rule_map_backward")
def _(d_o, d_final_state, *arguments):
    return _fake_map(arguments[:_NUM_INPUTS], arguments[_NUM_INPUTS], arguments[-1])
