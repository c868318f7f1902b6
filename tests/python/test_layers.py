"""The layers against the same mathematics in plain PyTorch, token by token; decoding, padding, packing, errors."""

import pytest
import torch
import torch.nn.functional as F

from fastweight.layers import Cache, DeltaNet, GatedDeltaNet, KimiDeltaAttention, RMSNorm, RMSNormGated

HIDDEN = 48


def delta_net(**options):
    return DeltaNet(hidden_size=HIDDEN, num_heads=3, layer_idx=0, **options)


def gated_delta_net(**options):
    return GatedDeltaNet(**{"hidden_size": HIDDEN, "head_dim": 16, "num_heads": 2, "layer_idx": 0} | options)


def kda(**options):
    return KimiDeltaAttention(**{"hidden_size": HIDDEN, "head_dim": 16, "num_heads": 2, "layer_idx": 0} | options)


LAYERS = {
    "delta_net": delta_net,
    "delta_net gate": lambda: delta_net(use_gate=True, allow_neg_eigval=True, expand_v=2, conv_bias=True),
    "delta_net elu sum": lambda: delta_net(qk_activation="elu", qk_norm="sum"),
    "delta_net relu": lambda: delta_net(qk_activation="relu"),
    "delta_net no beta": lambda: delta_net(use_beta=False, qk_activation="identity"),
    "gated_delta_net": gated_delta_net,
    "gated_delta_net gva": lambda: gated_delta_net(num_v_heads=4, allow_neg_eigval=True, conv_bias=True),
    "gated_delta_net no gate": lambda: gated_delta_net(use_gate=False, expand_v=1.5),
    "kda": kda,
    "kda gva": lambda: kda(num_v_heads=4, expand_v=0.5, allow_neg_eigval=True),
    "kda bound": lambda: kda(lower_bound=-4.0, safe_gate=True),
}
WITHOUT_CONVOLUTION = [
    lambda: delta_net(use_short_conv=False),
    lambda: gated_delta_net(use_short_conv=False),
    lambda: kda(use_short_conv=False),
]


def make(name):
    torch.manual_seed(0)
    layer = LAYERS[name]() if isinstance(name, str) else name()
    for parameter in layer.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
    return layer.eval()


@pytest.fixture(params=LAYERS)
def layer(request):
    return make(request.param)


# The mathematics once more ------------------------------------------------------------------------------------------


def plain(layer, x):
    """`layer(x)` for a dense batch, in the type of x, one token after the other."""

    def weight(name):
        return layer.get_parameter(name).to(x.dtype)

    def project(name, source=x):
        bias = f"{name}.bias"
        return F.linear(source, weight(f"{name}.weight"), weight(bias) if bias in names else None)

    def convolved(name):
        y = project(f"{name}_proj")
        activation = (
            isinstance(layer, GatedDeltaNet | KimiDeltaAttention) or name == "v" or layer.qk_activation == "silu"
        )
        if layer.use_short_conv:
            w = weight(f"{name}_conv1d.weight")
            bias = weight(f"{name}_conv1d.bias") if f"{name}_conv1d.bias" in names else None
            padded = F.pad(y.transpose(1, 2), (w.shape[-1] - 1, 0))
            y = F.conv1d(padded, w, bias, groups=w.shape[0]).transpose(1, 2)
        return F.silu(y) if activation else y

    names = dict(layer.named_parameters())
    B, T, _ = x.shape
    K, V = layer.head_k_dim, layer.head_v_dim
    q, k = convolved("q").view(B, T, -1, K), convolved("k").view(B, T, -1, K)
    v = convolved("v").view(B, T, -1, V)
    H = v.shape[2]
    decay = x.new_zeros(B, T, H, K)
    if isinstance(layer, DeltaNet):
        activations = {"silu": lambda y: y, "relu": torch.relu, "elu": lambda y: F.elu(y) + 1, "identity": lambda y: y}
        q, k = activations[layer.qk_activation](q), activations[layer.qk_activation](k)
        beta = project("b_proj").sigmoid() if layer.use_beta else x.new_ones(B, T, H)
    else:
        beta = project("b_proj").sigmoid()
        if isinstance(layer, GatedDeltaNet):
            raw, A = project("a_proj") + weight("dt_bias"), weight("A_log").exp()
            decay = (-A * F.softplus(raw)).unsqueeze(-1).expand(B, T, H, K)
        else:
            raw = project("f_proj.1", project("f_proj.0")) + weight("dt_bias")
            raw, A = raw.view(B, T, H, K), weight("A_log").exp().view(H, 1)
            bound = layer.lower_bound
            decay = -A * F.softplus(raw) if bound is None else bound * torch.sigmoid(A * raw)
    if layer.allow_neg_eigval:
        beta = 2 * beta
    if isinstance(layer, DeltaNet) and layer.qk_norm == "sum":
        q, k = q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True)
    else:
        q, k = (y / torch.sqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(H // y.shape[2], 2) for y in (q, k))

    S, rows = x.new_zeros(B, H, K, V), []
    for t in range(T):
        S = S * decay[:, t].exp().unsqueeze(-1)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    o = torch.stack(rows, 1)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + layer.o_norm.eps) * weight("o_norm.weight")
    if isinstance(layer, KimiDeltaAttention):
        o = o * project("g_proj.1", project("g_proj.0")).view(B, T, H, V).sigmoid()
    elif layer.use_gate:
        o = o * F.silu(project("g_proj")).view(B, T, H, V)
    return F.linear(o.reshape(B, T, -1), weight("o_proj.weight"))


@pytest.mark.parametrize("T", [5, 80])
def test_equals_the_mathematics(layer, T):
    x = torch.randn(2, T, HIDDEN)
    expected = plain(layer, x.double())
    output, attentions, cache = layer(x)
    assert attentions is None
    assert cache is None
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_layer", WITHOUT_CONVOLUTION)
def test_without_convolution(make_layer):
    with pytest.warns(UserWarning, match="use_short_conv"):
        layer = make(make_layer)
    x = torch.randn(2, 9, HIDDEN)
    torch.testing.assert_close(layer(x)[0].double(), plain(layer, x.double()), rtol=1e-4, atol=1e-5)
    cache = Cache()
    parts = [layer(x[:, t : t + 3], past_key_values=cache)[0] for t in (0, 3, 6)]
    assert cache[0]["conv_state"] is None
    torch.testing.assert_close(torch.cat(parts, 1), layer(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["delta_net gate", "gated_delta_net gva", "kda gva"])
def test_gradients(name):
    layer = make(name).train()
    x = torch.randn(2, 70, HIDDEN, requires_grad=True)
    dy = torch.randn(2, 70, HIDDEN)
    parameters = [x, *layer.parameters()]
    gradients = torch.autograd.grad(layer(x)[0], parameters, dy)
    expected = torch.autograd.grad(plain(layer, x.double()), parameters, dy.double())
    for (name, _), gradient, want in zip([("x", x), *layer.named_parameters()], gradients, expected, strict=True):
        error = (gradient - want).norm() / want.norm()
        assert error < 1e-4, f"{name}: {error}"


# Parameters ---------------------------------------------------------------------------------------------------------


def test_parameters_of_delta_net():
    shapes = {
        name: list(p.shape) for name, p in DeltaNet(hidden_size=64, num_heads=2, use_gate=True).named_parameters()
    }
    assert shapes == {
        **{f"{name}_proj.weight": [64, 64] for name in "qkvgo"},
        **{f"{name}_conv1d.weight": [64, 1, 4] for name in "qkv"},
        "b_proj.weight": [2, 64],
        "o_norm.weight": [32],
    }


def test_parameters_of_gated_delta_net():
    layer = GatedDeltaNet(hidden_size=64, head_dim=16, num_heads=2, num_v_heads=4, conv_bias=True)
    assert {name: list(p.shape) for name, p in layer.named_parameters()} == {
        "q_proj.weight": [32, 64],
        "k_proj.weight": [32, 64],
        "v_proj.weight": [128, 64],
        "a_proj.weight": [4, 64],
        "b_proj.weight": [4, 64],
        "g_proj.weight": [128, 64],
        "o_proj.weight": [64, 128],
        "A_log": [4],
        "dt_bias": [4],
        "q_conv1d.weight": [32, 1, 4],
        "k_conv1d.weight": [32, 1, 4],
        "v_conv1d.weight": [128, 1, 4],
        "q_conv1d.bias": [32],
        "k_conv1d.bias": [32],
        "v_conv1d.bias": [128],
        "o_norm.weight": [32],
    }
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay
    step = F.softplus(layer.dt_bias)
    assert bool(((step > 0.9e-3) & (step < 0.11)).all())


def test_parameters_of_kda():
    layer = KimiDeltaAttention(hidden_size=64, head_dim=16, num_heads=2, num_v_heads=4, expand_v=2)
    assert {name: list(p.shape) for name, p in layer.named_parameters()} == {
        "q_proj.weight": [32, 64],
        "k_proj.weight": [32, 64],
        "v_proj.weight": [128, 64],
        "f_proj.0.weight": [32, 64],
        "f_proj.1.weight": [64, 32],
        "b_proj.weight": [4, 64],
        "g_proj.0.weight": [32, 64],
        "g_proj.1.weight": [128, 32],
        "g_proj.1.bias": [128],
        "o_proj.weight": [64, 128],
        "A_log": [4],
        "dt_bias": [64],
        "q_conv1d.weight": [32, 1, 4],
        "k_conv1d.weight": [32, 1, 4],
        "v_conv1d.weight": [128, 1, 4],
        "o_norm.weight": [32],
    }
    safe = KimiDeltaAttention(hidden_size=64, head_dim=16, num_heads=2, safe_gate=True, lower_bound=-5)
    assert torch.equal(safe.A_log, torch.zeros(2))


# Decoding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [1, 3, 64, 70, 96])
@pytest.mark.parametrize("gradients", [False, True])
def test_prefill_and_steps_equal_one_pass(layer, prefill, gradients):
    x = torch.randn(2, 100, HIDDEN)
    whole_cache = Cache()
    with torch.set_grad_enabled(gradients):
        whole, _, _ = layer(x, past_key_values=whole_cache)
        cache = Cache()
        parts = [layer(x[:, :prefill], past_key_values=cache)[0]]
        assert cache.get_seq_length() == prefill
        for begin, end in [(prefill, prefill + 1), (prefill + 1, prefill + 2), (prefill + 2, 100)]:
            parts.append(layer(x[:, begin:end], past_key_values=cache)[0])
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=2e-6)
    for state, expected in zip(cache[0]["conv_state"], whole_cache[0]["conv_state"], strict=True):
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    state, expected = cache[0]["recurrent_state"], whole_cache[0]["recurrent_state"]
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    assert cache.get_seq_length() == 100
    cache.reset()
    assert len(cache) == cache.get_seq_length() == 0


def test_steps_without_gradients_are_in_place(layer):
    cache = Cache()
    with torch.no_grad():
        layer(torch.randn(1, 5, HIDDEN), past_key_values=cache)
        before = cache[0]["recurrent_state"], *cache[0]["conv_state"]
        layer(torch.randn(1, 1, HIDDEN), past_key_values=cache)
    after = cache[0]["recurrent_state"], *cache[0]["conv_state"]
    assert all(a is b for a, b in zip(before, after, strict=True))


# Padding and packing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_effect(layer, side):
    lengths = [70, 5, 0, 66]
    T = 70
    x = torch.randn(4, T, HIDDEN)
    mask = torch.zeros(4, T, dtype=torch.int64)
    parts = [slice(T - n, T) if side == "left" else slice(0, n) for n in lengths]
    for row, part in zip(mask, parts, strict=True):
        row[part] = 1
    cache = Cache()
    output, _, _ = layer(x, attention_mask=mask, past_key_values=cache)
    assert torch.equal(output[mask == 0], torch.zeros_like(output[mask == 0]))
    following, _, _ = layer(x[:, :1], attention_mask=F.pad(mask, (0, 1), value=1), past_key_values=cache)
    for n, part in enumerate(parts):
        if lengths[n] == 0:
            continue
        alone = Cache()
        expected, _, _ = layer(x[n : n + 1, part], past_key_values=alone)
        torch.testing.assert_close(output[n : n + 1, part], expected, rtol=1e-5, atol=2e-6)
        expected, _, _ = layer(x[n : n + 1, :1], past_key_values=alone)
        torch.testing.assert_close(following[n : n + 1], expected, rtol=1e-5, atol=2e-6)


def test_packed_sequences(layer):
    lengths = [3, 0, 66, 1]
    offsets = torch.tensor([0, 3, 3, 69, 70], dtype=torch.int32)
    x = torch.randn(1, 70, HIDDEN)
    cache = Cache()
    output, _, _ = layer(x, cu_seqlens=offsets, past_key_values=cache, use_cache=True)
    assert cache[0]["recurrent_state"].shape[0] == len(lengths)
    for n in range(len(lengths)):
        part = slice(int(offsets[n]), int(offsets[n + 1]))
        torch.testing.assert_close(output[:, part], layer(x[:, part])[0], rtol=1e-5, atol=2e-6)


def test_types(layer):
    x = torch.randn(2, 70, HIDDEN)
    expected, _, _ = layer(x)
    output, _, _ = layer.to(torch.bfloat16)(x.bfloat16())
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).norm() < 3e-2 * expected.norm()


def test_autocast_and_compile():
    layer = make("gated_delta_net").train()
    x = torch.randn(2, 70, HIDDEN)
    expected, _, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output, _, _ = layer(x)
    assert (output.float() - expected).norm() < 3e-2 * expected.norm()
    compiled = torch.compile(lambda x: layer(x)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


# Norms --------------------------------------------------------------------------------------------------------------


def test_norms():
    x, gate = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, 16, requires_grad=True)
    for activation, function in (("silu", F.silu), ("swish", F.silu), ("sigmoid", torch.sigmoid)):
        norm = RMSNormGated(16, eps=1e-3, activation=activation)
        norm.weight.data.uniform_(0.5, 2)
        expected = F.rms_norm(x, (16,), norm.weight, 1e-3) * function(gate)
        torch.testing.assert_close(norm(x, gate), expected)
        assert norm(x.bfloat16(), gate.bfloat16()).dtype == torch.bfloat16
    norm = RMSNorm(16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), None, 1e-5))
    with pytest.raises(ValueError, match="activation: expected one of silu, swish, sigmoid, got 'relu'"):
        RMSNormGated(16, activation="relu")


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_class", "options", "message"),
    [
        (DeltaNet, {"num_heads": 3}, "expand_k: expected a width that the 3 heads divide, got 1024"),
        (DeltaNet, {"qk_activation": "gelu"}, "qk_activation: expected one of silu, relu, elu, identity, got 'gelu'"),
        (DeltaNet, {"qk_norm": "max"}, "qk_norm: expected one of l2, sum, got 'max'"),
        (DeltaNet, {"mode": "fused_chunk"}, "mode: expected one of chunk, fused_recurrent"),
        (GatedDeltaNet, {"num_v_heads": 3}, "num_v_heads: expected a multiple of the 6 heads, got 3"),
        (GatedDeltaNet, {"num_v_heads": 8}, "num_v_heads: expected a multiple of the 6 heads, got 8"),
        (GatedDeltaNet, {"expand_v": 0.3}, "expand_v: expected an integer times 1 / 256, got 0.3"),
        (KimiDeltaAttention, {"num_v_heads": 8}, "num_v_heads: expected a multiple of the 16 heads, got 8"),
        (KimiDeltaAttention, {"lower_bound": 1}, "lower_bound: expected a number below 0, got 1"),
        (KimiDeltaAttention, {"safe_gate": True}, r"lower_bound: expected a number in \[-5, 0\) with safe_gate"),
    ],
)
def test_bad_options(layer_class, options, message):
    with pytest.raises(ValueError, match=message):
        layer_class(**options)


def test_bad_calls():
    layer = gated_delta_net()
    x = torch.randn(2, 5, HIDDEN)
    with pytest.raises(ValueError, match=r"attention_mask: expected a 0/1 matrix of shape \[2, 5\]"):
        layer(x, attention_mask=torch.ones(2, 5, 5))
    with pytest.raises(ValueError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1, got 2"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match="layer_idx: expected an index of this GatedDeltaNet in the cache, got None"):
        gated_delta_net(layer_idx=None)(x, past_key_values=Cache())


def test_what_fla_accepts():
    layer = gated_delta_net(some_option_of_fla=1)
    x = torch.randn(2, 5, HIDDEN)
    y, _, cache = layer(x, use_cache=True, some_argument_of_fla=1)
    assert cache is None
    assert torch.equal(layer(x)[0], y)
    recurrent = gated_delta_net(mode="fused_recurrent").train()
    recurrent.load_state_dict(layer.state_dict())
    torch.testing.assert_close(recurrent(x)[0], layer.train()(x)[0])
    recurrent(x)[0].sum().backward()
    assert recurrent.q_proj.weight.grad.abs().sum() > 0
