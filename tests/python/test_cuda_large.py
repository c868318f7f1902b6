"""CUDA tensors of more than 2^31 elements: a part of the whole against the part alone. Their gradients:
test_cuda_training.py."""

import pytest
import torch

from fastweight import ops
from fastweight.ops import delta_rule_step
from test_cuda import OPS, RECURRENT, needs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rows(op, shape, dtype):
    """Inputs of the delta-rule family of a shape [B, T, H, D]; q and k are to be normalised."""
    x = {name: torch.randn(*shape, device="cuda", dtype=dtype) for name in "qkv"}
    x["beta"] = torch.rand(*shape[:3], device="cuda")
    if op == "gated_delta_rule":
        x["g"] = torch.rand(*shape[:3], device="cuda").neg_()
    if op == "kda":
        x["g"] = torch.rand(*shape, device="cuda", dtype=torch.bfloat16).neg_()
    return x


def assert_same(part, alone):
    assert torch.isfinite(part).all()
    assert torch.equal(part, alone)


@pytest.mark.parametrize(
    ("op", "dtype", "gigabytes"),
    [
        ("delta_rule", torch.bfloat16, 45),
        ("gated_delta_rule", torch.bfloat16, 45),
        ("kda", torch.bfloat16, 90),
        ("gated_delta_rule", torch.float32, 65),
        ("kda", torch.float32, 100),
    ],
)
@torch.no_grad()
def test_many_elements_in_chunks(op, dtype, gigabytes, memory):
    """The whole at once against its second part from the state between them: the same bits."""
    T, H, D, cut = 64 * 2200, 128, 128, 64 * 2100
    assert T * H * D > 2**31
    memory(gigabytes)
    x = rows(op, (1, T, H, D), dtype)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    o, state = OPS[op](**x, **options)
    last = o[:, cut:].clone()
    del o
    middle = OPS[op](**{name: value[:, :cut] for name, value in x.items()}, **options)[1]
    o, end = OPS[op](**{name: value[:, cut:] for name, value in x.items()}, **options, initial_state=middle)
    assert_same(last, o)
    assert_same(state, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", RECURRENT)
@torch.no_grad()
def test_many_elements_token_by_token(op, dtype, memory):
    """The first and the last sequences against themselves alone; the states have as many elements as the tokens."""
    B, T, H, D = 1100, 128, 128, 128
    assert B * H * D * D == B * T * H * D > 2**31
    memory(60 if dtype == torch.float32 else 40)
    x = rows(op, (B, T, H, D), dtype)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    o, state = RECURRENT[op](**x, **options)
    for part in (slice(0, 2), slice(B - 2, B)):
        alone = RECURRENT[op](**{name: value[part] for name, value in x.items()}, **options)
        assert_same(o[part], alone[0])
        assert_same(state[part], alone[1])


@torch.no_grad()
def test_many_elements_of_states(memory):
    """A step of every slot, and of the first and the last ones alone."""
    slots, H, D = 1100, 128, 128
    assert slots * H * D * D > 2**31
    memory(12)
    states = torch.randn(slots, H, D, D, device="cuda")
    for op in OPS:
        x = rows(op, (slots, 1, H, D), torch.bfloat16)
        before = [(part, states[part].clone()) for part in (slice(0, 2), slice(slots - 2, slots))]
        o = delta_rule_step(**x, state=states, use_qk_l2norm_in_kernel=True)
        for part, state in before:
            token = {name: value[part] for name, value in x.items()}
            assert_same(o[part], delta_rule_step(**token, state=state, use_qk_l2norm_in_kernel=True))
            assert_same(states[part], state)


@needs("ttt_linear", "forward")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_many_elements_of_ttt_linear(dtype, memory):
    """As in chunks."""
    T, H, D, cut = 64 * 2200, 128, 128, 64 * 2100
    assert T * H * D > 2**31
    memory(55 if dtype == torch.float32 else 30)
    tokens = {name: torch.randn(1, T, H, D, device="cuda", dtype=dtype).mul_(0.1) for name in "qkv"}
    tokens["eta"] = torch.rand(1, T, H, 1, device="cuda").mul_(0.01)
    weights = {"w": torch.rand(H, D, device="cuda"), "b": torch.randn(H, D, device="cuda")}
    options = {**weights, "output_final_state": True}
    o, *end = ops.chunk_ttt_linear(**tokens, **options)
    last = o[:, cut:].clone()
    del o
    head = {name: value[:, :cut] for name, value in tokens.items()}
    _, state, bias = ops.chunk_ttt_linear(**head, **options)
    tail = {name: value[:, cut:] for name, value in tokens.items()}
    found = ops.chunk_ttt_linear(**tail, **options, initial_state=state, initial_state_bias=bias)
    for part, alone in zip((last, *end), found, strict=True):
        assert_same(part, alone)


@needs("short_conv", "forward")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_many_elements_of_short_convolution(dtype, memory):
    T, D, W = 1_100_000, 2048, 4
    assert T * D > 2**31
    memory(25 if dtype == torch.float32 else 15)
    x, w = torch.randn(1, T, D, device="cuda", dtype=dtype), torch.randn(D, W, device="cuda", dtype=dtype)
    y, state = ops.causal_conv1d(x, w, activation="silu", output_final_state=True)
    before = x[:, -100 - W : -100].transpose(1, 2).contiguous()
    options = {"initial_state": before, "activation": "silu", "output_final_state": True}
    alone = ops.causal_conv1d(x[:, -100:], w, **options)
    assert_same(y[:, -100:], alone[0])
    assert_same(state, alone[1])


MANY = {
    "l2norm": (ops.l2norm, 128, ()),
    "cumsum": (lambda x: ops.chunk_local_cumsum(x, 64), 128, ()),
    "solve_tril": (ops.solve_tril, 64, ()),
    "kda_gate": (ops.fused_kda_gate, 128, ((128,), (128 * 128,))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", MANY)
@torch.no_grad()
def test_many_elements_of_blocks(block, dtype, memory):
    """The first and the last chunks against themselves alone."""
    function, width, parameters = MANY[block]
    T, H = 64 * 2200 * 128 // width, 128
    assert T * H * width > 2**31
    memory(25)
    x = torch.randn(1, T, H, width, device="cuda", dtype=dtype).mul_(0.1)
    others = [torch.rand(*shape, device="cuda") for shape in parameters]
    y = function(x, *others)
    for part in (slice(0, 128), slice(T - 128, T)):
        assert_same(y[:, part], function(x[:, part], *others))
