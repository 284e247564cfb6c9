"""Servers that hang, URLs and keys that are none, requests that nobody can ask: each is told of, nobody waits on."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from fake_replicas import count_patience
from fake_servers import serving

from prefold.cluster import http_host
from prefold.cluster.fleet import Fleet
from prefold.cluster.http_host import HttpHost, HttpReplicas, ServedModel
from prefold.cluster.replicas import RESTARTS, ReplicaDown, ReplicaLost, ReplicaReady
from prefold.errors import FleetError, InputError
from prefold.spec.requests import Namespace, Readout, Request, Sampling
from prefold.trie import Spool


def requests_of(texts, **sampling) -> Spool:
    spool = Spool()
    for text in texts:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        spool.add(Request(tokens, sampling=Sampling(max_tokens=3, **sampling)), text.encode())
    return spool


def replicas_at(server, **options) -> HttpReplicas:
    none = np.empty(0, np.int32)
    of_bytes = SimpleNamespace(prefix_ids=none, suffix_ids=none, decode=lambda ids: bytes(ids.tolist()).decode())
    return HttpReplicas([server.url], "m", of_bytes, takes_ids=False, **options)


def generated(fleet, spool):
    return dict(fleet.run(spool.windows(max_tokens=1000), Readout("tokens"), object()))


@pytest.mark.parametrize("url", ["http://localhost:99999", "http://localhost:abc", "http://[::1"])
def test_a_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(InputError, match="is not the URL of a server"):
        HttpReplicas([url], "m", None)


@pytest.mark.parametrize("key", ["schl\u00fcssel", "secret\n"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_said(monkeypatch, key):
    monkeypatch.setenv("PREFOLD_API_KEY", key)
    with pytest.raises(InputError, match="has characters that no key has") as found:
        HttpReplicas(["http://localhost:1"], "m", None)
    assert key.strip() not in str(found.value)


@pytest.mark.parametrize("status", [401, 403])
def test_what_a_server_says_of_a_refusal_is_told(status):
    said = {"error": {"message": "this server is not 'gpu-a:8000'; start it with --allowed-host"}}
    with (
        serving(ids=False, refusal=(status, said)) as server,
        pytest.raises(ReplicaDown, match="this server is not 'gpu-a:8000'") as refused,
    ):
        HttpHost(server.url, ServedModel("m", None, patience=0.0, timeout=5.0))
    assert ("the API key was refused" in str(refused.value)) is (status == 401)


PROXY = "http://someone:secret@127.0.0.1:9"


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch, name, host):
    monkeypatch.setenv(name, "socks5://127.0.0.1:9" if name == "ALL_PROXY" else PROXY)
    with serving(ids=False) as server:
        url = f"http://{host}:{server.server_port}"
        HttpHost(url, ServedModel("m", None, patience=0.0, timeout=60.0)).close()


def test_a_proxy_that_cannot_be_reached_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    with pytest.raises(ReplicaDown) as down:
        HttpHost("http://server.example", ServedModel("m", None, patience=0.0, timeout=5.0))
    assert str(down.value) == "it cannot be reached through the proxy 127.0.0.1:9 (connection refused)"


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.1.2.3:8000", True), ("http://[::1]:8000", True), ("https://a.localhost", True),
        ("http://10.0.0.1", False), ("http://localhost.example", False),
    ],
)  # fmt: skip
def test_the_loopback_addresses(url, is_here):
    assert http_host.is_loopback(url) is is_here


@pytest.mark.parametrize("other", [False, True])
def test_a_server_that_never_answered_is_asked_for_as_long_as_patience_only_beside_one_that_has(monkeypatch, other):
    dead, notes, pauses = "http://127.0.0.1:9", [], []
    monkeypatch.setattr(http_host, "_jittered", lambda pause: pauses.append(pause) or 0.05)
    with serving(ids=False) as server:
        urls = [dead, server.url] if other else [dead]
        replicas = HttpReplicas(urls, "m", None, patience=600, unanswered=600 if other else 0.5, notify=notes.append)
        with closing(Fleet(replicas)) as fleet:
            ends, events, enough = time.monotonic() + 300, [], None
            while not any(isinstance(event, ReplicaLost) for _, event in events):
                assert time.monotonic() < ends
                events += [event for event in [fleet.next_event(0.1)] if event]
                if enough is None and notes and any(isinstance(event, ReplicaReady) for _, event in events):
                    # From now on a server would be lost at once that is not asked for as long as patience.
                    replicas.served.unanswered = 0.0
                    enough = len(pauses) + 3
                if enough is not None and len(pauses) >= enough:
                    break
    lost = [(name, event) for name, event in events if isinstance(event, ReplicaLost)]
    assert len(notes) == 1 and notes[0].startswith(f"{dead}: it cannot be reached (connection refused); retrying")
    if other:
        assert not lost
    else:
        ((name, event),) = lost
        assert name == dead and event.reason == "it cannot be reached (connection refused)" and not event.returns


def test_a_server_that_never_answers_is_asked_for_no_longer_than_the_fleet_is_there():
    told = []
    replicas = HttpReplicas(["http://127.0.0.1:9"], "m", None, patience=600, unanswered=600, notify=told.append)
    with closing(Fleet(replicas)):
        while not told:
            time.sleep(0.01)
    assert not any(thread.is_alive() for thread in replicas._threads)


def test_a_server_that_cannot_be_met_for_another_reason_is_lost(monkeypatch):
    async def meet(*_, **__):
        raise OSError("no file descriptors")

    monkeypatch.setattr(HttpHost, "_meet", meet)
    with (
        closing(Fleet(HttpReplicas(["http://localhost:1"], "m", None))) as fleet,
        requests_of(["a"]) as spool,
        pytest.raises(FleetError, match="OSError: no file descriptors"),
    ):
        generated(fleet, spool)


def test_a_request_that_cannot_be_asked_is_an_error_of_its_record(monkeypatch):
    body = http_host.generation_body

    def failing(request, *rest, **options):
        if len(request.tokens) == 3:
            raise OverflowError("nobody thought of that")
        return body(request, *rest, **options)

    monkeypatch.setattr(http_host, "generation_body", failing)
    texts = ["one", "four", "\x00messages\x00 x"]
    with serving(ids=False) as server, closing(Fleet(replicas_at(server))) as fleet, requests_of(texts) as spool:
        found = generated(fleet, spool)
    assert "nobody thought of that" in str(found[b"one"]) and found[b"four"][0].text.startswith("4 of four")
    assert isinstance(found[texts[2].encode()], InputError)


def test_what_is_refused_is_asked_once():
    texts = [f"refused {number:02}" for number in range(16)]
    with serving(ids=False) as server, closing(Fleet(replicas_at(server))) as fleet, requests_of(texts) as spool:
        assert all(isinstance(one, InputError) for one in generated(fleet, spool).values())
        assert len(server.requests) == 16
        server.requests.clear()
        assert all(isinstance(one, InputError) for _, one in fleet.run(spool.windows(max_tokens=1000), Readout("last")))
        batches = [len(body["input"]) for _, body in server.requests]
        assert max(batches) > 1 and sum(one for one in batches if one > 1) <= 16 and batches.count(1) == 16


def test_embeddings_of_one_body_are_of_one_adapter():
    with serving(models=("m", "fr", "de")) as server, Spool() as spool:
        for number in range(60):
            adapter = ("", "fr", "de")[number % 3]
            spool.add(Request(np.array([65 + number], np.int32), namespace=Namespace(adapter)), b"%d" % number)
        with closing(Fleet(HttpReplicas([server.url], "m", None))) as fleet:
            assert len(dict(fleet.run(spool.windows(max_tokens=1000), Readout("last")))) == 60
    of = {"m": 0, "fr": 1, "de": 2}
    for _, body in server.requests:
        assert {(ids[0] - 65) % 3 for ids in body["input"]} == {of[body["model"]]}


@pytest.mark.parametrize("counts", [True, False])
def test_a_server_that_counts_tokens_is_at_work_however_long_an_answer_takes(monkeypatch, counts):
    """One that counts none is killed, and after some times in which that did not help given up."""
    counted, release, notes = itertools.count(), threading.Event(), []

    def hangs():
        return len(server.requests) > sum("made no progress" in note for note in notes)

    def fault(*_):
        while not release.wait(0.01) and not (counts and now() > 3 * 30):
            pass

    with (
        serving(ids=False, fault=fault,
                metrics=(lambda: f"vllm:generation_tokens_total{{}} {next(counted)}") if counts else None) as server,
        closing(Fleet(replicas_at(server, patience=30, looks=600), patience=30, notify=notes.append)) as fleet,
        requests_of(["long"]) as spool,
    ):  # fmt: skip
        now = count_patience(monkeypatch, fleet, hangs)
        if counts:
            assert generated(fleet, spool)[b"long"][0].text.startswith("4 of long")
            assert not notes and len(server.requests) == 1
        else:
            with pytest.raises(FleetError, match="increase --patience"):
                generated(fleet, spool)
            assert len(server.requests) == RESTARTS + 1
        release.set()
