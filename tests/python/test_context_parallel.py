"""Operators over the ranks of a group against one process: outputs, states and every gradient."""

import datetime
import functools
import itertools
import pathlib
import random
import sys
import time
import types
import unittest.mock

import pytest
import torch
import torch.distributed as dist

import ranks
from fastweight import _accelerate, _delta_rule, last_implementation, layers, ops, using
from fastweight._cp_context import CPContext, cut, spans_of
from fastweight.ops.cp import build_cp_context, context_parallel

LENGTHS = {
    "one": [200],
    "spanning": [5, 0, 130, 1, 37, 90],  # the third is on three of four ranks
    "fewer_than_ranks": [2, 1],
    "short": [16] * 12,
}
PER_TOKEN = ("q", "k", "v", "g", "beta", "eta", "x")
STATES = ("initial_state", "initial_state_bias")


def offsets_of(lengths):
    return [0, *itertools.accumulate(lengths)]


# Cases: a function, and what it is called with on one process -------------------------------------------------------


def delta_rule(T, N, dtype, generator):
    H, K, V = 3, 12, 20
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = {
        "q": normal(1, T, H, K),
        "k": torch.nn.functional.normalize(normal(1, T, H, K), dim=-1),
        "v": normal(1, T, H, V),
        "beta": normal(1, T, H).sigmoid(),
    }
    x = {name: value.to(dtype) for name, value in x.items()}
    x["initial_state"] = normal(N, H, K, V)
    return ops.chunk_delta_rule, x, {"use_qk_l2norm_in_kernel": False}


def gated_delta_rule(T, N, dtype, generator):
    """Grouped value heads with very different gates."""
    H, HV, K, V = 2, 4, 20, 12
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = {"q": normal(1, T, H, K), "k": normal(1, T, H, K), "v": normal(1, T, HV, V)}
    x |= {"g": normal(1, T, HV), "beta": normal(1, T, HV)}
    x = {name: value.to(dtype) for name, value in x.items()}
    x |= {"A_log": torch.tensor([-9.0, -4.0, 0.0, 3.0], dtype=torch.float64), "dt_bias": normal(HV)}
    x["initial_state"] = normal(N, HV, V, K)
    options = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"), True
    )
    return ops.chunk_gated_delta_rule, x, options


def kda(T, N, dtype, generator):
    H, HV, K, V = 1, 2, 16, 24
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = {"q": normal(1, T, H, K), "k": normal(1, T, H, K), "v": normal(1, T, HV, V)}
    x |= {"g": normal(1, T, HV, K), "beta": normal(1, T, HV).sigmoid()}
    x = {name: value.to(dtype) for name, value in x.items()}
    x |= {"A_log": torch.tensor([-5.0, 1.0], dtype=torch.float64), "dt_bias": normal(HV * K)}
    x["initial_state"] = normal(N, HV, K, V)
    return ops.chunk_kda, x, {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0}


def ttt_linear(T, N, dtype, generator):
    H, D = 3, 16
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = {name: torch.nn.functional.normalize(normal(1, T, H, D), dim=-1) for name in ("q", "k", "v")}
    x |= {"eta": 0.1 * normal(1, T, H).sigmoid()}
    x = {name: value.to(dtype) for name, value in x.items()}
    x |= {"w": 1 + 0.1 * normal(H, D), "b": 0.1 * normal(H, D)}
    x |= {"initial_state": 0.1 * normal(N, H, D, D), "initial_state_bias": 0.1 * normal(N, H, 1, D)}
    return ops.chunk_ttt_linear, x, {}


def convolution(T, N, dtype, generator):
    D, W = 6, 4
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = {"x": normal(1, T, D).to(dtype), "weight": normal(D, W), "bias": normal(D)}
    x["initial_state"] = normal(N, D, W)
    return ops.causal_conv1d, x, {"activation": "silu"}


# One process, and the ranks -----------------------------------------------------------------------------------------


def prepared(case, lengths, dtype, with_states, device="cpu"):
    """The function, its tensors and options, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    function, x, options = case(sum(lengths), len(lengths), dtype, generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = {name: value if name in PER_TOKEN else value.to(wide) for name, value in x.items()}
    x = {name: value.to(device) for name, value in x.items() if with_states or name not in STATES}
    return function, x, options


def loss_of(outputs, weights):
    return sum((y.double() * w).sum() for y, w in zip(outputs, weights, strict=True))


def leaves_of(x):
    return {name: value.detach().clone().requires_grad_() for name, value in x.items()}


def on_one_process(case, lengths, dtype, with_states, device):
    function, x, options = prepared(case, lengths, dtype, with_states, device)
    leaves = leaves_of(x)
    cu_seqlens = torch.tensor(offsets_of(lengths), device=device)
    outputs = function(**leaves, **options, output_final_state=True, cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(device) for y in outputs]
    loss_of(outputs, weights).backward()
    return outputs, weights, {name: leaf.grad for name, leaf in leaves.items()}


def on_this_rank(context, case, lengths, dtype, with_states, weights):
    """(outputs, gradients, which sequences are here, which of them begin here, which end here)."""
    device = context.cu_seqlens.device
    function, x, options = prepared(case, lengths, dtype, with_states, device)
    cu_seqlens, span = offsets_of(lengths), context.span
    here = [n for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens)) if max(a, span.start) < min(b, span.end)]
    begin = [cu_seqlens[n] >= span.start for n in here]
    end = [cu_seqlens[n + 1] <= span.end for n in here]

    def local(name, value):
        if name in PER_TOKEN:
            return context.shard(value)
        if name not in STATES:
            return value
        states = value[here].clone()
        for i, begins in enumerate(begin):
            if not begins:
                states[i] = torch.nan  # nobody reads it
        return states

    leaves = leaves_of({name: local(name, value) for name, value in x.items()})
    outputs = function(**leaves, **options, output_final_state=True, cp_context=context)
    ending = torch.tensor(end, dtype=torch.float64, device=device)
    local_weights = [
        context.shard(weights[0]),
        *(w[here] * ending.view(-1, *[1] * (w.dim() - 1)) for w in weights[1:]),
    ]
    loss_of(outputs, local_weights).backward()
    return outputs, {name: leaf.grad for name, leaf in leaves.items()}, (here, begin, end)


def distance(x, y):
    x, y = x.detach(), y.detach()
    scale = y.double().square().mean().sqrt()
    return float((x.double() - y.double()).square().mean().sqrt() / (scale + 1e-8)) if y.numel() else 0.0


def check(context, case, lengths, dtype=torch.float32, with_states=True, bound=1e-5, same_bits=False):
    device = context.cu_seqlens.device
    expected, weights, gradients = on_one_process(case, lengths, dtype, with_states, device)
    outputs, found, (here, begin, end) = on_this_rank(context, case, lengths, dtype, with_states, weights)
    what = f"{case.__name__} {lengths} {dtype} {context.mode} rank {context.rank} of {context.world_size}"

    def compare(name, x, y, bits=same_bits):
        assert x.shape == y.shape, (what, name)
        if bits:
            assert torch.equal(x, y), (what, name, distance(x, y))
        else:
            assert distance(x, y) <= bound, (what, name, distance(x, y))

    compare("o", outputs[0], context.shard(expected[0]))
    for x, y in zip(outputs[1:], expected[1:], strict=True):
        for i, n in enumerate(here):
            if end[i]:
                compare("final state", x[i], y[n])
    for name, gradient in found.items():
        if name in PER_TOKEN:  # the inputs before a cut have gradients from both sides of it, which are added last
            compare("d" + name, gradient, context.shard(gradients[name]), bits=same_bits and name != "x")
        elif name in STATES:
            for i, n in enumerate(here):
                compare("d" + name, gradient[i], gradients[name][n] if begin[i] else torch.zeros_like(gradient[i]))
        else:  # the caller sums the gradients of parameters over the ranks
            total = gradient.cpu()
            dist.all_reduce(total)
            compare("d" + name, total, gradients[name].cpu(), bits=False)


# What runs on the ranks ---------------------------------------------------------------------------------------------


def agreement_with_one_process():
    affine = (delta_rule, gated_delta_rule, kda)
    for lengths in LENGTHS.values():
        cu_seqlens = torch.tensor(offsets_of(lengths))
        for mode in ("affine", "in_order"):
            context = build_cp_context(cu_seqlens, mode=mode)
            for case in affine:
                check(context, case, lengths)
        check(build_cp_context(cu_seqlens), gated_delta_rule, lengths, with_states=False)
        check(build_cp_context(cu_seqlens, align=16), ttt_linear, lengths)
        context = build_cp_context(cu_seqlens.int(), conv1d_kernel_size=4, cu_seqlens_cpu=cu_seqlens)
        check(context, convolution, lengths)
        check(context, convolution, lengths, with_states=False)
    lengths = LENGTHS["spanning"]
    cu_seqlens = torch.tensor(offsets_of(lengths))
    for mode in ("affine", "in_order"):
        context = build_cp_context(cu_seqlens, mode=mode)
        for case in affine:
            check(context, case, lengths, torch.float64, bound=1e-10)
            check(context, case, lengths, torch.bfloat16, bound=2e-2)
    check(context, convolution, lengths, torch.bfloat16, bound=2e-2)


def the_bits_of_one_process(mode):
    for name in ("one", "spanning"):
        lengths = LENGTHS[name]
        context = build_cp_context(torch.tensor(offsets_of(lengths)), mode=mode, align=64)
        for case in (delta_rule, gated_delta_rule, kda, ttt_linear, convolution):
            check(context, case, lengths, same_bits=True)


def maps_of_a_choice(device, dtype, name, bound):
    """The maps run by a name of their own, whatever the operator runs by."""
    lengths = LENGTHS["one"]
    context = build_cp_context(torch.tensor(offsets_of(lengths), device=device), mode="affine")
    with using(name, family="delta_rule_map"):
        check(context, gated_delta_rule, lengths, dtype, bound=bound)
    if context.span.after:
        assert last_implementation("delta_rule_map_forward") == name
    if context.span.before:
        assert last_implementation("delta_rule_map_backward") == name
    assert last_implementation("delta_rule_forward") != name


def a_state_at_a_cut():
    """What output_final_state returns of a sequence that goes on is a result like others: it has a gradient."""
    x = {name: value.double() for name, value in gated_delta_rule(90, 1, torch.float64, torch.Generator())[1].items()}
    options = gated_delta_rule(0, 0, torch.float64, torch.Generator())[2]
    names = ("q", "k", "v", "g", "beta")
    generator = torch.Generator().manual_seed(1)
    for mode in ("affine", "in_order"):
        context = build_cp_context(torch.tensor([0, 90]), mode=mode)
        weights = [torch.randn(1, 4, 12, 20, generator=generator, dtype=torch.float64) for _ in context.spans]
        leaves = leaves_of(x)
        loss, state = 0, leaves["initial_state"]
        for span, weight in zip(context.spans, weights, strict=True):
            part = {name: leaves[name][:, span.start : span.end] for name in names}
            parameters = {"A_log": leaves["A_log"], "dt_bias": leaves["dt_bias"], "initial_state": state}
            o, state = ops.chunk_gated_delta_rule(**part, **parameters, **options, output_final_state=True)
            loss = loss + o.square().sum() + (state * weight).sum()
        loss.backward()

        local = leaves_of({name: context.shard(x[name]) for name in names} | {"A_log": x["A_log"]})
        start = leaves["initial_state"].detach() if context.rank == 0 else None
        o, state = ops.chunk_gated_delta_rule(
            **local, dt_bias=x["dt_bias"], initial_state=start, **options, output_final_state=True, cp_context=context
        )
        (o.square().sum() + (state * weights[context.rank]).sum()).backward()
        for name in names:
            assert distance(local[name].grad, context.shard(leaves[name].grad)) < 1e-10, (mode, name)


def wide_values_in_parts():
    """What runs on CUDA, where the kernels take 256 columns, with parts of 5."""
    parts, lengths = [slice(0, 5), slice(5, 10), slice(10, 12)], LENGTHS["spanning"]
    with unittest.mock.patch.object(_delta_rule, "columns", lambda v: parts if v.shape[-1] == 12 else None):
        for mode in ("affine", "in_order"):
            check(build_cp_context(torch.tensor(offsets_of(lengths)), mode=mode), gated_delta_rule, lengths)


LAYERS = {
    "DeltaNet": {"hidden_size": 32, "num_heads": 2},
    "GatedDeltaNet": {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "num_v_heads": 4, "expand_v": 1},
    "KimiDeltaAttention": {"hidden_size": 32, "head_dim": 16, "num_heads": 2},
    "TTTLinear": {"hidden_size": 32, "num_heads": 2},
}


def layers_on_the_ranks(checkpointing):
    lengths = [70, 3, 150]
    cu_seqlens = torch.tensor(offsets_of(lengths))
    x = torch.randn(1, sum(lengths), 32, generator=torch.Generator().manual_seed(0))
    for name, options in LAYERS.items():
        torch.manual_seed(0)
        layer = getattr(layers, name)(**options)
        context = build_cp_context(cu_seqlens, conv1d_kernel_size=4, align=16)
        whole, local = (y.detach().clone().requires_grad_() for y in (x, context.shard(x)))
        expected = layer(whole, cu_seqlens=cu_seqlens)[0]
        expected.square().sum().backward()
        gradients = {key: parameter.grad for key, parameter in layer.named_parameters()}
        layer.zero_grad()

        def forward(y, layer=layer, context=context):
            return layer(y, cp_context=context)[0]

        if checkpointing:
            o = torch.utils.checkpoint.checkpoint(forward, local, use_reentrant=False)
        else:
            o = forward(local)
        o.square().sum().backward()
        assert distance(o, context.shard(expected)) < 1e-5, name
        assert distance(local.grad, context.shard(whole.grad)) < 1e-5, name
        for key, parameter in layer.named_parameters():
            dist.all_reduce(parameter.grad)
            assert distance(parameter.grad, gradients[key]) < 1e-5, (name, key)
        with torch.no_grad():
            assert distance(layer.eval()(local, cp_context=context)[0], context.shard(expected)) < 1e-5, name
        if checkpointing:
            continue
        with pytest.raises(ValueError, match="attention_mask: expected None with cp_context"):
            layer(local, attention_mask=torch.ones(1, local.shape[1]), cp_context=context)
        with pytest.raises(ValueError, match="past_key_values: expected None with cp_context"):
            layers.GatedDeltaNet(**LAYERS["GatedDeltaNet"], layer_idx=0)(
                local, past_key_values=layers.Cache(), cp_context=context
            )
        with pytest.raises(ValueError, match="hidden_states: expected the .* tokens of rank"):
            layer(x, cp_context=context)


def layers_and_states_on_the_ranks():
    layers_on_the_ranks(False)
    layers_on_the_ranks(True)
    a_state_at_a_cut()
    wide_values_in_parts()


def example_on_a_mesh(arguments):
    path = pathlib.Path(__file__).parents[2] / "examples" / "context_parallel.py"
    example = types.ModuleType("example")
    exec(compile(path.read_text(), path, "exec"), vars(example))
    one, every = example.run(example.parse(arguments))
    assert max(abs(a - b) for a, b in zip(one, every, strict=True)) < 1e-4, (one, every)


def a_model_of_transformers():
    """Linear layers alone: attention over ranks is not ours. Logits and gradients, with checkpointing."""
    import fastweight
    from test_accelerate import build, tokens

    model = build(
        "qwen3_next", num_experts=0, mlp_only_layers=[0, 1], num_hidden_layers=2, layer_types=["linear_attention"] * 2
    )
    ids = tokens(1, 150)
    fastweight.accelerate()
    expected = model(ids, use_cache=False).logits
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        context = build_cp_context(torch.tensor([0, 150]), conv1d_kernel_size=4)
        with context_parallel(context):
            logits = model(context.shard(ids), use_cache=False).logits
            logits.square().sum().backward()
        assert distance(logits, context.shard(expected)) < 1e-5
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad)
            assert distance(parameter.grad, gradients[name]) < 1e-4, name
    with pytest.raises(TypeError, match="cp_context: expected what"), context_parallel(None):
        pass
    # A step sees the tokens of this rank alone.
    module = sys.modules[type(model).__module__]
    q = torch.zeros(1, 1, 2, 16)
    with context_parallel(context), pytest.raises(NotImplementedError, match="context_parallel: .*recurrent_gated"):
        module.torch_recurrent_gated_delta_rule(q, q, q, q[..., 0], q[..., 0], None, False)


def functions_of_fla():
    """Its layers have no argument for a context: what they call gets it, or refuses."""

    def original(*args, **kwargs):
        raise AssertionError

    lengths = LENGTHS["spanning"]
    context = build_cp_context(torch.tensor(offsets_of(lengths)))
    for case in (delta_rule, gated_delta_rule, kda, convolution):
        function, x, options = prepared(case, lengths, torch.float32, False)
        expected, _ = function(**x, **options, cu_seqlens=torch.tensor(offsets_of(lengths)))
        x = {name: context.shard(value) if name in PER_TOKEN else value for name, value in x.items()}
        with context_parallel(context):
            o, _ = _accelerate._FLA[function.__name__](original)(**x, **options, cu_seqlens=context.cu_seqlens)
        assert distance(o, context.shard(expected)) < 1e-5, case.__name__
    with context_parallel(context):
        for name in ("fused_recurrent_gated_delta_rule", "causal_conv1d_update"):
            with pytest.raises(NotImplementedError, match=f"context_parallel: .* {name}"):
                _accelerate._FLA[name](original)(*[torch.zeros(1, 1, 1, 8)] * 5)
        with pytest.raises(NotImplementedError, match="context_parallel: .* chunk_kda"):
            _accelerate._FLA["chunk_kda"](original)(*[torch.zeros(1, 1, 1, 257)] * 5)


# Refusals -----------------------------------------------------------------------------------------------------------


def refusals():
    rank = dist.get_rank()
    cu_seqlens = torch.tensor([0, 40, 100])
    for change in ({"mode": "affine"}, {"align": 2}, {"conv1d_kernel_size": 4}, {"tokens_per_rank": [0, 50, 50]}):
        (name,) = change
        with pytest.raises(ValueError, match=rf"{name}: expected the same on every rank, got another on \[1, 2\]"):
            build_cp_context(cu_seqlens, **(change if rank == 0 else {}))
    with pytest.raises(ValueError, match=r"cu_seqlens: expected the same on every rank, got another on \[2\]"):
        build_cp_context(cu_seqlens + (rank == 2) * torch.tensor([0, 1, 0]))
    malformed = {
        "cu_seqlens: expected offsets that start at 0": {"cu_seqlens": torch.tensor([0, 50, 40])},
        "cu_seqlens: expected two or more offsets of int32": {"cu_seqlens": torch.tensor([0.0, 100.0])},
        "cu_seqlens: expected a tensor, got list": {"cu_seqlens": [0, 100]},
        "cu_seqlens_cpu: expected shape": {"cu_seqlens_cpu": torch.tensor([0, 100])},
        "mode: expected one of affine, in_order or None, got 'ring'": {"mode": "ring"},
        "align: expected 1 or more tokens, got 0": {"align": 0},
        "conv1d_kernel_size: expected a number from 1 to 16, got 17": {"conv1d_kernel_size": 17},
        "tokens_per_rank: expected 3 numbers that add up to 100 tokens": {"tokens_per_rank": [50, 50, 1]},
        "tokens_per_rank: expected cuts at multiples of 16": {"tokens_per_rank": [32, 18, 50], "align": 16},
    }
    for message, change in malformed.items():
        arguments = {"cu_seqlens": cu_seqlens} | (change if rank == 1 else {})
        expected = message if rank == 1 else r"expected every rank to accept its arguments, got a refusal of \[1\]"
        with pytest.raises((TypeError, ValueError), match=expected):
            build_cp_context(**arguments)

    others = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="group: expected one that this process is in"):
            build_cp_context(cu_seqlens, others)

    context = build_cp_context(cu_seqlens, conv1d_kernel_size=4)
    function, x, options = prepared(delta_rule, [40, 60], torch.float32, False)
    with pytest.raises(ValueError, match=f"q: expected the {context.num_tokens} tokens of rank {rank}, got 100"):
        function(**x, **options, cp_context=context)
    with pytest.raises(ValueError, match="q: expected a batch of 1 with cp_context, got 2"):
        function(**{name: value.repeat_interleave(2, 0) for name, value in x.items()}, **options, cp_context=context)
    x = {name: context.shard(value) for name, value in x.items()}
    with pytest.raises(ValueError, match="cu_seqlens: expected none with cp_context"):
        function(**x, **options, cp_context=context, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="initial_state: expected one state for each of the"):
        function(**x, **options, cp_context=context, initial_state=torch.zeros(7, 3, 12, 20))
    with pytest.raises(ValueError, match="weight: expected the 4 columns of cp_context, got 3"):
        ops.causal_conv1d(x["v"].flatten(2), torch.ones(60, 3), cp_context=context)
    with pytest.raises(ValueError, match="x: expected all 100 tokens, got"):
        context.shard(x["v"])
    function, x, options = prepared(ttt_linear, [40, 60], torch.float32, False)
    x = {name: context.shard(value) if name in PER_TOKEN else value for name, value in x.items()}
    with pytest.raises(ValueError, match=r"cut at multiples of the chunk size 16.*rank 1 starting after 33 tokens"):
        function(**x, **options, cp_context=context)
    for case in (delta_rule, gated_delta_rule, kda):
        function, x, options = prepared(case, [40, 60], torch.float32, False)
        x = {name: context.shard(value) if name in PER_TOKEN else value for name, value in x.items()}
        with torch.no_grad(), pytest.raises(NotImplementedError, match="return_intermediate_states"):
            function(**x, **options, return_intermediate_states=True, cp_context=context)


def one_rank_is_missing(mode, late):
    """A rank that ends, or that is later than the timeout, is an error on the others, in time."""
    lengths = [100]
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    context = build_cp_context(torch.tensor([0, 100]), group, mode=mode)
    function, x, options = prepared(delta_rule, lengths, torch.float32, False)
    missing = 0 if mode == "in_order" else 1
    if context.rank == missing:
        if late:
            time.sleep(5)
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        function(**{name: context.shard(value) for name, value in x.items()}, **options, cp_context=context)
    assert time.monotonic() - start < 4.5


# Who holds what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", [1, 4])
def test_spans(align):
    """Against a list of the sequence of every token."""
    dice = random.Random(align)
    for _ in range(300):
        lengths = [dice.choice([0, 1, 2, 7, 30]) for _ in range(dice.randint(1, 6))]
        world_size = dice.randint(1, 6)
        cu_seqlens = offsets_of(lengths)
        bounds = cut(cu_seqlens, world_size, align)
        owner = [n for n, length in enumerate(lengths) for _ in range(length)]
        assert [bounds[0], bounds[-1]] == [0, len(owner)]
        assert bounds == sorted(bounds)
        held = [owner[a:b] for a, b in itertools.pairwise(bounds)]
        for rank, span in enumerate(spans_of(cu_seqlens, bounds)):
            here = held[rank]
            assert [b - a for a, b in itertools.pairwise(span.cu_seqlens)] == [
                len(list(run)) for _, run in itertools.groupby(here)
            ]
            assert span.before == tuple(r for r in range(rank) if here and here[0] in held[r])
            assert span.after == tuple(r for r in range(rank + 1, world_size) if here and here[-1] in held[r])
            assert span.halo == (span.start - cu_seqlens[here[0]] if here else 0)
            assert span.halo % align == 0
            if align == 1:
                assert span.start == rank * len(owner) // world_size


def test_mode_for():
    """The mode with fewer products where none was asked for; a CUDA device has one stage, of all heads."""

    def mode(world_size, lengths, device="cpu", heads=16, threads=1, wish=None):
        offsets = offsets_of(lengths)
        spans = spans_of(offsets, cut(offsets, world_size, 1))
        local = torch.tensor(spans[0].cu_seqlens)
        context = CPContext(None, local, local, None, 0, wish, threads, tuple(offsets), spans)
        return context.mode_for(torch.device(device), heads, 1)

    assert mode(2, [100, 100], "cuda") == "in_order"  # nothing crosses
    for world_size in (2, 3, 8, 12, 64):
        assert mode(world_size, [200], "cuda") == "affine"
        assert mode(world_size, [200], "cuda", wish="in_order") == "in_order"
        assert mode(world_size, [200]) == ("in_order" if world_size < 12 else "affine")
    assert mode(2, [200], heads=2) == "affine"  # 1 + 1 / 2 over 34 / 24
    assert mode(2, [200], threads=16) == "affine"


# The map in one process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [delta_rule, gated_delta_rule, kda])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_map(case, dtype):
    """S_out = M S_in + h and G_in = M^T G_out + e, with the forward and backward of one device as S_out and G_in."""
    lengths = [40, 0, 25]
    function, x, options = prepared(case, lengths, dtype, True)
    cu_seqlens = torch.tensor(offsets_of(lengths))
    leaf = x["initial_state"].requires_grad_()
    o, final = function(**x, **options, output_final_state=True, cu_seqlens=cu_seqlens)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    (d_initial,) = torch.autograd.grad((o, final), leaf, (d_o, d_final))
    shared = {name: value for name, value in x.items() if name in ("g", "beta", "A_log", "dt_bias")}
    shared |= options | {"cu_seqlens": cu_seqlens}
    M, h = ops.delta_rule_map(x["k"], x["v"], **shared)
    Mt, e = ops.delta_rule_map_backward(x["q"], x["k"], d_o, **shared)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    k_first = (lambda y: y.mT) if options.get("state_v_first") else (lambda y: y)
    assert distance(M @ k_first(leaf.detach()) + k_first(h), k_first(final)) < bound
    assert distance(Mt @ k_first(d_final) + k_first(e), k_first(d_initial)) < bound
    assert distance(Mt.mT, M) < bound
    _, whole = ops.delta_rule_map(x["k"], x["v"], **shared, initial_state=leaf.detach())
    _, back = ops.delta_rule_map_backward(x["q"], x["k"], d_o, **shared, d_final_state=d_final)
    assert distance(whole, final) < bound
    assert distance(back, d_initial) < bound


@pytest.mark.parametrize("v_first", [False, True])
def test_map_of_wide_values_in_parts(v_first, monkeypatch):
    """What runs on CUDA, where the kernels take 256 columns, with parts of 5."""
    _, x, options = prepared(gated_delta_rule, [40], torch.float32, True)
    options["state_v_first"] = v_first
    state = x.pop("initial_state") if v_first else x.pop("initial_state").mT
    q, v = x.pop("q"), x.pop("v")
    results = []
    for parts in (None, [slice(0, 5), slice(5, 10), slice(10, 12)]):
        monkeypatch.setattr(_delta_rule, "columns", lambda v, parts=parts: parts if v.shape[-1] == 12 else None)
        forward = ops.delta_rule_map(v=v, **x, **options, initial_state=state)
        backward = ops.delta_rule_map_backward(q, d_o=v, **x, **options, d_final_state=state)
        results.append((*forward, *backward))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert distance(a, b) < 1e-6


def test_map_refuses_a_beta_per_value_channel():
    x = prepared(gated_delta_rule, [33], torch.float32, False)[1]
    with pytest.raises(ValueError, match="beta: expected shape"):
        ops.delta_rule_map(x["k"], x["v"], beta=torch.ones(1, 33, 4, 12))


# Several processes --------------------------------------------------------------------------------------------------


def agreement_on_cuda():
    """All ranks on one device, with gloo over copies in host memory."""
    for name in ("one", "spanning", "fewer_than_ranks"):
        lengths = LENGTHS[name]
        cu_seqlens = torch.tensor(offsets_of(lengths), device="cuda")
        for mode in ("affine", "in_order", None):
            context = build_cp_context(cu_seqlens, mode=mode)
            for case in (delta_rule, gated_delta_rule, kda, convolution):
                check(context, case, lengths, bound=3e-5)
                check(context, case, lengths, torch.bfloat16, bound=3e-2)
        if context.longest_chain == 2:  # nothing to compose, and the maps round as the operator does
            context = build_cp_context(cu_seqlens, mode="affine", align=64)
            for case in (delta_rule, gated_delta_rule, kda):
                check(context, case, lengths, torch.bfloat16, same_bits=True)
        context = build_cp_context(cu_seqlens, mode="in_order", align=64)
        check(context, ttt_linear, lengths, bound=3e-5)
        for case in (delta_rule, gated_delta_rule, kda):
            for dtype in (torch.float32, torch.bfloat16):
                check(context, case, lengths, dtype, bound=3e-2, same_bits=True)
    maps_of_a_choice("cuda", torch.bfloat16, "chunk_fp32", 3e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("world_size", [2, 4])
def test_agreement_on_cuda(world_size):
    ranks.run(world_size, agreement_on_cuda)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_agreement(world_size):
    ranks.run(world_size, agreement_with_one_process)


@pytest.mark.parametrize(("world_size", "mode"), [(3, "in_order"), (2, "affine")])
def test_bits(world_size, mode):
    """On two ranks the affine mode has nothing to compose: h is the final state of one, e a gradient of the other."""
    ranks.run(world_size, the_bits_of_one_process, mode)


def test_maps_of_a_choice():
    ranks.run(3, maps_of_a_choice, "cpu", torch.float32, "reference", 1e-5)


def test_layers_and_states():
    ranks.run(3, layers_and_states_on_the_ranks)


def test_a_model_of_transformers():
    pytest.importorskip("transformers")
    ranks.run(2, a_model_of_transformers)


def test_functions_of_fla():
    ranks.run(2, functions_of_fla)


def test_refusals():
    ranks.run(3, refusals)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["affine", "in_order"])
def test_a_missing_rank(mode, late):
    ranks.run(2, one_rank_is_missing, mode, late)


@pytest.mark.parametrize(
    "arguments", [["--shard", "--checkpointing", "--mode", "affine"], ["--mode", "in_order"]], ids=["fsdp2", "ddp"]
)
def test_mesh(arguments):
    """The example, on two rows of two ranks."""
    ranks.run(4, example_on_a_mesh, ["--data-parallel", "2", "--steps", "3", "--width", "32", "--no-cuda", *arguments])
