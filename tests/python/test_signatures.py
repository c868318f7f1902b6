"""The signatures of flash-linear-attention's functions, recorded from its source by tools/fla_signatures.py, against
ours: the same path, names, order and defaults. What differs stands here, and in docs/coming-from-fla.md."""

import importlib
import inspect
import json
import pathlib
import re

import pytest
import torch

import fastweight

RECORDED = json.loads((pathlib.Path(__file__).parent / "fla_signatures.json").read_text())

# Functions that launch one kernel of fla's, and others that no user of the operators calls.
INNER = re.compile(
    r"chunk_delta_rule_(fwd|bwd)|fused_recurrent_delta_rule_(fwd|bwd)|chunk_gated_delta_rule_(fwd|bwd)"
    r"|fused_recurrent_(gated_delta_rule|kda|comba|dplr_delta_rule)_fwd"
    r"|(fused_)?chunk_ttt_linear_(fwd|bwd).*|norm_residual|ttt_linear|ceildiv|chunk_(simple_)?gla_(fwd|bwd).*"
    r"|parallel_simple_gla_(fwd|bwd)|chunk_comba_(fwd|bwd)|gate_bound_is_safe|chunk_dplr_fwd"
    r"|chunk_generalized_iplr_delta_rule_fwd.*|(un)?pack_sequence_fwdbwd|l2norm_(fwd|bwd)|causal_conv1d_(fwd|bwd)"
    r"|chunk_comba_cumsum_scalar_bwd|compute_dh0_triton|causal_conv1d_update_states|elu_p1|sum_norm"
)
# What is not here.
ABSENT = re.compile(
    r"delta_rule_parallel|(layer|group)_norm.*|rms_norm_(ref|linear|swish_gate_linear)"
    r"|(GroupNorm|LayerNorm|RMSNormLinear|NormParallel|FusedLayerNorm|FusedRMSNorm\w+Linear).*"
)
# Where fla's path is that of a kernel's launcher.
PATHS = {"modules.conv.triton.ops": "modules.conv.causal_conv1d"}


def entries():
    for module, functions in RECORDED.items():
        for name, parameters in functions.items():
            if not INNER.fullmatch(name) and not ABSENT.fullmatch(name):
                yield pytest.param(module, name, parameters, id=f"{module}.{name}")


def found(module, name):
    target = importlib.import_module(f"fastweight.{PATHS.get(module, module)}")
    for part in name.split("."):
        target = getattr(target, part)
    return target


@pytest.mark.parametrize(("module", "name", "parameters"), list(entries()))
def test_signature(module, name, parameters):
    ours = inspect.signature(found(module, name)).parameters
    ours = [parameter for key, parameter in ours.items() if key != "self"]
    positional = [p for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    theirs = [row for row in parameters if row[1] == "positional"]
    assert [p.name for p in positional][: len(theirs)] == [row[0] for row in theirs]
    for parameter, (key, _, default) in zip(positional, theirs, strict=False):
        if default is not None:  # what fla asks for, ours may do without
            assert parameter.default == eval(default, {"torch": torch}), key
    if "." not in name:
        assert re.search(r"`\[|`\w{6,}`", found(module, name).__doc__), "no shape, nor a function that has one"
    # Beyond fla's arguments nothing is asked for.
    for parameter in ours[len(theirs) :]:
        assert parameter.default is not inspect.Parameter.empty or parameter.kind == parameter.VAR_KEYWORD, parameter


def test_the_record_is_walked():
    """Neither list of exceptions hides a function that is there, nor has an entry for nothing."""
    names = [(module, name) for module, functions in RECORDED.items() for name in functions]
    for pattern in (INNER, ABSENT):
        for module, name in names:
            if pattern.fullmatch(name):
                with pytest.raises((AttributeError, ModuleNotFoundError)):
                    found(module, name)
    assert len(list(entries())) > 70


@pytest.mark.parametrize(
    ("module", "name"),
    [("delta_net", "DeltaNet"), ("gated_deltanet", "GatedDeltaNet"), ("kda", "KimiDeltaAttention")],
)
def test_layers_keep_their_arguments(module, name):
    """Under the names that they have, as fla's layers do with all but these."""
    recorded = RECORDED[f"layers.{module}"][f"{name}.__init__"]
    arguments = {row[0] for row in recorded if row[1] == "positional"} - {"d_model", "norm_eps"}
    layer = getattr(fastweight.layers, name)(hidden_size=16, num_heads=2, layer_idx=3)
    assert arguments <= vars(layer).keys()
    assert (layer.hidden_size, layer.num_heads, layer.layer_idx, layer.conv_size) == (16, 2, 3, 4)


@pytest.mark.parametrize("name", fastweight.ops.__all__)
def test_checkers_of_types_can_unpack_results(name):
    """How many results there are depends on switches, which a union of tuples would let no caller unpack."""
    returned = str(inspect.signature(getattr(fastweight.ops, name)).return_annotation)
    assert returned.count("tuple[") <= 1, returned
    assert not returned.startswith("Tensor | tuple"), returned


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("ops.delta_rule", "chunk_delta_rule fused_chunk_delta_rule fused_recurrent_delta_rule"),
        ("ops.gated_delta_rule", "chunk_gated_delta_rule chunk_gdn fused_recurrent_gdn naive_chunk_gated_delta_rule"),
        ("ops.gated_delta_rule.wy_fast", "fwd_recompute_w_u bwd_prepare_wy_repr"),
        ("ops.delta_rule.wy_fast", "fwd_prepare_wy_repr bwd_prepare_wy_repr fwd_recompute_w_u"),
        ("ops.kda", "chunk_kda fused_recurrent_kda"),
        ("ops.cp", "build_cp_context CPContext FLACPContext context_parallel"),
        ("ops.cp.context", "build_cp_context FLACPContext"),
        ("ops.ttt", "chunk_ttt_linear fused_chunk_ttt_linear"),
        ("ops.gla", "chunk_gla fused_chunk_gla fused_recurrent_gla"),
        ("ops.simple_gla", "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla parallel_simple_gla"),
        ("ops.comba", "chunk_comba fused_recurrent_comba naive_chunk_comba naive_recurrent_comba"),
        ("ops.generalized_delta_rule", "chunk_dplr_delta_rule chunk_iplr_delta_rule fused_recurrent_iplr_delta_rule"),
        ("ops.linear_attn", "chunk_linear_attn fused_chunk_linear_attn fused_recurrent_linear_attn"),
        ("ops.utils", "chunk_global_cumsum_vector prepare_chunk_indices pack_sequence solve_tril get_max_num_splits"),
        ("ops", "chunk_gated_delta_rule chunk_kda chunk_gla chunk_comba chunk_delta_rule chunk_simple_gla"),
        ("modules", "ShortConvolution FusedRMSNormGated FusedRMSNormSwishGate RMSNorm L2Norm"),
        ("modules.convolution", "ShortConvolution causal_conv1d causal_conv1d_update"),
        ("modules.l2norm", "l2norm l2_norm"),
        ("layers", "DeltaNet GatedDeltaNet KimiDeltaAttention"),
    ],
)
def test_imports(path, names):
    module = importlib.import_module(f"fastweight.{path}")
    for name in names.split():
        assert callable(getattr(module, name)), name
