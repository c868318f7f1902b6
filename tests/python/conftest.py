import os

import pytest

import onednn


def pytest_configure():
    """Before a module here imports PyTorch. The workers of pytest-xdist inherit what the first process has set."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        onednn.avoid_broken_amx()


@pytest.fixture(autouse=True)
def _surroundings():
    """A seed; and one thread: the problems are small, and PyTorch's threads wait for each other on a busy machine."""
    import torch

    torch.manual_seed(20240817)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def memory():
    """memory(gigabytes) skips where a CUDA device has less to give; what a test took is given back after it."""
    import torch

    def expect(gigabytes):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < gigabytes << 30:
            pytest.skip(f"{free >> 30} GiB free, expected {gigabytes}")

    yield expect
    torch.cuda.empty_cache()
