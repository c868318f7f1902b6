"""transformers' models on our operators: small random models of each architecture, with and without."""

import importlib
import subprocess
import sys
import textwrap
import types

import pytest
import torch

import fastweight
import naive
from fastweight import _accelerate

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GROUPED = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS = {
    "qwen3_next": ("Qwen3Next", {**COMMON, **GROUPED, **EXPERTS}),
    "qwen3_5": ("Qwen3_5", {**COMMON, **GROUPED}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**COMMON, **GROUPED, **EXPERTS}),
    "kimi_linear": (
        "KimiLinear",
        {
            **COMMON,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", {**COMMON, **GROUPED, "linear_allow_neg_eigval": True}),
}


@pytest.fixture(autouse=True)
def _restored():
    fastweight.restore()
    yield
    fastweight.restore()


# Where experts are chosen, a rounding error may choose another one.
WITHOUT_EXPERTS = {
    "qwen3_next": {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 4},
}


def build(name, **changes):
    prefix, options = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}")
    config_class = getattr(module, f"{prefix}TextConfig", None) or getattr(module, f"{prefix}Config")
    torch.manual_seed(0)
    config = config_class(**{**options, **changes})
    config._attn_implementation = "sdpa"
    model = getattr(module, f"{prefix}ForCausalLM")(config).eval()
    # As initialised, small random models give almost the same token everywhere.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return build(request.param)


def tokens(*shape, seed=3):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def calls(monkeypatch):
    """Counts what reaches the library."""
    counts = types.SimpleNamespace(delta_rule=0, short_conv=0)
    from fastweight import _delta_rule, _short_conv

    def count(module, function, counter):
        original = getattr(module, function)

        def counted(*arguments):
            setattr(counts, counter, getattr(counts, counter) + 1)
            return original(*arguments)

        monkeypatch.setattr(module, function, counted)

    count(_delta_rule, "forward", "delta_rule")
    count(_short_conv, "forward", "short_conv")
    count(_short_conv, "step", "short_conv")
    return counts


def exact_rule(query, key, value, g, beta, *arguments, **options):
    """The recurrence token by token in fp64. transformers' own chunks lose digits in the gradients."""
    assert not arguments
    assert options.get("initial_state") is None
    tensors = {"q": query, "k": key, "v": value, "g": g, "beta": beta}
    o, state = naive.delta_rule(
        **{name: x.double() for name, x in tensors.items()}, l2norm=options.get("use_qk_l2norm_in_kernel", False)
    )
    return o.to(query.dtype), state.float()


def test_same_logits_and_gradients(model, monkeypatch):
    counts = calls(monkeypatch)
    ids = tokens(2, 70)

    def run():
        model.zero_grad()
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    module = sys.modules[type(model).__module__]
    with monkeypatch.context() as patch:
        replaced = [name for name in _accelerate._TRANSFORMERS_RULES if hasattr(module, name)]
        for name in replaced:
            patch.setattr(module, name, exact_rule)
        assert replaced
        logits, gradients = run()
    assert counts.delta_rule == counts.short_conv == 0
    assert fastweight.accelerate()
    other_logits, other_gradients = run()
    linear = sum("linear" in kind for kind in model.config.layer_types)
    assert linear > 0
    assert counts.delta_rule == counts.short_conv == linear
    torch.testing.assert_close(other_logits, logits, rtol=1e-3, atol=1e-4)
    assert other_gradients.keys() == gradients.keys()
    errors = {
        name: float((other_gradients[name] - gradient).norm() / (gradient.norm() + 1e-6))
        for name, gradient in gradients.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] < 2e-4, f"{worst}: {errors[worst]}"


def test_same_generation(model, monkeypatch):
    counts = calls(monkeypatch)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padding on the left
    ids[1, :4] = 0
    expected = model.generate(ids, attention_mask=mask, **options)
    fastweight.accelerate()
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
    assert counts.delta_rule >= 12
    assert counts.short_conv >= 12
    assert len(set(expected[:, 9:].flatten().tolist())) > 4  # or the comparison would say little
    short = tokens(1, 2)  # shorter than the convolution
    fastweight.restore()
    expected = model.generate(short, **options)
    fastweight.accelerate()
    assert torch.equal(model.generate(short, **options), expected)


@pytest.mark.parametrize("given", ["cu_seq_lens", "seq_idx"])
def test_packed_sequences(model, given):
    lengths = [5, 40, 1, 24]
    parts = [tokens(1, n, seed=n) for n in lengths]
    offsets = torch.tensor([0, 5, 45, 46, 70], dtype=torch.int32)
    packed = {
        "input_ids": torch.cat(parts, 1),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "use_cache": False,
    }
    if given == "cu_seq_lens":
        packed |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 40, "max_length_k": 40}
    else:
        packed["seq_idx"] = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
        if model.config.model_type != "kimi_linear" or given == "seq_idx":  # which does not notice
            with pytest.raises(ValueError, match="packed sequences"):
                model(**packed)
        fastweight.accelerate()
        logits = model(**packed).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_restore_is_complete(model):
    module = sys.modules[type(model).__module__]
    before, finders = dict(vars(module)), list(sys.meta_path)
    replaced = fastweight.accelerate()
    assert fastweight.accelerate() == replaced  # a second call adds nothing
    names = {name.rsplit(".", 1)[1] for name in replaced if name.startswith(module.__name__ + ".")}
    assert len(names) == 4
    changed = {name for name in before if vars(module)[name] is not before[name]}
    assert changed == names
    fastweight.restore()
    assert dict(vars(module)) == before
    assert sys.meta_path == finders
    fastweight.restore()


def test_models_that_are_imported_later():
    script = """
        import sys, torch, fastweight
        assert fastweight.accelerate() == []
        import transformers.models.qwen3_next.modeling_qwen3_next as qwen
        assert qwen.causal_conv1d_fn.__code__.co_filename.endswith("_accelerate.py")
        assert qwen.__spec__.loader.get_source(qwen.__name__)
        assert "exec_module" not in vars(qwen.__spec__.loader)
        assert len(fastweight.accelerate()) == 4
        fastweight.restore()
        assert not qwen.causal_conv1d_fn.__code__.co_filename.endswith("_accelerate.py")
        import transformers.models.olmo_hybrid.modeling_olmo_hybrid as olmo
        assert not olmo.causal_conv1d_fn.__code__.co_filename.endswith("_accelerate.py")
        import transformers.models.mamba.modeling_mamba
        assert len(fastweight.accelerate()) == 8
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


def test_what_ours_do_not_take_goes_to_the_original():
    model = build("qwen3_next")
    module = sys.modules[type(model).__module__]
    x, weight = torch.randn(1, 8, 5), torch.randn(8, 20)
    expected = module.causal_conv1d_fn(x, weight, activation="gelu"), module.causal_conv1d_fn(x, weight)
    q, v = torch.randn(1, 5, 2, 300), torch.randn(1, 5, 2, 8)
    g = beta = torch.rand(1, 5, 2)
    wide, _ = module.torch_chunk_gated_delta_rule(q, q, v, -g, beta)
    fastweight.accelerate()
    assert torch.equal(module.causal_conv1d_fn(x, weight, activation="gelu"), expected[0])
    assert torch.equal(module.causal_conv1d_fn(x, weight), expected[1])
    assert torch.equal(module.torch_chunk_gated_delta_rule(q, q, v, -g, beta)[0], wide)
    seq_idx = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_idx: expected a batch of 1, got 2"):
        module.causal_conv1d_fn(torch.randn(2, 8, 5), torch.randn(8, 4), seq_idx=seq_idx)


def test_where_there_is_no_forward(monkeypatch):
    for key in list(_accelerate._DEVICES):
        monkeypatch.setitem(_accelerate._DEVICES, key, frozenset())
    counts = calls(monkeypatch)
    model = build("qwen3_next")
    fastweight.accelerate()
    with torch.no_grad():
        model.generate(tokens(1, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert counts.delta_rule == counts.short_conv == 0


def test_sixteen_bits():
    """No further from the model in fp32 than the code that was replaced."""
    model = build("qwen3_5")
    ids = tokens(1, 70)
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        model.bfloat16()
        expected = model(input_ids=ids).logits.float()
        fastweight.accelerate()
        logits = model(input_ids=ids).logits.float()
    assert (logits - exact).norm() < 1.3 * (expected - exact).norm()
