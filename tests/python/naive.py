"""The definitions, token by token in PyTorch: what results and gradients are compared with. Run it in float64."""

import torch
import torch.nn.functional as F


def _sequences(total, cu_seqlens):
    """(row of the batch, tokens) of every sequence; None: all rows at once."""
    if cu_seqlens is None:
        return [(slice(None), slice(0, total))]
    return [(slice(0, 1), slice(a, b)) for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]


def delta_rule(
    q, k, v, g=None, beta=None, initial_state=None, scale=None, cu_seqlens=None, l2norm=False, beta_sigmoid=False,
    neg_eigval=False, A_log=None, dt_bias=None, gate_in_kernel=False, lower_bound=None, v_first=False,
):  # fmt: skip
    """(o, final state) of the whole family: g is None, [B, T, HV] or [B, T, HV, K]."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if beta is None:
        beta = v.new_ones(B, T, HV)
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if neg_eigval else 1)
    if g is not None and gate_in_kernel:
        per_channel = g.dim() == 4
        a = torch.ones((), dtype=g.dtype) if A_log is None else A_log.reshape(HV, *[1] * per_channel).exp()
        x = g if dt_bias is None else g + dt_bias.reshape(g.shape[2:])
        g = -a * F.softplus(x) if lower_bound is None else lower_bound * (a * x).sigmoid()
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    if beta.dim() == 3:
        beta = beta.unsqueeze(-1)
    decay = None if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1)

    outputs, states = [], []
    for n, (rows, tokens) in enumerate(_sequences(T, cu_seqlens)):
        if initial_state is None:
            S = v.new_zeros(B, HV, K, V)
        else:
            S = initial_state if cu_seqlens is None else initial_state[n : n + 1]
            S = S.transpose(-1, -2) if v_first else S
        for t in range(tokens.start, tokens.stop):
            if decay is not None:
                S = decay[rows, t] * S
            u = beta[rows, t] * (v[rows, t] - torch.einsum("bhk,bhkv->bhv", k[rows, t], S))
            S = S + torch.einsum("bhk,bhv->bhkv", k[rows, t], u)
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[rows, t], S))
        states.append(S.transpose(-1, -2) if v_first else S)
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, V)
    return o, torch.cat(states)


def ttt_linear(q, k, v, w, b, eta, initial_state=None, initial_state_bias=None, scale=None, eps=1e-6, chunk_size=16,
               cu_seqlens=None):  # fmt: skip
    """(o, final state, final state bias); eta is [B, T, H, 1]."""
    B, T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale

    def norm(x):
        return F.layer_norm(x, (D,), eps=eps)

    def inner_gradient(z, target):
        x, r = norm(z), (z.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
        y = w[:, None] * (w[:, None] * x + b[:, None] - target)
        return r * (y - y.mean(-1, keepdim=True) - x * (x * y).mean(-1, keepdim=True))

    outputs, states, biases = [], [], []
    for n, (rows, tokens) in enumerate(_sequences(T, cu_seqlens)):
        pick = slice(None) if cu_seqlens is None else slice(n, n + 1)
        count = B if cu_seqlens is None else 1
        h = q.new_zeros(count, H, D, D) if initial_state is None else initial_state[pick]
        c = q.new_zeros(count, H, 1, D) if initial_state_bias is None else initial_state_bias[pick]
        for begin in range(tokens.start, tokens.stop, chunk_size):
            end = min(begin + chunk_size, tokens.stop)
            qc, kc, vc, ec = (x[rows, begin:end].transpose(1, 2) for x in (q, k, v, eta))
            extension = begin + chunk_size - end
            grad = inner_gradient(kc @ h + c, vc - kc)
            scores = torch.tril(ec * (scale * qc @ kc.transpose(-1, -2) + 1))
            y = scale * qc @ h + c - scores @ grad
            outputs.append((y + w[:, None] * norm(y) + b[:, None]).transpose(1, 2))
            last = ec[:, :, -1:]
            extended = extension * inner_gradient(c, torch.zeros_like(c))
            h, c = h - last * (kc.transpose(-1, -2) @ grad), c - last * (grad.sum(-2, keepdim=True) + extended)
        states.append(h)
        biases.append(c)
    o = torch.cat(outputs, 1) if outputs else torch.zeros_like(q)
    return o, torch.cat(states), torch.cat(biases)


def related(q, k, v, g=None, p=None, a=None, b=None, beta=None, initial_state=None, scale=None, cu_seqlens=None,
            correction=None):  # fmt: skip
    """(o, final state) of linear attention, simple GLA and GLA, of Comba ("feedback"), IPLR and DPLR ("low_rank")."""
    B, T, _, K = q.shape
    H, V = v.shape[2:]
    q, k, p, a, b = (None if x is None else x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k, p, a, b))
    if beta is not None and beta.dim() == 3:
        beta = beta.unsqueeze(-1)
    scale = K**-0.5 if scale is None else scale
    decay = None if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1)
    outputs, states = [], []
    for n, (rows, tokens) in enumerate(_sequences(T, cu_seqlens)):
        if initial_state is None:
            S = v.new_zeros(B, H, K, V)
        else:
            S = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for t in range(tokens.start, tokens.stop):
            u = v[rows, t]
            if correction == "feedback":
                u = beta[rows, t] * (u - torch.einsum("bhk,bhkv->bhv", p[rows, t], S))
            new = torch.einsum("bhk,bhv->bhkv", k[rows, t], u)
            if correction == "low_rank":
                read = torch.einsum("bhk,bhkv->bhv", a[rows, t], S)
                new = new + torch.einsum("bhk,bhv->bhkv", b[rows, t], read)
            S = (S if decay is None else decay[rows, t] * S) + new
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[rows, t], S))
        states.append(S)
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, H, V)
    return o, torch.cat(states)
