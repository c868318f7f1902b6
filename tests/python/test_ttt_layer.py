"""The TTT-Linear layer, and heads of GatedDeltaNet that are wider than the operators take."""

import pytest
import torch
import torch.nn.functional as F

from fastweight import ops
from fastweight.layers import Cache, GatedDeltaNet, TTTLinear

HIDDEN = 48


def make(**options):
    torch.manual_seed(0)
    layer = TTTLinear(**{"hidden_size": HIDDEN, "num_heads": 3, "layer_idx": 0} | options).eval()
    for parameter in (layer.norm_weight, layer.norm_bias, layer.initial_state_bias):
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("options", [{}, {"use_gate": False, "mini_batch_size": 32, "conv_bias": True}])
def test_equals_the_mathematics(options):
    layer = make(**options)
    x = torch.randn(2, 40, HIDDEN)

    def rows(name):
        convolution = getattr(layer, f"{name}_conv1d")
        y = F.linear(x, getattr(layer, f"{name}_proj").weight).transpose(1, 2)
        y = F.conv1d(F.pad(y, (3, 0)), convolution.weight, convolution.bias, groups=HIDDEN).transpose(1, 2)
        return F.silu(y).view(2, 40, 3, 16)

    def unit(y):
        return y / torch.sqrt(y.square().sum(-1, keepdim=True) + 1e-6)

    eta = torch.sigmoid(F.linear(x, layer.eta_proj.weight, layer.eta_proj.bias)) / 16
    o, _, _ = ops.chunk_ttt_linear(
        unit(rows("q")), unit(rows("k")), rows("v"), layer.norm_weight, layer.norm_bias, eta,
        chunk_size=layer.mini_batch_size, initial_state=layer.initial_state.expand(2, -1, -1, -1),
        initial_state_bias=layer.initial_state_bias.expand(2, -1, -1, -1),
    )  # fmt: skip
    o = F.rms_norm(o, (16,), layer.o_norm.weight, 1e-5)
    if layer.use_gate:
        o = o * F.silu(F.linear(x, layer.g_proj.weight)).view(2, 40, 3, 16)
    expected = F.linear(o.reshape(2, 40, HIDDEN), layer.o_proj.weight)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_every_parameter_has_a_gradient():
    layer = make().train()
    layer(torch.randn(2, 40, HIDDEN))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize("prefill", [1, 16, 21, 40])
def test_prefill_and_steps_equal_one_pass(prefill):
    layer = make()
    x = torch.randn(2, 50, HIDDEN)
    with torch.no_grad():
        whole, _, _ = layer(x)
        cache = Cache()
        cuts = [0, prefill, prefill + 1, prefill + 2, 50]
        parts = [layer(x[:, a:b], past_key_values=cache)[0] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert cache[0]["recurrent_state"][4].tolist() == [50 % 16] * 2


def test_padding_and_packing():
    layer = make()
    x = torch.randn(2, 40, HIDDEN)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :23] = 0
    with torch.no_grad():
        cache = Cache()
        output, _, _ = layer(x, attention_mask=mask, past_key_values=cache)
        following, _, _ = layer(x[:, :1], past_key_values=cache)
        alone = Cache()
        expected, _, _ = layer(x[1:, 23:], past_key_values=alone)
        torch.testing.assert_close(output[1:, 23:], expected, rtol=1e-4, atol=1e-5)
        expected, _, _ = layer(x[1:, :1], past_key_values=alone)
        torch.testing.assert_close(following[1:], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer(x, attention_mask=mask)[0], output, rtol=1e-4, atol=1e-5)


def test_bad_options():
    with pytest.raises(ValueError, match="num_heads: expected a divisor of the hidden size 64, got 3"):
        TTTLinear(hidden_size=64, num_heads=3)
    with pytest.raises(ValueError, match="num_heads: expected heads of at most 128 channels, got 256"):
        TTTLinear(hidden_size=512, num_heads=2)
    with pytest.raises(ValueError, match="mini_batch_size: expected 16, 32 or 64, got 8"):
        TTTLinear(mini_batch_size=8)


def test_gated_delta_net_with_wide_heads():
    """A head of 320 value channels runs as two of 160: the same as two layers' worth of heads, each with its half."""
    torch.manual_seed(0)
    wide = GatedDeltaNet(hidden_size=HIDDEN, head_dim=16, num_heads=2, expand_v=20, use_gate=False, layer_idx=0).eval()
    narrow = GatedDeltaNet(hidden_size=HIDDEN, head_dim=16, num_heads=2, num_v_heads=4, expand_v=10, use_gate=False)
    state = wide.state_dict()
    for name in ("A_log", "dt_bias", "a_proj.weight", "b_proj.weight"):
        state[name] = state[name].repeat_interleave(2, 0)
    state["o_norm.weight"] = state["o_norm.weight"][:160]
    narrow.load_state_dict(state)
    narrow.eval()
    seen = []
    for layer in (wide, narrow):
        layer.o_norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(-2)))
    x = torch.randn(2, 70, HIDDEN)
    whole, _, _ = wide(x)
    narrow(x)
    torch.testing.assert_close(seen[0], seen[1])
    cache = Cache()
    with torch.no_grad():
        parts = [wide(x[:, a:b], past_key_values=cache)[0] for a, b in ((0, 66), (66, 67), (67, 70))]
    assert cache[0]["recurrent_state"].shape == (2, 2, 320, 16)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
