"""A server without keys answers programs that reach it, and no page of another site."""

from __future__ import annotations

import httpx
import pytest
from serving import serving

from prefold.serve.http import Hosts, Refusal
from prefold.spec.server import ServerSpec

HERE = {"host": "localhost:8000"}


def is_answered(headers, **options):
    try:
        Hosts(ServerSpec(**options)).check([(name.encode(), value.encode()) for name, value in headers.items()])
    except Refusal as refusal:
        assert refusal.status == 403
        return False
    return True


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, True),
        (HERE, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "192.168.0.7:80"}, True),
        ({"host": "LOCALHOST"}, True),
        ({"host": "evil.example:8000"}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "localhost@evil.example"}, False),
        ({"host": "[x"}, False),
        (HERE | {"origin": "http://localhost:8000"}, True),
        (HERE | {"origin": "http://127.0.0.1:3000"}, True),
        ({"host": "192.168.0.7:80", "origin": "http://192.168.0.7:80"}, True),
        (HERE | {"origin": "http://192.168.0.7"}, False),
        (HERE | {"origin": "https://evil.example"}, False),
        (HERE | {"origin": "null"}, False),
        ({"host": "localhost.:8000", "origin": "http://localhost."}, True),
    ],
)
def test_names_and_origins(headers, expected):
    assert is_answered(headers) is expected


def test_names_that_were_allowed():
    allowed = {"allowed_hosts": ("Serve.Example",), "host": "inner.example"}
    for name in ("serve.example", "inner.example:80"):
        assert is_answered({"host": name, "origin": f"http://{name}"}, **allowed)
    assert not is_answered({"host": "other.example"}, **allowed)


@pytest.mark.parametrize("name", ["gpu-a:8000", "prefold_backend", "host.docker.internal:8000", "gpu-a.example.org."])
def test_a_server_that_others_reach_is_asked_by_names_it_does_not_know(name):
    opened = {"host": "0.0.0.0", "insecure": True}
    assert is_answered({"host": name}, **opened)
    assert is_answered({"host": name, "origin": f"http://{name}"}, **opened)
    for origin in ("http://evil.example", "null", "file://"):
        assert not is_answered({"host": name, "origin": origin}, **opened)
    assert not is_answered({"host": name}, **opened, allowed_hosts=("serve.example",))
    assert is_answered({"host": name}, **opened, allowed_hosts=("serve.example", name.partition(":")[0]))


@pytest.mark.parametrize("origin", ["null", "file://"])
def test_a_page_without_a_name_is_not_told_of_names(origin):
    with pytest.raises(Refusal, match="not as a file") as refused:
        Hosts(ServerSpec()).check([(b"host", b"localhost"), (b"origin", origin.encode())])
    assert "--allowed-host" not in str(refused.value)


def test_a_server(server, llm, tmp_path):
    asked = {"json": {"prompt": "yes", "max_tokens": 1}}
    foreign = [{"host": "evil.example"}, {"origin": "http://evil.example", "content-type": "text/plain"}]
    for headers in foreign:
        for path in ("/v1/completions", "/cache/clear"):
            found = httpx.post(server.url + path, headers=headers, **asked)
            assert found.status_code == 403 and "--allowed-host" in found.json()["error"]["message"]
        for path in ("/", "/page/data", "/v1/models", "/health", "/nowhere"):
            assert httpx.get(server.url + path, headers=headers).status_code == 403
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nkey = "sk"\ntenant = "a"\n')
    with serving(llm, api_keys=str(keys)) as locked:
        headers = {"authorization": "Bearer sk"}
        for more in foreign:
            assert httpx.post(f"{locked.url}/v1/completions", headers=headers | more, **asked).status_code == 200
