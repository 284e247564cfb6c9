"""Connections that send what no answer waits for: none holds memory, or a place, for long."""

from __future__ import annotations

import time

import pytest
from batching import client_of
from serving import Raw, serving, until

KEYS = '[[key]]\nkey = "a"\ntenant = "a"\n'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"


@pytest.fixture(scope="module")
def locked(llm, tmp_path_factory):
    path = tmp_path_factory.mktemp("protocol") / "keys.toml"
    path.write_text(KEYS)
    with serving(llm, api_keys=str(path), header_seconds=0.7, max_header_bytes=4096) as made:
        yield made


def ends(server, raw, data, seconds=60.0):
    """Sends the same bytes again and again; returns whether the server has ended the connection by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.server_state.connections:
        try:
            raw.socket.sendall(data)
        except OSError:
            break
        time.sleep(0.02)
    raw.close()
    until(lambda: not server.server_state.connections)
    return time.monotonic() < end


@pytest.mark.parametrize("trailer", [b"x: " + b"a" * 500 + b"\r\n", b"a" * 500])
def test_trailers_are_bounded(llm, trailer):
    """Also one that has no end."""
    with serving(llm, max_header_bytes=4096) as server:
        raw = Raw(server)
        raw.socket.sendall(CHUNKED + b"x: ")
        assert ends(server, raw, trailer)


@pytest.mark.parametrize(
    "first, more",
    [
        (HEAD + b"content-length: 100000\r\n\r\n", b"a"),
        (CHUNKED, b"x: a\r\n"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n"),
    ],
)
def test_what_comes_behind_an_answer(locked, first, more):
    raw = Raw(locked)
    raw.socket.sendall(first)
    assert raw.read_until(b"\r\n\r\n")
    assert ends(locked, raw, more)


def test_a_body_that_comes_behind_its_answer_leaves_the_connection_open(locked):
    raw = Raw(locked)
    for _ in range(2):
        raw.socket.sendall(HEAD + b"content-length: 10000\r\n\r\n")
        assert b" 401 " in raw.read_until(b"\r\n\r\n")
        raw.socket.sendall(b"a" * 5000)
        time.sleep(0.3)
        raw.socket.sendall(b"a" * 5000)
    time.sleep(1)  # longer than headers may take
    raw.send("/health", b"", method="GET")
    assert b'"ready"' in raw.read_until(b"}")
    raw.close()


@pytest.fixture(scope="module")
def impatient(llm, tmp_path_factory):
    """A server whose clients must take what they are sent, and a file of 30 MB in it."""
    folder = tmp_path_factory.mktemp("data")
    with serving(llm, data_dir=str(folder), send_seconds=2.0) as server:
        with client_of(server) as client:
            made = client.files.create(file=("a", b"0123456789" * 3_000_000), purpose="batch")
        yield server, f"/v1/files/{made.id}/content"


def test_a_client_that_does_not_take_its_answer_is_left(impatient):
    server, path = impatient
    raw = Raw(server).send(path, b"", method="GET")
    raw.read_until(b"\r\n\r\n")
    until(lambda: not server.server_state.connections)
    raw.close()


def test_a_client_that_takes_it_slowly_gets_all(impatient):
    server, path = impatient
    raw = Raw(server).send(path, b"", method="GET", headers="connection: close\r\n")
    got, end = 0, time.monotonic() + 4
    while part := raw.socket.recv(1 << 18):
        got += len(part)
        if time.monotonic() < end:
            time.sleep(0.05)
    assert got > 30_000_000
