"""flash-linear-attention's layers on our operators, on the CPU, where it is installed: its checkpoints in our layers,
and the same results."""

import warnings

import pytest
import torch

import fastweight

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it has no device
    fla_layers = pytest.importorskip("fla.layers")
    fla_utils = pytest.importorskip("fla.models.utils")

LAYERS = {
    "DeltaNet": {"hidden_size": 64, "num_heads": 2, "use_gate": True},
    "GatedDeltaNet": {"hidden_size": 64, "head_dim": 16, "num_heads": 2, "num_v_heads": 4},
    "KimiDeltaAttention": {"hidden_size": 64, "head_dim": 16, "num_heads": 2},
}


@pytest.fixture(autouse=True)
def _accelerated():
    fastweight.accelerate()
    yield
    fastweight.restore()


@pytest.mark.parametrize("name", LAYERS)
def test_checkpoints_and_results(name):
    torch.manual_seed(0)
    options = LAYERS[name] | {"layer_idx": 0}
    theirs = getattr(fla_layers, name)(**options).eval()
    ours = getattr(fastweight.layers, name)(**options).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 70, 64)
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :10] = 0
    torch.testing.assert_close(theirs(x)[0], ours(x)[0])
    torch.testing.assert_close(theirs(x, attention_mask=mask)[0], ours(x, attention_mask=mask)[0])
    their_cache, our_cache = fla_utils.Cache(), fastweight.layers.Cache()
    for part in (slice(0, 9), slice(9, 10), slice(10, 11), slice(11, 70)):
        with torch.no_grad():
            expected, _, _ = theirs(x[:, part], past_key_values=their_cache, use_cache=True)
            output, _, _ = ours(x[:, part], past_key_values=our_cache, use_cache=True)
        torch.testing.assert_close(output, expected)
