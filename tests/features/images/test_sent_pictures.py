"""Images on a fleet: each is sent once as long as it is needed, and prompts give what they give on one process."""

from __future__ import annotations

import gc
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from fake_replicas import ThreadReplicas
from tiny_vision import FAMILIES, tiny_vision

from prefold import LLM
from prefold.cluster.fleet import Fleet
from prefold.cluster.native_host import ReplicaHost, facts_of
from prefold.cluster.replicas import RunCall, tag_of
from prefold.engine.cache.events import CacheCleared, CacheEvents, RowsStored
from prefold.errors import InputError
from prefold.features.images.decode import Image
from prefold.features.images.items import ImageInputs
from prefold.features.images.sending import ReplicaImages, SentImage, SentImages
from prefold.features.images.table import MediaTable
from prefold.spec.requests import Readout, Request, Sampling
from prefold.trie import MEDIA_BASE, Feed, LiveInput, Spool
from prefold.trie.live_windows import window_of

HOW = {"dtype": "float32", "device": "cpu", "threads": 1, "cache": "lru", "kv_memory": 1 << 22}


@pytest.fixture(scope="module", params=FAMILIES[:2])
def llms(request, tmp_path_factory):
    folder = tiny_vision(tmp_path_factory.mktemp("pictures"), request.param)
    made = [LLM(str(folder), **HOW) for _ in range(3)]
    yield made
    for llm in made:
        llm.close()


def pictures(count, seed=0):
    rng = np.random.default_rng(seed)
    return [Image(rng.integers(0, 255, (30 + k, 37, 3), dtype=np.uint8)) for k in range(count)]


def requests_of(llm, table, kind, images, count=60, most=2):
    """Requests with up to `most` of the images, in mixed order; they hold the images' ids."""
    inputs = ImageInputs(llm.images.processor, llm.tokenizer, table)
    rng = np.random.default_rng(1)
    found = []
    for number in range(count):
        shown = [(images[i], "image") for i in rng.permutation(len(images))[: 1 + number % most]]
        text = inputs.processor.placeholder * len(shown) + f"yes no {number % 7} {number}"
        ids, media = inputs.encode(text, inputs.read(shown), "", "text")
        sampling = Sampling(max_tokens=6, ignore_eos=True) if kind == "tokens" else None
        found.append(Request(ids, sampling=sampling, media=media))
    return found


def answers_of(engine, kind, requests, *, live=False):
    """The answers by tag; nobody holds the requests, nor their images, but who answers them."""

    def run(source):
        return engine.run(source, Readout(kind))

    if live:
        feed = Feed(1 << 20)
        for number, request in enumerate(requests):
            feed.put([(request, b"%d" % number)])
        requests.clear()
        feed.end()
        return dict(run(LiveInput(feed, 1 << 14)))
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, b"%d" % number)
        requests.clear()
        return dict(run(spool.windows(max_tokens=700)))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for tag, one in expected.items():
        if isinstance(one, list):
            assert found[tag][0].tokens == one[0].tokens
        else:
            assert np.allclose(found[tag].values, one.values, atol=1e-5)


def fleet_of(llms, table, **options):
    facts = {name: replace(facts_of(llm), max_running=4, max_rows=64) for name, llm in zip("ab", llms, strict=True)}
    replicas = ThreadReplicas("ab", llms=dict(zip("ab", llms, strict=True)), facts=facts, **options)
    return Fleet(replicas, media=table), replicas


@pytest.mark.covering(1)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_prompts_with_images_give_what_they_give_alone(llms, kind, live):
    one, *others = llms
    expected = answers_of(one.engine, kind, requests_of(one, one.images.table, kind, pictures(5)))
    table = MediaTable()
    fleet, replicas = fleet_of(others, table)
    with closing(fleet):
        assert_same(answers_of(fleet, kind, requests_of(one, table, kind, pictures(5)), live=live), expected)
        # Ids of the run before are free, and stand for other images now. Caches hold rows of the former ones.
        gc.collect()
        table.sweep()
        assert not len(table)
        other = answers_of(one.engine, kind, requests_of(one, one.images.table, kind, pictures(5, seed=7)))
        assert_same(answers_of(fleet, kind, requests_of(one, table, kind, pictures(5, seed=7)), live=live), other)
    for name in "ab":
        sent = [int(one.ids[0]) for who, some, _ in replicas.held for one in some if who == name]
        assert sent and all(isinstance(one.pixels, np.ndarray) for _, some, _ in replicas.held for one in some)


def test_an_image_is_sent_once_while_it_is_needed(llms):
    one, *others = llms
    table = MediaTable()
    fleet, replicas = fleet_of(others, table)
    with closing(fleet):
        requests = requests_of(one, table, "last", pictures(12), count=200, most=1)
        answers_of(fleet, "last", requests)
        there = {"a": set(), "b": set()}
        for name, some, gone in replicas.held:
            for first in gone:
                there[name].remove(first)
            for picture in some:
                first = int(picture.ids[0])
                assert first not in there[name], "it is there"
                there[name].add(first)
        sends = sum(len(some) for _, some, _ in replicas.held)
        # Sorted, the requests of an image come together: each replica has its part of them.
        assert 12 <= sends < 20 and any(gone for _, _, gone in replicas.held)
        for host in replicas.hosts.values():
            assert len(host._pictures._media) == len(host._pictures._driver_ids) < 12


def test_a_replica_that_is_lost_has_held_nothing(llms):
    one, *others = llms
    expected = answers_of(one.engine, "tokens", requests_of(one, one.images.table, "tokens", pictures(4)))
    table, count = MediaTable(), 0

    def before(name, tokens):
        nonlocal count
        count += 1
        if count == 20:
            replicas.lose(name, "made up")

    fleet, replicas = fleet_of(others, table, before=before, returns=True)
    with closing(fleet):
        assert_same(answers_of(fleet, "tokens", requests_of(one, table, "tokens", pictures(4))), expected)
        assert fleet.losses == 1


def test_an_image_that_cannot_be_read_any_more_is_the_error_of_its_records(llms):
    one, *others = llms
    table = MediaTable()
    fleet, _ = fleet_of(others, table)
    with closing(fleet):
        requests = requests_of(one, table, "tokens", pictures(3, seed=9), count=20)
        (bad, *_), found = requests[0].media, {}
        object.__setattr__(bad.load, "digest", b"another")
        shows = {b"%d" % i for i, request in enumerate(requests) if bad in request.media}
        found = answers_of(fleet, "tokens", requests)
    failed = {tag for tag, answer in found.items() if isinstance(answer, InputError)}
    assert failed == shows and len(found) == 20
    assert all("has changed since it was first read" in str(found[tag]) for tag in failed)


def test_a_replica_has_its_own_ids_and_tells_of_the_drivers(llms):
    one = llms[0]
    table, processor = MediaTable(), one.images.processor
    requests = requests_of(one, table, "tokens", pictures(3), count=6)
    options = {"tiles": 1, "rows_per_tile": 5, "span": processor.span, "load": lambda: None}
    taken = [one.images.table.medium(bytes([k]), **options) for k in range(3)]
    sent = SentImages(table)
    spool = Spool()
    for request in requests:
        spool.add(request, b"")
    (window,) = spool.windows(max_tokens=10**6)
    window = replace(window, tags=[tag_of(1, place) for place in range(6)])
    (window,), found, gone = sent.send("a", [window])
    assert len(found) == 3 and not gone and sent.send("a", [window])[1] == []
    held = ReplicaImages(one.images.table, processor)
    held.hold(found, [])
    own = held.own(window)
    is_row = window.tokens >= MEDIA_BASE
    assert np.array_equal(own.tokens >= MEDIA_BASE, is_row) and is_row.any()
    assert not np.isin(own.tokens[is_row], [i for medium in taken for i in medium.ids]).any()
    assert (own.tokens != window.tokens)[is_row].all() and (own.tokens == window.tokens)[~is_row].all()
    assert len(own.media) == 3
    events = CacheEvents(0, 0, (CacheCleared(), RowsStored(1, None, own.tokens)))
    assert np.array_equal(held.translated(events).events[1].tokens, window.tokens)
    spool.close()


def test_a_new_run_begins_without_images(llms):
    one = llms[0]
    host = ReplicaHost(one, facts_of(one))
    ids = np.arange(one.images.processor.rows_per_tile, dtype=np.int32) + MEDIA_BASE
    host.hold([SentImage(b"key", "", ids, pictures(1)[0].pixels)], [])
    host.begin(RunCall(Readout("last")))
    assert not host._pictures._media and not host._pictures._driver_ids
    host.close()


def test_windows_hold_the_images_of_their_requests():
    table = MediaTable()
    media = [table.medium(bytes([k]), tiles=1, rows_per_tile=3, span=False, load=lambda: None) for k in range(3)]
    feed = Feed(1 << 20)
    for k in (0, 1, 2, 1):
        feed.put([(Request(np.concatenate(([5], media[k].ids)).astype(np.int32), media=(media[k],)), b"")])
    keys = [one.key for one in media]
    del media
    gc.collect()
    (window,) = window_of([came[0][0] for came in iter(feed.take, None)], share=False)
    assert [one.key for one in window.media] == keys
    assert [window.request(i).media[0].key for i in range(4)] == [keys[0], keys[1], keys[2], keys[1]]
    assert [one.key for one in window.take(np.array([1, 2])).request(0).media] == [keys[1]]
