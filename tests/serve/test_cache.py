"""What admins do with the cache, over a real socket."""

from __future__ import annotations

import httpx
import pytest
from serving import KEYS, serving

CHAT = [{"role": "system", "content": "the one that is pinned"}]


@pytest.fixture
def ask(llm, tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    llm.cache.clear()
    with (
        serving(llm, api_keys=str(tmp_path / "keys.toml")) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def ask(key, path, **body):
            headers = {"authorization": f"Bearer {key}"}
            found = (
                client.post(path, json=body, headers=headers) if path != "/cache" else client.get(path, headers=headers)
            )
            return found.json() | {"status": found.status_code}

        yield ask
    llm.cache.clear()
    assert llm.engine.generator.scheduler.pool.used_slots == 0


def cached(found):
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_pins(ask):
    prompt = {"messages": CHAT, "add_generation_prompt": False}
    pinned = ask("one", "/cache/pin", **prompt, tenant="second")
    assert pinned["pinned"] == pinned["tokens"] > 10
    state = ask("one", "/cache")
    assert state["tenants"]["second"]["pinned"] == pinned["pinned"] and state["rows"]["pinned"] == pinned["pinned"]
    assert ask("one", "/cache/clear")["status"] == 200
    turn = {"messages": [*CHAT, {"role": "user", "content": "a"}], "max_tokens": 1}
    assert cached(ask("two", "/v1/chat/completions", **turn)) == pinned["tokens"]
    assert cached(ask("one", "/v1/chat/completions", **turn)) == 0  # it is not this tenant's
    assert ask("one", "/cache/unpin", **prompt, tenant="second")["unpinned"] == pinned["pinned"]
    assert ask("one", "/cache/clear")["cleared"] >= pinned["pinned"]
    assert ask("one", "/cache")["rows"] == {"kept": 0, "pinned": 0, "in_use": 0, "nodes": 0}
    assert cached(ask("two", "/v1/chat/completions", **turn)) == 0


def test_who_may(ask):
    for path in ("/cache", "/cache/pin", "/cache/unpin", "/cache/clear"):
        assert ask("two", path)["status"] == 403 and ask("none", path)["status"] == 401
    assert ask("one", "/cache/pin", prompt="a", tenant="nobody")["error"]["param"] == "tenant"
    assert ask("one", "/cache/pin")["status"] == 400
