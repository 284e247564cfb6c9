import pytest
from vllm_engines import engines  # noqa: F401


@pytest.fixture
def short_pauses(monkeypatch):
    """Between the tries of a request."""
    monkeypatch.setattr("prefold.cluster.http_host._jittered", lambda pause: pause / 50)


@pytest.fixture(autouse=True)
def short_reports(monkeypatch):
    """Lets replicas without news report soon: a fleet that is closed waits for the last report of each."""
    monkeypatch.setattr("prefold.cluster.replicas.LONGEST_WAIT", 0.02)
