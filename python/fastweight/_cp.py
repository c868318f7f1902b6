"""The operators over the ranks of a context: the state of a sequence crosses from rank to rank.

Two ways (docs/context-parallel.md). `affine`: each rank computes the map of its part of a sequence, `S -> M S + h`
forward and `G -> M^T G + e` backward; one all-gather later every rank composes the maps before it, or after it, into
the state that its part begins with, or the gradient that it ends with. `in_order`: a rank waits for the state of some
heads, computes these heads, and hands their state on.

Either way the operator of one device then runs on the rank's own tokens. Local states are those of the sequences that
have a token on the rank. The first may have begun on an earlier rank: then the state that comes from there takes the
place of its initial state. The last may go on: then its final state is the one at the cut.

Backward passes communicate too. All ranks run them in the same order, as autograd does with one graph on all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _delta_rule
from ._autograd import run
from ._compiler import outside_graphs
from ._cp_context import CPContext, Received, all_gather, send
from ._library import operators


def expect_context(cp_context: Any) -> CPContext:
    if not isinstance(cp_context, CPContext):
        raise TypeError(
            f"cp_context: expected what fastweight.ops.cp.build_cp_context returns, got {type(cp_context).__name__}"
        )
    return cp_context


def local_offsets(cp_context: Any, name: str, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The offsets of the sequences on this rank, for the tokens `[1, T, ..]` of x."""
    context = expect_context(cp_context)
    if x.shape[0] != 1:
        raise ValueError(
            f"{name}: expected a batch of 1 with cp_context, got {x.shape[0]}: pack the sequences into one"
        )
    if x.shape[1] != context.num_tokens:
        raise ValueError(f"{name}: expected the {context.num_tokens} tokens of rank {context.rank}, got {x.shape[1]}")
    if cu_seqlens is not None and cu_seqlens is not context.cu_seqlens:
        raise ValueError("cu_seqlens: expected none with cp_context, which has the offsets, got a tensor")
    if x.device != context.cu_seqlens.device:
        raise ValueError(
            f"{name}: expected a tensor on {context.cu_seqlens.device} as cu_seqlens, got one on {x.device}"
        )
    return context.cu_seqlens


_contexts: list[CPContext] = []


@contextlib.contextmanager
def context_parallel(cp_context: CPContext):
    """Gives the context to the operators of models that `fastweight.accelerate` has put on ours, which have no argument
    for it. Backward passes that compute layers again, as activation checkpointing does, belong inside too."""
    _contexts.append(expect_context(cp_context))
    try:
        yield cp_context
    finally:
        _contexts.pop()


def active_context() -> CPContext | None:
    return _contexts[-1] if _contexts else None


# Families -----------------------------------------------------------------------------------------------------------


class _Family:
    """An operator: how its inputs are cut by heads, and how it runs on one device."""

    axes: tuple[int, ...]  # the axis of each input that heads lie along; the initial states, at the end, are inputs too
    first_state: int  # the place of the first of them
    num_kept: int  # tensors that a forward keeps for the backward, beside its inputs
    num_heads: int  # those that can be computed on their own
    group: int  # state heads for each of them
    state_shape: tuple[int, int]  # of the matrix that a message has for each of those
    state_dtype: torch.dtype

    def heads(self, inputs: tuple, first: int, last: int) -> tuple:
        """The inputs of heads [first, last)."""
        raise NotImplementedError

    def forward(self, inputs: tuple, offsets: Tensor, keep: bool) -> tuple[Tensor, tuple, tuple]:
        """(o, final states, what the backward wants to have kept: num_kept of it)."""
        raise NotImplementedError

    def backward(self, gradients: tuple, kept: tuple, inputs: tuple, offsets: Tensor, mask: int) -> tuple:
        """The gradients of the inputs, from those of o and the final states."""
        raise NotImplementedError

    def pack(self, states: tuple) -> Tensor:
        """The matrices `[N, heads, ..]` of a message, in which the state tensors may lie under each other."""
        raise NotImplementedError

    def unpack(self, matrices: Tensor) -> tuple:
        raise NotImplementedError


class _DeltaRule(_Family):
    axes, first_state, num_kept = (2, 2, 2, 2, 2, 0, 0, 1), 7, 2

    def __init__(self, inputs: tuple, bits: int, scale: float | None, lower_bound: float | None, keep: bool) -> None:
        q, k, v = inputs[:3]
        self.num_heads, self.group = q.shape[2], v.shape[2] // q.shape[2]
        self.state_shape = self.K, self.V = q.shape[3], v.shape[3]
        self.v_first = bool(bits & _delta_rule.STATE_V_FIRST)
        bits |= _delta_rule.OUTPUT_FINAL_STATE
        self.kept = _delta_rule.kept_for_backward(q, bits, keep)
        self.options = (bits | v.shape[2] << _delta_rule.TOTAL_HEADS_SHIFT, scale, lower_bound)
        self.state_dtype = _delta_rule.state_dtype(q)

    def heads(self, inputs, first, last):
        count = last - first
        part = [x.narrow(2, first, count) for x in inputs[:2]]
        for x, axis in zip(inputs[2:], self.axes[2:], strict=True):
            if x is not None and axis == 0:  # A_log and dt_bias, which may have one row for each head or lie flat
                heads = self.num_heads * self.group
                x = x.reshape(heads, -1) if x.numel() > heads else x.flatten()
            part.append(None if x is None else x.narrow(axis, first * self.group, count * self.group))
        return tuple(part)

    def forward(self, inputs, offsets, keep):
        bits, scale, lower_bound = self.options
        dtype, words = self.kept if keep else (None, 0)
        if dtype is not None:
            bits |= _delta_rule.STATES_FOR_BACKWARD
        o, final_state, *kept = run(
            operators.delta_rule_forward.default, *inputs, offsets, bits, scale, lower_bound, dtype, None, words
        )
        return o, (final_state,), tuple(kept)

    def backward(self, gradients, kept, inputs, offsets, mask):
        arguments = (*gradients, *kept, *inputs, offsets, *self.options, mask)
        return run(operators.delta_rule_backward.default, *arguments)

    def pack(self, states):
        return states[0].transpose(-1, -2) if self.v_first else states[0]

    def unpack(self, matrices):
        return (matrices.transpose(-1, -2) if self.v_first else matrices,)

    def map_forward(self, inputs: tuple, state: Tensor | None, with_square: bool) -> tuple:
        """(M or None, h) `[1, HV, K, ..]` of the tokens, h from the state that they begin with."""
        wanted = _delta_rule.MAP_STATE | (_delta_rule.MAP_SQUARE if with_square else 0)
        return _delta_rule.map_forward((*inputs[:7], state, None), self._map_options(), wanted)

    def map_backward(self, inputs: tuple, d_o: Tensor | None, d_state: Tensor | None) -> Tensor:
        """e `[1, HV, K, V]` of the tokens, from the gradient of the state that they end with."""
        tokens = (*inputs[:7], None, None)
        return _delta_rule.map_backward(d_o, d_state, tokens, self._map_options(), _delta_rule.MAP_STATE)[1]

    def _map_options(self) -> tuple:
        bits, scale, lower_bound = self.options
        return bits & ~_delta_rule.STATE_V_FIRST, scale, lower_bound


class _TttLinear(_Family):
    axes, first_state, num_kept = (2, 2, 2, 0, 0, 2, 1, 1), 6, 0

    def __init__(self, inputs: tuple, options: tuple) -> None:
        q = inputs[0]
        self.num_heads, self.group, self.D = q.shape[2], 1, q.shape[3]
        self.state_shape = (self.D + 1, self.D)
        self.options = options
        self.state_dtype = _delta_rule.state_dtype(q)

    def heads(self, inputs, first, last):
        return tuple(
            None if x is None else x.narrow(axis, first, last - first)
            for x, axis in zip(inputs, self.axes, strict=True)
        )

    def forward(self, inputs, offsets, keep):
        o, *states, _ = run(operators.ttt_linear_forward.default, *inputs, offsets, *self.options, True, 0)
        return o, tuple(states), ()

    def backward(self, gradients, kept, inputs, offsets, mask):
        return run(operators.ttt_linear_backward.default, *gradients, None, *inputs, offsets, *self.options, mask)

    def pack(self, states):
        return torch.cat(states, -2)

    def unpack(self, matrices):
        return matrices[..., : self.D, :], matrices[..., self.D :, :]


# States at the ends of a rank ---------------------------------------------------------------------------------------


def _first_and_rest(count: int, given: tuple, first: tuple) -> tuple:
    """The states of `count` sequences: those that are given, or zeros, with those of the first replaced."""
    result = []
    for one, replacement in zip(given, first, strict=True):
        shape = (count, *replacement.shape[1:])
        rest = replacement.new_zeros(shape)[1:] if one is None else one[1:].to(replacement.dtype)
        result.append(torch.cat([replacement, rest]))
    return tuple(result)


def _add_to_last(count: int, given: tuple, last: tuple) -> tuple:
    """The gradients of the final states of `count` sequences: those that are given, or zeros, plus one for the last."""
    result = []
    for one, addition in zip(given, last, strict=True):
        total = addition.new_zeros((count, *addition.shape[1:])) if one is None else one.to(addition.dtype).clone()
        total[-1:] += addition
        result.append(total)
    return tuple(result)


def _without_first(states: tuple) -> tuple:
    """No gradient reaches what was given for a sequence that began on an earlier rank."""
    return tuple(None if x is None else torch.cat([torch.zeros_like(x[:1]), x[1:]]) for x in states)


# The affine mode ----------------------------------------------------------------------------------------------------


def _compose(messages: Tensor, ranks: tuple[int, ...], V: int, transposed: bool) -> Tensor:
    """The state after the last of these ranks, in their order: `S <- M S + h`, from the h of the first. In double, and
    rounded once: no part of it depends on what the products of the device are allowed to be rounded to."""
    state = messages[ranks[0], ..., :V].double()
    for rank in ranks[1:]:
        M, h = messages[rank, ..., V:].double(), messages[rank, ..., :V].double()
        state = torch.matmul(M.mT if transposed else M, state) + h
    return state.to(messages.dtype).unsqueeze(0)


class _Affine:
    """One exchange each way. What is kept for the backward: (what the operator keeps, the initial states, M)."""

    def __init__(self, context: CPContext, family: _DeltaRule) -> None:
        self.context, self.family = context, family
        self.has_squares = any(span.is_interior for span in context.spans)

    def _message(self, like: Tensor, square: Tensor | None, state: Tensor | None) -> Tensor:
        """`[HV, K, V]`, or `[HV, K, V + K]` where a rank has an M to tell; zeros for what nobody needs of this one."""
        family = self.family
        width = family.V + (family.K if self.has_squares else 0)
        shape = (family.num_heads * family.group, family.K, width)
        message = torch.zeros(shape, dtype=family.state_dtype, device=like.device)
        if state is not None:
            message[..., : family.V] = state[0]
        if square is not None:
            message[..., family.V :] = square[0]
        return message

    def forward(self, inputs: tuple, keep: bool) -> tuple[Tensor, tuple, tuple]:
        context, family, span = self.context, self.family, self.context.span
        square = state = None
        given = inputs[family.first_state]
        if span.after:
            begin = span.cu_seqlens[-2]
            last = tuple(x if i > 4 or x is None else x[:, begin:] for i, x in enumerate(inputs))
            begins_here = span.num_sequences > 1 or not span.before
            start = family.pack((given,))[-1:] if given is not None and begins_here else None
            square, state = family.map_forward(last, start, span.is_interior)
        exchange = all_gather(self._message(inputs[0], square, state), context.group)
        if span.before:
            incoming = _compose(exchange.wait(), span.before, family.V, False)
            (given,) = _first_and_rest(span.num_sequences, (given,), family.unpack(incoming))
        o, final, kept = family.forward((*inputs[: family.first_state], given), context.cu_seqlens, keep)
        if not span.before:
            exchange.wait()
        return o, final, (*kept, given, square)

    def backward(self, gradients: tuple, kept: tuple, inputs: tuple, mask: int) -> tuple:
        context, family, span = self.context, self.family, self.context.span
        *kept, given, square = kept
        d_o, d_final = gradients
        state = None
        if span.before:
            end = span.cu_seqlens[1]
            first = tuple(x if i > 4 or x is None else x[:, :end] for i, x in enumerate(inputs))
            d_state = None if d_final is None else family.pack((d_final,))[:1]
            state = family.map_backward(first, None if d_o is None else d_o[:, :end], d_state)
        exchange = all_gather(self._message(inputs[0], square, state), context.group)
        if span.after:
            outgoing = _compose(exchange.wait(), span.after[::-1], family.V, True)
            (d_final,) = _add_to_last(span.num_sequences, (d_final,), family.unpack(outgoing))
        results = family.backward(
            (d_o, d_final), kept, (*inputs[: family.first_state], given), context.cu_seqlens, mask
        )
        if not span.after:
            exchange.wait()
        return results


# States in order ----------------------------------------------------------------------------------------------------


class _Heads:
    """A result that is made of the results of the stages, along an axis of heads. Each is copied to its place at once,
    so that the memory of one stage serves the next."""

    def __init__(self, stages: int, axis: int) -> None:
        self._stages, self._axis = stages, axis
        self._whole, self._filled = None, 0

    def add(self, part: Tensor | None) -> None:
        if part is None or self._stages == 1:
            self._whole = part
            return
        count = part.shape[self._axis]
        if self._whole is None:
            shape = list(part.shape)
            shape[self._axis] = count * self._stages
            self._whole = part.new_empty(shape)
        self._whole.narrow(self._axis, self._filled, count).copy_(part)
        self._filled += count

    def result(self) -> Tensor | None:
        if self._whole is None or self._stages == 1:
            return self._whole
        return self._whole.narrow(self._axis, 0, self._filled)  # the last stage may have had fewer heads


class _InOrder:
    """A message to the next rank for every stage of heads. What is kept for the backward, for each stage: (what the
    operator keeps, the initial states)."""

    def __init__(self, context: CPContext, family: _Family, device: torch.device) -> None:
        self.context, self.family = context, family
        step = context.heads_per_stage(device, family.num_heads, family.group)
        self.stages = [(h, min(h + step, family.num_heads)) for h in range(0, family.num_heads, step)]

    def _receive(self, like: Tensor, rank: int) -> list[Received]:
        family = self.family
        like = like.new_empty((), dtype=family.state_dtype)
        shapes = [(1, (last - first) * family.group, *family.state_shape) for first, last in self.stages]
        return [Received(shape, like, rank, self.context.group) for shape in shapes]

    def forward(self, inputs: tuple, keep: bool) -> tuple[Tensor, tuple, tuple]:
        context, family, span = self.context, self.family, self.context.span
        arriving = self._receive(inputs[0], span.before[-1]) if span.before else None
        output = _Heads(len(self.stages), 2)
        finals = [_Heads(len(self.stages), 1) for _ in inputs[family.first_state :]]
        kept, under_way = [], []
        for stage, (first, last) in enumerate(self.stages):
            part = family.heads(inputs, first, last)
            states = part[family.first_state :]
            if arriving is not None:
                states = _first_and_rest(span.num_sequences, states, family.unpack(arriving[stage].wait()))
            o, final, extra = family.forward((*part[: family.first_state], *states), context.cu_seqlens, keep)
            if span.after:
                under_way.append(send(family.pack(tuple(x[-1:] for x in final)), span.after[0], context.group))
            output.add(o)
            for whole, one in zip(finals, final, strict=True):
                whole.add(one)
            kept += [*extra, *states]
        for _, work in under_way:
            work.wait()
        return output.result(), tuple(whole.result() for whole in finals), tuple(kept)

    def backward(self, gradients: tuple, kept: tuple, inputs: tuple, mask: int) -> tuple:
        context, family, span = self.context, self.family, self.context.span
        arriving = self._receive(inputs[0], span.after[0]) if span.after else None
        num_states = len(family.axes) - family.first_state
        num_saved = family.num_kept + num_states
        state_mask = ((1 << num_states) - 1) << family.first_state if span.before else 0
        d_o, *d_final = gradients
        results, under_way = [_Heads(len(self.stages), axis) for axis in family.axes], []
        for stage, (first, last) in enumerate(self.stages):
            part = family.heads(inputs, first, last)
            of_stage = kept[stage * num_saved : (stage + 1) * num_saved]
            extra, states = of_stage[: family.num_kept], of_stage[family.num_kept :]
            low, count = first * family.group, (last - first) * family.group
            d_states = tuple(None if x is None else x.narrow(1, low, count) for x in d_final)
            if arriving is not None:
                d_states = _add_to_last(span.num_sequences, d_states, family.unpack(arriving[stage].wait()))
            d_rows = None if d_o is None else d_o.narrow(2, low, count)
            parts = family.backward(
                (d_rows, *d_states), extra, (*part[: family.first_state], *states), context.cu_seqlens,
                mask | state_mask,
            )  # fmt: skip
            if span.before:
                first_states = tuple(x[:1] for x in parts[family.first_state :])
                under_way.append(send(family.pack(first_states), span.before[-1], context.group))
            for whole, one in zip(results, parts, strict=True):
                whole.add(one)
        for _, work in under_way:
            work.wait()
        return tuple(whole.result() for whole in results)


# Autograd -----------------------------------------------------------------------------------------------------------


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, family: _Family, way, *inputs):
        needed = any(ctx.needs_input_grad)
        o, final, kept = way.forward(inputs, needed)
        ctx.family, ctx.way = family, way
        ctx.save_for_backward(*inputs, *kept)
        ctx.set_materialize_grads(False)
        return (o, *final)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        family, way = ctx.family, ctx.way
        saved = ctx.saved_tensors  # which activation checkpointing lets be read once
        inputs, kept = saved[: len(family.axes)], saved[len(family.axes) :]
        needed = ctx.needs_input_grad[2:]
        mask = sum(bit << index for index, bit in enumerate(needed))
        results = list(way.backward(gradients, kept, inputs, mask))
        if way.context.span.before:
            results[family.first_state :] = _without_first(tuple(results[family.first_state :]))
        results = [
            x.reshape(given.shape).to(given.dtype) if x is not None and wanted else None
            for x, given, wanted in zip(results, inputs, needed, strict=True)
        ]
        return None, None, *results


@outside_graphs
def delta_rule(
    cp_context: CPContext,
    inputs: tuple,
    bits: int,
    scale: float | None,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`_delta_rule.forward` over the ranks; the inputs end with the initial state."""
    parts = _delta_rule.columns(inputs[2])
    if parts is not None:
        results = []
        for part in parts:
            rows = _delta_rule.inputs_of((*inputs, None), part, bits)[:-1]
            results.append(delta_rule(cp_context, rows, bits, scale, lower_bound, disable_recompute))
        return _delta_rule.joined(results, bits)
    family = _DeltaRule(inputs, bits, scale, lower_bound, disable_recompute)
    device = inputs[0].device
    if cp_context.mode_for(device, family.num_heads, family.group) == "affine" and cp_context.longest_chain > 1:
        way = _Affine(cp_context, family)
    else:
        way = _InOrder(cp_context, family, device)
    o, final_state = _Function.apply(family, way, *inputs)
    return o, final_state if bits & _delta_rule.OUTPUT_FINAL_STATE else None


@outside_graphs
def ttt_linear(
    cp_context: CPContext, inputs: tuple, options: tuple, output_final_state: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`_ttt_linear.forward` over the ranks; the inputs end with the initial states, the options are (scale, eps,
    mini_batch)."""
    mini_batch = options[2]
    for rank, span in enumerate(cp_context.spans):
        if span.halo % mini_batch != 0:
            raise ValueError(
                f"cp_context: expected sequences cut at multiples of the chunk size {mini_batch}, as with align="
                f"{mini_batch} in build_cp_context, got rank {rank} starting after {span.halo} tokens of one"
            )
    family = _TttLinear(inputs, options)
    o, *states = _Function.apply(family, _InOrder(cp_context, family, inputs[0].device), *inputs)
    return (o, *states) if output_final_state else (o, None, None)


# The tokens before a convolution ------------------------------------------------------------------------------------


def _halo_rows(context: CPContext, rank: int, width: int) -> list[tuple[int, int] | None]:
    """Where the `width` inputs before the first token of a rank are, oldest first: (rank, row of its message). None: a
    rank that begins with a sequence has none before it. A message has the last inputs of a rank's last sequence, with
    those before its first token where it begins there."""
    rows: list[tuple[int, int] | None] = []
    span = context.spans[rank]
    for other in reversed(span.before):
        neighbour = context.spans[other]
        has_start = neighbour.num_sequences > 1 or not neighbour.before
        count = width if has_start else min(width, neighbour.end - neighbour.start)
        rows = [(other, width - count + i) for i in range(count)] + rows
        if len(rows) >= width:
            return rows[-width:]
    return [None] * (width - len(rows)) + rows


class _ConvStates(torch.autograd.Function):
    """From the last inputs of this rank's last sequence, at most W of them, `[1, .., D]`, and the initial states
    `[N, D, W]` or None, to the states of the sequences on this rank. On every rank the convolution depends on the
    result and the result on x, so that all of them take part in the backward."""

    @staticmethod
    def forward(ctx, context: CPContext, width: int, x: Tensor, initial_state: Tensor | None) -> Tensor:
        span, (_, count, D) = context.span, x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        tail = x.new_zeros((width, D), dtype=wide)
        ctx.with_start = initial_state is not None and (span.num_sequences > 1 or not span.before)
        if span.after:
            tail[width - count :] = x[0]
            if ctx.with_start:
                tail[: width - count] = initial_state[-1, :, count:].mT
        tails = all_gather(tail, context.group).wait()
        ctx.context, ctx.count = context, count
        ctx.dtypes = (x.dtype, None if initial_state is None else initial_state.dtype)
        states = x.new_zeros((span.num_sequences, D, width)) if initial_state is None else initial_state.clone()
        if span.before:
            rows = _halo_rows(context, context.rank, width)
            states[0] = torch.stack([tail.new_zeros(D) if at is None else tails[at] for at in rows], 1)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, d_states: Tensor):
        context, span = ctx.context, ctx.context.span
        dtype, state_dtype = ctx.dtypes
        wide = torch.promote_types(dtype, torch.float32)
        _, D, width = d_states.shape
        d_halo = d_states.new_zeros((width, D), dtype=wide)
        if span.before:
            d_halo += d_states[0].mT
        d_halos = all_gather(d_halo, context.group).wait()
        d_tail = torch.zeros_like(d_halo)
        for rank in span.after:
            for row, at in enumerate(_halo_rows(context, rank, width)):
                if at is not None and at[0] == context.rank:
                    d_tail[at[1]] += d_halos[rank, row]
        d_initial = None
        if state_dtype is not None:
            d_initial = d_states.to(wide).clone()
            if span.before:
                d_initial[0] = 0
            if span.after and ctx.with_start:
                d_initial[-1, :, ctx.count :] += d_tail[: width - ctx.count].mT
            d_initial = d_initial.to(state_dtype)
        return None, None, d_tail[width - ctx.count :].unsqueeze(0).to(dtype), d_initial


@outside_graphs
def conv_states(
    cp_context: CPContext, rows: Sequence[Tensor], width: int, initial_state: Tensor | None = None
) -> Tensor | None:
    """The inputs before the sequences on this rank, `[N, D, W]`: those of the ranks before it for one that began there,
    else those of the initial state. Several inputs `[1, T, ..]` lie behind each other in D and take one exchange."""
    if cp_context.conv1d_kernel_size not in (None, width):
        raise ValueError(f"weight: expected the {cp_context.conv1d_kernel_size} columns of cp_context, got {width}")
    if cp_context.longest_chain == 1:
        return initial_state
    span, T = cp_context.span, cp_context.num_tokens
    count = min(width, T - span.cu_seqlens[-2]) if span.num_sequences else 0
    tail = torch.cat([x[:, T - count :] for x in rows], -1)
    return _ConvStates.apply(cp_context, width, tail, initial_state)
