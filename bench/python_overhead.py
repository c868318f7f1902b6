"""What a call from Python costs: one token of a problem so small that its arithmetic is nothing.

Best of many short rounds. Beside it stands the same call from C++, which checks the arguments and computes:
`fastweight bench --op gdn --mode fwd,step --shape B=1,T=1,H=2,K=16,V=16 --threads 1`.
"""

import time

import torch

from fastweight import ops


def best(call, rounds=2000, calls=20):
    shortest = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        shortest = min(shortest, (time.perf_counter() - begin) / calls)
    return shortest * 1e6


def main():
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in range(3))
    g, beta, state = -torch.rand(1, 1, 2), torch.rand(1, 1, 2), torch.zeros(1, 2, 16, 16)
    channel_g = -torch.rand(1, 1, 2, 16)
    final = {"initial_state": state, "output_final_state": True}
    calls = {
        "torch.mul": lambda: torch.mul(q, k),
        "fused_recurrent_delta_rule": lambda: ops.fused_recurrent_delta_rule(q, k, v, beta, **final),
        "fused_recurrent_gated_delta_rule": lambda: ops.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, **final
        ),
        "fused_recurrent_kda": lambda: ops.fused_recurrent_kda(q, k, v, channel_g, beta, **final),
        "chunk_gated_delta_rule": lambda: ops.chunk_gated_delta_rule(q, k, v, g, beta, **final),
        "delta_rule_step": lambda: ops.delta_rule_step(q, k, v, state, g, beta),
    }
    with torch.no_grad():
        for name, call in calls.items():
            print(f"{name:<34}{best(call):6.1f} us")
    q.requires_grad_()
    print(f"{'chunk_gated_delta_rule, recording':<34}{best(calls['chunk_gated_delta_rule']):6.1f} us")


if __name__ == "__main__":
    main()
