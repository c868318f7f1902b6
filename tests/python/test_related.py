"""Linear attention, simple GLA, GLA, Comba, IPLR and DPLR from Python."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import naive
from fastweight import ops
from helpers import assert_close, gradients, leaves

OPERATORS = {
    "linear_attn": (ops.chunk_linear_attn, ops.fused_recurrent_linear_attn),
    "simple_gla": (ops.chunk_simple_gla, ops.fused_recurrent_simple_gla),
    "gla": (ops.chunk_gla, ops.fused_recurrent_gla),
    "comba": (ops.chunk_comba, ops.fused_recurrent_comba),
    "iplr": (ops.chunk_iplr_delta_rule, ops.fused_recurrent_iplr_delta_rule),
    "dplr": (ops.chunk_dplr_delta_rule, ops.fused_recurrent_dplr_delta_rule),
}
STEPS = {
    "linear_attn": ops.gla_step,
    "simple_gla": ops.gla_step,
    "gla": ops.gla_step,
    "comba": ops.comba_step,
    "iplr": ops.dplr_step,
    "dplr": ops.dplr_step,
}
KEEP = ("g", "gk", "beta", "initial_state")
FORMS = [pytest.param(op, f, id=f.__name__) for op, functions in OPERATORS.items() for f in functions]
CU = torch.tensor([0, 5, 5, 22, 40])


def draw(op, B=1, T=33, H=2, K=16, V=12, N=None, dtype=torch.float64):
    """Named as the chunk function names them."""
    keys = [F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(4)]
    x = {"q": keys[0], "k": keys[1], "v": torch.randn(B, T, H, V)}
    if op == "comba":
        x["p"] = F.normalize(keys[1] + 0.5 * keys[2], dim=-1)
    if op in ("iplr", "dplr"):
        x["b"] = keys[2]
        x["a"] = -torch.rand(B, T, H, 1) * F.normalize(keys[2] + 0.5 * keys[3], dim=-1)
    if op in ("simple_gla", "comba"):
        x["g"] = F.logsigmoid(torch.randn(B, T, H))
    if op in ("gla", "dplr"):
        x["g" if op == "gla" else "gk"] = F.logsigmoid(torch.randn(B, T, H, K))
    if op == "comba":
        x["beta"] = torch.rand(B, T, H)
    x["initial_state"] = torch.randn(B if N is None else N, H, K, V)
    return {name: value.to(dtype) for name, value in x.items()}


def call(op, function, x, **options):
    """(o, final_state); linear attention without its denominator."""
    x = dict(x)
    if op == "gla" and function is ops.fused_recurrent_gla:
        x["gk"] = x.pop("g")
    if op == "linear_attn":
        options["normalize"] = False
    return function(**x, output_final_state=True, **options)


def expected(op, x, **options):
    x = {"g" if name == "gk" else name: value for name, value in x.items()}
    correction = {"comba": "feedback", "iplr": "low_rank", "dplr": "low_rank"}.get(op)
    return naive.related(**x, correction=correction, **options)


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize(("op", "function"), FORMS)
def test_results_and_gradients(op, function, cu_seqlens):
    x = draw(op, B=2, T=40) if cu_seqlens is None else draw(op, T=40, N=4)
    reference = leaves(x)
    wanted = expected(op, reference, cu_seqlens=cu_seqlens)
    cotangents = [torch.randn_like(y) for y in wanted]
    wanted_gradients = gradients(wanted, cotangents, reference)
    for dtype, threshold in ((torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        inputs = leaves(x, dtype, KEEP)
        results = call(op, function, inputs, cu_seqlens=cu_seqlens)
        assert results[0].dtype == dtype
        for name, a, b in zip(("o", "final_state"), results, wanted, strict=True):
            assert_close(name, a, b, threshold)
        for name, value in gradients(results, cotangents, inputs).items():
            assert value.dtype == inputs[name].dtype
            assert_close(f"d{name}", value, wanted_gradients[name], threshold)


@pytest.mark.parametrize("per_value", [False, True], ids=["beta per head", "beta per value"])
def test_grouped_heads_of_comba(per_value):
    x = draw("comba", B=2, H=2)
    for name in ("v", "g", "beta"):
        x[name] = torch.cat([x[name], x[name].roll(1, 1), x[name].roll(2, 1)], 2)
    if per_value:
        x["beta"] = x["beta"].unsqueeze(-1) * torch.rand(x["v"].shape, dtype=torch.float64)
    x["initial_state"] = torch.randn(2, 6, 16, 12, dtype=torch.float64)
    reference = leaves(x)
    wanted = expected("comba", reference)
    cotangents = [torch.randn_like(y) for y in wanted]
    wanted_gradients = gradients(wanted, cotangents, reference)
    for dtype, threshold in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        for function in OPERATORS["comba"]:
            inputs = leaves(x, dtype, KEEP)
            results = call("comba", function, inputs)
            for name, a, b in zip(("o", "final_state"), results, wanted, strict=True):
                assert_close(name, a, b, threshold)
            for name, value in gradients(results, cotangents, inputs).items():
                assert_close(f"d{name}", value, wanted_gradients[name], threshold)
        state = x["initial_state"].to(dtype, copy=True)
        tokens = {name: value.to(dtype) for name, value in x.items() if name != "initial_state"}
        assert_close("o of a step", ops.comba_step(**tokens, state=state), wanted[0], threshold)
        assert_close("state", state, wanted[1], threshold)


@pytest.mark.parametrize(("op", "function"), FORMS)
def test_defaults(op, function):
    """Without states, and with a scale."""
    x = draw(op)
    del x["initial_state"]
    o, _ = call(op, function, x, scale=0.3)
    assert_close("o", o, expected(op, x, scale=0.3)[0], 1e-10)
    options = {"normalize": False} if op == "linear_attn" else {}
    if op == "gla" and function is ops.fused_recurrent_gla:
        x["gk"] = x.pop("g")
    assert function(**x, **options)[1] is None


@pytest.mark.parametrize("op", STEPS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_steps(op, packed):
    """Tokens one by one, in slots, and packed ones at once."""
    x = draw(op, B=1 if packed else 3, T=40 if packed else 6, N=4 if packed else None, dtype=torch.float32)
    wanted = call(op, OPERATORS[op][1], x, cu_seqlens=CU if packed else None)
    state = x.pop("initial_state")
    if packed:
        o = STEPS[op](**x, state=state, cu_seqlens=CU)
        assert_close("o", o, wanted[0], 1e-6)
        assert_close("state", state, wanted[1], 1e-6)
        return
    slots, order = torch.randn(5, *state.shape[1:]), torch.tensor([3, 0, 4])
    slots[order] = state
    rest = slots[[1, 2]].clone()
    outputs = [
        STEPS[op](**{name: value[:, t : t + 1] for name, value in x.items()}, state=slots, state_indices=order)
        for t in range(6)
    ]
    assert_close("o", torch.cat(outputs, 1), wanted[0], 1e-6)
    assert_close("state", slots[order], wanted[1], 1e-6)
    assert torch.equal(slots[[1, 2]], rest)
    with pytest.raises(NotImplementedError, match="no gradient"):
        STEPS[op](**x | {"q": x["q"].clone().requires_grad_()}, state=state)


def test_constant_decay():
    x = draw("simple_gla", B=2)
    gamma = torch.tensor([-0.3, -0.05], dtype=torch.float64)
    x["g"] = gamma.expand_as(x["g"])
    wanted = expected("simple_gla", x)
    del x["g"]
    for function in (ops.chunk_simple_gla, ops.fused_recurrent_simple_gla, ops.fused_chunk_simple_gla):
        o, state = function(**x, g_gamma=gamma, output_final_state=True)
        assert_close("o", o, wanted[0], 1e-10)
        assert_close("state", state, wanted[1], 1e-10)
    # Beside a decay per token the two multiply, as in fla.
    g = -torch.rand(2, 33, 2, dtype=torch.float64)
    wanted = expected("simple_gla", x | {"g": g + gamma})
    for function in (ops.chunk_simple_gla, ops.fused_recurrent_simple_gla, ops.fused_chunk_simple_gla):
        leaf = g.clone().requires_grad_()
        o, state = function(**x, g=leaf, g_gamma=gamma, output_final_state=True)
        assert_close("o", o, wanted[0], 1e-10)
        assert_close("state", state, wanted[1], 1e-10)
        assert torch.autograd.grad(o.sum(), leaf)[0].abs().sum() > 0
    state = x.pop("initial_state")
    assert_close("o of a step", ops.gla_step(**x, state=state, g=g, g_gamma=gamma), wanted[0], 1e-10)
    assert_close("state", state, wanted[1], 1e-10)
    with pytest.raises(ValueError, match=r"g_gamma: expected shape \[2\], got \[3\]"):
        ops.chunk_simple_gla(**x, g=g, g_gamma=torch.zeros(3))
    with pytest.raises(ValueError, match="g_gamma: expected none unless the gate is per head"):
        ops.gla_step(**x, state=state, g=torch.zeros_like(x["q"]), g_gamma=gamma)


def test_state_v_first():
    for op in ("simple_gla", "gla"):
        x = draw(op)
        wanted = call(op, OPERATORS[op][0], x)
        x["initial_state"] = x["initial_state"].transpose(-1, -2)
        for function in OPERATORS[op]:
            o, state = call(op, function, x, state_v_first=True)
            assert_close("o", o, wanted[0], 1e-10)
            assert_close("state", state, wanted[1].transpose(-1, -2), 1e-10)


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("op", ["linear_attn", "simple_gla", "gla", "dplr"])
def test_reverse(op, cu_seqlens):
    x = draw(op, B=2, T=40) if cu_seqlens is None else draw(op, T=40, N=4)
    offsets = torch.tensor([0, 40]) if cu_seqlens is None else cu_seqlens
    pieces = [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    wanted_o, wanted_state = [], []
    for n, piece in enumerate(pieces):
        state = x["initial_state"] if cu_seqlens is None else x["initial_state"][n : n + 1]
        part = {name: value[:, piece].flip(1) for name, value in x.items() if name != "initial_state"}
        o, state = expected(op, part | {"initial_state": state})
        wanted_o.append(o.flip(1))
        wanted_state.append(state)
    o, state = call(op, OPERATORS[op][1], x, reverse=True, cu_seqlens=cu_seqlens)
    assert_close("o", o, torch.cat(wanted_o, 1), 1e-10)
    assert_close("state", state, torch.cat(wanted_state), 1e-10)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
def test_normalised_linear_attention(cu_seqlens, reverse):
    x = draw("linear_attn", B=2, T=40) if cu_seqlens is None else draw("linear_attn", T=40, N=4)
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    z = torch.rand(x["initial_state"].shape[0], 1, 2, 16, dtype=torch.float64)
    # The denominator is the output of a value that is 1 everywhere.
    values = torch.cat([x["v"], torch.ones_like(x["v"][..., :1])], -1)
    state = torch.cat([x["initial_state"], z.transpose(1, 2).transpose(-1, -2)], -1)
    options = {"cu_seqlens": cu_seqlens, "output_final_state": True}
    both, both_states = ops.fused_recurrent_linear_attn(
        x["q"], x["k"], values, initial_state=state, reverse=reverse, **options
    )
    function = ops.fused_recurrent_linear_attn if reverse else ops.chunk_linear_attn
    direction = {"reverse": True} if reverse else {}
    o, (end, z_end) = function(
        x["q"], x["k"], x["v"], initial_state=(x["initial_state"], z), normalize=True, **direction, **options
    )
    assert_close("o", o, both[..., :-1] / both[..., -1:], 1e-8)
    assert_close("state", end, both_states[..., :-1], 1e-10)
    assert_close("z", z_end.transpose(1, 2).transpose(-1, -2), both_states[..., -1:], 1e-10)
    q = x["q"][:, :6].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda q: ops.chunk_linear_attn(q, x["k"][:, :6], x["v"][:, :6])[0], q)


def test_normalised_linear_attention_in_a_graph():
    """Packed sequences, too: no shape follows from the lengths."""
    x = leaves(draw("linear_attn", T=40, N=4), torch.float32)

    def run(x, cu_seqlens):
        o, (state, z) = ops.chunk_linear_attn(**x, output_final_state=True, cu_seqlens=cu_seqlens)
        return o, state, z

    results = run(x, CU)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x, CU)
    for a, b in zip(compiled, results, strict=True):
        torch.testing.assert_close(a, b)
    gradients = (torch.autograd.grad(y[0].sum(), list(x.values())) for y in (compiled, results))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    meta = run({name: value.to("meta") for name, value in x.items()}, CU.to("meta"))
    for a, b in zip(meta, results, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_parallel_simple_gla():
    x = draw("simple_gla", B=2)
    del x["initial_state"]
    o, scores = ops.parallel_simple_gla(**x, output_attentions=True)
    assert_close("o", torch.einsum("bhij,bjhv->bihv", scores, x["v"]), o, 1e-10)
    assert ops.parallel_simple_gla(**x)[1] is None


def test_mixed_types():
    for op, functions in OPERATORS.items():
        x = draw(op, dtype=torch.float32)
        x["v"] = x["v"].half()
        wanted = expected(op, {name: value.double() for name, value in x.items()})
        for function in functions:
            o, _ = call(op, function, x)
            assert_close(function.__name__, o, wanted[0], 2e-3)


def test_wide_values():
    for op, functions in OPERATORS.items():
        x = draw(op, T=20, K=8, V=300, dtype=torch.float32)
        wanted = expected(op, {name: value.double() for name, value in x.items()})
        for function in functions:
            assert_close(function.__name__, call(op, function, x)[0], wanted[0], 1e-5)


@pytest.mark.parametrize("op", ["linear_attn", "simple_gla", "gla"])
def test_wide_keys(op):
    """More key channels than the library takes at once: no operator without a correction has a limit, as in fla."""
    x = draw(op, B=2, T=20, K=300)
    reference = leaves(x)
    wanted = expected(op, reference)
    cotangents = [torch.randn_like(y) for y in wanted]
    wanted_gradients = gradients(wanted, cotangents, reference)
    for dtype, threshold in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2)):
        for function in OPERATORS[op]:
            inputs = leaves(x, dtype, KEEP)
            results = call(op, function, inputs)
            assert results[0].dtype == dtype
            for name, a, b in zip(("o", "final_state"), results, wanted, strict=True):
                assert_close(name, a, b, threshold)
            for name, value in gradients(results, cotangents, inputs).items():
                assert_close(f"d{name}", value, wanted_gradients[name], threshold)
    if op != "linear_attn":
        v_first = x | {"initial_state": x["initial_state"].transpose(-1, -2)}
        o, state = call(op, OPERATORS[op][1], v_first, state_v_first=True)
        assert_close("o", o, wanted[0], 1e-10)
        assert_close("state", state, wanted[1].transpose(-1, -2), 1e-10)
    with pytest.raises((ValueError, AssertionError), match=r"k: expected shape \[2, 20, 2, 300\]"):
        call(op, OPERATORS[op][0], x | {"k": x["k"][..., :280]})


def test_disable_recompute():
    x, results = draw("dplr", T=80, dtype=torch.float32), []
    for switch in (False, True):
        inputs = leaves(x)
        o, _ = ops.chunk_dplr_delta_rule(**inputs, disable_recompute=switch)
        results.append(gradients([o], [torch.ones_like(o)], inputs))
    for name in x:
        assert torch.equal(results[0][name], results[1][name]), name


def test_errors():
    x = draw("gla", T=5, dtype=torch.float32)
    with pytest.raises(AssertionError, match="initial_state: expected torch.float32, got torch.float16"):
        ops.chunk_gla(**x | {"initial_state": x["initial_state"].half()})
    with pytest.raises(AssertionError, match=r"g: expected shape \[1, 5, 2, 16\], got \[1, 5, 2, 8\]"):
        ops.chunk_gla(**x | {"g": x["g"][..., :8]})
    with pytest.raises(NotImplementedError, match="gv: a decay per value channel"):
        ops.fused_recurrent_gla(x["q"], x["k"], x["v"], gv=x["v"])
    with pytest.raises(NotImplementedError, match="fused_chunk_gla: use chunk_gla"):
        ops.fused_chunk_gla(q=x["q"])
    with pytest.raises(NotImplementedError, match="fused_chunk_delta_rule: use chunk_delta_rule"):
        ops.fused_chunk_delta_rule(q=x["q"])
    with pytest.raises(ValueError, match="chunk_size: expected a power of two, got 24"):
        ops.chunk_simple_gla(x["q"], x["k"], x["v"], chunk_size=24)
    with pytest.raises(ValueError, match="lower_bound: expected a number below 0, got 1"):
        ops.chunk_dplr_delta_rule(*[x["q"]] * 6, lower_bound=1)
    with pytest.raises(NotImplementedError, match="cp_context: context parallelism of this operator is not supported"):
        ops.chunk_dplr_delta_rule(*[x["q"]] * 6, cp_context=object())
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1, got 2"):
        ops.chunk_comba(*[torch.zeros(2, 4, 1, 4)] * 4, torch.zeros(2, 4, 1), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        ops.chunk_gla(**x, scale=float("inf"))
    with pytest.raises(ValueError, match=r"a: expected shape \[1, 5, 2, 16\], got \[1, 5, 2, 8\]"):
        ops.chunk_iplr_delta_rule(x["q"], x["k"], x["v"], x["q"][..., :8], x["k"])


def test_positions_of_fla():
    """Where fla's order differs between two forms, ours does, too."""
    assert list(inspect.signature(ops.chunk_comba).parameters)[:4] == ["q", "k", "v", "p"]
    assert list(inspect.signature(ops.fused_recurrent_comba).parameters)[:4] == ["q", "k", "p", "v"]


def opcheck_cases():
    """For test_pytorch.py."""
    options = {"gla": (1, None, 16, False), "comba": (None, 16, False, True), "dplr": (2, None, 16, True)}
    for name, op in (("gla", "simple_gla"), ("comba", "comba"), ("dplr", "dplr")):
        x = draw(op, T=20, K=8, V=8, dtype=torch.float32)
        order = {"gla": ["q", "k", "v", "g"], "comba": ["q", "k", "v", "p", "g", "beta"],
                 "dplr": ["q", "k", "v", "a", "b", "gk"]}[name]  # fmt: skip
        tail = (None, None) if name == "gla" else (None,)
        inputs = [x[key] for key in order]
        state = x["initial_state"]
        for dtype in (None, torch.float32):
            yield f"{name}_forward", (*inputs, state, *tail, *options[name], True, dtype)
            grad = [value.clone().requires_grad_() for value in (*inputs, state)]
            yield f"{name}_differentiable", (*grad, *tail, *options[name], True, dtype)
        yield (
            f"{name}_backward",
            (torch.randn(1, 20, 2, 8), None, None, *inputs, state, *tail, *options[name], 0b1111111),
        )
        yield f"{name}_step", (state, None, *inputs, None, *tail, *options[name])
