"""Training on CUDA tensors: every gradient against double precision on the CPU, then what PyTorch does with gradients:
compile, checkpointing, autocast, graphs of a whole training step, data parallelism, models of transformers."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastweight
from fastweight import _ttt_linear, layers, ops
from helpers import assert_close, draw, gradients, leaves
from test_cuda_large import rows
from test_delta_rule import CHUNK, FP32, RAW, RECURRENT, THRESHOLDS
from test_ttt_linear import KEEP
from test_ttt_linear import THRESHOLDS as TTT_THRESHOLDS
from test_ttt_linear import draw as draw_ttt

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tensor cores take 16-bit operands: docs/notation.md has the room that this asks for.
HALF = {name: 1.4 * bound for name, bound in THRESHOLDS.items()}
TTT_HALF = {name: 1.4 * bound for name, bound in TTT_THRESHOLDS.items()}
TTT_FP32 = dict.fromkeys(TTT_THRESHOLDS, 2e-4)


def place(tensors, dtype, keep=(*KEEP, "g", "beta", "A_log", "dt_bias")):
    """Leaves on the device; q, k and v in `dtype`, the others in fp32."""
    return {name: x.to(DEVICE).detach().requires_grad_() for name, x in leaves(tensors, dtype, keep).items()}


def on_host(tensors):
    """The same numbers as leaves in double."""
    return leaves({name: x.detach().double().cpu() for name, x in tensors.items()})


def compare(function, x, bounds, **options):
    """Results and every gradient against the reference on the CPU, of a loss that reads o and all states."""
    outputs = function(**x, output_final_state=True, **options)
    exact = on_host(x)
    options = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    expected = function(**exact, output_final_state=True, **options)
    d_outputs = [torch.randn(y.shape).to(y.dtype) for y in outputs]
    for a, b in zip(outputs, expected, strict=True):
        assert_close("output", a.cpu(), b, bounds["o"])
    ours = gradients(outputs, [d.to(DEVICE) for d in d_outputs], x)
    theirs = gradients(expected, d_outputs, exact)
    for name in x:
        assert ours[name].dtype == x[name].dtype
        assert_close(f"gradient of {name}", ours[name].cpu(), theirs[name], bounds[name])


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("functions", "op"), [pytest.param(f, op, id=f[op].__name__) for f in (CHUNK, RECURRENT) for op in CHUNK]
)
def test_gradients(functions, op, dtype):
    x = place(draw(op, B=2, T=200, H=2, K=64, V=96), dtype)
    compare(functions[op], x, FP32 if dtype == torch.float32 else HALF)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("functions", [CHUNK, RECURRENT], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_gradients_through_gates_norms_and_groups(op, functions, dtype):
    """dq and dk are sums over the value heads of a group, those of A_log and dt_bias over all tokens."""
    x = place(draw(op, B=2, T=150, H=2, HV=6, K=64, V=32, raw=True), dtype)
    compare(functions[op], x, FP32 if dtype == torch.float32 else HALF, **RAW)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("functions", [CHUNK, RECURRENT], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("op", CHUNK)
def test_gradients_of_packed_sequences(op, functions, dtype):
    cu_seqlens = torch.tensor([0, 1, 1, 70, 134, 200], device=DEVICE)
    x = place(draw(op, T=200, K=32, V=48, N=5), dtype)
    compare(functions[op], x, FP32 if dtype == torch.float32 else HALF, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("K", "V"), [(128, 128), (256, 64), (20, 36)])
@pytest.mark.parametrize("op", CHUNK)
def test_gradients_by_width(op, K, V, dtype):
    x = place(draw(op, T=130, H=1, K=K, V=V), dtype)
    compare(CHUNK[op], x, FP32 if dtype == torch.float32 else HALF)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_with_kept_states(keep, dtype):
    x = place(draw("kda", B=2, T=200, K=64, V=32), dtype)
    bounds = FP32 if dtype == torch.float32 else HALF
    compare(functools.partial(ops.chunk_kda, disable_recompute=keep, state_v_first=False), x, bounds)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("chunk_size", "cu_seqlens"), [(16, None), (32, None), (64, None), (16, [0, 1, 1, 70, 134, 200])]
)
def test_gradients_of_ttt_linear(chunk_size, cu_seqlens, dtype):
    """The last mini-batch of a sequence is not full: the rows that extend it count too."""
    N = 2 if cu_seqlens is None else len(cu_seqlens) - 1
    x = place(draw_ttt(B=2 if cu_seqlens is None else 1, T=200, D=64, N=N), dtype)
    options = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens, device=DEVICE)}
    bounds = TTT_FP32 if dtype == torch.float32 else TTT_HALF
    compare(ops.chunk_ttt_linear, x, bounds, chunk_size=chunk_size, **options)


def test_gradients_of_the_short_convolution():
    x = {"x": torch.randn(2, 70, 96), "weight": torch.randn(96, 4), "bias": torch.randn(96)}
    x = place(x, torch.float32)
    bounds = dict.fromkeys(("o", "x", "weight", "bias"), 1e-4)
    compare(functools.partial(ops.causal_conv1d, activation="silu"), x, bounds)


# One of each, small: a function of named tensors and the tensors ---------------------------------------------------


def cases():
    for functions in (CHUNK, RECURRENT):
        for op, function in functions.items():
            raw = op != "delta_rule"
            x = draw(op, B=2, T=100, HV=4 if raw else 2, K=32, V=32, raw=raw)
            yield function.__name__, functools.partial(function, **(RAW if raw else {})), x
    yield "chunk_ttt_linear", ops.chunk_ttt_linear, draw_ttt(B=2, T=100, D=32)


EVERY = [pytest.param(f, x, id=name) for name, f, x in cases()]


def loss_of(function, x, **options):
    o, state, *_ = function(**x, output_final_state=True, **options)
    return o.float().square().sum() + state.square().sum()


def gradients_of(function, x, **options):
    return torch.autograd.grad(loss_of(function, x, **options), list(x.values()))


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.isfinite(x).all()
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "tensors"), EVERY)
def test_two_runs_agree(function, tensors, dtype):
    x = place(tensors, dtype)
    assert_same_bits(gradients_of(function, x), gradients_of(function, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", CHUNK)
def test_gradients_do_not_depend_on_the_rest_of_the_batch(op, dtype):
    """A sequence alone, in a batch and packed among others."""
    x = place(draw(op, B=3, T=100, K=64, V=64), dtype)
    batch = gradients_of(CHUNK[op], x)
    alone = gradients_of(CHUNK[op], {name: y[1:2].detach().requires_grad_() for name, y in x.items()})
    assert_same_bits(alone, [y[1:2] for y in batch])
    packed = {n: (y if n == "initial_state" else y.flatten(0, 1)[None]).detach().requires_grad_() for n, y in x.items()}
    cu_seqlens = torch.tensor([0, 100, 200, 300], device=DEVICE)
    found = dict(zip(x, gradients_of(CHUNK[op], packed, cu_seqlens=cu_seqlens), strict=True))
    for name, y in zip(x, batch, strict=True):
        assert_same_bits([found[name]], [y if name == "initial_state" else y.flatten(0, 1)[None]])


@pytest.mark.parametrize(
    ("op", "gate", "options"),
    [("gated_delta_rule", 1, {}), ("kda", 2, {}), ("kda", 2, {"disable_recompute": True})],
)
def test_what_is_kept(op, gate, options):
    """Of a forward that records gradients: o, one state per chunk in the type of q, and what was made of the chunk, all
    of it or, with decays per channel, less than a fifth.
    """
    x = place(draw(op, T=1024, H=4, K=128, V=64, state=False), torch.bfloat16)
    run = functools.partial(getattr(ops, f"chunk_{op}"), **options)
    run(**x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, _ = run(**x)
    chunks = 1024 // 64 * 4
    words_of = functools.partial(torch.ops.fastweight.delta_rule_kept_words, torch.cuda.current_device(), gate)
    least, most = words_of(torch.bfloat16, 128, False), words_of(torch.bfloat16, 128, True)
    assert least > 0
    assert least == most if gate == 1 else 5 * least < most
    words = most if options else least
    assert torch.cuda.memory_allocated() - before == 2 * (o.numel() + chunks * 128 * 64) + 4 * chunks * words
    del o
    with torch.no_grad():
        o, _ = run(**x)
    assert torch.cuda.memory_allocated() - before == 2 * o.numel()


def test_states_of_ttt_linear_are_kept(monkeypatch):
    """Before every mini-batch of 16 tokens, with D = 64: no bit depends on it."""
    x = place(draw_ttt(B=2, T=200, D=64), torch.bfloat16)
    assert _ttt_linear._words_of_kept_states(x["q"], 16) > 0
    kept = gradients_of(ops.chunk_ttt_linear, x)
    monkeypatch.setattr(_ttt_linear, "_words_of_kept_states", lambda q, mini_batch: 0)
    assert_same_bits(gradients_of(ops.chunk_ttt_linear, x), kept)


def test_gradients_of_views():
    """The gradient of a sum is one number with strides of 0, that of a slice has gaps."""
    x = place(draw("gated_delta_rule", T=100, K=32, V=64, state=False), torch.bfloat16)
    values = list(x.values())
    o, _ = ops.chunk_gated_delta_rule(**x)
    expanded = torch.autograd.grad(o.sum(), values, retain_graph=True)
    assert_same_bits(expanded, torch.autograd.grad(o, values, torch.ones_like(o), retain_graph=True))
    wide = torch.randn(1, 100, 2, 128, device=DEVICE, dtype=torch.bfloat16)
    strided = torch.autograd.grad(o, values, wide[..., ::2], retain_graph=True)
    assert_same_bits(strided, torch.autograd.grad(o, values, wide[..., ::2].contiguous()))


@pytest.mark.parametrize(
    ("op", "gigabytes"), [("delta_rule", 90), ("gated_delta_rule", 90), ("kda", 125), ("ttt_linear", 90)]
)
def test_many_elements(op, gigabytes, memory):
    """More than 2^31 in a tensor: the gradients of the last chunks against those of these chunks alone, from the state
    before them: the same bits."""
    T, H, D, cut = 64 * 2200, 128, 128, 64 * 2198
    assert T * H * D > 2**31
    memory(gigabytes)
    if op == "ttt_linear":
        x = {name: torch.randn(1, T, H, D, device=DEVICE, dtype=torch.bfloat16).mul_(0.1) for name in "qkv"}
        x["eta"] = torch.rand(1, T, H, 1, device=DEVICE).mul_(0.01)
        weights = {"w": torch.rand(H, D, device=DEVICE), "b": torch.randn(H, D, device=DEVICE)}
        function = functools.partial(ops.chunk_ttt_linear, **weights)
        states = ("initial_state", "initial_state_bias")
    else:
        x = rows(op, (1, T, H, D), torch.bfloat16)
        function = functools.partial(CHUNK[op], use_qk_l2norm_in_kernel=True)
        states = ("initial_state",)

    def run(x, **options):
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        o = function(**leaves, **options)[0]
        return torch.autograd.grad(o, list(leaves.values()), x["v"])

    with torch.no_grad():
        middle = function(**{name: y[:, :cut] for name, y in x.items()}, output_final_state=True)[1:]
    alone = run({name: y[:, cut:] for name, y in x.items()}, **dict(zip(states, middle, strict=True)))
    assert_same_bits(alone, [y[:, cut:] for y in run(x)])


# PyTorch's surroundings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("function", "tensors"), EVERY)
def test_compile(function, tensors, backend):
    torch._dynamo.reset()
    x = place(tensors, torch.bfloat16)
    compiled = torch.compile(functools.partial(loss_of, function), fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(x), list(x.values()))
    expected = gradients_of(function, x)
    if backend == "aot_eager":
        assert_same_bits(found, expected)
    for name, a, b in zip(x, found, expected, strict=True):
        assert_close(name, a, b, 1e-2)


@pytest.mark.parametrize("op", CHUNK)
def test_compile_with_lengths_on_the_device(op):
    """One graph for all lengths: their contents are not read."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(functools.partial(loss_of, CHUNK[op]), fullgraph=True, backend="aot_eager")
    x = place(draw(op, T=200, K=32, V=32, N=3), torch.bfloat16)
    for offsets in ([0, 64, 128, 200], [0, 0, 1, 200]):
        cu_seqlens = torch.tensor(offsets, device=DEVICE)
        found = torch.autograd.grad(compiled(x, cu_seqlens=cu_seqlens), list(x.values()))
        assert_same_bits(found, gradients_of(CHUNK[op], x, cu_seqlens=cu_seqlens))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("function", "tensors"), EVERY)
def test_checkpointing(function, tensors, use_reentrant):
    x = place(tensors, torch.bfloat16)

    def call(*values):
        return loss_of(function, dict(zip(x, values, strict=True)))

    expected = gradients_of(function, x)
    checkpoint(call, *x.values(), use_reentrant=use_reentrant).backward()
    assert_same_bits([y.grad for y in x.values()], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", CHUNK)
def test_autocast(op, dtype):
    """q and k of a product are in its type, v has stayed in fp32: gradients arrive in the types of the leaves."""
    x = place(draw(op, T=100, K=32, V=32), torch.float32)
    with torch.autocast(DEVICE, dtype=dtype):
        rows = {**x, "q": x["q"].to(dtype), "k": x["k"].to(dtype)}
        o, _ = CHUNK[op](**rows)
        assert o.dtype == dtype
        o.float().square().sum().backward()
    expected = torch.autograd.grad(CHUNK[op](**x)[0].square().sum(), list(x.values()), allow_unused=True)
    for name, b in zip(x, expected, strict=True):
        assert x[name].grad.dtype == torch.float32
        assert_close(name, x[name].grad, b, 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "tensors"), EVERY)
def test_graph_of_forward_and_backward(function, tensors, dtype):
    """Captured once, replayed with other contents: what an eager call gives. What waits would end the capture."""
    x = place(tensors, dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients_of(function, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = gradients_of(function, x)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x["v"].copy_(torch.randn_like(x["v"]))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, gradients_of(function, x))


@pytest.mark.parametrize("op", [*CHUNK, "ttt_linear"])
def test_graph_with_other_lengths(op):
    function = ops.chunk_ttt_linear if op == "ttt_linear" else CHUNK[op]
    tensors = draw_ttt(T=200, D=32, N=4) if op == "ttt_linear" else draw(op, T=200, K=32, V=32, N=4)
    x = place(tensors, torch.bfloat16)
    cu_seqlens = torch.tensor([0, 50, 100, 150, 200], device=DEVICE)
    gradients_of(function, x, cu_seqlens=cu_seqlens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients_of(function, x, cu_seqlens=cu_seqlens)
    for offsets in ([0, 50, 100, 150, 200], [0, 1, 1, 65, 200], [0, 200, 200, 200, 200]):
        cu_seqlens.copy_(torch.tensor(offsets))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, gradients_of(function, x, cu_seqlens=cu_seqlens))


def test_nothing_waits_for_the_device():
    x = place(draw("kda", T=200, K=32, V=32, N=3), torch.bfloat16)
    cu_seqlens = torch.tensor([0, 64, 128, 200], device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients_of(ops.chunk_kda, x, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Layers --------------------------------------------------------------------------------------------------------------

LAYERS = {
    "delta_net": lambda: layers.DeltaNet(hidden_size=64, num_heads=2),
    "gated_delta_net": lambda: layers.GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16, num_v_heads=4),
    "kda": lambda: layers.KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32),
    "ttt_linear": lambda: layers.TTTLinear(hidden_size=64, num_heads=2),
}


class Stack(nn.Module):
    """All layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mixers = nn.ModuleList(make() for make in LAYERS.values())
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in LAYERS)

    def forward(self, x, cu_seqlens=None):
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), cu_seqlens=cu_seqlens)[0]
        return x


def batch(seed, T=100):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2, T, 64, generator=generator) for _ in range(2))
    return x.to(DEVICE), y.to(DEVICE)


def parameter_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(1)
    layer = LAYERS[name]().train()
    x, y = batch(0)
    found = {}
    for device in ("cpu", DEVICE):
        layer.to(device)
        out = layer(x.to(device))[0]
        found[device] = parameter_gradients(layer, F.mse_loss(out, y.to(device)))
    for key, expected in found["cpu"].items():
        assert_close(key, found[DEVICE][key].cpu(), expected, 1e-3)


def test_layers_in_autocast():
    model = Stack().to(DEVICE)
    x, y = batch(0)
    exact = parameter_gradients(model, F.mse_loss(model(x), y))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = F.mse_loss(model(x), y)
    found = parameter_gradients(model, loss)
    for name, expected in exact.items():
        assert found[name].dtype == torch.float32
        assert_close(name, found[name], expected, 0.1)


def test_layers_compile():
    torch._dynamo.reset()
    model = Stack().to(DEVICE)
    x, y = batch(0)
    expected = parameter_gradients(model, F.mse_loss(model(x), y))
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    found = parameter_gradients(model, F.mse_loss(compiled(x), y))
    for name in expected:
        assert_close(name, found[name], expected[name], 1e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_graph_of_a_training_step(autocast):
    """Forward, backward and optimizer in one graph: three replays leave the parameters of three eager steps."""
    eager = Stack().to(DEVICE)
    captured = copy.deepcopy(eager)
    initial = copy.deepcopy(eager.state_dict())
    static_x, static_y = batch(0)

    def step(model, optimizer, x, y):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, capturable=True) for m in (eager, captured)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizers[1].zero_grad()
            step(captured, optimizers[1], static_x, static_y)
    torch.cuda.current_stream().wait_stream(stream)
    optimizers[1].zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step(captured, optimizers[1], static_x, static_y)
    captured.load_state_dict(initial)  # copies in place
    for state in optimizers[1].state.values():
        for value in state.values():
            value.zero_()
    losses = []
    for seed in range(3):
        x, y = batch(seed)
        static_x.copy_(x)
        static_y.copy_(y)
        graph.replay()
        optimizers[0].zero_grad()
        expected = step(eager, optimizers[0], x, y)
        torch.cuda.synchronize()
        assert torch.equal(loss, expected)
        losses.append(float(loss))
    assert len(set(losses)) == 3
    for (name, a), b in zip(captured.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, initial[name]), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_in_checkpoints(use_reentrant):
    model = Stack().to(DEVICE)
    x, y = batch(0)
    x.requires_grad_()
    expected = parameter_gradients(model, F.mse_loss(model(x), y))
    found = parameter_gradients(model, F.mse_loss(checkpoint(model, x, use_reentrant=use_reentrant), y))
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_layers_in_data_parallel():
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    backend = "nccl" if distributed.is_nccl_available() else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Stack().to(DEVICE)
        x, y = batch(0)
        expected = parameter_gradients(model, F.mse_loss(model(x), y))
        parallel = nn.parallel.DistributedDataParallel(model)
        found = parameter_gradients(model, F.mse_loss(parallel(x), y))
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
    finally:
        distributed.destroy_process_group()


def test_layers_with_packed_sequences():
    """The gradients of sequences packed into one row are those of the sequences one by one."""
    model = Stack().to(DEVICE)
    x, y = (z.flatten(0, 1)[None] for z in batch(0))
    offsets = [0, 30, 31, 120, 200]
    loss = F.mse_loss(model(x, cu_seqlens=torch.tensor(offsets, device=DEVICE)), y, reduction="sum")
    found = parameter_gradients(model, loss)
    parts = [slice(a, b) for a, b in zip(offsets, offsets[1:], strict=False)]
    loss = sum(F.mse_loss(model(x[:, part]), y[:, part], reduction="sum") for part in parts)
    expected = parameter_gradients(model, loss)
    for name in expected:
        assert_close(name, found[name], expected[name], 1e-3)


# Models of transformers ----------------------------------------------------------------------------------------------

MODELS = ["qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"]


@pytest.fixture
def accelerated(monkeypatch):
    """accelerated(model, ids): loss and gradients with our operators, which have to be called."""
    pytest.importorskip("transformers")
    from test_accelerate import calls

    counts = calls(monkeypatch)
    fastweight.restore()

    def run(model, ids):
        assert counts.delta_rule == 0
        fastweight.accelerate()
        result = train(model, ids)
        assert counts.delta_rule == sum("linear" in kind for kind in model.config.layer_types)
        return result

    yield run
    fastweight.restore()


def train(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_models_train(name, accelerated):
    """Loss and gradients with our operators against those of the code that they replace."""
    from test_accelerate import build, tokens

    model, ids = build(name).to(DEVICE), tokens(2, 70).to(DEVICE)
    loss, expected = train(model, ids)
    other_loss, found = accelerated(model, ids)
    assert other_loss == pytest.approx(loss, rel=1e-4)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert (found[key] - gradient).norm() <= 2e-3 * (gradient.norm() + 1e-6), key


@pytest.mark.parametrize("name", MODELS)
def test_models_train_in_sixteen_bits(name, accelerated):
    """About as far from fp32 as the code that is replaced: most of it is the rounding of everything else."""
    from test_accelerate import WITHOUT_EXPERTS, build, tokens

    model, ids = build(name, **WITHOUT_EXPERTS.get(name, {})).to(DEVICE), tokens(2, 70).to(DEVICE)
    exact_loss, exact = train(model, ids)
    model.bfloat16()
    plain_loss, plain = train(model, ids)
    our_loss, ours = accelerated(model, ids)
    assert abs(our_loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 5e-3 * exact_loss

    def distance(gradients):
        return torch.stack([(gradients[key] - x).norm() for key, x in exact.items()]).norm()

    assert distance(ours) <= 2 * distance(plain)
