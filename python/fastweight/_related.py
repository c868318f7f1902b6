"""The operators of the families related to the delta rule inside PyTorch.

The schemas follow from the tables in src/core/related_fields.h (python/bindings/related.cc): inputs (q, k, v, ..,
cu_seqlens), options (.., scale, chunk_size, state_v_first, ..), for a forward then (output_final_state,
chunk_states_dtype).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ._autograd import differentiable, fake_gradients, needs_gradient, run
from ._delta_rule import state_dtype
from ._library import argument_names, operators


class Family:
    """One family: its forward, with gradients, and its step."""

    def __init__(self, name: str) -> None:
        self._arguments = argument_names(f"{name}_forward")
        self._num_inputs = self._arguments.index("cu_seqlens") + 1
        num_options = self._arguments.index("output_final_state") - self._num_inputs
        self._step = getattr(operators, f"{name}_step").default
        self._forward = differentiable(
            name,
            num_inputs=self._num_inputs,
            num_backward_options=num_options,
            num_output_gradients=2,
            saved=lambda inputs, options, outputs: (outputs[2], *inputs),
        )
        torch.library.register_fake(f"fastweight::{name}_forward", self._fake_forward)
        torch.library.register_fake(f"fastweight::{name}_differentiable", self._fake_forward)
        torch.library.register_fake(f"fastweight::{name}_backward", self._fake_backward)
        torch.library.register_fake(f"fastweight::{name}_step", self._fake_step)

    def forward(
        self, inputs: tuple, options: tuple, output_final_state: bool, disable_recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(o, final_state), None where it was not asked for."""
        kept = state_dtype(inputs[0]) if disable_recompute and needs_gradient(inputs) else None
        o, final_state, _ = self._forward(inputs, (*options, bool(output_final_state), kept))
        return o, final_state

    def step(self, state: Tensor, state_indices: Tensor | None, inputs: tuple, options: tuple) -> Tensor:
        """Advances `state` in place and returns o."""
        if needs_gradient((state, *inputs)):
            raise NotImplementedError("a step in place has no gradient: call it under torch.no_grad()")
        return run(self._step, state, state_indices, *inputs, *options)

    def _fake_forward(self, *arguments):
        x = SimpleNamespace(**dict(zip(self._arguments, arguments, strict=True)))
        B, T, H, V = x.v.shape
        K = x.q.shape[3]
        state = (H, V, K) if x.state_v_first else (H, K, V)
        final_state = chunk_states = None
        if x.output_final_state:
            N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
            final_state = x.q.new_empty((N, *state), dtype=state_dtype(x.q))
        if x.chunk_states_dtype is not None:
            NT = (T + x.chunk_size - 1) // x.chunk_size
            if x.cu_seqlens is not None:
                NT = torch.library.get_ctx().new_dynamic_size()
            chunk_states = x.q.new_empty((B, NT, *state), dtype=x.chunk_states_dtype)
        return x.q.new_empty((B, T, H, V)), final_state, chunk_states

    def _fake_backward(self, d_o, d_final_state, chunk_states, *rest):
        named = dict(zip(self._arguments, rest, strict=False))
        gradients = [name for name in self._arguments[: self._num_inputs] if name not in ("g_gamma", "cu_seqlens")]
        inputs = tuple(named[name] for name in gradients)
        dtypes = tuple(None if x is None else x.dtype for x in inputs[:-1])
        return fake_gradients(inputs, (*dtypes, state_dtype(inputs[0])), rest[-1])

    def _fake_step(self, state, state_indices, q, k, v, *rest):
        return q.new_empty(v.shape)


gla = Family("gla")
comba = Family("comba")
dplr = Family("dplr")
