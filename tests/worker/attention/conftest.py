"""Who computes attention on a CPU."""

from __future__ import annotations

import pytest

from prefold import kernels


@pytest.fixture
def no_blocked_attention(monkeypatch):
    """Attention fails if PyTorch would compute it."""

    def refuse(*args, **kwargs):
        raise AssertionError("fell back to PyTorch")

    monkeypatch.setattr("prefold.worker.torch.attention.row_attention.blocked_attention", refuse)
    monkeypatch.setattr("prefold.worker.torch.attention.store.attend_block", refuse)


@pytest.fixture(params=["compiled", "pytorch"])
def backend(request) -> str:
    """Both forms behind the same call."""
    if request.param == "compiled" and kernels.load() is None:
        pytest.skip(kernels.status())
    request.getfixturevalue("no_blocked_attention" if request.param == "compiled" else "no_kernels")
    return request.param
