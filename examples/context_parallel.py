"""Trains a small language model whose sequences are split over several processes, and compares it with one process.

    torchrun --nproc-per-node 2 examples/context_parallel.py
    torchrun --nproc-per-node 4 examples/context_parallel.py --data-parallel 2          # two batches, two ranks each
    torchrun --nproc-per-node 4 examples/context_parallel.py --data-parallel 2 --shard  # with the parameters sharded

Every row of the data-parallel axis has a batch of packed sequences of its own, whose tokens are split over the ranks of
the other axis. Ranks do not differ otherwise: gradients are averaged over all of them, by DDP or, with --shard, by
FSDP2. On CUDA devices, one for each process, the groups use NCCL, else gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastweight.layers import GatedDeltaNet
from fastweight.ops.cp import CPContext, build_cp_context

VOCABULARY = 64
LENGTHS = (700, 40, 1, 283)  # of the packed sequences of a batch
IGNORED = -100


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mixer = GatedDeltaNet(width, expand_v=1, head_dim=16, num_heads=width // 16)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None, cp_context: CPContext | None) -> Tensor:
        x = x + self.mixer(self.norms[0](x), cu_seqlens=cu_seqlens, cp_context=cp_context)[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, checkpointing: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None, cp_context: CPContext | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, cu_seqlens, cp_context, use_reentrant=False)
            else:
                x = block(x, cu_seqlens, cp_context)
        return self.head(x)


def batch(step: int, row: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and offsets. Three of four tokens are the one before them plus 1."""
    generator = torch.Generator().manual_seed(1000 * step + row)
    total = sum(LENGTHS)
    jumps = torch.randint(VOCABULARY, (total,), generator=generator)
    steps = torch.where(torch.rand(total, generator=generator) < 0.25, jumps, 1)
    tokens = steps.cumsum(0) % VOCABULARY
    cu_seqlens = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    labels = tokens.roll(-1)
    labels[cu_seqlens[1:] - 1] = IGNORED  # the last token of a sequence has none after it
    return tokens.view(1, -1).to(device), labels.view(1, -1).to(device), cu_seqlens.to(device)


def loss_of(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return (
        F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum") / count
    )


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_on_one_process(model: nn.Module, steps: int, rows: int, device: torch.device) -> list[float]:
    optimiser, losses = optimiser_of(model), []
    for step in range(steps):
        optimiser.zero_grad()
        batches = [batch(step, row, device) for row in range(rows)]
        count = sum(int((labels != IGNORED).sum()) for _, labels, _ in batches)
        loss = sum(loss_of(model(tokens, cu_seqlens), labels, count) for tokens, labels, cu_seqlens in batches)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def train_on_all_ranks(
    model: nn.Module, mesh: DeviceMesh, steps: int, shard: bool, mode: str | None, device: torch.device
) -> list[float]:
    group = mesh["cp"].get_group()
    rows, row = mesh["dp"].size(), mesh["dp"].get_local_rank()
    if shard:
        everyone = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
    else:
        model = DistributedDataParallel(model)
    optimiser, losses = optimiser_of(model), []
    for step in range(steps):
        optimiser.zero_grad()
        tokens, labels, cu_seqlens = batch(step, row, device)
        count = rows * int((labels != IGNORED).sum())
        context = build_cp_context(cu_seqlens, group=group, conv1d_kernel_size=4, mode=mode)
        logits = model(context.shard(tokens), cp_context=context)
        # The gradients of all ranks are averaged: each has its part of the loss, times their number.
        loss = loss_of(logits, context.shard(labels), count)
        (loss * dist.get_world_size()).backward()
        optimiser.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
    return losses


def run(arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The losses of one process, and of all ranks, on every rank of a group that exists."""
    device = torch.device("cuda", torch.cuda.current_device()) if arguments.cuda else torch.device("cpu")
    shape = (arguments.data_parallel, dist.get_world_size() // arguments.data_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    alone = Model(arguments.width, arguments.layers, arguments.checkpointing).to(device)
    together = Model(arguments.width, arguments.layers, arguments.checkpointing).to(device)
    together.load_state_dict(alone.state_dict())
    one = train_on_one_process(alone, arguments.steps, arguments.data_parallel, device)
    every = train_on_all_ranks(together, mesh, arguments.steps, arguments.shard, arguments.mode, device)
    return one, every


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--data-parallel", type=int, default=1, help="rows of the mesh; the other axis splits sequences"
    )
    parser.add_argument("--shard", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward")
    parser.add_argument("--mode", choices=("affine", "in_order"), help="how states cross ranks; left out: chosen")
    parser.add_argument("--cuda", action="store_true", default=torch.cuda.is_available())
    parser.add_argument("--no-cuda", action="store_false", dest="cuda")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if arguments.cuda else "gloo")
    if dist.get_world_size() % arguments.data_parallel:
        raise SystemExit(f"--data-parallel: expected a divisor of {dist.get_world_size()} processes")
    one, every = run(arguments)
    worst = max(abs(a - b) for a, b in zip(one, every, strict=True))
    if dist.get_rank() == 0:
        print("step   one process   all ranks")
        for step, (a, b) in enumerate(zip(one, every, strict=True)):
            print(f"{step:4d}   {a:11.6f}   {b:9.6f}")
        print(f"the largest difference is {worst:.1e}")
    dist.destroy_process_group()
    if worst > 1e-3:
        raise SystemExit("the ranks have trained another model than one process")


if __name__ == "__main__":
    main()
