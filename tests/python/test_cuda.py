"""CUDA tensors: forward and decoding of the delta-rule family, streams, graphs, compile, refusals."""

import pytest
import torch

import naive
from fastweight.ops import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, delta_rule_step, fused_recurrent_kda
from helpers import assert_close, draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPS = {"delta_rule": chunk_delta_rule, "gated_delta_rule": chunk_gated_delta_rule, "kda": chunk_kda}


def on_device(x, dtype):
    """The drawn inputs rounded to `dtype` (gates, beta and states in fp32), on the device and back in double."""
    keep = {"initial_state", "g", "beta"}
    placed = {key: value.to("cuda", torch.float32 if key in keep else dtype) for key, value in x.items()}
    return placed, {key: value.double().cpu() for key, value in placed.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_forward(op, dtype):
    x, exact = on_device(draw(op, B=2, T=200, H=2, K=64, V=96), dtype)
    o, state = OPS[op](**x, output_final_state=True)
    expected, expected_state = naive.delta_rule(**exact)
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    assert_close("o", o.cpu(), expected, bound)
    assert_close("final_state", state.cpu(), expected_state, bound)


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_stay_on_the_device(op):
    cu_seqlens = torch.tensor([0, 1, 1, 70, 200])
    x, exact = on_device(draw(op, T=200, K=32, V=32, N=4), torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        o, state = OPS[op](**x, output_final_state=True, cu_seqlens=cu_seqlens.cuda())
    torch.cuda.synchronize()
    expected, expected_state = naive.delta_rule(**exact, cu_seqlens=cu_seqlens)
    assert_close("o", o.cpu(), expected, 6e-3)
    assert_close("final_state", state.cpu(), expected_state, 6e-3)


def test_graph_replays_with_other_contents():
    x, _ = on_device(draw("gated_delta_rule", T=130, K=64, V=64, state=False), torch.bfloat16)
    chunk_gated_delta_rule(**x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = chunk_gated_delta_rule(**x)
    for seed in range(3):
        torch.manual_seed(seed)
        x["v"].copy_(torch.rand_like(x["v"]))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, chunk_gated_delta_rule(**x)[0])


def test_compile():
    x, _ = on_device(draw("kda", T=65, K=64, V=64, state=False), torch.bfloat16)
    compiled = torch.compile(lambda **y: chunk_kda(**y)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**x), chunk_kda(**x)[0])


def test_steps_continue_a_prefill():
    x, exact = on_device(draw("kda", B=3, T=40, K=64, V=64), torch.float32)
    whole, final = fused_recurrent_kda(**x, output_final_state=True)
    state = x["initial_state"].clone()
    for t in range(40):
        token = {key: x[key][:, t : t + 1] for key in ("q", "k", "v", "g", "beta")}
        assert torch.equal(delta_rule_step(**token, state=state), whole[:, t : t + 1])
    assert torch.equal(state, final)
    assert_close("o", whole.cpu(), naive.delta_rule(**exact)[0], 1e-5)


def test_what_is_not_there_is_refused():
    x, _ = on_device(draw("gated_delta_rule", T=20, K=16, V=16), torch.bfloat16)
    x["q"].requires_grad_()
    o, _ = chunk_gated_delta_rule(**x)
    with pytest.raises(NotImplementedError, match="delta_rule_backward"):
        o.sum().backward()
    with pytest.raises(ValueError, match="k: expected"):
        chunk_gated_delta_rule(**{**x, "k": x["k"].cpu()})
