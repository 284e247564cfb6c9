import pytest

from .vllm_engines import engines  # noqa: F401


@pytest.fixture(autouse=True)
def short_reports(monkeypatch):
    """Of replicas that have no news: a fleet that is closed waits until each has made its last report."""
    monkeypatch.setattr("prefold.cluster.replicas.LONGEST_WAIT", 0.02)
