"""Results and gradients of the delta-rule family through the Python functions."""

import itertools

import pytest
import torch

import helpers
import naive
from fastweight import _delta_rule, ops
from helpers import assert_close, draw, golden, golden_cases, gradients, leaves

CHUNK = {
    "delta_rule": ops.chunk_delta_rule,
    "gated_delta_rule": ops.chunk_gated_delta_rule,
    "kda": ops.chunk_kda,
}
RECURRENT = {
    "delta_rule": ops.fused_recurrent_delta_rule,
    "gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
    "kda": ops.fused_recurrent_kda,
}
BOTH = [pytest.param(CHUNK, id="chunk"), pytest.param(RECURRENT, id="recurrent")]
OPS = list(CHUNK)
HALF = [torch.float16, torch.bfloat16]

# error of (o, final state), and of each gradient, by type: the tables of the operators.
THRESHOLDS = {"o": 0.005, "q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02, "initial_state": 0.008,
              "A_log": 0.02, "dt_bias": 0.02}  # fmt: skip
FP32 = dict.fromkeys(THRESHOLDS, 1e-4)


def compare(functions, op, inputs, dtype, thresholds, **options):
    """Results and every gradient against float64 on the same rounded inputs: there the reference runs, which
    test_definition and test_golden hold to the definition."""
    rounded = leaves(inputs, dtype)
    outputs = functions[op](**rounded, output_final_state=True, **options)
    assert outputs[0].dtype == dtype
    exact = leaves({name: value.double() for name, value in rounded.items()})
    expected = functions[op](**exact, output_final_state=True, **options)
    d_outputs = [torch.randn_like(x, dtype=torch.float32).to(x.dtype) for x in outputs]
    assert_close("o", outputs[0], expected[0], thresholds["o"])
    assert_close("final_state", outputs[1], expected[1], thresholds["o"])
    ours, theirs = gradients(outputs, d_outputs, rounded), gradients(expected, d_outputs, exact)
    for name in rounded:
        assert ours[name].dtype == rounded[name].dtype
        assert_close(f"gradient of {name}", ours[name], theirs[name], thresholds[name])


NAIVE_NAMES = {"use_qk_l2norm_in_kernel": "l2norm", "use_beta_sigmoid_in_kernel": "beta_sigmoid",
               "allow_neg_eigval": "neg_eigval", "use_gate_in_kernel": "gate_in_kernel",
               "state_v_first": "v_first"}  # fmt: skip
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize(
    ("op", "sizes", "options"),
    [
        ("delta_rule", {"B": 2, "K": 6, "V": 4}, {}),
        ("delta_rule", {"state": False}, {"scale": 0.3, "use_qk_l2norm_in_kernel": True}),
        ("delta_rule", {"N": 3}, {"cu_seqlens": torch.tensor([0, 7, 7, 18])}),
        ("gated_delta_rule", {"B": 2, "HV": 4, "K": 6, "V": 4}, {}),
        ("gated_delta_rule", {"raw": True}, RAW),
        ("gated_delta_rule", {"raw": True, "HV": 4}, {**RAW, "allow_neg_eigval": True, "scale": 0.2}),
        ("gated_delta_rule", {"N": 3, "HV": 4}, {"cu_seqlens": torch.tensor([0, 7, 7, 18]), "state_v_first": True}),
        ("kda", {"B": 2, "HV": 4, "K": 6, "V": 4}, {}),
        ("kda", {"raw": True}, RAW),
        ("kda", {"raw": True, "HV": 4}, {**RAW, "allow_neg_eigval": True, "lower_bound": -3.0}),
        ("kda", {"N": 3, "HV": 4}, {"cu_seqlens": torch.tensor([0, 7, 7, 18]), "state_v_first": True}),
    ],
)
def test_definition(op, sizes, options, functions):
    inputs = leaves(draw(op, T=18, **({"K": 4, "V": 4} | sizes)))
    outputs = functions[op](**inputs, output_final_state=True, **options)
    exact = leaves(inputs)
    expected = naive.delta_rule(**exact, **{NAIVE_NAMES.get(name, name): value for name, value in options.items()})
    d_outputs = [torch.randn_like(x) for x in outputs]
    ours, theirs = gradients(outputs, d_outputs, inputs), gradients(expected, d_outputs, exact)
    for name, a, b in [("o", outputs[0], expected[0]), ("final_state", outputs[1], expected[1])]:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)
    for name in inputs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-9, msg=f"gradient of {name}")


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", golden_cases("delta_rule") + golden_cases("gdn") + golden_cases("kda"))
def test_golden(name, dtype, functions):
    case, tensors, answers = golden(name)
    names = {"h0": "initial_state"}
    inputs = leaves({names.get(n, n): x.to(dtype) for n, x in tensors.items() if n not in ("do", "dht")})
    options = {"scale": case.get("scale")}
    if "cu_seqlens" in case:
        options["cu_seqlens"] = torch.tensor(case["cu_seqlens"])
    switches = {"l2norm": "use_qk_l2norm_in_kernel", "beta_sigmoid": "use_beta_sigmoid_in_kernel",
                "neg_eigval": "allow_neg_eigval", "gate_in_kernel": "use_gate_in_kernel"}  # fmt: skip
    options.update({ours: True for theirs, ours in switches.items() if case.get(theirs)})
    if "lower_bound" in case:
        options["lower_bound"] = case["lower_bound"]
    has_state = case.get("state", True)
    outputs = functions[case["op"]](**inputs, output_final_state=has_state, **options)
    assert (outputs[1] is not None) == has_state
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    d_outputs = [tensors[name] for name in ("do", "dht") if name in tensors]
    assert_close("o", outputs[0], answers["o"], tolerance)
    if has_state:
        assert_close("final_state", outputs[1], answers["ht"], tolerance)
    ours = gradients([x for x in outputs if x is not None], d_outputs, inputs)
    for key, value in ours.items():
        answer = answers["d" + {"initial_state": "h0"}.get(key, key)]
        assert_close(f"gradient of {key}", value, answer.reshape(value.shape), tolerance)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 100, 256])
@pytest.mark.parametrize("op", OPS)
def test_lengths_fp32(op, T, functions):
    compare(functions, op, draw(op, T=T, K=24, V=20), torch.float32, FP32)


@pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("T", "K", "V"), [(63, 60, 60), (64, 64, 64), (200, 100, 100), (1024, 64, 64), (1100, 64, 128)]
)
@pytest.mark.parametrize("op", OPS)
def test_lengths_half(op, T, K, V, dtype):
    compare(CHUNK, op, draw(op, T=T, H=1, K=K, V=V), dtype, THRESHOLDS)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("gate_div", [0.01, 0.1, 1, 10])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_gates(op, gate_div, functions):
    inputs = draw(op, T=130, H=1, K=32, V=32, gate_div=gate_div)
    inputs["g"] = inputs["g"].clamp(min=-1000) * (torch.rand_like(inputs["g"]) < 0.5)
    compare(functions, op, inputs, torch.float32, FP32 | {"g": 1e-3})
    compare(functions, op, inputs, torch.float16, THRESHOLDS | {"g": 0.05})


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [[15, 0, 1, 84], [100], [64, 64, 128], [1] * 20, [0, 0, 33, 0]])
@pytest.mark.parametrize("op", OPS)
def test_variable_lengths(op, lengths, dtype, functions):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw(op, T=sum(lengths), N=len(lengths), K=32, V=24)
    compare(functions, op, inputs, dtype, FP32 if dtype == torch.float32 else THRESHOLDS, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize(("H", "HV"), [(1, 3), (2, 4), (2, 8)])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_grouped_heads(op, H, HV, functions):
    compare(functions, op, draw(op, B=2, T=70, H=H, HV=HV, K=20, V=36), torch.float32, FP32)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("neg", [False, True])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_activations_in_kernel(op, neg, dtype, functions):
    compare(
        functions, op, draw(op, T=90, H=2, HV=4, raw=True), dtype, FP32 if dtype == torch.float32 else THRESHOLDS,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg, use_gate_in_kernel=True,
    )  # fmt: skip


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("with_a", [False, True])
def test_kda_lower_bound(with_a, functions):
    inputs = draw("kda", T=90, raw=True)
    if not with_a:
        del inputs["A_log"]
    compare(functions, "kda", inputs, torch.float32, FP32, use_gate_in_kernel=True, lower_bound=-5.0,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)  # fmt: skip


def test_kda_dt_bias_may_be_a_matrix_and_absent():
    inputs = draw("kda", T=20, H=2, raw=True, dtype=torch.float32)
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    flat = ops.chunk_kda(**inputs, **options)[0]
    inputs["dt_bias"] = inputs["dt_bias"].view(2, 16)
    assert torch.equal(ops.chunk_kda(**inputs, **options)[0], flat)
    del inputs["dt_bias"]
    compare(CHUNK, "kda", inputs, torch.float32, FP32, **options)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_state_v_first(op, functions):
    inputs = draw(op, B=2, T=50, K=12, V=20)
    inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    compare(functions, op, inputs, torch.float32, FP32, state_v_first=True)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_scale_and_absent_state(op, functions):
    compare(functions, op, draw(op, T=40, state=False), torch.float32, FP32, scale=0.3)


@pytest.mark.parametrize("op", OPS)
def test_absent_final_state_is_none(op):
    o, final_state = CHUNK[op](**draw(op, T=5))
    assert final_state is None
    assert o.shape == (1, 5, 2, 16)


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
def test_beta_absent_or_per_channel(op):
    inputs = draw(op, T=40, K=12, V=20)
    compare(RECURRENT, op, inputs | {"beta": torch.rand(1, 40, 2, 20).double()}, torch.float32, FP32)
    del inputs["beta"]
    compare(RECURRENT, op, inputs, torch.float32, FP32)


def test_gk_adds_a_decay_per_key_channel():
    inputs, gk = draw("gated_delta_rule", T=40, dtype=torch.float32), -torch.rand(1, 40, 2, 16)
    both = ops.fused_recurrent_gated_delta_rule(**inputs, gk=gk)[0]
    alone = ops.fused_recurrent_gated_delta_rule(**{**inputs, "g": None}, gk=gk)[0]
    kda = ops.fused_recurrent_kda(**{**inputs, "g": inputs["g"].unsqueeze(-1) + gk})[0]
    assert torch.equal(both, kda)
    assert not torch.equal(alone, kda)
    assert torch.equal(alone, ops.fused_recurrent_kda(**{**inputs, "g": gk})[0])


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("op", OPS)
def test_cut_at_a_chunk_boundary_changes_no_bit(op, chunk_size):
    if op == "kda" and chunk_size == 16:
        chunk_size = 32
    inputs = draw(op, T=150, dtype=torch.float32)
    whole, state = CHUNK[op](**inputs, output_final_state=True, chunk_size=chunk_size)
    initial_state = inputs.pop("initial_state")
    first = {name: x[:, : 2 * chunk_size] for name, x in inputs.items()}
    second = {name: x[:, 2 * chunk_size :] for name, x in inputs.items()}
    a, carried = CHUNK[op](**first, initial_state=initial_state, output_final_state=True, chunk_size=chunk_size)
    b, final = CHUNK[op](**second, initial_state=carried, output_final_state=True, chunk_size=chunk_size)
    assert torch.equal(torch.cat((a, b), 1), whole)
    assert torch.equal(final, state)


@pytest.mark.parametrize("functions", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_same_bits_in_every_run_batch_and_thread_count(op, functions):
    inputs = draw(op, B=3, T=100, K=32, V=32, dtype=torch.float32)

    def run(tensors):
        tensors = leaves(tensors)
        o, state = functions[op](**tensors, output_final_state=True)
        return [o, state, *torch.autograd.grad(o.square().sum() + state.square().sum(), list(tensors.values()))]

    first = run(inputs)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(first, run(inputs), strict=True))
    finally:
        torch.set_num_threads(threads)
    alone = run({name: x[1:2] for name, x in inputs.items()})
    assert all(torch.equal(a[1:2], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_kda_intermediate_states(varlen, v_first):
    inputs = draw("kda", T=150, N=2 if varlen else None, K=12, V=20, dtype=torch.float32)
    if v_first:
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    lengths = [70, 80] if varlen else [150]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0) if varlen else None
    with torch.inference_mode():
        o, _, h = ops.chunk_kda(**inputs, cu_seqlens=cu_seqlens, chunk_size=32, state_v_first=v_first,
                                return_intermediate_states=True)  # fmt: skip
        assert h.shape == (1, sum(-(-n // 32) for n in lengths), 2, *((20, 12) if v_first else (12, 20)))
        assert h.dtype == torch.float32
        assert torch.equal(h[0, 0], inputs["initial_state"][0])
        start = {name: x[:, :64] if name != "initial_state" else x[:1] for name, x in inputs.items()}
        carried = ops.chunk_kda(**start, output_final_state=True, chunk_size=32, state_v_first=v_first)[1]
        assert torch.equal(h[0, 2], carried[0])
        halves = leaves(inputs, torch.bfloat16)
        assert ops.chunk_kda(**halves, cu_seqlens=cu_seqlens, state_v_first=v_first,
                             return_intermediate_states=True)[2].dtype == torch.bfloat16  # fmt: skip


@torch.no_grad()
def test_kda_intermediate_states_are_as_many_as_chunks():
    """Those of the packed sequences one by one, with the offsets given once or twice."""
    offsets = [0, 1, 1, 65, 65, 135, 200]
    inputs = draw("kda", T=200, N=6, dtype=torch.float32)
    cu_seqlens = torch.tensor(offsets)
    h = ops.chunk_kda(**inputs, cu_seqlens=cu_seqlens, return_intermediate_states=True)[2]
    alone = [
        ops.chunk_kda(
            **{name: x[n : n + 1] if name == "initial_state" else x[:, a:b] for name, x in inputs.items()},
            return_intermediate_states=True,
        )[2]
        for n, (a, b) in enumerate(itertools.pairwise(offsets))
    ]
    assert [x.shape[1] for x in alone] == [1, 0, 1, 0, 2, 2]
    assert torch.equal(h, torch.cat(alone, 1))
    again = ops.chunk_kda(**inputs, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens, return_intermediate_states=True)
    assert torch.equal(again[2], h)
    # As for offsets on a device: the operator counts the chunks of the copy.
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    bits = _delta_rule.bits(_delta_rule.PER_CHANNEL, 64, False, False, False)
    arguments = [*(inputs.get(name) for name in names), cu_seqlens, bits, None, None, torch.float32]
    assert torch.equal(_delta_rule.operators.delta_rule_forward(*arguments, cu_seqlens.int(), 0)[2], h)
    with pytest.raises(RuntimeError, match="expected the token count 200 at position 5, got 135"):
        _delta_rule.operators.delta_rule_forward(*arguments, cu_seqlens[:-1], 0)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 70, 70, 150]])
def test_kda_kept_states_change_no_bit(cu_seqlens):
    inputs = draw("kda", T=150, N=None if cu_seqlens is None else 3, dtype=torch.float32)
    cu_seqlens = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    results = []
    for keep in (False, True):
        tensors = leaves(inputs)
        o, state = ops.chunk_kda(**tensors, cu_seqlens=cu_seqlens, output_final_state=True, disable_recompute=keep)
        results.append([o, state, *torch.autograd.grad(o.sum() + state.sum(), list(tensors.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_step_in_place(op):
    """Prefill and steps against one pass; slots of others stay as they are; skipped sequences give zeros."""
    T, prefill = 40, 32
    inputs = draw(op, B=3, T=T, dtype=torch.float32)
    whole, final = RECURRENT[op](**inputs, output_final_state=True)
    initial_state = inputs.pop("initial_state")
    start = {name: x[:, :prefill] for name, x in inputs.items()}
    _, carried = CHUNK[op](**start, initial_state=initial_state, output_final_state=True)
    slots = torch.full((5, *carried.shape[1:]), 7.0)
    indices = torch.tensor([4, 0, 2])
    slots[indices] = carried
    for t in range(prefill, T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        o = ops.delta_rule_step(**token, state=slots, state_indices=indices)
        torch.testing.assert_close(o[:, 0], whole[:, t])
    torch.testing.assert_close(slots[indices], final)
    assert (slots[[1, 3]] == 7).all()
    before = slots.clone()
    token = {name: x[:, -1:] for name, x in inputs.items()}
    o = ops.delta_rule_step(**token, state=slots, state_indices=torch.tensor([4, -1, -1], dtype=torch.int32))
    assert (o[1:] == 0).all()
    assert torch.equal(slots[:4], before[:4])
    assert not torch.equal(slots[4], before[4])


def test_step_with_activations_in_kernel():
    inputs = draw("kda", B=2, T=1, H=1, HV=2, raw=True, dtype=torch.float32)
    state = inputs.pop("initial_state")
    switches = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
                "allow_neg_eigval": True, "lower_bound": -4.0}  # fmt: skip
    o, final = ops.fused_recurrent_kda(**inputs, initial_state=state, output_final_state=True, **switches)
    assert torch.equal(ops.delta_rule_step(**inputs, state=state, **switches), o)
    assert torch.equal(state, final)


@pytest.mark.parametrize("shape", [{"T": 0}, {"B": 0, "T": 5}])
@pytest.mark.parametrize("op", OPS)
def test_empty(op, shape):
    tensors = leaves(draw(op, **shape), torch.float32)
    o, state = CHUNK[op](**tensors, output_final_state=True)
    assert o.numel() == 0
    assert torch.equal(state, tensors["initial_state"])
    (gradient,) = torch.autograd.grad(state.sum() + o.sum(), tensors["initial_state"])
    assert (gradient == 1).all()


@pytest.mark.parametrize("op", OPS)
def test_initial_state_in_another_type(op):
    tensors = draw(op, T=20, dtype=torch.float32)
    tensors["initial_state"] = tensors["initial_state"].bfloat16().requires_grad_()
    o, _ = RECURRENT[op](**tensors)
    (gradient,) = torch.autograd.grad(o.sum(), tensors["initial_state"])
    assert gradient.dtype == torch.bfloat16


def test_names_of_the_same_function():
    assert ops.chunk_gdn is ops.chunk_gated_delta_rule
    assert ops.fused_recurrent_gdn is ops.fused_recurrent_gated_delta_rule
    assert helpers.GOLDEN.is_dir()
