"""What the token mixers share: padding, the cache, the convolutions, and the parameters of gates."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _cp
from .._cp_context import CPContext
from ..modules import ShortConvolution
from .cache import Cache

# Up to this many tokens a call in evaluation takes the recurrent form.
RECURRENT_TOKENS = 64
MODES = ("chunk", "fused_recurrent")


class TokenMixer(nn.Module):
    """A layer `[B, T, hidden] -> [B, T, hidden]`. A subclass computes `_mix`: from tokens without padding and the
    layer's entry of the cache to the output and the new entry."""

    def __init__(self, hidden_size: int, layer_idx: int | None, mode: str) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.hidden_size = hidden_size
        self.layer_idx = layer_idx
        self.mode = mode

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        cp_context: CPContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Cache | None]:
        """
        Args:
            hidden_states: `[B, T, hidden]`.
            attention_mask: `[B, S]` with S >= T, 1 for tokens and 0 for padding on either side; the last T columns
                count. Padding has no effect on other tokens, and its output is 0.
            past_key_values: the states to begin with, which this call advances; None: it begins and ends with none.
            use_cache: accepted; a cache that is given is used, and there is none without.
            output_attentions: accepted; there are none.
            cu_seqlens: `[N + 1]` int32 or int64, offsets of N packed sequences, then B is 1; overrides the mask.
            cp_context: of `fastweight.ops.cp.build_cp_context`: the tokens are those of this rank, `[1, T, hidden]`,
                without mask, cache and cu_seqlens.
            kwargs: accepted and ignored, as in fla.

        Returns:
            `(output, None, past_key_values)`.
        """
        if past_key_values is not None and self.layer_idx is None:
            raise ValueError(f"layer_idx: expected an index of this {type(self).__name__} in the cache, got None")
        entry = None
        if past_key_values is not None and len(past_key_values) > self.layer_idx:
            entry = past_key_values[self.layer_idx]
        B, T, _ = hidden_states.shape
        indices = None
        if cp_context is not None:
            for name, x in (("attention_mask", attention_mask), ("past_key_values", past_key_values)):
                if x is not None:
                    raise ValueError(f"{name}: expected None with cp_context, got {type(x).__name__}")
            cu_seqlens = _cp.local_offsets(cp_context, "hidden_states", hidden_states, cu_seqlens)
        if attention_mask is not None and cu_seqlens is None:
            hidden_states, indices, cu_seqlens = _without_padding(hidden_states, attention_mask)

        recurrent = self.mode == "fused_recurrent" or (T <= RECURRENT_TOKENS and not self.training)
        recurrent = recurrent and cp_context is None
        output, entry = self._mix(hidden_states, entry, past_key_values is not None, cu_seqlens, recurrent, cp_context)
        if past_key_values is not None:
            past_key_values.update(layer_idx=self.layer_idx, offset=T, **entry)
        if indices is not None:
            padded = output.new_zeros(B * T, output.shape[-1])
            output = padded.index_copy(0, indices, output.squeeze(0)).view(B, T, -1)
        return output, None, past_key_values

    def _mix(
        self,
        x: Tensor,
        entry: dict[str, Any] | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
        recurrent: bool,
        cp_context: CPContext | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        raise NotImplementedError

    # The convolutions -----------------------------------------------------------------------------------------------

    def _make_convolutions(self, widths: dict[str, int], size: int, bias: bool, activations: dict[str, str | None]):
        self.q_conv1d = ShortConvolution(widths["q"], size, bias, activations["q"])
        self.k_conv1d = ShortConvolution(widths["k"], size, bias, activations["k"])
        self.v_conv1d = ShortConvolution(widths["v"], size, bias, activations["v"])

    def _project(
        self,
        x: Tensor,
        entry: dict[str, Any] | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
        silu: tuple,
        cp_context: CPContext | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple | None]:
        """q, k, v `[B, T, ..]` after convolution and activation, and the states of the convolutions. `silu`: which of
        the three it follows where there is no convolution."""
        rows = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if not self.use_short_conv:
            return tuple(F.silu(r) if s else r for r, s in zip(rows, silu, strict=True)), None
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        if cp_context is not None:
            together = _cp.conv_states(cp_context, rows, self.q_conv1d.kernel_size[0])
            widths = [row.shape[2] for row in rows]
            states = (None, None, None) if together is None else together.split(widths, 1)
        else:
            states = (None, None, None) if entry is None else entry["conv_state"]
        results = [
            convolution(row, cache=state, output_final_state=keep_state, cu_seqlens=cu_seqlens)
            for convolution, row, state in zip(convolutions, rows, states, strict=True)
        ]
        return tuple(y for y, _ in results), tuple(state for _, state in results)


def in_place(entry: dict[str, Any] | None) -> bool:
    """Whether a call advances the states of the cache in place: there are some, and no gradient has to see them."""
    return entry is not None and not torch.is_grad_enabled()


def heads(x: Tensor, width: int) -> Tensor:
    """`[B, T, H * width]` to `[B, T, H, width]`."""
    return x.unflatten(-1, (-1, width))


def _without_padding(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tokens `[1, sum of lengths, ..]`, their places in `B * T`, and the offsets of the B sequences; x itself where
    nothing is masked."""
    B, T = x.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask: expected a 0/1 matrix of shape [{B}, {T}], or of more columns, "
            f"got {list(attention_mask.shape)}"
        )
    mask = attention_mask[:, -T:] != 0
    if bool(mask.all()):
        return x, None, None
    indices = mask.flatten().nonzero().squeeze(-1)
    lengths = mask.sum(-1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    return x.flatten(0, 1).index_select(0, indices).unsqueeze(0), indices, cu_seqlens


# The sizes and gates of GatedDeltaNet and KDA -----------------------------------------------------------------------


def value_heads(num_heads: int, num_v_heads: int | None) -> int:
    if num_v_heads is None:
        return num_heads
    if num_v_heads < num_heads or num_v_heads % num_heads != 0:
        raise ValueError(f"num_v_heads: expected a multiple of the {num_heads} heads, got {num_v_heads}")
    return num_v_heads


def value_width(head_dim: int, expand_v: float) -> int:
    width = round(head_dim * expand_v)
    if width < 1 or not math.isclose(width, head_dim * expand_v, rel_tol=1e-5):
        raise ValueError(f"expand_v: expected an integer times 1 / {head_dim}, got {expand_v}")
    return width


def gate_parameter(values: Tensor) -> nn.Parameter:
    """fp32, and marked for optimisers that ask: no weight decay."""
    parameter = nn.Parameter(values)
    parameter._no_weight_decay = True
    return parameter


def initial_dt_bias(count: int) -> nn.Parameter:
    """softplus(dt_bias) is a step between 1e-3 and 0.1, uniform in its logarithm."""
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.exp(torch.rand(count) * (high - low) + low).clamp(min=1e-4)
    return gate_parameter(dt + torch.log(-torch.expm1(-dt)))


def warn_without_convolution() -> None:
    warnings.warn("use_short_conv=False: these layers lose much of their quality without convolutions", stacklevel=3)
