"""The operators of the delta-rule family inside PyTorch.

The schemas follow from the tables in src/core/delta_rule_fields.h (python/bindings/delta_rule.cc): inputs (q, k, v, g,
beta, .., cu_seqlens), options (bits, scale, lower_bound), for a forward then (chunk_states_dtype, cu_seqlens_cpu,
kept_words). The bits are a gate, the switches below, `chunk_size << CHUNK_SIZE_SHIFT`, and
`total_value_heads << TOTAL_HEADS_SHIFT`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._compiler import constant_result
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
    """Chunk states that are no result, and what else was kept, spare the backward the work of making them again."""
    return (outputs[2] if options[0] & STATES_FOR_BACKWARD else None, outputs[3], *inputs)


_forward = differentiable(
    "delta_rule",
    num_inputs=_NUM_INPUTS,
    num_backward_options=_NUM_OPTIONS,
    num_output_gradients=2,
    saved=_saved,
)


def _dtype_of_kept_states(q: Tensor, options: int, disable_recompute: bool) -> torch.dtype | None:
    """What a forward whose gradient will be asked for keeps of the states before every chunk; None: nothing, and the
    backward walks through the tokens once more.

    On CUDA chunks of a 16-bit problem keep them in its type, which is what the products of the backward take: with 64
    tokens to a chunk and K = V = 128, half of the memory of q, k, v and o. Everything else keeps them where it is told
    to, in fp32.
    """
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and not options & TOKEN_BY_TOKEN:
        return q.dtype
    return state_dtype(q) if disable_recompute else None


@constant_result
def _kept_words(device: int, gate: int, dtype: torch.dtype, head_dim_k: int, everything: bool) -> int:
    return operators.delta_rule_kept_words(device, gate, dtype, head_dim_k, everything)


def _words_of_kept_factors(q: Tensor, options: int, disable_recompute: bool) -> int:
    """How many words such a forward keeps beside the states, of every chunk and value head; 0: none.

    A fifth of the memory of q, k, v and o (64 tokens to a chunk, K = V = 128). With one decay per channel nearly as
    much as they have themselves where it is told to: then the keys that have their decays, too, which the backward
    otherwise makes again.
    """
    index = q.device.index if q.device.index is not None else torch.cuda.current_device()
    return _kept_words(index, options & 3, q.dtype, q.shape[3], disable_recompute)


def kept_for_backward(q: Tensor, options: int, disable_recompute: bool) -> tuple[torch.dtype | None, int]:
    """(the type of the states, the words beside them) of a forward whose gradient will be asked for."""
    dtype = _dtype_of_kept_states(q, options, disable_recompute)
    with_factors = q.device.type == "cuda" and dtype == q.dtype
    return dtype, _words_of_kept_factors(q, options, disable_recompute) if with_factors else 0


def forward(
    inputs: tuple,
    options: int,
    scale: float | None,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state), None where it was not asked for."""
    parts = columns(inputs[2])
    if parts is not None:
        results = [
            forward(inputs_of(inputs, part, options), options, scale, lower_bound, disable_recompute) for part in parts
        ]
        return joined(results, options)
    dtype, kept_words = None, 0
    if needs_gradient(inputs):
        dtype, kept_words = kept_for_backward(inputs[0], options, disable_recompute)
        if dtype is not None:
            options |= STATES_FOR_BACKWARD
    o, final_state, _, _ = _forward(inputs, (options, scale, lower_bound, dtype, None, kept_words))
    return o, final_state


def forward_with_states(
    inputs: tuple, options: int, scale: float | None, lower_bound: float | None, cu_seqlens_cpu: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(o, final_state, chunk_states), the states before every chunk in the type of k. No gradients."""
    parts = columns(inputs[2])
    if parts is not None:
        results = [
            forward_with_states(inputs_of(inputs, part, options), options, scale, lower_bound, cu_seqlens_cpu)
            for part in parts
        ]
        return joined(results, options)
    return _forward(inputs, (options, scale, lower_bound, inputs[1].dtype, cu_seqlens_cpu, 0))[:3]


# Value columns do not touch each other. The kernels on CUDA take so many at a time; the CPU takes them all.

_WIDEST_ON_CUDA = 256


def columns(v: Tensor) -> list[slice] | None:
    """The ranges of columns that run one after the other; None: all at once."""
    V = v.shape[-1]
    if v.device.type != "cuda" or V <= _WIDEST_ON_CUDA:
        return None
    return [slice(begin, min(begin + _WIDEST_ON_CUDA, V)) for begin in range(0, V, _WIDEST_ON_CUDA)]


def _state_of(state: Tensor | None, part: slice, options: int) -> Tensor | None:
    if state is None:
        return None
    return state[..., part, :] if options & STATE_V_FIRST else state[..., part]


def inputs_of(inputs: tuple, part: slice, options: int) -> tuple:
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens = inputs
    if beta is not None and beta.dim() == 4:
        beta = beta[..., part]
    return q, k, v[..., part], g, beta, A_log, dt_bias, _state_of(initial_state, part, options), cu_seqlens


def joined(results: list[tuple], options: int) -> tuple:
    """(o, states ..) of all columns."""
    o, *states = zip(*results, strict=True)
    axis = -2 if options & STATE_V_FIRST else -1
    return torch.cat(o, -1), *(None if parts[0] is None else torch.cat(parts, axis) for parts in states)


_step_operator = operators.delta_rule_step.default


def step(state: Tensor, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
    """Advances `state` in place and returns o."""
    if needs_gradient((state, *inputs)):
        raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
    parts = columns(inputs[2])
    if parts is not None:
        bits = options[0]
        outputs = [
            step(_state_of(state, part, bits), state_indices, inputs_of(inputs, part, bits), options) for part in parts
        ]
        return torch.cat(outputs, -1)
    return run(_step_operator, state, state_indices, *inputs, *options)


MAP_SQUARE, MAP_STATE = 1, 2  # the results of a map that are wanted


def _joined_map(results: list[tuple], options: int) -> tuple:
    """The square matrix is that of the first columns, and the same for all."""
    squares, states = zip(*results, strict=True)
    axis = -2 if options & STATE_V_FIRST else -1
    return squares[0], None if states[0] is None else torch.cat(states, axis)


def map_forward(inputs: tuple, options: tuple, wanted: int = MAP_SQUARE | MAP_STATE) -> tuple:
    """(M, h), None for what is not wanted."""
    parts = columns(inputs[2])
    if parts is not None:
        results = [
            map_forward(inputs_of(inputs, part, options[0]), options, wanted & MAP_STATE if part.start else wanted)
            for part in parts
        ]
        return _joined_map(results, options[0])
    return run(operators.delta_rule_map_forward.default, *inputs, *options, wanted)


def map_backward(
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    inputs: tuple,
    options: tuple,
    wanted: int = MAP_SQUARE | MAP_STATE,
) -> tuple:
    """(the transpose of M, e), None for what is not wanted."""
    parts = columns(inputs[2])
    if parts is not None:
        results = []
        for part in parts:
            gradients = None if d_o is None else d_o[..., part], _state_of(d_final_state, part, options[0])
            rows = inputs_of(inputs, part, options[0])
            results.append(map_backward(*gradients, rows, options, wanted & MAP_STATE if part.start else wanted))
        return _joined_map(results, options[0])
    return run(operators.delta_rule_map_backward.default, d_o, d_final_state, *inputs, *options, wanted)


def _fake_forward(*arguments):
    x = SimpleNamespace(**dict(zip(_ARGUMENTS, arguments, strict=True)))
    chunk_size = x.options >> CHUNK_SIZE_SHIFT & 0xFFFF
    B, T, HV, V = x.v.shape
    K = x.q.shape[3]
    state = (HV, V, K) if x.options & STATE_V_FIRST else (HV, K, V)
    final_state = chunk_states = kept = None
    if x.options & OUTPUT_FINAL_STATE:
        N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        final_state = x.q.new_empty((N, *state), dtype=state_dtype(x.q))
    if x.cu_seqlens is None:
        most_chunks = (T + chunk_size - 1) // chunk_size
    else:
        most_chunks = torch.sym_min(T, T // chunk_size + x.cu_seqlens.shape[0] - 1)
    if x.kept_words > 0:
        kept = x.q.new_empty((B, most_chunks, HV, x.kept_words), dtype=torch.int32)
    if x.chunk_states_dtype is not None:
        if x.cu_seqlens is None or (x.cu_seqlens.device.type == "cuda" and x.cu_seqlens_cpu is None):
            NT = most_chunks
        else:
            NT = torch.library.get_ctx().new_dynamic_size()
        if x.options & STATES_FOR_BACKWARD:
            chunk_states = x.q.new_empty((B, NT, HV, V, K), dtype=x.chunk_states_dtype)
            chunk_states = chunk_states if x.options & STATE_V_FIRST else chunk_states.transpose(-1, -2)
        else:
            chunk_states = x.q.new_empty((B, NT, *state), dtype=x.chunk_states_dtype)
    return x.q.new_empty((B, T, HV, V)), final_state, chunk_states, kept


torch.library.register_fake("fastweight::delta_rule_forward", _fake_forward)
torch.library.register_fake("fastweight::delta_rule_differentiable", _fake_forward)


@torch.library.register_fake("fastweight::delta_rule_backward")
def _(d_o, d_final_state, chunk_states, kept, *rest):
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
