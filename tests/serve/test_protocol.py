"""Connections that send what no answer waits for: none holds memory, or a place, for long."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from batching import client_of
from serving import Raw, serving, until

from prefold.serve import app
from prefold.serve.context import Entry
from prefold.serve.dialects import OPENAI
from prefold.serve.http import EventStream

KEYS = '[[key]]\nkey = "a"\ntenant = "a"\n'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"


@pytest.fixture(scope="module")
def locked(llm, tmp_path_factory):
    path = tmp_path_factory.mktemp("protocol") / "keys.toml"
    path.write_text(KEYS)
    with serving(llm, api_keys=str(path), header_seconds=0.5, max_header_bytes=4096) as made:
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
        time.sleep(0.1)
        raw.socket.sendall(b"a" * 5000)
    time.sleep(0.7)  # longer than headers may take
    raw.send("/health", b"", method="GET")
    assert b'"ready"' in raw.read_until(b"}")
    raw.close()


def answer_to(server, data):
    """Returns the status line and what follows of the answer to some bytes, once the server has closed."""
    raw = Raw(server)
    raw.socket.sendall(data)
    got = raw.read_all()
    raw.close()
    return got


@pytest.mark.parametrize("header", [b"x: " + b"a" * 5000 + b"\r\n", b"x: a\r\n" * 700])
def test_headers_that_come_at_once_are_bounded(locked, header):
    """Also where a request before them has been answered."""
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    assert answer_to(locked, health + header + b"\r\n").startswith(b"HTTP/1.1 431 ")
    raw = Raw(locked)
    raw.socket.sendall(health + b"\r\n")
    assert raw.read_until(b"}").startswith(b"HTTP/1.1 200 ")
    raw.socket.sendall(health + header + b"\r\n")
    assert raw.read_all().startswith(b"HTTP/1.1 431 ")
    raw.close()


BODY = b'{"prompt": "yes", "max_tokens": 1}'
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + b"transfer-encoding: Chunked\r\n", 200),
        (HEAD + b"transfer-encoding: identity, chunked\r\n", 400),
        (HEAD + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n", 400),
        (HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n", 400),
    ],
)
def test_where_a_body_ends_is_not_open_to_doubt(server, head, status):
    got = answer_to(server, head + b"connection: close\r\n\r\n" + CHUNKS)
    assert got.startswith(b"HTTP/1.1 %d " % status) and got.count(b"HTTP/1.1") == 1, got


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("length", [b"content-length: %d\r\n" % len(BODY), b"transfer-encoding: chunked\r\n"])
def test_an_offer_of_another_protocol_is_ignored(server, length, parts):
    """Java's client makes it with every first request. What follows on the connection is read as ever."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    data = HEAD + offer + length + b"\r\n" + (BODY if length[:1] == b"c" else CHUNKS)
    data += HEAD + offer + b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
    raw = Raw(server)
    size = -(-len(data) // parts)
    for at in range(0, len(data), size):
        raw.socket.sendall(data[at : at + size])
        time.sleep(0.1)
    got = raw.read_all()
    raw.close()
    assert [one[:3] for one in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"], got
    assert b'"text_completion"' in got and b"prompt is missing" in got


@pytest.fixture(scope="module")
def impatient(llm, tmp_path_factory):
    """A server whose clients must take what they are sent, and a file of 30 MB in it."""
    folder = tmp_path_factory.mktemp("data")
    with serving(llm, data_dir=str(folder), send_seconds=1.0) as server:
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
    got, end = 0, time.monotonic() + 2.5
    while part := raw.socket.recv(1 << 18):
        got += len(part)
        if time.monotonic() < end:
            time.sleep(0.05)
    assert got > 30_000_000


@pytest.mark.parametrize("ping_seconds", [0.2, 60.0])
def test_a_stream_whose_client_takes_nothing_ends(llm, keep, ping_seconds):
    """Also where comments are sent meanwhile, which nobody takes either."""
    closed = []

    async def events():
        try:
            while True:
                yield b"data: " + b"a" * 100_000 + b"\n\n"
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def stream(context):
        await context.request.body()
        return EventStream(events(), context.request, context.state.options)

    own = SimpleNamespace(ENTRIES=[Entry(OPENAI, "GET", "/stream", stream)])
    keep(app.DIALECTS)
    app.DIALECTS.append(own)
    with serving(llm, send_seconds=0.5, ping_seconds=ping_seconds) as server:
        raw = Raw(server).send("/stream", b"", method="GET")
        raw.read_until(b"data: ")
        until(lambda: closed and not server.server_state.connections)
        raw.close()
