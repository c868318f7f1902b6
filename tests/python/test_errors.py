"""Every refused call: its class, and a message with the argument, what was expected and what was found."""

import types
import warnings

import pytest
import torch

from fastweight import ops
from helpers import draw
from test_ttt_linear import draw as draw_ttt

CHUNK = {"delta_rule": ops.chunk_delta_rule, "gated_delta_rule": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda}
RECURRENT = {
    "delta_rule": ops.fused_recurrent_delta_rule,
    "gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
    "kda": ops.fused_recurrent_kda,
}
ALL = [(op, f) for functions in (CHUNK, RECURRENT) for op, f in functions.items()]
GATED = [(op, f) for op, f in ALL if op != "delta_rule"]
CU = torch.tensor([0, 4, 10])
F32 = torch.float32


def inputs(op, **changes):
    return draw(op, T=10, dtype=F32) | changes


@pytest.mark.parametrize(("op", "function"), ALL)
def test_sequences(op, function):
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1, got 2"):
        function(**draw(op, B=2, T=10, dtype=F32), cu_seqlens=CU)
    with pytest.raises(ValueError, match="initial_state: .* 2 sequences .* got 1"):
        function(**inputs(op), cu_seqlens=CU)
    for offsets in ([1, 4, 10], [0, 11, 10], [0, 4, 9]):
        with pytest.raises(ValueError, match="cu_seqlens: expected"):
            function(**draw(op, T=10, N=2, dtype=F32), cu_seqlens=torch.tensor(offsets))
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        function(**draw(op, T=10, N=2, dtype=F32), cu_seqlens=CU.float())


@pytest.mark.parametrize(("op", "function"), ALL)
def test_shapes_and_types(op, function):
    bad_shape = AssertionError if function is ops.chunk_kda else ValueError
    with pytest.raises(bad_shape, match=r"k: expected shape \[1, 10, 2, 16\], got \[1, 10, 2, 12\]"):
        function(**inputs(op, k=torch.zeros(1, 10, 2, 12)))
    with pytest.raises(ValueError, match=r"v: expected shape \[1, 10, 2, 16\], got \[1, 9, 2, 16\]"):
        function(**inputs(op, v=torch.zeros(1, 9, 2, 16)))
    with pytest.raises(bad_shape, match=r"beta: expected shape \[1, 10, 2\], got \[1, 10, 3\]"):
        function(**inputs(op, beta=torch.zeros(1, 10, 3)))
    state_error = AssertionError if function is ops.chunk_kda else ValueError
    with pytest.raises(state_error, match="initial_state: expected"):
        function(**inputs(op, initial_state=torch.zeros(1, 2, 16, 16, dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[1, 2, 16, 16\], got \[1, 2, 16, 12\]"):
        function(**inputs(op, initial_state=torch.zeros(1, 2, 16, 12)))
    if function in CHUNK.values():
        mixed = AssertionError if function is ops.chunk_delta_rule else ValueError
        with pytest.raises(mixed, match="q, k, v: expected one dtype"):
            function(**inputs(op, v=torch.zeros(1, 10, 2, 16, dtype=torch.float16)))
    with pytest.raises(ValueError, match="scale: expected a finite number, got (inf|nan)"):
        function(**inputs(op), scale=float("inf"))
    with pytest.raises(ValueError, match="q: expected float32, .*, got Byte"):
        function(**(inputs(op) | {name: torch.zeros(1, 10, 2, 16, dtype=torch.uint8) for name in "qkv"}))


@pytest.mark.parametrize("op", CHUNK)
def test_wide_heads(op):
    with pytest.raises(AssertionError, match="q: expected a head width of at most 256, got 257"):
        CHUNK[op](**draw(op, T=2, K=257, dtype=F32))


@pytest.mark.parametrize("op", CHUNK)
def test_chunk_size(op):
    text = "`chunk_size` must be either 32 or 64" if op == "kda" else "chunk_size: expected 16, 32 or 64, got 48"
    with pytest.raises(ValueError, match=text):
        CHUNK[op](**inputs(op), chunk_size=48)


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
def test_head_first(op):
    for value in (False, True):
        with pytest.raises(DeprecationWarning, match="head_first"):
            CHUNK[op](**inputs(op), head_first=value)


@pytest.mark.parametrize(("op", "function"), GATED)
def test_old_name_of_state_v_first(op, function):
    x = inputs(op)
    with pytest.raises(ValueError, match="state_v_first: .* got both"):
        function(**x, state_v_first=True, transpose_state_layout=True)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        old = function(**x, transpose_state_layout=True)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function(**x, state_v_first=True)[0], old)


@pytest.mark.parametrize(("op", "function"), GATED)
def test_beta_and_gate(op, function):
    with pytest.raises(ValueError, match="allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel"):
        function(**inputs(op), allow_neg_eigval=True)
    absent = AssertionError if function is ops.chunk_gated_delta_rule else ValueError
    with pytest.raises(absent, match="(?i)A_log: expected a tensor"):
        function(**inputs(op), use_gate_in_kernel=True)
    bad_shape = AssertionError if function is ops.chunk_kda else ValueError
    with pytest.raises(bad_shape, match="g: expected shape"):
        function(**inputs(op, g=torch.zeros(1, 10, 3, *[16] * (op == "kda"))))


def test_grouped_heads():
    with pytest.raises(ValueError, match="v: expected a multiple of the 2 heads of q, got 3"):
        ops.chunk_gated_delta_rule(**inputs("gated_delta_rule", v=torch.zeros(1, 10, 3, 16)))
    with pytest.raises(AssertionError, match="v: expected a multiple of the 2 heads of q, got 3"):
        ops.chunk_kda(**inputs("kda", v=torch.zeros(1, 10, 3, 16)))
    with pytest.raises(ValueError, match="k: expected the 2 heads of q, got 1"):
        ops.chunk_gated_delta_rule(**inputs("gated_delta_rule", k=torch.zeros(1, 10, 1, 16)))
    with pytest.raises(ValueError, match="v: expected the 2 heads of q, got 4"):
        ops.chunk_delta_rule(**inputs("delta_rule", v=torch.zeros(1, 10, 4, 16)))


def test_delta_rule():
    with pytest.raises(AssertionError, match="beta: expected 3 dimensions, got 4"):
        ops.chunk_delta_rule(**inputs("delta_rule", beta=torch.ones(1, 10, 2, 16)))
    with pytest.raises(AssertionError, match="scale: expected a number above 0, got -1"):
        ops.fused_recurrent_delta_rule(**inputs("delta_rule"), scale=-1)


def test_gated_delta_rule_recurrent():
    with pytest.raises(ValueError, match="g: expected a tensor with use_gate_in_kernel"):
        ops.fused_recurrent_gated_delta_rule(
            **inputs("gated_delta_rule", g=None), use_gate_in_kernel=True, A_log=torch.zeros(2)
        )
    with pytest.raises(NotImplementedError, match="gv"):
        ops.fused_recurrent_gated_delta_rule(**inputs("gated_delta_rule"), gv=torch.zeros(1, 10, 2, 16))


def test_kda():
    x = inputs("kda")
    with pytest.raises(AssertionError, match="initial_state: expected torch.float32, got torch.bfloat16"):
        ops.chunk_kda(**x | {"initial_state": x["initial_state"].bfloat16()})
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "safe_gate": True}
    with pytest.raises(ValueError, match="lower_bound: expected a number with safe_gate"):
        ops.chunk_kda(**x, **gate)
    for bound in (-6.0, 0.0):
        with pytest.raises(ValueError, match=r"lower_bound: expected a number in \[-5, 0\)"):
            ops.chunk_kda(**x, **gate, lower_bound=bound)
    with pytest.raises(ValueError, match="lower_bound: expected a finite number below 0"):
        ops.chunk_kda(**x, **gate | {"safe_gate": False}, lower_bound=1.0)
    with pytest.raises(AssertionError, match="return_intermediate_states"):
        ops.chunk_kda(**x, return_intermediate_states=True)
    with torch.no_grad(), pytest.raises(AssertionError, match="disable_recompute"):
        ops.chunk_kda(**x, return_intermediate_states=True, disable_recompute=True)


@pytest.mark.parametrize("op", CHUNK)
def test_a_context_of_another_package(op):
    context = types.SimpleNamespace(cu_seqlens=CU)
    with pytest.raises(TypeError, match="cp_context: expected what .*build_cp_context returns, got SimpleNamespace"):
        CHUNK[op](**inputs(op), cp_context=context)


def test_ttt_linear():
    x = draw_ttt(T=20, dtype=F32)
    with pytest.raises(AssertionError, match="q, k, v: expected one dtype"):
        ops.chunk_ttt_linear(**x | {"v": x["v"].half()})
    with pytest.raises(AssertionError, match="v: expected the head width 16 of k, got 12"):
        ops.chunk_ttt_linear(**x | {"v": x["v"][..., :12]})
    with pytest.raises(DeprecationWarning, match="head_first"):
        ops.chunk_ttt_linear(**x, head_first=False)
    with pytest.raises(AssertionError, match="scale: expected a number above 0, got 0"):
        ops.chunk_ttt_linear(**x, scale=0)
    with pytest.raises(AssertionError, match="head width of at most 128, got 129"):
        ops.chunk_ttt_linear(**draw_ttt(T=2, D=129, dtype=F32))
    with pytest.raises(ValueError, match="chunk_size: expected 16, 32 or 64, got 8"):
        ops.chunk_ttt_linear(**x, chunk_size=8)
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1, got 2"):
        ops.chunk_ttt_linear(**draw_ttt(B=2, T=10, dtype=F32), cu_seqlens=CU)
    with pytest.raises(ValueError, match=r"initial_state_bias: expected shape \[1, 2, 1, 16\]"):
        ops.chunk_ttt_linear(**x | {"initial_state_bias": torch.zeros(1, 1, 1, 16)})
    with pytest.raises(ValueError, match=r"eta: expected shape \[1, 20, 2\]"):
        ops.chunk_ttt_linear(**x | {"eta": torch.zeros(1, 20)})
    with pytest.raises(ValueError, match=r"w: expected shape \[2, 16\]"):
        ops.chunk_ttt_linear(**x | {"w": torch.zeros(16)})


def test_step():
    x = inputs("gated_delta_rule")
    state = x.pop("initial_state")
    with pytest.raises(ValueError, match="state: expected type .*, got fp16"):
        ops.delta_rule_step(**x, state=state.half())
    with pytest.raises(ValueError, match="state_indices: expected"):
        ops.delta_rule_step(**x, state=state, state_indices=torch.tensor([1]))
    with pytest.raises(NotImplementedError, match="no_grad"):
        ops.delta_rule_step(**x | {"q": x["q"].clone().requires_grad_()}, state=state)
    before = state.clone()
    with pytest.raises(ValueError, match="g: expected"):
        ops.delta_rule_step(**x | {"g": torch.zeros(1, 10, 3)}, state=state)
    assert torch.equal(state, before)


def test_unknown_argument():
    with pytest.raises(TypeError, match="output_final_sate"):
        ops.chunk_gated_delta_rule(**inputs("gated_delta_rule"), output_final_sate=True)
