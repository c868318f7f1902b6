"""Draws, comparisons and the golden cases."""

import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors import safe_open

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


def error(a, b):
    """sqrt(mean((a - b)^2)) / sqrt(mean(b^2)): the metric of the thresholds."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).square().mean().sqrt() / (b.square().mean().sqrt() + 1e-8))


def assert_close(name, a, b, threshold):
    assert a.shape == b.shape, f"{name}: {list(a.shape)} against {list(b.shape)}"
    if a.numel() == 0 or (a.detach().double() - b.detach().double()).abs().max() <= 1e-6:
        return
    assert torch.isfinite(a).all(), f"{name}: not finite"
    assert error(a, b) < threshold, f"{name}: error {error(a, b):.2e}, threshold {threshold}"


def golden_cases(prefix):
    return sorted(path.stem for path in GOLDEN.glob(f"{prefix}*.safetensors"))


def golden(name):
    """(case, inputs, answers)"""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        case = json.loads(file.metadata()["case"])
    inputs = {key[3:]: value for key, value in tensors.items() if key.startswith("in.")}
    return case, inputs, {key[4:]: value for key, value in tensors.items() if key.startswith("out.")}


def draw(op, B=1, T=33, H=2, HV=None, K=16, V=16, N=None, state=True, gate_div=1.0, raw=False, dtype=torch.float64):
    """The inputs of one of delta_rule, gated_delta_rule, kda as the thresholds assume them. `raw`: gate and beta before
    their activations, with A_log and dt_bias; q and k not normalised."""
    HV = H if HV is None else HV
    q, k = torch.rand(B, T, H, K), torch.rand(B, T, H, K)
    if op == "delta_rule":
        q, k = torch.randn(B, T, H, K), torch.randn(B, T, H, K)
    x = {"q": q, "k": k, "v": torch.rand(B, T, HV, V)}
    if not raw:
        x["q"], x["k"] = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    shape = {"delta_rule": None, "gated_delta_rule": (B, T, HV), "kda": (B, T, HV, K)}[op]
    if shape is not None:
        g = torch.randn(shape)
        x["g"] = g if raw else F.logsigmoid(g) / gate_div
    x["beta"] = torch.randn(B, T, HV)
    if not raw:
        x["beta"] = x["beta"].sigmoid()
    if raw and shape is not None:
        x["A_log"] = torch.rand(HV)
        x["dt_bias"] = torch.randn(HV * K if op == "kda" else HV)
    if state:
        x["initial_state"] = torch.randn(B if N is None else N, HV, K, V)
    return {name: value.to(dtype) for name, value in x.items()}


def leaves(tensors, dtype=None, keep=("g", "beta", "A_log", "dt_bias", "initial_state")):
    """Copies that require gradients; q, k and v in `dtype`, the others in fp32 unless all are in fp64."""
    result = {}
    for name, value in tensors.items():
        if dtype is not None:
            value = value.to(torch.float32 if name in keep and dtype != torch.float64 else dtype)
        result[name] = value.detach().clone().requires_grad_()
    return result


def gradients(outputs, output_gradients, inputs):
    """{name: gradient} of sum(output * gradient) with respect to the inputs."""
    total = sum((o.double() * d.double()).sum() for o, d in zip(outputs, output_gradients, strict=True))
    return dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))
