"""The short convolution against PyTorch's convolution: values, gradients, states, decoding, errors."""

import pytest
import torch
import torch.nn.functional as F

from fastweight.ops import causal_conv1d, causal_conv1d_update


def reference(x, weight, bias=None, residual=None, initial_state=None, activation=None):
    """One dense batch: (y, final_state)."""
    W = weight.shape[1]
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], x.shape[2], W)
    line = torch.cat([initial_state, x.transpose(1, 2)], -1)
    y = F.conv1d(line, weight.unsqueeze(1), bias, groups=x.shape[2])[:, :, 1:].transpose(1, 2)
    y = F.silu(y) if activation else y
    return y if residual is None else y + residual, line[:, :, -W:]


def draw(B, T, D, W, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return normal(B, T, D), normal(D, W), normal(D), normal(B, T, D), normal(B, D, W)


@pytest.mark.parametrize("T", [1, 3, 4, 70, 300])
@pytest.mark.parametrize("W", [1, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_values_and_gradients(T, W, activation, dtype, tolerance):
    tensors = draw(2, T, 24, W, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    y, final_state = causal_conv1d(
        *tensors[:4], initial_state=tensors[4], output_final_state=True, activation=activation
    )
    expected, expected_state = reference(*exact, activation=activation)
    assert y.dtype == final_state.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(final_state.double(), expected_state, rtol=0, atol=0)
    dy, d_state = torch.randn_like(expected), torch.randn_like(expected_state)
    gradients = torch.autograd.grad((y, final_state), tensors, (dy.to(dtype), d_state.to(dtype)))
    wanted = torch.autograd.grad((expected, expected_state), exact, (dy.to(dtype).double(), d_state.to(dtype).double()))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_sixteen_bits(dtype, tolerance):
    x, weight, bias, residual, state = draw(2, 65, 40, 4, dtype)
    y, _ = causal_conv1d(x, weight, bias, residual, state, activation="silu")
    expected, _ = reference(x.double(), weight.double(), bias.double(), residual.double(), state.double(), "silu")
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    y.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == dtype


def test_packed_sequences_are_kept_apart():
    lengths = [5, 0, 1, 130, 2]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    x, weight, bias, _, _ = (t.detach() for t in draw(1, sum(lengths), 24, 4, torch.float32))
    states = torch.randn(len(lengths), 24, 4)
    y, final = causal_conv1d(x, weight, bias, None, states, True, "silu", cu_seqlens=offsets)
    for n in range(len(lengths)):
        part = x[:, offsets[n] : offsets[n + 1]]
        one, one_final = causal_conv1d(part, weight, bias, None, states[n : n + 1], True, "silu")
        assert torch.equal(y[:, offsets[n] : offsets[n + 1]], one)
        assert torch.equal(final[n : n + 1], one_final)


def test_decoding_gives_the_same_bits():
    x, weight, bias, residual, _ = (t.detach() for t in draw(3, 9, 40, 4, torch.float32))
    whole, final = causal_conv1d(x, weight, bias, residual, None, True, "silu")
    y, cache = causal_conv1d(x[:, :4], weight, bias, residual[:, :4], None, True, "silu")
    parts = [y]
    for t in range(4, 8):
        y, same = causal_conv1d_update(x[:, t], cache, residual[:, t], weight, bias, "silu")
        assert same is cache
        parts.append(y.unsqueeze(1))
    parts.append(causal_conv1d_update(x[:, 8:], cache, residual[:, 8:], weight, bias, "swish")[0])
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(cache, final)


def test_channels_first_memory_is_read_as_it_is():
    x, weight, _, _, _ = (t.detach() for t in draw(2, 33, 24, 4, torch.float32))
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(causal_conv1d(strided, weight)[0], causal_conv1d(x, weight)[0])


def test_slots():
    x, weight, _, _, _ = (t.detach() for t in draw(3, 1, 8, 4, torch.float32))
    cache = torch.randn(5, 8, 4)
    before = cache.clone()
    slots = torch.tensor([4, -1, 0])
    y, _ = causal_conv1d_update(x, cache, weight=weight, state_indices=slots)
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert torch.equal(cache[1:4], before[1:4])
    assert torch.equal(cache[4, :, -1], x[0, 0])
    assert torch.equal(cache[0, :, -1], x[2, 0])


def test_compiled_with_gradients():
    x, weight, bias, residual, state = draw(2, 17, 24, 4, torch.float32)

    def loss(x, weight, bias, residual, state):
        y, final = causal_conv1d(x, weight, bias, residual, state, True, "silu")
        return (y * y).sum() + final.sum()

    plain = torch.autograd.grad(loss(x, weight, bias, residual, state), (x, weight, bias, residual, state))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    other = torch.autograd.grad(compiled(x, weight, bias, residual, state), (x, weight, bias, residual, state))
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(a, b)


def test_operator_registration():
    x, weight, bias, _, state = draw(2, 5, 8, 4, torch.float32)
    operator = torch.ops.fastweight.short_conv_differentiable.default
    torch.library.opcheck(operator, (x, weight, bias, state, None, 1, None, True))
    arguments = (None, state.detach().clone(), None, x.detach(), weight.detach(), None, None, None, 1)
    torch.library.opcheck(torch.ops.fastweight.short_conv_step.default, arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(7, 4)}, ValueError, r"weight: expected shape \[8, 4\], got \[7, 4\]"),
        ({"weight": torch.ones(8, 17)}, ValueError, "weight: width W"),
        ({"bias": torch.ones(7)}, ValueError, r"bias: expected shape \[8\]"),
        ({"activation": "relu"}, AssertionError, "activation: expected silu, swish or None, got 'relu'"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, ValueError, "cu_seqlens: expected a batch of 1"),
        ({"initial_state": torch.ones(2, 8, 3)}, ValueError, r"initial_state: expected shape \[2, 8, 4\]"),
        ({"residual": torch.ones(2, 4, 8)}, ValueError, r"residual: expected shape \[2, 5, 8\]"),
        ({"x": torch.ones(2, 5, 8, dtype=torch.int32)}, ValueError, "x: expected a floating type"),
        ({"x": torch.ones(5, 8)}, ValueError, "x: expected rank 3"),
        ({"cp_context": object()}, TypeError, "cp_context"),
    ],
)
def test_errors(change, error, message):
    arguments = {"x": torch.ones(2, 5, 8), "weight": torch.ones(8, 4)} | change
    with pytest.raises(error, match=message):
        causal_conv1d(**arguments)


def test_a_step_has_no_gradient():
    weight = torch.ones(8, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient"):
        causal_conv1d_update(torch.ones(2, 1, 8), torch.zeros(2, 8, 4), weight=weight)


def test_shapes_of_fla():
    """Heads that are not flattened, no weight, one token for each sequence in a row."""
    x, weight = torch.randn(2, 5, 2, 4), torch.randn(8, 4)
    y, _ = causal_conv1d(x, weight)
    assert torch.equal(y.flatten(2), causal_conv1d(x.flatten(2), weight)[0])
    state = torch.randn(2, 8, 4)
    y, _ = causal_conv1d(x, initial_state=state)
    torch.testing.assert_close(y.flatten(2), causal_conv1d(x.flatten(2), torch.ones(8, 4), initial_state=state)[0])
    with pytest.raises(ValueError, match="weight: expected a tensor without initial_state"):
        causal_conv1d(x)
    caches = [torch.zeros(5, 8, 4) for _ in range(3)]
    expected, _ = causal_conv1d_update(x[0].flatten(1), caches[0], weight=weight)
    assert torch.equal(causal_conv1d_update(x[:1].flatten(2), caches[1], weight=weight)[0][0], expected)
    assert torch.equal(causal_conv1d_update(x[:1], caches[2], weight=weight)[0].flatten(2)[0], expected)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])
    ones, none = torch.zeros(2, 2, 8, 4).unbind()
    expected, _ = causal_conv1d_update(x[:, 0].flatten(1), ones, weight=torch.ones(8, 4))
    assert torch.equal(causal_conv1d_update(x[:, 0].flatten(1), none)[0], expected)
