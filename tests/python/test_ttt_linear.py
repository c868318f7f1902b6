"""Results and gradients of TTT-Linear through the Python functions."""

import pytest
import torch
import torch.nn.functional as F

import naive
from fastweight import ops
from helpers import assert_close, golden, golden_cases, gradients, leaves

FUNCTIONS = [ops.chunk_ttt_linear, ops.fused_chunk_ttt_linear]
NAMES = {"h0": "initial_state", "hb0": "initial_state_bias"}
THRESHOLDS = {"o": 0.005, "q": 0.005, "k": 0.01, "v": 0.007, "w": 0.006, "b": 0.006, "eta": 0.03,
              "initial_state": 0.007, "initial_state_bias": 0.005}  # fmt: skip
KEEP = ("w", "b", "eta", "initial_state", "initial_state_bias")


def draw(B=1, T=63, H=2, D=16, N=None, dtype=torch.float64):
    N = B if N is None else N
    x = {
        "q": torch.randn(B, T, H, D),
        "k": F.normalize(torch.randn(B, T, H, D), dim=-1),
        "v": torch.randn(B, T, H, D),
        "w": torch.randn(H, D),
        "b": torch.randn(H, D),
        "eta": 5e-3 * torch.randn(B, T, H, 1),
        "initial_state": torch.randn(N, H, D, D),
        "initial_state_bias": torch.randn(N, H, 1, D),
    }
    return {name: value.to(dtype) for name, value in x.items()}


def compare(inputs, dtype, thresholds, **options):
    rounded = leaves(inputs, dtype, KEEP)
    outputs = ops.chunk_ttt_linear(**rounded, output_final_state=True, **options)
    exact = leaves({name: value.double() for name, value in rounded.items()})
    expected = ops.chunk_ttt_linear(**exact, output_final_state=True, **options)
    d_outputs = [torch.rand_like(x, dtype=torch.float32).to(x.dtype) for x in outputs]
    for name, a, b in zip(("o", "final_state", "final_state_bias"), outputs, expected, strict=True):
        assert_close(name, a, b, thresholds["o"])
    ours, theirs = gradients(outputs, d_outputs, rounded), gradients(expected, d_outputs, exact)
    for name in rounded:
        assert ours[name].dtype == rounded[name].dtype
        assert_close(f"gradient of {name}", ours[name], theirs[name], thresholds[name])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", golden_cases("ttt"))
def test_golden(name, dtype, function):
    case, tensors, answers = golden(name)
    fed = [tensors.pop(key) for key in ("do", "dht", "dhbt")]
    inputs = leaves({NAMES.get(key, key): x.to(dtype) for key, x in tensors.items()})
    options = {"scale": case.get("scale"), "chunk_size": case.get("chunk_size", 16)}
    if "cu_seqlens" in case:
        options["cu_seqlens"] = torch.tensor(case["cu_seqlens"])
    outputs = function(**inputs, output_final_state=True, **options)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    for key, value in zip(("o", "ht", "hbt"), outputs, strict=True):
        assert_close(key, value, answers[key], tolerance)
    for key, value in gradients(outputs, fed, inputs).items():
        answer = answers["d" + {ours: theirs for theirs, ours in NAMES.items()}.get(key, key)]
        assert_close(f"gradient of {key}", value, answer, tolerance)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"B": 2, "T": 40}, {}),
        ({"T": 35}, {"chunk_size": 32, "scale": 0.3}),
        ({"T": 39, "N": 4}, {"cu_seqlens": torch.tensor([0, 17, 17, 20, 39])}),
    ],
)
def test_definition(sizes, options):
    inputs = leaves(draw(**({"D": 6} | sizes)))
    outputs = ops.chunk_ttt_linear(**inputs, output_final_state=True, **options)
    exact = leaves(inputs)
    expected = naive.ttt_linear(**exact, **options)
    d_outputs = [torch.randn_like(x) for x in outputs]
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    ours, theirs = gradients(outputs, d_outputs, inputs), gradients(expected, d_outputs, exact)
    for name in inputs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-8, atol=1e-8, msg=f"gradient of {name}")


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 256])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_lengths_fp32(T, chunk_size):
    compare(draw(T=T), torch.float32, dict.fromkeys(THRESHOLDS, 2e-4), chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("T", "chunk_size", "D"), [(63, 16, 60), (96, 32, 64), (128, 64, 128)])
def test_lengths_half(T, chunk_size, D, dtype):
    compare(draw(T=T, D=D), dtype, THRESHOLDS, chunk_size=chunk_size)


def test_eta_as_a_number():
    inputs = draw(dtype=torch.float32)
    inputs["eta"] = 0.01
    number = ops.chunk_ttt_linear(**inputs)
    inputs["eta"] = torch.full((1, 63, 2, 1), 0.01)
    assert torch.equal(number[0], ops.chunk_ttt_linear(**inputs)[0])
    assert number[1:] == (None, None)


def test_step_in_place():
    inputs = draw(B=2, T=40, dtype=torch.float32)
    whole, _, _ = ops.chunk_ttt_linear(**inputs)
    kept = [inputs.pop("initial_state").clone(), inputs.pop("initial_state_bias").clone()]
    kept += [torch.zeros_like(x) for x in kept]
    position = torch.zeros(2, dtype=torch.int32)
    parameters = {name: inputs.pop(name) for name in ("w", "b")}
    for t in range(40):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        o = ops.ttt_linear_step(**token, **parameters, state=kept[0], state_bias=kept[1], gradient=kept[2],
                                gradient_bias=kept[3], position=position)  # fmt: skip
        torch.testing.assert_close(o[:, 0], whole[:, t], rtol=1e-4, atol=1e-4)
    assert position.tolist() == [8, 8]
