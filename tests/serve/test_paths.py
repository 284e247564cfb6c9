"""Clients learn nothing of where files lie on the server's machine."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from batching import batch_of, client_of, completion, content, ended
from serving import serving

from prefold.tasks.make import require_lm_head

CHAT = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 1}


@pytest.fixture
def headless(llm, monkeypatch):
    """The model, which says at every request that it has no head."""

    def task(self, name, **options):
        require_lm_head(replace(llm.config, lm_head=False, num_labels=None), llm.checkpoint, name)

    monkeypatch.setattr(type(llm), "task", task)
    return llm


@pytest.mark.parametrize("names", [(), ("m",)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "yes", "max_tokens": 1}),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "yes"}),
        ("/v2/embed", {"texts": ["yes"], "embedding_types": ["float"]}),
        ("/embed", {"inputs": "yes"}),
        ("/score", {"text_1": "the", "text_2": "yes"}),
    ],
)
def test_errors_have_the_name_and_the_log_has_the_path(headless, caplog, names, path, body):
    with serving(headless, served_names=names) as server:
        found = httpx.post(server.url + path, json=body, timeout=60)
    shown = names[0] if names else headless.folder.name
    assert found.status_code in (400, 424) and f"; {shown} has no head" in found.text, found.text
    assert str(headless.folder.parent) not in found.text
    assert str(headless.folder) in caplog.records[-1].getMessage()
    assert not any(record.exc_info for record in caplog.records), "the client is at fault, and no line of code"


def test_lines_of_a_batch_have_the_name(headless, tmp_path):
    with serving(headless, data_dir=str(tmp_path / "data")) as server, client_of(server) as client:
        line = completion(1)
        line["body"]["model"] = headless.folder.name
        done = ended(client, batch_of(client, [line]))
        text = content(client, done.error_file_id)
    assert f"; {headless.folder.name} has no head" in text and str(tmp_path.parent) not in text, text
    assert str(headless.folder.parent) not in text


def test_a_model_is_served_by_the_last_part_of_its_path(llm):
    with serving(llm) as server:
        models = httpx.get(f"{server.url}/v1/models").text
        assert f'"id":"{llm.folder.name}"' in models and str(llm.folder.parent) not in models
        for name in (str(llm.folder), llm.folder.name, "dummy"):
            found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "yes", "max_tokens": 1, "model": name})
            assert found.status_code == 200 and found.json()["model"] == llm.folder.name, found.text
        found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "yes", "model": "other"})
        assert found.status_code == 404 and str(llm.folder.parent) not in found.text
