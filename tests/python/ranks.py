"""Runs a function on the ranks of a gloo group, each in a process of its own."""

import datetime
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback

TIMEOUT = datetime.timedelta(seconds=60)
LONGEST = 300  # seconds that all of it may take


def _main(function, arguments, rank, world_size, store, results):
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    error = None
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        function(*arguments)
        dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()[-4000:]  # what a pipe holds without a reader, for several of them
    results.put((rank, error))


def run(world_size, function, *arguments):
    """`function(*arguments)` on every rank. The processes are forks of one that has imported PyTorch. What ranks raise
    is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "fastweight"])
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder) / "store"
        processes = [
            context.Process(target=_main, args=(function, arguments, rank, world_size, store, results), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LONGEST
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        errors = {rank: "ended without a word, or did not end" for rank in range(world_size)}
        while not results.empty():
            rank, error = results.get()
            errors[rank] = error
        for process in processes:
            process.kill()
    failed = [f"rank {rank}: {error}" for rank, error in sorted(errors.items()) if error is not None]
    assert not failed, "\n".join(failed)
