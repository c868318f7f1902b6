"""The checks that several functions share: those of fla's functions, with their classes of errors. Shapes, types and
everything else are checked by the library."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """An assert that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)


def v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """The switch, whichever of its two names was used."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first: expected it without its old name transpose_state_layout, got both")
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def no_head_first(head_first: bool | None) -> None:
    if head_first is not None:
        raise DeprecationWarning("head_first: expected none, there is one layout [B, T, H, ..]")


def four_axes(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{name}: expected rank 4, got shape {list(x.shape)}")


def shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {list(expected)}, got {list(x.shape)}")


def sequences(q: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected a batch of 1, got {q.shape[0]}: pack the sequences into one")
    if initial_state is not None and initial_state.shape[0] != cu_seqlens.shape[0] - 1:
        raise ValueError(
            f"initial_state: expected one state for each of the {cu_seqlens.shape[0] - 1} sequences of cu_seqlens, "
            f"got {initial_state.shape[0]}"
        )


def offsets(cu_seqlens: Tensor, total: int | None = None) -> None:
    """That offsets start at 0, do not decrease and end at the `total` tokens. Nothing is read back from a device, nor
    in a graph that is being traced."""
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values = cu_seqlens.tolist()
    if not values or values[0] != 0:
        raise ValueError(f"cu_seqlens: expected 0 at position 0, got {values[0] if values else 'nothing'}")
    for place, (before, value) in enumerate(zip(values[:-1], values[1:], strict=True), start=1):
        if value < before:
            raise ValueError(f"cu_seqlens: expected at least {before} at position {place}, got {value}")
    if total is not None and values[-1] != total:
        raise ValueError(
            f"cu_seqlens: expected the token count {total} at position {len(values) - 1}, got {values[-1]}"
        )


def host_offsets(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """The copy of cu_seqlens on the CPU, where it tells what cu_seqlens does not."""
    if cu_seqlens is None or cu_seqlens_cpu is None or cu_seqlens.device.type == "cpu":
        return None
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu: expected a tensor on cpu, got one on {cu_seqlens_cpu.device}")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(f"cu_seqlens_cpu: expected shape {list(cu_seqlens.shape)}, got {list(cu_seqlens_cpu.shape)}")
    return cu_seqlens_cpu


def beta_from_logits(allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")


def one_dtype(q: Tensor, k: Tensor, v: Tensor, error: type[Exception]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in one type. Autocast may have left some of them in fp32: then all get its type, as in a product."""
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        raise error(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def any_dtype(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in one type: under autocast its own, else the widest of theirs. What is no floating type stays as it
    is, for the library to refuse."""
    dtypes = {x.dtype for x in tensors if x is not None and x.is_floating_point()}
    if len(dtypes) <= 1:
        return tensors
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, dtypes)
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors)


def power_of_two(chunk_size: int | None) -> None:
    if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size: expected a power of two, got {chunk_size}")


def no_value_gate(gv: Tensor | None) -> None:
    if gv is not None:
        raise NotImplementedError("gv: a decay per value channel is not supported")


def no_gradients() -> None:
    require(
        not torch.is_grad_enabled(),
        "return_intermediate_states: expected torch.no_grad() or torch.inference_mode() around the call",
    )
