"""What no request is at fault for: it is told by /health, and nothing that was acknowledged is lost."""

from __future__ import annotations

import json
from unittest.mock import Mock

import httpx
import openai
import pytest
from generating import until_idle
from serving import serving, until

from prefold.errors import OutOfMemoryError, RankError

BODY = {"prompt": "yes the no", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def broken(llm, start_by):
    """Every step raises what is in the list that this is."""
    errors = []

    def start(real, *given):
        if errors:
            raise errors[0]
        return real(*given)

    start_by(llm.engine.generator.worker, start)  # it has its store
    # It falls to one row where memory is too small, and other tests share the engine.
    budget, before = llm.engine.budget, llm.engine.budget.rows
    yield errors
    budget.rows = before


def health(server):
    found = httpx.get(f"{server.url}/health")
    return found.status_code, found.json().get("reason", "")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_rank_that_is_gone(llm, broken, path):
    body = BODY if path == "/v1/completions" else {"input": "yes"}
    with serving(llm) as server:
        broken.append(RankError("rank 1 has died"))
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == 503
        assert (status := health(server))[0] == 503 and "rank" in status[1]
        server.state.handler.engine.failed_at -= 1000
        assert health(server)[0] == 503  # it does not come back
        broken.clear()
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == 200
        assert health(server) == (200, "")


def test_memory_that_is_too_small(llm, broken):
    with serving(llm) as server:
        broken.append(OutOfMemoryError("not even one row fits"))
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 503
        assert (status := health(server))[0] == 503 and "memory" in status[1]
        server.state.handler.engine.failed_at -= 1000  # nobody asks a server that fails: it must be tried again
        assert health(server)[0] == 200
        broken.clear()
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 200
    until_idle(llm.engine)


@pytest.mark.parametrize("error", [RankError("rank 1 has died"), OutOfMemoryError("not even one row fits")])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_batch_waits_until_the_engine_works_again(llm, broken, tmp_path, path, error, work_by):
    """None of its lines is answered with an error that is the engine's."""
    lines, tries = [], []
    for i in range(12):
        body = BODY | {"prompt": f"{i} yes", "max_tokens": 12} if path == "/v1/completions" else {"input": f"{i} yes"}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": body | {"model": "tiny"}}))
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server:
        server.state.batches.retry_seconds, server.state.batches.look_seconds = 0.05, 0.02
        work_by(server, finish=lambda finish, one: tries.append(one) or finish(one))
        broken.append(error)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
            until(lambda: server.state.failing is not None)
            until(lambda: len(tries) > 3)
            assert client.batches.retrieve(batch.id).status == "in_progress"
            broken.clear()
            until(lambda: client.batches.retrieve(batch.id).status == "completed")
            done = client.batches.retrieve(batch.id)
            assert done.request_counts.completed == 12 and done.error_file_id is None
            until(lambda: server.state.failing is None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_an_error_of_the_thread_itself_is_told_and_does_not_end_it(llm, monkeypatch, path):
    body = BODY if path == "/v1/completions" else {"input": "yes"}
    with serving(llm) as server:
        service = server.state.handler.engine
        with monkeypatch.context() as patch:
            patch.setattr(service, "_step", Mock(side_effect=KeyError("a defect")))
            assert httpx.post(server.url + path, json=body, timeout=60).status_code == 500
            assert health(server)[0] == 503
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == 200
        assert health(server) == (200, "") and not service.handles


def test_a_cancellation_between_two_looks_does_not_end_the_thread(llm, monkeypatch):
    """Requests are cancelled from the event loop while the thread notes which of them have begun."""

    class Racing(dict):
        def get(self, key, default=None):
            return self.pop(key, default)

    with serving(llm) as server:
        monkeypatch.setattr(server.state.handler.engine, "_no_token", Racing())
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 200
        assert health(server) == (200, "")
