"""An installed wheel in bare surroundings: it imports, carries its libraries with it, and computes."""

import os

import torch

from fastweight import info, ops

assert os.environ.get("PATH") == "/nonexistent", "expected no compiler in reach"
with open("/proc/self/maps") as maps:
    mapped = {line.split()[-1] for line in maps if "libhwy" in line}
assert mapped, "expected Highway to be loaded"
assert all("fastweight.libs" in path for path in mapped), mapped

q, k, v = (torch.ones(1, 8, 2, 16, requires_grad=True) for _ in range(3))
g, beta = torch.full((1, 8, 2), -0.1), torch.full((1, 8, 2), 0.5)
o, state = ops.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
(o.sum() + state.sum()).backward()
assert torch.isfinite(q.grad).all()
assert float(v.grad.min()) > 0
architectures = ", ".join(info()["cuda_architectures"]) or "none"
print(f"CUDA kernels for: {architectures}")
print(f"PyTorch {torch.__version__}: o[0, -1, 0, 0] = {o[0, -1, 0, 0].item():.6f}")
