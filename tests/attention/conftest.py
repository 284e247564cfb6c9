import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors gain nothing from more, and lose much on a busy machine; what threads change has its own test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
