"""The building blocks: values against PyTorch, gradients by gradcheck, errors."""

import pytest
import torch
import torch.nn.functional as F

from fastweight import ops

CU = torch.tensor([0, 5, 5, 40])


def chunks(T, C, cu_seqlens):
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        for begin in range(a, b, C):
            yield slice(begin, min(begin + C, b))


@pytest.mark.parametrize("cu_seqlens", [None, CU])
@pytest.mark.parametrize("shape", [(1, 40, 3), (1, 40, 2, 5)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_chunk_local_cumsum(C, reverse, shape, cu_seqlens):
    g = torch.randn(shape)
    expected = torch.empty(shape)
    for chunk in chunks(40, C, cu_seqlens):
        part = g[:, chunk].flip(1) if reverse else g[:, chunk]
        expected[:, chunk] = part.cumsum(1).flip(1) if reverse else part.cumsum(1)
    y = ops.chunk_local_cumsum(g, C, reverse=reverse, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ops.chunk_local_cumsum(g, C, reverse, 2.0, cu_seqlens), 2 * expected)
    assert ops.chunk_local_cumsum(g.bfloat16(), C).dtype == torch.float32
    assert ops.chunk_local_cumsum(g.bfloat16(), C, output_dtype=None).dtype == torch.bfloat16
    exact = g.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ops.chunk_local_cumsum(x, C, reverse, None, cu_seqlens, torch.float64), exact, fast_mode=True
    )


@pytest.mark.parametrize("cu_seqlens", [None, CU])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_solve_tril(C, cu_seqlens):
    A = torch.zeros(1, 40, 2, C, dtype=torch.float64)
    expected = torch.zeros_like(A)
    for chunk in chunks(40, C, cu_seqlens):
        L = chunk.stop - chunk.start
        lower = 0.3 * torch.randn(2, L, L, dtype=torch.float64).tril(-1)
        A[0, chunk, :, :L] = lower.transpose(0, 1)
        expected[0, chunk, :, :L] = torch.linalg.inv(torch.eye(L, dtype=torch.float64) + lower).transpose(0, 1)
    torch.testing.assert_close(ops.solve_tril(A, cu_seqlens, output_dtype=torch.float64), expected)
    torch.testing.assert_close(ops.solve_tril(A.float(), cu_seqlens), expected.float())
    assert ops.solve_tril(A.float(), cu_seqlens, output_dtype=torch.bfloat16).dtype == torch.bfloat16
    mask = A != 0

    def call(x):
        return ops.solve_tril(torch.where(mask, x, 0), cu_seqlens, output_dtype=torch.float64)

    assert torch.autograd.gradcheck(call, A.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 4, 16), (1, 1, 2, 1, 2, 9)])
def test_l2norm(shape):
    x = torch.randn(shape)
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(ops.l2norm(x), expected)
    assert ops.l2norm(x.half()).dtype == torch.float16
    assert ops.l2norm(x.half(), output_dtype=torch.float32).dtype == torch.float32
    assert torch.autograd.gradcheck(ops.l2norm, x.double().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 3), (3,), (2, 2, 2, 3)])
def test_gdn_gate(shape, with_bias):
    g, A_log = torch.randn(shape), torch.randn(3)
    dt_bias = torch.randn(3) if with_bias else None
    expected = -A_log.exp() * F.softplus(g + dt_bias if with_bias else g)
    torch.testing.assert_close(ops.fused_gdn_gate(g, A_log, dt_bias), expected)
    inputs = [x.double().requires_grad_() for x in (g, A_log, dt_bias) if x is not None]
    assert torch.autograd.gradcheck(
        lambda *x: ops.fused_gdn_gate(*x, output_dtype=torch.float64), inputs, fast_mode=True
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("with_a", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_kda_gate(flat, with_a, lower_bound):
    g, A_log, dt_bias = torch.randn(2, 5, 3, 4), torch.randn(3), torch.randn(3, 4)
    dt_bias = dt_bias.flatten() if flat else dt_bias
    if not with_a:
        A_log = None
        if lower_bound is None:
            with pytest.raises(ValueError, match="A_log: expected a tensor without lower_bound"):
                ops.fused_kda_gate(g, A_log, dt_bias)
            return
    a = A_log.exp()[:, None] if with_a else 1.0
    x = g + dt_bias.view(3, 4)
    expected = -a * F.softplus(x) if lower_bound is None else lower_bound * (a * x).sigmoid()
    torch.testing.assert_close(ops.fused_kda_gate(g, A_log, dt_bias, lower_bound), expected)
    leaves = [g.double().requires_grad_(), A_log.double().requires_grad_() if with_a else None,
              dt_bias.double().requires_grad_()]  # fmt: skip
    assert torch.autograd.gradcheck(
        lambda *x: ops.fused_kda_gate(*x, lower_bound, torch.float64), leaves, fast_mode=True
    )


def test_errors():
    g = torch.zeros(2, 40, 3)
    with pytest.raises(AssertionError, match="cu_seqlens: expected a batch of 1, got 2"):
        ops.chunk_local_cumsum(g, 16, cu_seqlens=CU)
    with pytest.raises(DeprecationWarning, match="head_first"):
        ops.chunk_local_cumsum(g, 16, head_first=True)
    with pytest.raises(ValueError, match="g: expected"):
        ops.chunk_local_cumsum(g[0], 16)
    with pytest.raises(AssertionError, match="chunk_size: expected a power of two, got 24"):
        ops.chunk_local_cumsum(g, 24)
    with pytest.raises(AssertionError, match="A: expected 16, 32 or 64 columns, got 24"):
        ops.solve_tril(torch.zeros(1, 40, 2, 24))
    with pytest.raises(ValueError, match="eps: expected a finite number above 0"):
        ops.l2norm(g, eps=0.0)
    with pytest.raises(ValueError, match="lower_bound: expected a finite number below 0"):
        ops.fused_kda_gate(torch.zeros(2, 5, 3, 4), lower_bound=1.0)
