import pytest
import torch


@pytest.fixture(autouse=True)
def _surroundings():
    """A seed; and one thread: the problems are small, and PyTorch's threads wait for each other on a busy machine."""
    torch.manual_seed(20240817)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
