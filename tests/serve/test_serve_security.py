"""Who gets at what: keys and admins on every path, nothing secret in the log, nothing for pages of other origins."""

from __future__ import annotations

import hmac
import re

import httpx
import pytest
from serving import serving
from starlette.routing import Route

from prefold.serve.app import make_app
from prefold.serve.keys import Keys

KEYS = """
[[key]]
key = "sk-admin-of-first"
tenant = "first"
admin = true

[[key]]
key = "sk-of-second"
tenant = "second"
"""
OPEN = {"/health", "/healthz", "/livez", "/readyz", "/ping", "/", "/docs", "/openapi.json"}  # the pages hold no data
ADMINS = {"/metrics", "/cache", "/cache/pin", "/cache/unpin", "/cache/clear", "/page/data"}
ADMIN, OTHER = ({"authorization": f"Bearer {key}"} for key in ("sk-admin-of-first", "sk-of-second"))


@pytest.fixture(scope="module")
def locked(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys.toml").write_text(KEYS)
    with serving(llm, api_keys=str(folder / "keys.toml"), data_dir=str(folder / "data")) as made:
        yield made


def paths_of(server):
    """(method, path) of everything that there is."""
    found = [
        (method, re.sub(r"{\w+(:\w+)?}", "x", route.path))
        for route in make_app(server.state).routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    ]
    return [(method, path) for method, path in dict.fromkeys(found) if not (method == "GET" and path in OPEN)]


def test_every_path_asks_for_a_key_and_some_for_an_admins(locked):
    found = paths_of(locked)
    assert len(found) > 35 and {path for _, path in found} >= ADMINS
    with httpx.Client(base_url=locked.url) as client:
        for method, path in found:
            for key in ({}, {"authorization": "Bearer sk-none"}, {"x-api-key": ""}, {"authorization": "sk-of-second"}):
                assert client.request(method, path, headers=key).status_code == 401, (method, path)
            status = client.request(method, path, headers=OTHER, content=b"{}").status_code
            assert (status == 403) == (path in ADMINS), (method, path, status)
            assert client.request(method, path, headers=ADMIN, content=b"{}").status_code not in (401, 403)
        for method, path, status in (("GET", "/nowhere", 404), ("PUT", "/v1/models", 405), ("GET", "/embed", 405)):
            assert client.request(method, path).status_code == 401, path
            assert client.request(method, path, headers=OTHER).status_code == status, path


def test_what_others_keep_is_not_there(locked):
    with httpx.Client(base_url=locked.url, timeout=60) as client:
        upload = {"file": ("a.jsonl", b"{}"), "purpose": (None, "batch")}
        file = client.post("/v1/files", files=upload, headers=ADMIN).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert client.post("/v1/batches", json=body, headers=OTHER).status_code == 404
        batch = client.post("/v1/batches", json=body, headers=ADMIN).json()["id"]
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
            assert client.get(path, headers=ADMIN).status_code == 200
            assert client.get(path, headers=OTHER).status_code == 404
        for method, path in (("DELETE", f"/v1/files/{file}"), ("POST", f"/v1/batches/{batch}/cancel")):
            assert client.request(method, path, headers=OTHER).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert client.get(path, headers=OTHER).json()["data"] == []


def test_pages_of_other_origins_get_nothing(locked):
    asks = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    with httpx.Client(base_url=locked.url) as client:
        answers = [client.options("/v1/completions", headers=asks)]
        headers = asks | ADMIN
        answers += [client.request(*one, headers=headers, content=b"{}") for one in paths_of(locked)]
        answers += [client.get(path, headers=asks) for path in sorted(OPEN)]
        assert answers[0].status_code == 401
        assert not [one.url for one in answers for name in one.headers if name.startswith("access-control")]
        for path in ("/", "/docs"):
            found = client.get(path).headers
            policy = dict(part.strip().partition(" ")[::2] for part in found["content-security-policy"].split(";"))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert "unsafe" not in found["content-security-policy"] and found["x-content-type-options"] == "nosniff"


def test_neither_keys_nor_prompts_are_logged(locked, llm, start_by, caplog, capfd):
    """Not when all goes well, and not when a request is wrong, or a step fails."""
    secret = "hidden thought"

    def fails(*given):
        raise RuntimeError("the step failed")

    with httpx.Client(base_url=locked.url, timeout=60) as client, caplog.at_level(0):
        for path, body in (
            ("/v1/completions", {"prompt": secret, "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}),
            ("/v1/embeddings", {"input": secret}),
            ("/v1/completions", {"prompt": secret, "max_tokens": secret}),
            ("/v1/completions", {"prompt": secret, secret: 1}),
            ("/v1/messages", {"messages": [{"role": secret, "content": secret}], "max_tokens": 2}),
        ):
            client.post(path, json=body, headers=OTHER)
        client.get("/v1/models", headers={"authorization": "Bearer sk-wrong"})
        start_by(llm.engine.worker, fails)
        assert client.post("/v1/embeddings", json={"input": secret + "s"}, headers=OTHER).status_code == 500
        locked.reload_keys()
        metrics = client.get("/metrics", headers=ADMIN).text
    said = capfd.readouterr()
    written = caplog.text + said.out + said.err + metrics
    assert "the step failed" in written and "reloaded" in written
    assert secret not in written and "sk-" not in written


@pytest.fixture
def compared(monkeypatch):
    """What is compared in constant time."""
    found, real = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: found.append((a, b)) or real(a, b))
    return found


def test_keys_are_hashed_compared_in_constant_time_and_found_by_what_a_secret_makes_of_them(tmp_path, compared):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    keys, others = Keys(str(path)), Keys(str(path))
    assert "sk-" not in repr(vars(keys))
    assert len(keys.by_digest) == 2 and not keys.by_digest.keys() & others.by_digest.keys()
    assert not keys.by_digest.keys() & {digest for digest, _ in keys.by_digest.values()}
    for key in ("sk-admin-of-first", "sk-of-second", "sk-none", ""):
        compared.clear()
        keys.tenant({"x-api-key": key})
        assert len(compared) == 1 and all(len(a) == len(b) == 32 for a, b in compared)


def test_many_keys_cost_no_more_than_few(tmp_path, compared):
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[[key]]\nkey = "sk-{i}"\ntenant = "{i}"\n' for i in range(500)))
    keys = Keys(str(path))
    assert [keys.tenant({"x-api-key": f"sk-{i}"}).name for i in range(500)] == [str(i) for i in range(500)]
    assert keys.tenant({"x-api-key": "sk-500"}) is None and len(compared) == 501 and len(keys.by_digest) == 500


def test_a_key_need_not_be_ascii(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nkey = "schlüssel"\ntenant = "a"\n')
    sent = "schlüssel".encode().decode("latin-1")  # as headers are read
    assert Keys(str(path)).tenant({"x-api-key": sent}).name == "a"
