"""Who computes attention on a CPU."""

from __future__ import annotations

import pytest

from prefold import kernels


@pytest.fixture(params=["compiled", "pytorch"])
def backend(request, monkeypatch) -> str:
    """Both forms behind the same call."""
    if request.param == "compiled":
        if kernels.load() is None:
            pytest.skip(kernels.status())

        def refuse(*args, **kwargs):
            raise AssertionError("fell back to PyTorch")

        monkeypatch.setattr("prefold.worker.attention.row_attention.blocked_attention", refuse)
        monkeypatch.setattr("prefold.worker.attention.store.attend_block", refuse)
    else:
        monkeypatch.setattr(kernels, "load", lambda: None)
    return request.param
