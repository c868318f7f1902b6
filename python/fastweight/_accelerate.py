"""Models of other packages on our operators.

The modeling files of Hugging Face transformers (Qwen3-Next, Qwen3.5, Kimi-Linear, OLMo-hybrid and their relatives) and
the layers of flash-linear-attention call a handful of functions that they find under a name in their own module.
`accelerate` puts ours under these names, in modules that are loaded and, through an import hook, in those loaded later;
models look the names up when they run, so those that exist already follow too. `restore` puts everything back.

A replacement computes what the original would, gradients included. It leaves calls to the original that ours have no
kernel for: tensors on another device, query heads wider than 256, an activation other than silu, fp64 on CUDA, and
graphs that are being exported.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor

from . import _cp, ops
from ._delta_rule import state_dtype
from ._info import devices
from ._short_conv import ACTIVATIONS
from .modules.fused_norm_gate import rms_norm_gated
from .modules.layernorm import rms_norm

_MAX_HEAD_DIM = 256
_MAX_CONV_SIZE = 16
_DEVICES = {
    (family, mode): devices(family, mode) for family in ("delta_rule", "short_conv") for mode in ("forward", "step")
}


def _takes(family: str, mode: str, x: Tensor) -> bool:
    """Whether the family has kernels for x."""
    device = x.device.type
    return (
        device in _DEVICES[family, mode]
        and not (device == "cuda" and x.dtype == torch.float64)
        and not torch.compiler.is_exporting()
    )


def _takes_delta_rule(k: Tensor) -> bool:
    return k.shape[-1] <= _MAX_HEAD_DIM and _takes("delta_rule", "forward", k)


def _takes_short_conv(mode: str, x: Tensor, weight: Tensor, activation: str | None) -> bool:
    return activation in ACTIVATIONS and weight.shape[-1] <= _MAX_CONV_SIZE and _takes("short_conv", mode, x)


def _context(function: str, takes: bool) -> _cp.CPContext | None:
    """The context to run over, if there is one. A call that does not run over its ranks would take their tokens for
    whole sequences."""
    context = _cp.active_context()
    if context is not None and not takes:
        raise NotImplementedError(f"context_parallel: expected calls that run over ranks, got this one of {function}")
    return context


# transformers -------------------------------------------------------------------------------------------------------


def _offsets(cu_seqlens: Tensor | None, kwargs: dict) -> Tensor | None:
    """The offsets of packed sequences, under whichever name the model received them: `cu_seqlens`, the arguments of
    flash attention, or the number of each token's sequence."""
    if cu_seqlens is None:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
    seq_idx = kwargs.get("seq_idx")
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens
    if seq_idx.shape[0] != 1:
        raise ValueError(f"seq_idx: expected a batch of 1, got {seq_idx.shape[0]}: pack the sequences into one")
    starts = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero().flatten() + 1
    return torch.cat([starts.new_tensor([0]), starts, starts.new_tensor([seq_idx.shape[1]])])


def _causal_conv1d_fn(original):
    @functools.wraps(original)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        takes = _takes_short_conv("forward", hidden_states, weight, activation)
        context = _context("causal_conv1d_fn", takes)
        if not takes:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        x = hidden_states.transpose(1, 2)  # they have the channels first
        offsets = _offsets(None, kwargs) if context is None else None
        y, _ = ops.causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=offsets, cp_context=context)
        return y.transpose(1, 2)

    return causal_conv1d_fn


def _causal_conv1d_update(original):
    @functools.wraps(original)
    def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
        _context("causal_conv1d_update", False)
        if (
            torch.is_grad_enabled()
            or not _takes_short_conv("step", hidden_states, weight, activation)
            or conv_state.shape[-1] != weight.shape[-1]
            or conv_state.dtype not in (hidden_states.dtype, torch.float32)
        ):
            return original(hidden_states, conv_state, weight, bias, activation)
        y, _ = ops.causal_conv1d_update(hidden_states.transpose(1, 2), conv_state, None, weight, bias, activation)
        return y.transpose(1, 2)

    return causal_conv1d_update


def _rule(ours, *positional):
    """For a function of (query, key, value, g, beta, *positional) in their file."""

    def make(original):
        @functools.wraps(original)
        def rule(query, key, value, g, beta, *arguments, **kwargs):
            options = dict(zip(positional, arguments, strict=False)) | kwargs
            state = options.get("initial_state")
            takes = _takes_delta_rule(key)
            context = _context(original.__name__, takes and "chunk_size" in positional)
            if not takes:
                return original(query, key, value, g, beta, *arguments, **kwargs)
            parallel = {} if context is None else {"cp_context": context}
            return ours(
                query,
                key,
                value,
                g,
                beta=beta,
                initial_state=None if state is None else state.to(state_dtype(query)),
                output_final_state=options.get("output_final_state", False),
                use_qk_l2norm_in_kernel=options.get("use_qk_l2norm_in_kernel", False),
                cu_seqlens=_offsets(options.get("cu_seqlens"), options) if context is None else None,
                **parallel,
            )

        return rule

    return make


_RECURRENT = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_CHUNK = ("chunk_size", *_RECURRENT)

# What marks a modeling file as one of ours, and what is replaced in it.
_TRANSFORMERS_RULES = {
    "torch_chunk_gated_delta_rule": _rule(ops.chunk_gated_delta_rule, *_CHUNK),
    "torch_recurrent_gated_delta_rule": _rule(ops.fused_recurrent_gated_delta_rule, *_RECURRENT),
    "chunk_kimi_delta_attention": _rule(ops.chunk_kda, *_CHUNK),
    "recurrent_kimi_delta_attention": _rule(ops.fused_recurrent_kda, *_RECURRENT),
}
_TRANSFORMERS_CONVOLUTIONS = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "causal_conv1d_update": _causal_conv1d_update,
}


# flash-linear-attention ---------------------------------------------------------------------------------------------


def _fla_rule(ours):
    """The same names and arguments as ours."""

    def make(original):
        @functools.wraps(original)
        def rule(q, k, v, *arguments, **options):
            takes = _takes_delta_rule(k)
            context = _context(ours.__name__, takes and ours.__name__.startswith("chunk"))
            if context is not None:
                options |= {"cp_context": context, "cu_seqlens": None}
            return (ours if takes else original)(q, k, v, *arguments, **options)

        return rule

    return make


def _fla_causal_conv1d(original):
    @functools.wraps(original)
    def causal_conv1d(
        x,
        weight=None,
        bias=None,
        residual=None,
        initial_state=None,
        output_final_state=False,
        activation=None,
        **options,
    ):
        arguments = (x, weight, bias, residual, initial_state, output_final_state, activation)
        takes = _takes_short_conv("forward", x, weight, activation)
        context = _context("causal_conv1d", takes)
        if context is not None:
            options |= {"cp_context": context, "cu_seqlens": None}
        return (ops.causal_conv1d if takes else original)(*arguments, **options)

    return causal_conv1d


def _fla_causal_conv1d_update(original):
    @functools.wraps(original)
    def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
        _context("causal_conv1d_update", False)
        if not _takes_short_conv("step", x, weight, activation):
            return original(x, cache, residual, weight, bias, activation)
        # One token for each sequence, packed or not.
        with torch.no_grad():
            rows = x.reshape(cache.shape[0], 1, -1)
            residual = None if residual is None else residual.reshape(rows.shape)
            y, cache = ops.causal_conv1d_update(rows, cache, residual, weight, bias, activation)
        return y.view(x.shape), cache

    return causal_conv1d_update


def _fla_rms_norm(original):
    @functools.wraps(original)
    def norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
        function = rms_norm if x.device.type == "cpu" else original
        return function(x, weight, bias, residual, eps, prenorm, residual_in_fp32)

    return norm


def _fla_rms_norm_gated(original):
    @functools.wraps(original)
    def norm(x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6):
        function = rms_norm_gated if x.device.type == "cpu" else original
        return function(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)

    return norm


_FLA = {
    "chunk_delta_rule": _fla_rule(ops.chunk_delta_rule),
    "fused_recurrent_delta_rule": _fla_rule(ops.fused_recurrent_delta_rule),
    "chunk_gated_delta_rule": _fla_rule(ops.chunk_gated_delta_rule),
    "fused_recurrent_gated_delta_rule": _fla_rule(ops.fused_recurrent_gated_delta_rule),
    "chunk_kda": _fla_rule(ops.chunk_kda),
    "fused_recurrent_kda": _fla_rule(ops.fused_recurrent_kda),
    "causal_conv1d": _fla_causal_conv1d,
    "causal_conv1d_update": _fla_causal_conv1d_update,
    "rms_norm": _fla_rms_norm,
    "rms_norm_gated": _fla_rms_norm_gated,
}
_FLA_MODULES = ("fla.layers", "fla.modules")


# Putting them in place ----------------------------------------------------------------------------------------------


def _replacements(module: types.ModuleType) -> dict[str, Callable]:
    """The names of a module that are replaced, with what makes the replacement from the original."""
    name = module.__name__
    if name.startswith("transformers.models."):
        rules = {key: make for key, make in _TRANSFORMERS_RULES.items() if key in vars(module)}
        return rules | _TRANSFORMERS_CONVOLUTIONS if rules else {}
    if any(name == package or name.startswith(f"{package}.") for package in _FLA_MODULES):
        return _FLA
    return {}


_PREFIXES = ("transformers.models.", *(f"{package}." for package in _FLA_MODULES))
_in_place: list[tuple[types.ModuleType, str, Callable, Callable]] = []  # module, name, original, replacement


def _accelerate_module(module: types.ModuleType) -> None:
    ours = {id(replacement) for _, _, _, replacement in _in_place}
    for name, make in _replacements(module).items():
        original = vars(module).get(name)
        if not isinstance(original, types.FunctionType) or id(original) in ours:
            continue
        replacement = make(original)
        setattr(module, name, replacement)
        _in_place.append((module, name, original, replacement))


class _Hook(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and visits it when it has been executed."""

    def find_spec(self, fullname, path, target=None):
        if not fullname.startswith(_PREFIXES):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                self._visit_after_execution(spec.loader)
                return spec
        return None

    @staticmethod
    def _visit_after_execution(loader) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            del loader.exec_module
            execute(module)
            if _hook in sys.meta_path:
                _accelerate_module(module)

        loader.exec_module = exec_module


_hook = _Hook()


def accelerate() -> list[str]:
    """Lets models of transformers (Qwen3-Next, Qwen3.5, Kimi-Linear, OLMo-hybrid and relatives) and the layers of
    flash-linear-attention run on fastweight's operators: models that exist, and models that are built later.

    Results and gradients agree with those of the PyTorch code that they replace to within rounding, on the CPU and on
    CUDA. Packed sequences (`cu_seq_lens_q` or `seq_idx` among the arguments of the model) are kept apart. Inside
    `fastweight.ops.cp.context_parallel` their operators run over the ranks of the context. Calling it again does no
    harm.

    Calls that fastweight has no kernel for keep the original function, such as query heads wider than 256; inside
    `context_parallel` these, and steps of decoding, are a `NotImplementedError`.

    Returns:
        The functions that have been replaced so far; those of modules that are imported later come on top.
    """
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIXES) and isinstance(module, types.ModuleType):
            _accelerate_module(module)
    return sorted(f"{module.__name__}.{name}" for module, name, _, _ in _in_place)


def restore() -> None:
    """Undoes `accelerate`."""
    if _hook in sys.meta_path:
        sys.meta_path.remove(_hook)
    while _in_place:
        module, name, original, replacement = _in_place.pop()
        if vars(module).get(name) is replacement:
            setattr(module, name, original)
