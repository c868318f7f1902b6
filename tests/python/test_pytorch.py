"""The operators as citizens of PyTorch: gradcheck, opcheck, compile, autocast, checkpointing, strides, fake tensors."""

import gc
import inspect
import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fastweight import _delta_rule, ops
from fastweight._compiler import constant_result, outside_graphs
from helpers import assert_close, draw, leaves
from test_delta_rule import CHUNK, OPS, RECURRENT
from test_related import OPERATORS
from test_related import draw as draw_related
from test_related import opcheck_cases as related_opcheck_cases
from test_ttt_linear import KEEP
from test_ttt_linear import draw as draw_ttt

FAMILY = [(op, f) for functions in (CHUNK, RECURRENT) for op, f in functions.items()]


def functions():
    """(name, function of keyword tensors, tensors) of everything that is differentiable."""
    for op, function in FAMILY:
        yield op, function, draw(op, T=21, K=6, V=5)
    yield "ttt_linear", ops.chunk_ttt_linear, draw_ttt(T=21, D=6)
    for op, (chunk, recurrent) in OPERATORS.items():
        yield op, recurrent if op == "linear_attn" else chunk, draw_related(op, T=21, K=6, V=5)


DIFFERENTIABLE = [pytest.param(f, x, id=f.__name__) for _, f, x in functions()]


@pytest.mark.parametrize(("function", "tensors"), DIFFERENTIABLE)
def test_gradcheck(function, tensors):
    names = list(tensors)
    inputs = tuple(x.detach().clone().requires_grad_() for x in tensors.values())

    def call(*values):
        return function(**dict(zip(names, values, strict=True)), output_final_state=True)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_gradcheck_through_activations():
    tensors = draw("kda", T=6, H=1, HV=2, K=4, V=3, raw=True)
    names = list(tensors)

    def call(*values):
        return ops.chunk_kda(
            **dict(zip(names, values, strict=True)), output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=torch.tensor([0, 6]),
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in tensors.values()))


DELTA_RULE_BITS = _delta_rule.bits(_delta_rule.PER_HEAD, 16, False, True, False)
DELTA_RULE_OPTIONS = (DELTA_RULE_BITS, None, None)


def delta_rule_arguments(requires_grad, cu_seqlens=None):
    x = draw("gated_delta_rule", T=20, N=None if cu_seqlens is None else 2, dtype=torch.float32)
    values = [x[name].requires_grad_(requires_grad) for name in ("q", "k", "v", "g", "beta")]
    return (*values, None, None, x["initial_state"].requires_grad_(requires_grad), cu_seqlens)


def ttt_arguments(requires_grad):
    x = draw_ttt(T=20, dtype=torch.float32)
    return (*(value.requires_grad_(requires_grad) for value in x.values()), None)


def opcheck_cases():
    cu = torch.tensor([0, 5, 20])
    for with_states in (False, True):
        bits = DELTA_RULE_BITS | (_delta_rule.OUTPUT_FINAL_STATE if with_states else 0)
        options = (bits, None, None, torch.float32 if with_states else None, None, 0)
        yield "delta_rule_forward", (*delta_rule_arguments(False), *options)
        yield "delta_rule_differentiable", (*delta_rule_arguments(True), *options)
    options = (DELTA_RULE_BITS | _delta_rule.OUTPUT_FINAL_STATE, None, None, None, None, 0)
    yield "delta_rule_differentiable", (*delta_rule_arguments(True, cu), *options)
    for order in (0, _delta_rule.STATE_V_FIRST):
        options = (DELTA_RULE_BITS | _delta_rule.STATES_FOR_BACKWARD | order, None, None, torch.float32, None, 0)
        yield "delta_rule_differentiable", (*delta_rule_arguments(True), *options)
    d_o = torch.randn(1, 20, 2, 16)
    for mask in (0b11111111, 0b00000101):
        yield "delta_rule_backward", (d_o, None, None, None, *delta_rule_arguments(False), *DELTA_RULE_OPTIONS, mask)
    *inputs, state, cu_seqlens = delta_rule_arguments(False)
    yield "delta_rule_step", (state, None, *inputs, None, cu_seqlens, *DELTA_RULE_OPTIONS)
    for wanted in (1, 2, 3):
        yield "delta_rule_map_forward", (*delta_rule_arguments(False), *DELTA_RULE_OPTIONS, wanted)
        without_state = (*inputs, None, cu_seqlens, *DELTA_RULE_OPTIONS, wanted)
        yield "delta_rule_map_backward", (d_o, None, *without_state)
    for flag in (False, True):
        yield "ttt_linear_forward", (*ttt_arguments(False), None, 1e-6, 16, flag, 0)
        yield "ttt_linear_differentiable", (*ttt_arguments(True), None, 1e-6, 16, flag, 0)
    yield "ttt_linear_backward", (d_o, None, None, None, *ttt_arguments(False), None, 1e-6, 16, 0b11111111)
    *inputs, state, bias, cu_seqlens = ttt_arguments(False)
    kept = (state, bias, torch.zeros_like(state), torch.zeros_like(bias), torch.zeros(1, dtype=torch.int32))
    yield "ttt_linear_step", (*kept, None, *inputs, None, None, cu_seqlens, None, 1e-6, 16)
    convolution = (torch.randn(1, 20, 8), torch.randn(8, 4), torch.randn(8), torch.randn(1, 8, 4), None)
    yield "short_conv_forward", (*convolution, 1, None, True)
    yield "short_conv_differentiable", (*(x.clone().requires_grad_() for x in convolution[:4]), None, 1, None, True)
    yield "short_conv_backward", (torch.randn(1, 20, 8), None, *convolution, 1, 0b1111)
    x, weight, bias, state, _ = convolution
    yield "short_conv_step", (None, state, None, x[:, :1], weight, bias, None, None, 1)
    for suffix in ("forward", "differentiable"):
        grad = suffix == "differentiable"
        matrix, gate = torch.randn(1, 20, 2, 16, requires_grad=grad), torch.randn(1, 20, 2, requires_grad=grad)
        parameters = (torch.randn(2, requires_grad=grad), torch.randn(2, requires_grad=grad))
        yield f"chunk_local_cumsum_{suffix}", (gate, cu, 16, False, torch.float32)
        yield f"solve_tril_{suffix}", (matrix, None, torch.float32)
        yield f"l2norm_{suffix}", (matrix, 1e-6, torch.float32)
        yield f"gate_activation_{suffix}", (gate, *parameters, None, None, 0, torch.float32)
    gate, matrix, parameter = torch.randn(1, 20, 2), torch.randn(1, 20, 2, 16), torch.randn(2)
    yield "chunk_local_cumsum_backward", (gate, None, 16, False, 1)
    yield "solve_tril_backward", (matrix, matrix, None, 1)
    yield "l2norm_backward", (matrix, matrix, gate, 1)
    yield "gate_activation_backward", (gate, gate, parameter, parameter, None, None, 0, 0b111)
    yield "scaled_dot_kkt_forward", (matrix, gate, gate, cu, 16)
    yield "scaled_dot_kkt_backward", (matrix, matrix, gate, None, cu, 0b111)
    yield "wy_forward", (matrix, matrix, gate, gate, matrix, None)
    yield "wy_backward", (matrix, None, matrix, matrix, gate, gate, matrix, None, 0b1111)
    norm = (matrix, matrix + 1, torch.randn(16))
    yield "rms_norm_forward", (*norm, 1e-5, 0)
    yield "rms_norm_differentiable", (*(x.clone().requires_grad_() for x in norm), 1e-5, 1)
    yield "rms_norm_backward", (matrix, *norm, 1e-5, 0, 0b111)
    yield "rms_norm_in_place", (matrix.clone(), *norm[1:], 1e-5, 0)
    yield from related_opcheck_cases()


def test_opcheck_covers_every_operator():
    registered = {
        name.removeprefix("fastweight::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fastweight::")
    }
    without_tensors = {"info", "delta_rule_kept_words", "ttt_linear_kept_words"}
    assert {name for name, _ in opcheck_cases()} == registered - without_tensors


@pytest.mark.parametrize(("name", "arguments"), [pytest.param(n, a, id=n) for n, a in opcheck_cases()])
def test_opcheck(name, arguments):
    torch.library.opcheck(getattr(torch.ops.fastweight, name).default, arguments)


INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler"),
        pytest.mark.xdist_group("inductor"),  # a process compiles its headers first
    ],
)


def compile_cases():
    """The related operators are one to PyTorch's compiler: of them DPLR alone goes all the way."""
    related = {f for functions in OPERATORS.values() for f in functions} - {ops.chunk_dplr_delta_rule}
    for case in DIFFERENTIABLE:
        yield pytest.param(*case.values, "aot_eager", id=f"{case.id}-aot_eager")
        if case.values[0] not in related:
            yield pytest.param(*case.values, *INDUCTOR.values, marks=INDUCTOR.marks, id=f"{case.id}-inductor")


@pytest.mark.parametrize(("function", "tensors", "backend"), list(compile_cases()))
def test_compile_without_a_graph_break(function, tensors, backend):
    torch._dynamo.reset()

    def loss(x):
        results = function(**x, output_final_state=True)
        return sum((result * 2).square().sum() for result in results)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    x = leaves(tensors, torch.float32, KEEP)
    eager = torch.autograd.grad(loss(x), list(x.values()))
    again = torch.autograd.grad(compiled(x), list(x.values()))
    for a, b in zip(eager, again, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(loss(x), compiled(x))


def test_marks_for_the_compiler():
    """Those that leave it unloaded say what PyTorch's own say."""
    assert vars(constant_result(lambda: None)) == vars(torch.compiler.assume_constant_result(lambda: None))
    eager = outside_graphs(lambda x: x * 2)
    explained = torch._dynamo.explain(lambda x: eager(x + 1) + 1)(torch.ones(2))
    assert explained.graph_break_count == 1


def test_compile_with_a_symbolic_length():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ops.chunk_gated_delta_rule, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (20, 33, 70):
        x = leaves(draw("gated_delta_rule", T=T), torch.float32)
        a, b = (torch.autograd.grad(f(**x)[0].sum(), list(x.values())) for f in (ops.chunk_gated_delta_rule, compiled))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compile_step_in_place():
    torch._dynamo.reset()
    x = draw("gated_delta_rule", T=1, dtype=torch.float32)
    state = x.pop("initial_state")
    ours, theirs = state.clone(), state.clone()
    compiled = torch.compile(
        lambda state: ops.delta_rule_step(**x, state=state) * 2, fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        assert torch.equal(compiled(ours), ops.delta_rule_step(**x, state=theirs) * 2)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, state)


def test_compile_variable_lengths_with_kept_states():
    torch._dynamo.reset()
    cu_seqlens = torch.tensor([0, 40, 40, 100])
    x = leaves(draw("kda", T=100, N=3), torch.float32)

    def loss(x):
        return ops.chunk_kda(**x, cu_seqlens=cu_seqlens, disable_recompute=True)[0].square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    a, b = (torch.autograd.grad(f(x), list(x.values())) for f in (loss, compiled))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# What a forward keeps for the backward -------------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_states_in_sixteen_bits_are_kept(op, dtype, v_first, monkeypatch):
    """As a CUDA device has them: in the type of q, [.., V, K] in memory. The backward takes them on the CPU too."""
    x = draw(op, B=2, T=100, K=16, V=12)
    options = {}
    if v_first and op != "delta_rule":
        x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
        options["state_v_first"] = True
    exact, rounded = leaves(x), leaves(x, dtype)

    def run(x):
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y)
        with hooks:
            o, state = CHUNK[op](**x, output_final_state=True, **options)
        return saved, torch.autograd.grad(o.double().sum() + state.sum(), list(x.values()))

    _, expected = run(exact)
    plain, recomputed = run(rounded)
    assert len(plain) == len(x)
    monkeypatch.setattr(_delta_rule, "_dtype_of_kept_states", lambda q, options, disable_recompute: q.dtype)
    saved, found = run(rounded)
    (states,) = (y for y in saved if y.dim() == 5)
    assert states.dtype == dtype
    states = states if options else states.transpose(-1, -2)
    assert states.shape == (2, 2, 2, 12, 16)
    assert states.is_contiguous()
    for name, a, b, c in zip(x, found, expected, recomputed, strict=True):
        assert_close(name, a, b, 2e-2)
        assert_close(name, a, c, 2e-2)
    assert not all(torch.equal(a, b) for a, b in zip(found, recomputed, strict=True))


def test_what_is_kept_on_cuda():
    """The choice by device, type and form, and the shapes without values, for which no device is needed."""
    keep = _delta_rule._dtype_of_kept_states
    with FakeTensorMode():
        q, v, beta = (torch.empty(1, 300, *n, device="cuda") for n in ((2, 64), (4, 32), (4,)))
        for dtype in (torch.bfloat16, torch.float16):
            assert keep(q.to(dtype), 0, False) == keep(q.to(dtype), 0, True) == dtype
            assert keep(q.to(dtype), _delta_rule.TOKEN_BY_TOKEN, False) is None
            assert keep(q.to(dtype).cpu(), 0, False) is None
        assert keep(q, 0, False) is None
        assert keep(q, 0, True) == keep(q.bfloat16().cpu(), 0, True) == torch.float32
        q, v = q.bfloat16(), v.bfloat16()
        cu_seqlens = torch.empty(4, device="cuda", dtype=torch.int32)
        for v_first in (False, True):
            bits = _delta_rule.bits(_delta_rule.PER_HEAD, 64, v_first, True, False)
            options = (bits | _delta_rule.STATES_FOR_BACKWARD, None, None, torch.bfloat16, None, 0)
            inputs = (q, q, v, beta, beta, None, None, None, cu_seqlens)
            states = torch.ops.fastweight.delta_rule_forward(*inputs, *options)[2]
            states = states if v_first else states.transpose(-1, -2)
            assert states.shape == (1, 300 // 64 + 3, 4, 32, 64)
            assert states.is_contiguous()
            assert states.device.type == "cuda"


@pytest.mark.parametrize(("function", "tensors"), DIFFERENTIABLE)
def test_fake_and_meta_tensors(function, tensors):
    real = function(**tensors, output_final_state=True)
    meta = function(**{name: x.to("meta") for name, x in tensors.items()}, output_final_state=True)
    with FakeTensorMode() as mode:
        fake = function(**{name: mode.from_tensor(x) for name, x in tensors.items()}, output_final_state=True)
    for a, b, c in zip(real, meta, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) == (c.shape, c.dtype, c.stride())


@pytest.mark.parametrize(("function", "tensors"), DIFFERENTIABLE)
def test_strides_without_copies(function, tensors):
    """Transposed, interleaved and broadcast inputs give the bits of dense ones."""
    dense = leaves(tensors, torch.float32, KEEP)

    def strided(x):
        if x.dim() < 3:
            return x.detach().clone().requires_grad_()
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        wide = wide.transpose(1, 2).contiguous().transpose(1, 2)
        view = wide[..., :: 2 if x.shape[-1] > 1 else 1][..., : x.shape[-1]]
        view.copy_(x.detach())
        assert not view.is_contiguous()
        return view.requires_grad_()

    scattered = {name: strided(x) for name, x in dense.items()}
    results = []
    for x in (dense, scattered):
        outputs = function(**x, output_final_state=True)
        results.append([*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), list(x.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_broadcast_input():
    x = draw("gated_delta_rule", T=10, dtype=torch.float32)
    beta = torch.tensor(0.3, requires_grad=True)
    x["beta"] = beta.expand(1, 10, 2)
    one = ops.chunk_gated_delta_rule(**x)[0]
    one.sum().backward()
    x["beta"] = torch.full((1, 10, 2), 0.3, requires_grad=True)
    ops.chunk_gated_delta_rule(**x)[0].sum().backward()
    torch.testing.assert_close(beta.grad, x["beta"].grad.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_autocast(op, dtype):
    x = leaves(draw(op, T=20), torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        o, _ = CHUNK[op](**x)
        assert o.dtype == torch.float32  # one type: nothing to settle
        mixed = {**x, "v": x["v"].to(dtype)}
        o, _ = CHUNK[op](**mixed)
        assert o.dtype == dtype
    o.float().sum().backward()
    assert x["q"].grad.dtype == torch.float32
    error = AssertionError if op == "delta_rule" else ValueError
    with pytest.raises(error, match="q, k, v: expected one dtype"):
        CHUNK[op](**mixed)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("function", "tensors"), DIFFERENTIABLE)
def test_checkpointing(function, tensors, use_reentrant):
    x = leaves(tensors, torch.float32, KEEP)
    names = list(x)

    def call(*values):
        return function(**dict(zip(names, values, strict=True)))[0].square()

    plain = torch.autograd.grad(call(*x.values()).sum(), list(x.values()), allow_unused=True)
    checkpoint(call, *x.values(), use_reentrant=use_reentrant).sum().backward()
    for a, b in zip(plain, x.values(), strict=True):
        assert torch.equal(a, b.grad)


@pytest.mark.parametrize(("function", "tensors"), DIFFERENTIABLE)
def test_nothing_is_saved_without_gradients(function, tensors):
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    x = leaves(tensors, torch.float32, KEEP)
    with hooks:
        with torch.no_grad():
            assert function(**x)[0].grad_fn is None
        with torch.inference_mode():
            assert function(**x)[0].is_inference()
        function(**{name: value.detach() for name, value in x.items()})
        assert not saved
        function(**x)
        assert len(saved) == len(x)


def test_unused_outputs_and_inputs():
    x = draw("kda", T=20, dtype=torch.float32)
    x["v"].requires_grad_()
    o, state = ops.chunk_kda(**x, output_final_state=True)
    (from_o,) = torch.autograd.grad(o.sum(), x["v"], retain_graph=True)
    (from_state,) = torch.autograd.grad(state.sum(), x["v"], retain_graph=True)
    (from_both,) = torch.autograd.grad(o.sum() + state.sum(), x["v"])
    torch.testing.assert_close(from_o + from_state, from_both)


def test_second_derivatives_are_refused():
    x = leaves(draw("gated_delta_rule", T=4, K=4, V=4))
    (gradient,) = torch.autograd.grad(ops.chunk_gated_delta_rule(**x)[0].square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_no_memory_is_kept():
    x = leaves(draw("gated_delta_rule", T=50), torch.float32)

    def live():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    def step():
        o, state = ops.chunk_gated_delta_rule(**x, output_final_state=True)
        torch.autograd.grad(o.sum() + state.sum(), list(x.values()))

    step()
    before = live()
    for _ in range(3):
        step()
    assert live() <= before


def test_every_argument_has_a_name():
    for name in ops.__all__:
        if name in ("fused_chunk_delta_rule", "fused_chunk_gla"):
            continue  # which fla keeps to say that they are gone
        kinds = {p.kind for p in inspect.signature(getattr(ops, name)).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name
        assert getattr(ops, name).__doc__, name
