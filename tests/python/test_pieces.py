"""Pieces of the chunk form, helpers for packed sequences, and the plain references, under fla's paths."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

import naive
from fastweight import _delta_rule, ops
from fastweight.modules import FusedRMSNormGated, L2Norm, RMSNorm, ShortConvolution
from fastweight.modules.fused_norm_gate import rms_norm_gated, rms_norm_gated_
from fastweight.modules.layernorm import rms_norm
from fastweight.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba
from fastweight.ops.comba.utils import chunk_comba_cumsum_scalar_fwd
from fastweight.ops.common import chunk_scaled_dot_kkt_fwd
from fastweight.ops.delta_rule import naive as delta_rule_naive
from fastweight.ops.delta_rule import wy_fast as delta_rule_wy
from fastweight.ops.gated_delta_rule import gate as gdn_gate
from fastweight.ops.gated_delta_rule import naive as gdn_naive
from fastweight.ops.gated_delta_rule import wy_fast as gdn_wy
from fastweight.ops.generalized_delta_rule.dplr import naive as dplr_naive
from fastweight.ops.generalized_delta_rule.iplr import naive as iplr_naive
from fastweight.ops.gla.naive import naive_recurrent_gla
from fastweight.ops.kda import gate as kda_gate
from fastweight.ops.kda import naive as kda_naive
from fastweight.ops.kda import wy_fast as kda_wy
from fastweight.ops.linear_attn import naive as linear_naive
from fastweight.ops.simple_gla import naive as simple_naive
from fastweight.ops.ttt.naive import chunk_ttt_linear_ref
from fastweight.ops.utils import cumsum, index, pack
from helpers import assert_close, draw, error, leaves
from test_related import draw as draw_related
from test_related import expected as related_expected
from test_ttt_linear import draw as draw_ttt

CU = torch.tensor([0, 5, 5, 22, 40])
F64 = torch.float64


def chunk_starts(T, chunk_size, cu_seqlens):
    """For every token the first of its chunk."""
    offsets = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    pieces = zip(offsets[:-1], offsets[1:], strict=True)
    return [a + (t - a) // chunk_size * chunk_size for a, b in pieces for t in range(a, b)]


def plain_cumsum(x, chunk_size, cu_seqlens, reverse=False):
    starts = chunk_starts(x.shape[1], chunk_size, cu_seqlens)
    y = torch.zeros_like(x, dtype=F64)
    for t, start in enumerate(starts):
        other = [u for u, s in enumerate(starts) if s == start and (u >= t if reverse else u <= t)]
        y[:, t] = x[:, other].double().sum(1)
    return y


# Sums ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("chunk_size", [1, 8, 16, 64, 128])
def test_local_sums(chunk_size, cu_seqlens):
    for shape in ((1, 40, 3), (1, 40, 3, 2)):
        g = torch.randn(shape)
        for reverse in (False, True):
            wanted = plain_cumsum(g, chunk_size, cu_seqlens, reverse)
            options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
            assert_close("y", cumsum.chunk_local_cumsum(g, chunk_size, **options), wanted, 1e-6)
            y = cumsum.chunk_local_cumsum(g.half(), chunk_size, scale=2.0, output_dtype=torch.bfloat16, **options)
            assert y.dtype == torch.bfloat16
            assert_close("y in bf16", y, 2 * plain_cumsum(g.half(), chunk_size, cu_seqlens, reverse), 5e-3)
            y = cumsum.chunk_local_cumsum(g.bfloat16(), chunk_size, output_dtype=None, **options)
            assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
def test_global_sums(cu_seqlens):
    s = torch.randn(1, 40, 3, 2)
    for reverse in (False, True):
        y = ops.chunk_global_cumsum(s, reverse, cu_seqlens, scale=0.5)
        assert_close("y", y, 0.5 * plain_cumsum(s, 64, cu_seqlens, reverse), 1e-6)
        x = s.double().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, reverse=reverse: ops.chunk_global_cumsum(x, reverse, cu_seqlens, output_dtype=None), x
        )
    # What is not a number stays in its sequence.
    s[0, 3] = math.nan
    y = ops.chunk_global_cumsum(s, cu_seqlens=CU)
    assert y[0, 5:].isfinite().all()
    assert y[0, 3:5].isnan().all()


# Indices and packing ------------------------------------------------------------------------------------------------


def test_indices():
    for dtype in (torch.int32, torch.int64):
        cu = CU.to(dtype)
        assert index.prepare_lens(cu).tolist() == [5, 0, 17, 18]
        assert index.prepare_cu_seqlens_from_lens(index.prepare_lens(cu), dtype).equal(cu)
        assert index.prepare_position_ids(cu).tolist() == [*range(5), *range(17), *range(18)]
        assert index.prepare_sequence_ids(cu).tolist() == [0] * 5 + [2] * 17 + [3] * 18
        assert index.prepare_token_indices(cu, CU)[21].tolist() == [2, 16]
        assert index.prepare_chunk_indices(cu, 16).tolist() == [[0, 0], [2, 0], [2, 1], [3, 0], [3, 1]]
        assert index.prepare_chunk_indices(cu, 16).dtype == dtype
        assert index.prepare_chunk_offsets(cu, 16).tolist() == [0, 1, 1, 3, 5]
        assert index.get_max_num_splits(cu, 16, CU) == 2
        assert index.prepare_split_cu_seqlens(split_size=16, cu_seqlens=cu).tolist() == [0, 5, 21, 22, 38, 40]
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert index.prepare_lens_from_mask(mask).tolist() == [1, 3]
    assert index.prepare_cu_seqlens_from_mask(mask).tolist() == [0, 1, 4]
    assert index.prepare_split_cu_seqlens(2, 5, 3).tolist() == [0, 3, 5, 8, 10]
    with pytest.raises(TypeError, match="split_size"):
        index.prepare_split_cu_seqlens(2, 5)
    with pytest.raises(TypeError, match="cu_seqlens"):
        index.prepare_split_cu_seqlens(2, split_size=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_packing(side):
    x = torch.randn(40, 3, dtype=F64)
    padded = pack.unpack_sequence(x, CU, side)
    assert padded.shape == (4, 18, 3)
    for n, (a, b) in enumerate(zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True)):
        row = padded[n, 18 - (b - a) :] if side == "left" else padded[n, : b - a]
        assert torch.equal(row, x[a:b])
    assert padded.count_nonzero() == x.count_nonzero()
    assert torch.equal(pack.pack_sequence(padded, CU, side), x)
    assert pack.unpack_sequence(x, CU, side, (4, 20, 3)).shape == (4, 20, 3)
    assert torch.autograd.gradcheck(lambda x: pack.unpack_sequence(x, CU, side), x.requires_grad_())
    assert torch.autograd.gradcheck(lambda y: pack.pack_sequence(y, CU, side), padded.requires_grad_())
    with pytest.raises(AssertionError, match=r"desired_shape: expected \[4, S, 3\], got \[3, 18, 3\]"):
        pack.unpack_sequence(x, CU, side, (3, 18, 3))
    with pytest.raises(AssertionError, match="padding_side: expected left or right, got 'top'"):
        pack.pack_sequence(padded, CU, "top")


# Gates --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("chunk_size", [8, 16, 64])
def test_summed_gates(chunk_size, cu_seqlens):
    A_log, log2 = torch.rand(3), 1 / math.log(2)
    g, bias = torch.randn(1, 40, 3), torch.randn(3)
    wanted = plain_cumsum(gdn_gate.naive_gdn_gate(g, A_log, bias, F64), chunk_size, cu_seqlens)
    y = ops.gdn_gate_chunk_cumsum(g, A_log, chunk_size, log2, bias, cu_seqlens)
    assert_close("gdn", y, wanted * log2, 1e-5)
    g, bias = torch.randn(1, 40, 3, 4), torch.randn(12)
    for bound in (None, -5.0):
        if bound is None:
            gate = kda_gate.naive_kda_gate(g, A_log, bias, F64)
            assert_close("naive", gate, -A_log.exp()[:, None] * F.softplus(g + bias.view(3, 4)), 1e-6)
        else:
            gate = kda_gate.naive_kda_lowerbound_gate(g, A_log, bias, bound, F64)
            assert_close("naive", gate, bound * (A_log.exp()[:, None] * (g + bias.view(3, 4))).sigmoid(), 1e-6)
        y = ops.kda_gate_chunk_cumsum(g, A_log, chunk_size, None, bias, cu_seqlens, torch.bfloat16, lower_bound=bound)
        assert y.dtype == torch.bfloat16
        assert_close("kda", y, plain_cumsum(gate, chunk_size, cu_seqlens), 5e-3)


def test_any_output_type():
    g, A_log = torch.randn(2, 5, 3).half(), torch.rand(3)
    wanted = gdn_gate.naive_gdn_gate(g, A_log, output_dtype=F64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = ops.fused_gdn_gate(g, A_log, output_dtype=dtype)
        assert y.dtype == dtype
        assert_close("gate", y, wanted, 5e-3)
        y = ops.l2norm(g, output_dtype=dtype)
        assert y.dtype == dtype
        assert_close("l2norm", y, F.normalize(g.double(), dim=-1), 5e-3)
    assert ops.fused_gdn_gate(g, A_log, output_dtype=None).dtype == torch.float16
    assert torch.equal(L2Norm(output_dtype=torch.float32)(g), ops.l2norm(g, output_dtype=torch.float32))


# The WY factors -----------------------------------------------------------------------------------------------------


def chunk_matrix(k, beta, gamma, chunk_size, cu_seqlens):
    """A in fp64 from the definition; gamma is natural, per head or channel."""
    group = beta.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, 2)
    starts = chunk_starts(k.shape[1], chunk_size, cu_seqlens)
    rows = []
    for i, start in enumerate(starts):
        row = []
        for j in range(start, start + chunk_size):
            if j >= i:
                row.append(torch.zeros_like(beta[:, i]))
                continue
            pair = k[:, i] * k[:, j]
            if gamma is not None:
                difference = gamma[:, i] - gamma[:, j]
                pair = pair * (difference if difference.dim() == 3 else difference.unsqueeze(-1)).exp()
            row.append(beta[:, i] * pair.sum(-1))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, 1)


def wy_definition(k, v, beta, gamma, J, chunk_size, cu_seqlens):
    group = beta.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, 2)
    if gamma is not None:
        k = k * (gamma if gamma.dim() == 4 else gamma.unsqueeze(-1)).exp()
    starts = chunk_starts(k.shape[1], chunk_size, cu_seqlens)
    w, u = [], []
    for i, start in enumerate(starts):
        tokens = slice(start, i + 1)
        weights = J[:, i, :, : i + 1 - start].transpose(1, 2) * beta[:, tokens]
        w.append((weights.unsqueeze(-1) * k[:, tokens]).sum(1))
        u.append((weights.unsqueeze(-1) * v[:, tokens]).sum(1))
    return torch.stack(w, 1), torch.stack(u, 1)


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_wy_factors(gate, cu_seqlens):
    """Forward and backward from k, v, beta and the sums of the gates to w and u, through the inverse."""
    C, H, HV = 16, 2, 2 if gate == "none" else 4
    k = F.normalize(torch.randn(1, 40, H, 6, dtype=F64), dim=-1).requires_grad_()
    v = torch.randn(1, 40, HV, 5, dtype=F64, requires_grad=True)
    beta = torch.rand(1, 40, HV, dtype=F64, requires_grad=True)
    gamma = None
    if gate != "none":
        steps = -torch.rand(1, 40, HV, *([6] if gate == "channel" else []))
        gamma = plain_cumsum(steps, C, cu_seqlens).requires_grad_()
    A = chunk_matrix(k, beta, gamma, C, cu_seqlens)
    J = ops.solve_tril(A, cu_seqlens, output_dtype=F64)
    w, u = wy_definition(k, v, beta, gamma, J, C, cu_seqlens)
    dw, du = torch.randn_like(w), torch.randn_like(u)
    inputs = [x for x in (k, v, beta, gamma) if x is not None]
    wanted = torch.autograd.grad((w * dw).sum() + (u * du).sum(), inputs)

    g = None if gamma is None else (gamma / math.log(2)).detach()
    ours = chunk_scaled_dot_kkt_fwd(k, g, beta, cu_seqlens, C)
    assert not ours.requires_grad
    assert_close("A", ours, A, 1e-10)
    J = J.detach()
    if gate == "none":
        results = delta_rule_wy.prepare_wy_repr_fwd(k, v, beta, cu_seqlens, chunk_size=C)
        assert_close("J", results[2], J, 1e-10)
        found = delta_rule_wy.prepare_wy_repr_bwd(k, v, beta, J, dw, du, cu_seqlens)
    elif gate == "head":
        results = gdn_wy.recompute_w_u_fwd(k, v, beta, J, g, cu_seqlens)
        found = gdn_wy.prepare_wy_repr_bwd(k, v, beta, J, dw, du, g, cu_seqlens)
    else:
        q = torch.randn_like(k)
        results = kda_wy.recompute_w_u_fwd(k, v, beta, J, g, q, cu_seqlens)
        assert_close("qg", results[2], q.repeat_interleave(2, 2) * gamma.exp(), 1e-6)
        starts = chunk_starts(40, C, cu_seqlens)
        last = [max(t for t in range(40) if starts[t] == start) for start in starts]
        assert_close("kg", results[3], k.repeat_interleave(2, 2) * (gamma[:, last] - gamma).exp(), 1e-6)
        zeros = torch.zeros_like(k), torch.zeros_like(gamma)
        dk, dv, dbeta, dg, dA = kda_wy.prepare_wy_repr_bwd(k, v, beta, g, J, zeros[0], dw, du, zeros[1], cu_seqlens)
        # What is left is the way through A, which the caller of fla's function walks himself.
        more = torch.autograd.grad((chunk_matrix(k, beta, gamma, C, cu_seqlens) * dA).sum(), (k, beta, gamma))
        found = dk + more[0], dv, dbeta + more[1], dg + more[2]
    assert_close("w", results[0], w, 1e-10)
    assert_close("u", results[1], u, 1e-10)
    for name, a, b in zip(("dk", "dv", "dbeta", "dg"), found, wanted, strict=False):
        assert_close(name, a, b, 1e-6)


def test_wide_wy_factors():
    k, v = torch.randn(1, 20, 1, 8) / 3, torch.randn(1, 20, 1, 300)
    beta, A = torch.rand(1, 20, 1), torch.randn(1, 20, 1, 16)
    w, u = delta_rule_wy.recompute_w_u_fwd(k, v, beta, A, None)
    wanted = wy_definition(*(x.double() for x in (k, v, beta)), None, A.double(), 16, None)
    assert_close("w", w, wanted[0], 1e-5)
    assert_close("u", u, wanted[1], 1e-5)
    dw, du = torch.randn_like(w), torch.randn_like(u)
    parts = [delta_rule_wy.prepare_wy_repr_bwd(k, v, beta, A, d, e, None) for d, e in ((dw, 0 * du), (0 * dw, du))]
    whole = delta_rule_wy.prepare_wy_repr_bwd(k, v, beta, A, dw, du, None)
    for a, b, c in zip(whole, *parts, strict=True):
        assert error(a, b + c) < 1e-5


# References ---------------------------------------------------------------------------------------------------------


def head_first(x):
    return {name: value if name == "initial_state" else value.transpose(1, 2) for name, value in x.items()}


def test_references_of_the_delta_rule():
    for op, function in (
        ("gated_delta_rule", gdn_naive.naive_recurrent_gated_delta_rule),
        ("gated_delta_rule", gdn_naive.naive_chunk_gated_delta_rule),
        ("kda", kda_naive.naive_recurrent_kda),
        ("kda", kda_naive.naive_chunk_kda),
    ):
        x = draw(op, B=2, HV=4, dtype=torch.float32)
        wanted = naive.delta_rule(**{name: value.double() for name, value in x.items()})
        inputs = leaves(x)
        results = function(**inputs, output_final_state=True)
        for a, b in zip(results, wanted, strict=True):
            assert a.dtype == torch.float32
            assert_close(function.__name__, a, b, 2e-7)
        assert torch.autograd.grad(results[0].sum(), inputs["g"])[0].abs().sum() > 0
        assert function(**x)[1] is None
        short = function(**x | {name: x[name].bfloat16() for name in "qkv"})[0]
        assert short.dtype == (torch.bfloat16 if op == "kda" else torch.float32)
    x = draw("delta_rule", B=2, dtype=torch.float32)
    wanted = naive.delta_rule(**{name: value.double() for name, value in x.items()})
    o, state = delta_rule_naive.delta_rule_recurrence(**head_first(x))
    assert_close("o", o.transpose(1, 2), wanted[0], 2e-7)
    assert_close("state", state, wanted[1], 2e-7)
    del x["initial_state"]
    o, _ = delta_rule_naive.delta_rule_chunkwise(**head_first(x))
    assert_close("o", o.transpose(1, 2), naive.delta_rule(**{n: v.double() for n, v in x.items()})[0], 2e-7)


def test_references_of_the_related_operators():
    x = draw_related("comba", B=2, dtype=torch.float32)
    wanted = related_expected("comba", {name: value.double() for name, value in x.items()})
    for a, b in zip(naive_chunk_comba(**x, output_final_state=True), wanted, strict=True):
        assert_close("comba", a, b, 2e-7)
    late = {name: value.double() for name, value in x.items()}
    late["p"] = late["p"] * late["g"].exp().unsqueeze(-1)
    for a, b in zip(naive_recurrent_comba(**x, output_final_state=True), related_expected("comba", late), strict=True):
        assert_close("comba after the decay", a, b, 2e-7)

    for op, functions, rename in (
        ("gla", (naive_recurrent_gla,), {"g": "gk"}),
        ("simple_gla", (simple_naive.naive_recurrent_simple_gla, simple_naive.naive_chunk_simple_gla), {}),
        ("linear_attn", (linear_naive.naive_recurrent_linear_attn,), {}),
    ):
        x = draw_related(op, B=2, dtype=torch.float32)
        wanted = related_expected(op, {name: value.double() for name, value in x.items()})
        for function in functions:
            results = function(**{rename.get(n, n): value for n, value in x.items()}, output_final_state=True)
            for a, b in zip(results, wanted, strict=True):
                assert_close(function.__name__, a, b, 2e-7)
    for op, functions in (
        ("dplr", (dplr_naive.dplr_recurrence, dplr_naive.dplr_chunkwise)),
        ("iplr", (iplr_naive.iplr_recurrence, iplr_naive.iplr_chunkwise)),
    ):
        x = draw_related(op, B=2, dtype=torch.float32)
        wanted = related_expected(op, {name: value.double() for name, value in x.items()})
        theirs = {"a": "alpha", "b": "beta"}
        for function in functions:
            o, state = function(**{theirs.get(n, n): value for n, value in head_first(x).items()})
            assert_close(function.__name__, o.transpose(1, 2), wanted[0], 2e-7)
            assert_close(function.__name__, state, wanted[1], 2e-7)


def test_references_with_a_denominator():
    x = draw_related("linear_attn", B=2, dtype=torch.float32)
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    z = torch.rand(2, 1, 2, 16)
    start = (x.pop("initial_state"), z)
    o, (state, end) = linear_naive.naive_recurrent_linear_attn(
        **x, initial_state=start, output_final_state=True, normalize=True
    )
    wanted, (wanted_state, wanted_end) = ops.chunk_linear_attn(**x, initial_state=start, output_final_state=True)
    assert_close("o", wanted, o, 1e-5)
    assert_close("state", wanted_state, state, 1e-5)
    assert_close("z", wanted_end, end, 1e-6)
    assert_close("o", ops.chunk_linear_attn(**x)[0], linear_naive.naive_chunk_linear_attn(**x, normalize=True), 1e-5)
    o, scores = simple_naive.naive_parallel_simple_gla(**x, g=-torch.rand(2, 33, 2))
    assert_close("o", o, torch.einsum("bhij,bjhv->bihv", scores, x["v"]), 1e-6)


def test_reference_of_ttt_linear():
    x = draw_ttt(T=33, D=8, dtype=torch.float32)
    wanted = naive.ttt_linear(**{name: value.double() for name, value in x.items()})
    results = chunk_ttt_linear_ref(**x, output_final_state=True)
    for a, b in zip(results, wanted, strict=True):
        assert a.dtype == torch.float32
        assert_close("ttt", a, b, 2e-7)


def test_references_take_one_state_for_all_rows():
    """As fla's do: who goes through packed sequences one by one has a state without the axis of the batch."""
    x = draw("gated_delta_rule", B=2, HV=4, dtype=torch.float32)
    x["initial_state"] = x["initial_state"][:1].expand(2, -1, -1, -1)
    wanted = gdn_naive.naive_recurrent_gated_delta_rule(**x)[0]
    assert torch.equal(
        gdn_naive.naive_recurrent_gated_delta_rule(**x | {"initial_state": x["initial_state"][0]})[0], wanted
    )
    x = draw_ttt(B=1, T=33, D=8, dtype=torch.float32)
    one = {name: x[name][0] for name in ("initial_state", "initial_state_bias")}
    assert torch.equal(chunk_ttt_linear_ref(**x | one)[0], chunk_ttt_linear_ref(**x)[0])


# Differences to fla that are gone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "v_first"),
    [("delta_rule", False), ("gated_delta_rule", False), ("gated_delta_rule", True), ("kda", False), ("kda", True)],
)
def test_wide_values_in_parts(op, v_first, monkeypatch):
    """What runs on CUDA, where the kernels take 256 columns, with parts of 5 on the CPU."""
    chunk = {"delta_rule": ops.chunk_delta_rule, "gated_delta_rule": ops.chunk_gated_delta_rule, "kda": ops.chunk_kda}
    options = {"state_v_first": True} if v_first else {}
    x = draw(op, T=70, HV=None if op == "delta_rule" else 4, V=12, dtype=torch.float32)
    if v_first:
        x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    results = []
    for parts in (None, [slice(0, 5), slice(5, 10), slice(10, 12)]):
        monkeypatch.setattr(
            _delta_rule, "columns", lambda v, parts=parts: parts if parts is not None and v.shape[-1] == 12 else None
        )
        inputs = leaves(x)
        o, state = chunk[op](**inputs, output_final_state=True, **options)
        gradients = torch.autograd.grad(o.square().sum() + state.sum(), list(inputs.values()))
        with torch.no_grad():
            states = chunk[op](**x, return_intermediate_states=True, **options)[2]
            slots = x["initial_state"].clone()
            rest = {name: value for name, value in x.items() if name != "initial_state"}
            stepped = ops.delta_rule_step(**rest, state=slots, **options)
        results.append([o, state, *gradients, states, stepped, slots])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
def test_intermediate_states(op):
    chunk = {"delta_rule": ops.chunk_delta_rule, "gated_delta_rule": ops.chunk_gated_delta_rule}[op]
    x = draw(op, B=2, T=40, dtype=torch.float32)
    with torch.no_grad():
        o, state, h = chunk(**x, output_final_state=True, return_intermediate_states=True, chunk_size=16)
        assert h.shape == (2, 3, 2, 16, 16)
        assert torch.equal(h[:, 0], x["initial_state"])
        tokens = {name: value[:, :32] for name, value in x.items() if name != "initial_state"}
        _, middle = chunk(**tokens, initial_state=x["initial_state"], output_final_state=True, chunk_size=16)
        assert torch.equal(h[:, 2], middle)
    with pytest.raises(AssertionError, match="return_intermediate_states: expected torch.no_grad"):
        chunk(**x, return_intermediate_states=True)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("delta_rule", ops.fused_recurrent_delta_rule),
        ("gated_delta_rule", ops.fused_recurrent_gated_delta_rule),
        ("kda", ops.fused_recurrent_kda),
    ],
)
def test_mixed_types(op, function):
    x = draw(op, dtype=torch.float32)
    x["v"] = x["v"].half()
    o, _ = function(**x)
    assert o.dtype == (torch.float32 if op == "delta_rule" else torch.float16)
    assert_close("o", o, naive.delta_rule(**{name: value.double() for name, value in x.items()})[0], 1e-3)


def test_two_decays_with_the_gate_in_the_kernel():
    x = draw("gated_delta_rule", raw=True, dtype=F64)
    gk = -torch.rand(1, 33, 2, 16, dtype=F64)
    g = ops.fused_gdn_gate(x["g"], x["A_log"], x["dt_bias"], output_dtype=F64)
    rest = {name: x[name] for name in ("q", "k", "v", "beta", "initial_state")}
    wanted = naive.delta_rule(**rest, g=g.unsqueeze(-1) + gk)[0]
    o, _ = ops.fused_recurrent_gated_delta_rule(**x, gk=gk, use_gate_in_kernel=True)
    assert_close("o", o, wanted, 1e-6)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5), (1, 2, 1, 2, 2, 5)], ids=str)
def test_gated_norm(shape, activation):
    """Values, gradients and types of the fused norm, rows of any rank."""
    function = {"silu": F.silu, "sigmoid": torch.sigmoid, None: None}[activation]

    def plain(x, g, weight):
        y = F.rms_norm(x, x.shape[-1:], weight, 1e-3)
        return y if function is None else y * function(g)

    def fused(x, g, weight):
        if activation is None:
            return rms_norm(x, weight, eps=1e-3)
        return rms_norm_gated(x, g, weight, activation=activation, eps=1e-3)

    x, g, weight = (torch.randn(s, dtype=F64, requires_grad=True) for s in (shape, shape, shape[-1:]))
    inputs = (x, weight) if activation is None else (x, g, weight)
    torch.testing.assert_close(fused(x, g, weight), plain(x, g, weight))
    cotangent = torch.randn(shape, dtype=F64)
    wanted = torch.autograd.grad(plain(x, g, weight), inputs, cotangent)
    for dtype, tolerance in ((F64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        ours = [value.detach().to(dtype).requires_grad_() for value in (x, g, weight)]
        y = fused(*ours)
        assert y.dtype == dtype
        asked = ours if activation is not None else (ours[0], ours[2])
        for a, b in zip(torch.autograd.grad(y, asked, cotangent.to(dtype)), wanted, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).abs().max() <= tolerance * (1 + b.abs().max())


def test_norms_without_eps():
    x, g, weight = (torch.randn(3, 5, 8) for _ in range(3))
    norm, gated = RMSNorm(8, eps=0), FusedRMSNormGated(8, eps=0)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), None, 0.0))
    torch.testing.assert_close(gated(x, g), F.rms_norm(x, (8,), None, 0.0) * F.silu(g))


def test_gates_without_autograd():
    """fla's inner functions of the gates; a gate that is all but shut or open has a gradient as good as any."""
    for bound in (None, -5.0):
        x = torch.randn(2, 7, 3, 4) * 10
        A_log, bias, dyg = torch.rand(3), torch.randn(12), torch.randn(2, 7, 3, 4)
        wide = leaves({"g": x, "A_log": A_log, "dt_bias": bias}, F64)
        y = kda_gate.fused_kda_gate(**wide, lower_bound=bound, output_dtype=F64)
        wanted = torch.autograd.grad(y, tuple(wide.values()), dyg.double())
        assert_close("g", kda_gate.kda_gate_fwd(x, A_log, bias, bound), y, 1e-6)
        found = kda_gate.kda_gate_bwd(x, A_log, bias, dyg, bound)
        for name, a, b in zip(wide, found, wanted, strict=True):
            assert_close(f"d{name}", a, b, 2e-6)
        assert kda_gate.kda_gate_bwd(x, A_log, None, dyg, bound)[2] is None
    x, bias, dyg = x[..., 0], bias[:3], dyg[..., 0]
    wide = leaves({"g": x, "A_log": A_log, "dt_bias": bias}, F64)
    y = gdn_gate.fused_gdn_gate(**wide, output_dtype=F64)
    assert_close("g", gdn_gate.gdn_gate_fwd(x, A_log, bias), y, 1e-6)
    wanted = torch.autograd.grad(y, tuple(wide.values()), dyg.double())
    for a, b in zip(gdn_gate.gdn_gate_bwd(x, A_log, bias, dyg), wanted, strict=True):
        assert_close("gradient", a, b, 2e-6)


def test_pieces_name_their_arguments():
    k, v, beta, A = torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2, 3), torch.rand(1, 5, 2), torch.rand(1, 5, 2, 16)
    narrow = k[..., :3]
    for text, call in (
        ("gk: expected shape [1, 5, 2, 4]", lambda: kda_wy.recompute_w_u_fwd(k, v, beta, A, narrow)),
        ("q: expected shape [1, 5, 2, 4]", lambda: kda_wy.recompute_w_u_fwd(k, v, beta, A, k, narrow)),
        ("dg: expected shape [1, 5, 2, 4]", lambda: kda_wy.prepare_wy_repr_bwd(k, v, beta, k, A, k, k, v, narrow)),
        ("dyg: expected shape [1, 5, 2, 4]", lambda: kda_gate.kda_gate_bwd(k, torch.zeros(2), None, narrow)),
        ("dyg: expected a floating type", lambda: gdn_gate.gdn_gate_bwd(beta, torch.zeros(2), None, beta.int())),
        ("alpha: expected shape [1, 5, 2, 4]", lambda: iplr_naive.iplr_recurrence(k, k, v, narrow, k)),
        ("gk: expected shape [1, 5, 2, 4]", lambda: naive_recurrent_gla(k, k, v, narrow)),
        ("g: expected shape [1, 5, 2]", lambda: naive_recurrent_comba(k, k, v, k, beta, beta[..., :1])),
        (
            "initial_state: expected [1, H",
            lambda: kda_naive.naive_recurrent_kda(k, k, v, k, beta, initial_state=beta[0]),
        ),
        ("weight: expected shape [4]", lambda: rms_norm(k, torch.ones(3), torch.ones(4))),
        ("bias: expected shape [4]", lambda: rms_norm(k, torch.ones(4), torch.ones(3))),
        ("x: expected a floating type", lambda: rms_norm(k.int(), None)),
        ("cache: expected shape [1, 4, 2]", lambda: ShortConvolution(4, 2)(k[..., 0, :], cache=torch.ones(1, 4, 3))),
        ("z_init: expected shape [1, 1, 2, 4]", lambda: ops.chunk_linear_attn(k, k, v, initial_state=(None, k))),
        ("cu_seqlens: expected the token count 5", lambda: ops.chunk_global_cumsum(beta, cu_seqlens=CU)),
        ("cu_seqlens: expected at least 3", lambda: pack.unpack_sequence(k[0], torch.tensor([0, 3, 2, 5]))),
        ("cu_seqlens: expected 0 at position 0", lambda: pack.pack_sequence(k, torch.tensor([1, 5]))),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
    with pytest.raises(AssertionError, match=re.escape("x: expected room for 9 tokens, got [1, 5, 2, 4]")):
        pack.pack_sequence(k, torch.tensor([0, 9]))


def test_sums_of_comba():
    g = torch.randn(1, 40, 3)
    for options in ({}, {"cu_seqlens": CU, "scale": 2.0}):
        before, after = chunk_comba_cumsum_scalar_fwd(g, 16, **options)
        torch.testing.assert_close(after, cumsum.chunk_local_cumsum(g, 16, **options))
        torch.testing.assert_close(before, after - g * options.get("scale", 1))


def test_modules_of_fla():
    """Arguments by position, in fla's order."""
    convolution = ShortConvolution(8, 4, True, "silu", "triton")
    assert convolution.state_size == 32
    x = torch.randn(3, 1, 8)
    with torch.no_grad():
        cache = torch.randn(3, 8, 4)
        other, residual = cache.clone(), torch.randn_like(x)
        y, state = convolution.step(x, residual, cache, True)
        assert state is cache
        wanted, _ = convolution(x, residual, cache=other, output_final_state=True)
        assert torch.equal(y, wanted)
        assert torch.equal(cache, other)
        y, none = convolution(x, residual, cache=cache)  # advances it all the same
        wanted, _ = convolution(x, residual, cache=other, output_final_state=True)
        assert none is None
        assert torch.equal(y, wanted)
        assert torch.equal(cache, other)
        y, none = convolution(torch.randn(3, 2, 8), cache=cache)  # two tokens do not
        assert none is None
        assert torch.equal(cache, other)
        packed, none = convolution.step(x.transpose(0, 1), None, None)
        assert none is None
        assert torch.equal(packed.transpose(0, 1), convolution(x)[0])
    x, g, residual = (torch.randn(2, 5, 8).bfloat16() for _ in range(3))
    norm = RMSNorm(8, True, True, 1e-3)
    assert norm.bias is not None
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    y, total = norm(x, residual, True)
    wide = x.float() + residual.float()
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(total, wide.bfloat16())
    torch.testing.assert_close(y, (F.rms_norm(wide, (8,), norm.weight, 1e-3) + norm.bias).bfloat16())
    # residual_in_fp32 speaks of a sum that begins here: one that is there keeps its type.
    assert norm(x, residual, True, True)[1].dtype == torch.bfloat16
    assert norm(x, residual.float(), True, False)[1].dtype == torch.float32
    assert norm(x, None, True, True)[1].dtype == torch.float32
    assert norm(x, None, True)[1] is x
    gated = FusedRMSNormGated(8, False, 1e-3, "sigmoid")
    assert gated.weight is None
    wanted = F.rms_norm(wide, (8,), None, 1e-3) * g.float().sigmoid()
    torch.testing.assert_close(gated(x, g, residual), wanted.bfloat16())
    torch.testing.assert_close(rms_norm_gated(x, g, None, None, "sigmoid", residual, eps=1e-3), wanted.bfloat16())
    wide = x.float()
    assert rms_norm_gated_(wide, g, norm.weight.detach(), "sigmoid", 1e-3) is wide
    torch.testing.assert_close(wide, F.rms_norm(x.float(), (8,), norm.weight, 1e-3).detach() * g.float().sigmoid())
    with pytest.raises(NotImplementedError, match="a norm in place has no gradient"):
        rms_norm_gated_(wide, g, norm.weight)
    with pytest.raises(ValueError, match="activation: expected one of silu, swish, sigmoid, got 'relu'"):
        rms_norm_gated(x, g, None, activation="relu")
