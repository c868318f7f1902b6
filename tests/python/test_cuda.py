"""CUDA tensors: every family against double precision on the CPU; streams, graphs, layers, models, refusals. Gradients
and training: test_cuda_training.py; tensors of more than 2^31 elements: test_cuda_large.py."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import fastweight
import naive
from fastweight import _delta_rule, _info, layers, ops
from fastweight.modules.fused_norm_gate import rms_norm_gated, rms_norm_gated_
from fastweight.ops import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, delta_rule_step, fused_recurrent_kda
from helpers import assert_close, draw
from test_ttt_linear import draw as draw_ttt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPS = {"delta_rule": chunk_delta_rule, "gated_delta_rule": chunk_gated_delta_rule, "kda": chunk_kda}
RECURRENT = {
    "delta_rule": ops.fused_recurrent_delta_rule,
    "gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
    "kda": ops.fused_recurrent_kda,
}
# Rounding of q, k, v and o to 16 bits on the way in and out.
BOUND = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3}


def needs(family, mode):
    """Skips where the build has no such kernel."""
    return pytest.mark.skipif(
        "cuda" not in _info.devices(family, mode), reason=f"no {mode} of {family} on CUDA in this build"
    )


def on_device(x, dtype, keep=("initial_state", "g", "beta", "A_log", "dt_bias")):
    """The drawn inputs rounded to `dtype` (gates, beta and states in fp32), on the device and back in double."""
    placed = {key: value.to("cuda", torch.float32 if key in keep else dtype) for key, value in x.items()}
    return placed, {key: value.double().cpu() for key, value in placed.items()}


# The delta-rule family ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_forward(op, dtype):
    x, exact = on_device(draw(op, B=2, T=200, H=2, K=64, V=96), dtype)
    o, state = OPS[op](**x, output_final_state=True)
    expected, expected_state = naive.delta_rule(**exact)
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    assert_close("o", o.cpu(), expected, bound)
    assert_close("final_state", state.cpu(), expected_state, bound)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_wide_values(op, v_first):
    """More than 256 columns, which run in parts: forward, intermediate states and a step in place."""
    x, exact = on_device(draw(op, T=130, K=32, V=600), torch.bfloat16)
    options = {}
    if op != "delta_rule":
        options = {"state_v_first": v_first}
        if v_first:
            x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    expected, expected_state = naive.delta_rule(**exact)
    with torch.no_grad():
        o, state, h = OPS[op](**x, output_final_state=True, return_intermediate_states=True, **options)
    turned = options.get("state_v_first", False)
    assert h.shape[1:] == (3, 2, *((600, 32) if turned else (32, 600)))
    assert_close("o", o.cpu(), expected, 6e-3)
    assert_close("state", (state.transpose(-1, -2) if turned else state).cpu(), expected_state, 6e-3)
    slots = x.pop("initial_state").clone()
    stepped = delta_rule_step(**x, state=slots, **options)
    assert_close("stepped o", stepped.cpu(), expected, 6e-3)
    assert_close("stepped state", (slots.transpose(-1, -2) if turned else slots).cpu(), expected_state, 6e-3)


@pytest.mark.parametrize("op", RECURRENT)
def test_mixed_types(op):
    x, _ = on_device(draw(op, T=20), torch.float32)
    x["v"] = x["v"].half()
    o, _ = RECURRENT[op](**x)
    assert o.dtype == (torch.float32 if op == "delta_rule" else torch.float16)
    expected, _ = naive.delta_rule(**{name: value.double().cpu() for name, value in x.items()})
    assert_close("o", o.cpu(), expected, 1e-3)


def test_related_operators_say_what_is_missing():
    q = torch.zeros(1, 4, 1, 8, device="cuda")
    for call, entry in (
        (lambda: ops.chunk_gla(q, q, q, q), "gla_forward"),
        (lambda: ops.chunk_comba(q, q, q, q, q[..., 0]), "comba_forward"),
        (lambda: ops.chunk_dplr_delta_rule(q, q, q, q, q, q), "dplr_forward"),
        (lambda: ops.gla_step(q, q, q, torch.zeros(1, 1, 8, 8, device="cuda")), "gla_step"),
    ):
        with pytest.raises(NotImplementedError, match=f"{entry}: (has no CUDA implementation|built without CUDA)"):
            call()


@needs("rms_norm", "backward")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [5, 128, 700])
def test_gated_norm(width, dtype):
    x, g, cotangent = (torch.randn(3, 70, 2, width).to(dtype) for _ in range(3))
    weight = torch.randn(width)
    wanted = [value.double().requires_grad_() for value in (x, g, weight)]
    y = F.rms_norm(wanted[0], (width,), wanted[2], 1e-5) * F.silu(wanted[1])
    ours = [value.cuda().requires_grad_() for value in (x, g, weight)]
    result = rms_norm_gated(*ours, eps=1e-5)
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    assert_close("y", result.cpu(), y, bound)
    gradients = torch.autograd.grad(result, ours, cotangent.cuda())
    for name, a, b in zip(
        ("dx", "dg", "dw"), gradients, torch.autograd.grad(y, wanted, cotangent.double()), strict=True
    ):
        assert_close(name, a.cpu(), b, bound)
    again = torch.autograd.grad(rms_norm_gated(*ours, eps=1e-5), ours, cotangent.cuda())
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    placed = x.cuda()
    with torch.no_grad():
        assert torch.equal(rms_norm_gated_(placed, ours[1], ours[2], eps=1e-5), result)


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


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_raw_gates_and_grouped_heads(op):
    x, exact = on_device(draw(op, T=130, H=2, HV=4, K=64, V=32, raw=True), torch.bfloat16)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    o, state = OPS[op](**x, **options, output_final_state=True)
    expected, expected_state = OPS[op](**exact, **options, output_final_state=True)
    assert_close("o", o.cpu(), expected, 8e-3)
    assert_close("final_state", state.cpu(), expected_state, 8e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_intermediate_states_of_packed_sequences(dtype):
    """As many as there are chunks where the host knows the lengths; else as many as there may be, the rest 0."""
    lengths = [1, 0, 64, 70, 0, 65]
    T, N, chunks = sum(lengths), len(lengths), sum(-(-n // 64) for n in lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    x, exact = on_device(draw("kda", T=T, K=32, V=48, N=N), dtype)
    options = {"cu_seqlens": cu_seqlens.cuda(), "return_intermediate_states": True}
    bound = (1, T // 64 + N, 2, 32, 48)
    torch.full(bound, float("nan"), device="cuda", dtype=dtype)  # the memory that the next tensor of this size gets
    bounded = chunk_kda(**x, **options)[2]
    h = chunk_kda(**x, **options, cu_seqlens_cpu=cu_seqlens)[2]
    expected = chunk_kda(**exact, cu_seqlens=cu_seqlens, return_intermediate_states=True)[2]
    assert bounded.shape == bound
    assert h.shape == (1, chunks, 2, 32, 48)
    assert torch.equal(bounded[:, :chunks], h)
    assert torch.equal(bounded[:, chunks:], torch.zeros_like(bounded[:, chunks:]))
    assert_close("h", h.cpu(), expected, BOUND[dtype])
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected a tensor on cpu, got one on cuda:0"):
        chunk_kda(**x, **options, cu_seqlens_cpu=cu_seqlens.cuda())
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu: expected shape \[7\], got \[3\]"):
        chunk_kda(**x, **options, cu_seqlens_cpu=cu_seqlens[[0, 1, -1]])


def test_steps_continue_a_prefill():
    x, exact = on_device(draw("kda", B=3, T=40, K=64, V=64), torch.float32)
    whole, final = fused_recurrent_kda(**x, output_final_state=True)
    state = x["initial_state"].clone()
    for t in range(40):
        token = {key: x[key][:, t : t + 1] for key in ("q", "k", "v", "g", "beta")}
        assert torch.equal(delta_rule_step(**token, state=state), whole[:, t : t + 1])
    assert torch.equal(state, final)
    assert_close("o", whole.cpu(), naive.delta_rule(**exact)[0], 1e-5)


@pytest.mark.parametrize("op", RECURRENT)
def test_the_recurrent_functions_run_token_by_token(op):
    """In 16 bits, where the chunk form rounds its operands, they agree with a step in every bit."""
    x, _ = on_device(draw(op, B=2, T=1, K=64, V=64), torch.bfloat16)
    state = x.pop("initial_state")
    o, final = RECURRENT[op](**x, initial_state=state, output_final_state=True)
    assert torch.equal(delta_rule_step(**x, state=state), o)
    assert torch.equal(state, final)


def test_slots():
    x, _ = on_device(draw("gated_delta_rule", B=3, T=1, K=32, V=32), torch.bfloat16)
    states = torch.randn(5, 2, 32, 32, device="cuda")
    before = states.clone()
    del x["initial_state"]
    o = delta_rule_step(**x, state=states, state_indices=torch.tensor([4, -1, 0], device="cuda"))
    assert torch.equal(states[1:4], before[1:4])
    assert not torch.equal(states[4], before[4])
    assert torch.equal(o[1], torch.zeros_like(o[1]))


# The other families against themselves in double precision on the CPU ------------------------------------------------


@needs("short_conv", "forward")
@pytest.mark.parametrize("dtype", BOUND)
def test_short_convolution(dtype):
    x, w, b = torch.randn(2, 70, 96), torch.randn(96, 4), torch.randn(96)
    placed = [value.to("cuda", dtype) for value in (x, w, b)]
    y, state = ops.causal_conv1d(*placed, activation="silu", output_final_state=True)
    expected, expected_state = ops.causal_conv1d(
        *(value.double().cpu() for value in placed), activation="silu", output_final_state=True
    )
    assert_close("y", y.cpu(), expected, BOUND[dtype])
    assert torch.equal(state.cpu().double(), expected_state)


@needs("short_conv", "step")
def test_short_convolution_step():
    x, w, cache = torch.randn(3, 20, 40), torch.randn(40, 4), torch.zeros(3, 40, 4)
    expected, _ = ops.causal_conv1d(x, w, activation="silu")
    cache, outputs = cache.cuda(), []
    for t in range(20):
        y, same = ops.causal_conv1d_update(x[:, t : t + 1].cuda(), cache, weight=w.cuda(), activation="silu")
        assert same is cache
        outputs.append(y)
    assert_close("y", torch.cat(outputs, 1).cpu(), expected, 1e-5)
    assert torch.equal(cache.cpu(), x[:, -4:].transpose(1, 2))


@needs("ttt_linear", "forward")
@pytest.mark.parametrize("dtype", BOUND)
def test_ttt_linear(dtype):
    keep = ("w", "b", "eta", "initial_state", "initial_state_bias")
    x, exact = on_device(draw_ttt(B=2, T=70, D=64), dtype, keep)
    found = ops.chunk_ttt_linear(**x, output_final_state=True)
    expected = ops.chunk_ttt_linear(**exact, output_final_state=True)
    for name, a, b in zip(("o", "final_state", "final_state_bias"), found, expected, strict=True):
        assert_close(name, a.cpu(), b, 1e-4 if dtype == torch.float32 else 2e-2)


@needs("ttt_linear", "step")
def test_ttt_linear_steps():
    x, exact = on_device(draw_ttt(B=2, T=40, D=32), torch.float32, ())
    state, bias = x.pop("initial_state"), x.pop("initial_state_bias")
    kept = {"state": state, "state_bias": bias}
    kept |= {"gradient": torch.zeros_like(state), "gradient_bias": torch.zeros_like(bias)}
    kept["position"] = torch.zeros(2, dtype=torch.int32, device="cuda")
    rows = ("q", "k", "v", "eta")
    outputs = [
        ops.ttt_linear_step(**{**x, **{name: x[name][:, t : t + 1] for name in rows}}, **kept) for t in range(40)
    ]
    assert_close("o", torch.cat(outputs, 1).cpu(), ops.chunk_ttt_linear(**exact)[0], 1e-4)
    assert kept["position"].tolist() == [8, 8]


def lower(*shape):
    return torch.randn(*shape) * 0.1


BLOCKS = {
    "l2norm": (ops.l2norm, lambda: (torch.randn(2, 50, 3, 64),), {}),
    "cumsum": (ops.chunk_local_cumsum, lambda: (torch.randn(2, 100, 3),), {"chunk_size": 32}),
    "cumsum_channels": (
        ops.chunk_local_cumsum,
        lambda: (torch.randn(1, 70, 3, 16),),
        {"chunk_size": 64, "reverse": True},
    ),
    "solve_tril": (ops.solve_tril, lambda: (lower(2, 100, 3, 64),), {}),
    "gdn_gate": (ops.fused_gdn_gate, lambda: (torch.randn(2, 50, 4), torch.rand(4), torch.randn(4)), {}),
    "kda_gate": (ops.fused_kda_gate, lambda: (torch.randn(2, 50, 4, 16), torch.rand(4), torch.randn(64)), {}),
    "kda_gate_bound": (ops.fused_kda_gate, lambda: (torch.randn(2, 9, 4, 16), torch.rand(4)), {"lower_bound": -5.0}),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block):
    function, make, options = BLOCKS[block]
    inputs = make()
    try:
        found = function(*(x.cuda() for x in inputs), **options)
    except NotImplementedError as error:
        if "has no CUDA implementation" in str(error):
            pytest.skip(str(error))
        raise
    options = options | ({} if function is ops.l2norm else {"output_dtype": torch.float64})
    assert_close(block, found.cpu(), function(*(x.double() for x in inputs), **options), 1e-5)


# PyTorch's surroundings ----------------------------------------------------------------------------------------------


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


def test_graph_of_steps():
    x, _ = on_device(draw("kda", B=2, T=1, K=64, V=64), torch.bfloat16)
    state = x.pop("initial_state")
    plain, static = state.clone(), state.clone()
    delta_rule_step(**x, state=state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = delta_rule_step(**x, state=static)
    for _ in range(4):
        graph.replay()
        assert torch.equal(o, delta_rule_step(**x, state=plain))
    torch.cuda.synchronize()
    assert torch.equal(static, plain)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    torch._dynamo.reset()
    x, _ = on_device(draw("kda", T=65, K=64, V=64, state=False), torch.bfloat16)
    compiled = torch.compile(lambda **y: chunk_kda(**y)[0] * 2, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(**x), chunk_kda(**x)[0] * 2)


def test_compiled_step_in_cuda_graphs():
    torch._dynamo.reset()
    x, _ = on_device(draw("gated_delta_rule", B=2, T=1, K=64, V=64), torch.bfloat16)
    state = x.pop("initial_state")
    plain = state.clone()
    compiled = torch.compile(lambda s, **y: delta_rule_step(**y, state=s) + 1, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(state, **x).clone(), delta_rule_step(**x, state=plain) + 1)
    assert torch.equal(state, plain)


def test_fake_tensors_agree():
    x, _ = on_device(draw("gated_delta_rule", T=20), torch.bfloat16)
    values = [x[name] for name in ("q", "k", "v", "g", "beta")]
    bits = _delta_rule.bits(_delta_rule.PER_HEAD, 64, False, True, True)
    arguments = (*values, None, None, x["initial_state"], None, bits, None, None, torch.float32, None, 0)
    torch.library.opcheck(
        torch.ops.fastweight.delta_rule_forward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_streams():
    """Each call runs on the current stream: a slow kernel on another one does not hold it up, and results are in order
    with what comes after on the same stream."""
    x, _ = on_device(draw("gated_delta_rule", B=2, T=512, K=128, V=128), torch.bfloat16)
    expected = chunk_gated_delta_rule(**x)[0]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            results.append(chunk_gated_delta_rule(**x)[0] + 1)
    done = torch.cuda.Event()
    chunk_gated_delta_rule(**x)
    done.record()
    done.synchronize()
    torch.cuda.synchronize()
    for result in results:
        assert torch.equal(result, expected + 1)


def test_scratch_memory_is_pytorchs():
    x, _ = on_device(draw("gated_delta_rule", B=1, T=1024, H=8, K=128, V=128, state=False), torch.bfloat16)
    chunk_gated_delta_rule(**x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = chunk_gated_delta_rule(**x)
    assert torch.cuda.memory_allocated() == before + o.numel() * o.element_size()
    assert torch.cuda.max_memory_allocated() > torch.cuda.memory_allocated()


def test_autocast():
    x, _ = on_device(draw("gated_delta_rule", T=20), torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert chunk_gated_delta_rule(**{**x, "v": x["v"].bfloat16()})[0].dtype == torch.bfloat16


def test_two_runs_agree():
    x, _ = on_device(draw("kda", B=2, T=300, H=3, K=128, V=128), torch.bfloat16)
    for function in (chunk_kda, fused_recurrent_kda):
        first, second = (function(**x, output_final_state=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Layers and models ---------------------------------------------------------------------------------------------------


def layer(name):
    sizes = {"hidden_size": 64, "num_heads": 2, "layer_idx": 0}
    return {
        "delta_net": lambda: layers.DeltaNet(**sizes),
        "gated_delta_net": lambda: layers.GatedDeltaNet(**sizes, head_dim=16, num_v_heads=4),
        "kda": lambda: layers.KimiDeltaAttention(**sizes, head_dim=32),
        "ttt_linear": lambda: layers.TTTLinear(**sizes),
    }[name]().eval()


@needs("short_conv", "step")
@pytest.mark.parametrize(
    "name", ["delta_net", "gated_delta_net", "kda", pytest.param("ttt_linear", marks=needs("ttt_linear", "step"))]
)
@torch.no_grad()
def test_layers(name):
    """Reading, then tokens one by one, against the same layer on the CPU."""
    one = layer(name)
    x = torch.randn(2, 100, 64)
    outputs = {}
    for device in ("cpu", "cuda"):
        one.to(device)
        cache = layers.Cache()
        rows = [one(x[:, :90].to(device), past_key_values=cache)[0]]
        rows += [one(x[:, t : t + 1].to(device), past_key_values=cache)[0] for t in range(90, 100)]
        outputs[device] = torch.cat(rows, 1).cpu()
    assert_close(name, outputs["cuda"], outputs["cpu"], 1e-3)


@needs("short_conv", "forward")
@torch.no_grad()
def test_layer_with_padding():
    one = layer("gated_delta_net").cuda()
    x, mask = torch.randn(2, 90, 64, device="cuda"), torch.ones(2, 90, device="cuda")
    mask[1, :30] = 0
    alone, _, _ = one(x[1:, 30:])
    assert_close("y", one(x, attention_mask=mask)[0][1:, 30:], alone, 1e-4)


MODELS = ["qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"]


@pytest.fixture
def model(request):
    pytest.importorskip("transformers")
    pytest.importorskip(f"transformers.models.{request.param}")
    from test_accelerate import build

    fastweight.restore()
    yield build(request.param).cuda()
    fastweight.restore()


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_models_read_and_generate(model, monkeypatch):
    from test_accelerate import calls, tokens

    counts = calls(monkeypatch)
    ids = tokens(2, 70).cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        generated = model.generate(ids[:, :9], attention_mask=torch.ones_like(ids[:, :9]), **options)
        assert counts.delta_rule == counts.short_conv == 0
        fastweight.accelerate()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            logits = model(input_ids=ids, use_cache=False).logits
        assert counts.delta_rule == sum("linear" in kind for kind in model.config.layer_types)
        again = model.generate(ids[:, :9], attention_mask=torch.ones_like(ids[:, :9]), **options)
    torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)
    assert (again == generated).float().mean() > 0.9  # a tie may fall the other way
    assert counts.delta_rule >= 8


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("ttt_linear", lambda x: ops.chunk_ttt_linear(x, x, x, x[0, 0], x[0, 0], 0.1)),
        ("short_conv", lambda x: ops.causal_conv1d(x[0], x[0, 0].transpose(0, 1).contiguous())),
    ],
)
def test_families_without_kernels_say_so(family, call):
    if "cuda" in _info.devices(family, "forward"):
        pytest.skip(f"there is a forward of {family} on CUDA")
    with pytest.raises(NotImplementedError, match="has no CUDA implementation, cannot run on cuda:0"):
        call(torch.rand(1, 20, 4, 16, device="cuda"))


def test_what_does_not_fit_is_refused():
    x, _ = on_device(draw("gated_delta_rule", T=20, K=16, V=16), torch.bfloat16)
    with pytest.raises(ValueError, match="k: expected"):
        chunk_gated_delta_rule(**{**x, "k": x["k"].cpu()})
    with pytest.raises(ValueError, match=r"g: expected shape"):
        chunk_gated_delta_rule(**{**x, "g": x["g"][:, :3]})
    with pytest.raises(NotImplementedError, match="fp64"):
        chunk_gated_delta_rule(**{name: value.double() for name, value in x.items()})
    assert torch.isfinite(F.silu(chunk_gated_delta_rule(**x)[0])).all()  # the device is well
