"""What decoding carries from call to call."""

from __future__ import annotations

from typing import Any


class Cache:
    """The states of the layers of a model, by layer index. One entry is a dictionary with

    - `recurrent_state`: `[N, HV, V, K]` fp32 (DeltaNet: `[N, H, K, V]`),
    - `conv_state`: the last W inputs of the three short convolutions, `[N, D, W]` each, or None without convolutions.

    The recurrent state of TTTLinear is what `fastweight.ops.ttt_linear_step` advances: five tensors.

    A call without gradients advances them in place. The size of an entry does not depend on how many tokens were seen.
    """

    def __init__(self) -> None:
        self._layers: list[dict[str, Any] | None] = []
        self._seen: list[int] = []

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        return self._layers[layer_idx]

    def update(self, layer_idx: int, offset: int = 0, **state: Any) -> dict[str, Any]:
        """Replaces the entry of a layer, which has seen `offset` more tokens."""
        missing = layer_idx + 1 - len(self._layers)
        self._layers += [None] * missing
        self._seen += [0] * missing
        self._layers[layer_idx] = state
        self._seen[layer_idx] += offset
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the layer has seen."""
        return self._seen[layer_idx] if layer_idx < len(self._seen) else 0

    def reset(self) -> None:
        """Forgets everything: the next call begins new sequences."""
        self._layers.clear()
        self._seen.clear()
