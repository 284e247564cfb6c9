"""Streams on a fleet: the books of a live window with leases, and runs on replicas that are threads."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from fake_jobs import digest
from fake_replicas import ThreadReplicas
from fleet_books import check_book
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.cluster import fleet as fleet_module
from prefold.cluster.fleet import Fleet, FleetRun
from prefold.cluster.leases import LeaseBook
from prefold.cluster.native_host import facts_of
from prefold.cluster.offline import LeaseOptions, OfflineSource, offline_source
from prefold.cluster.online import OnlineSource
from prefold.cluster.replicas import ReplicaFacts, ReplicaReport, RunCall
from prefold.engine.cache import CacheOptions
from prefold.engine.cache.events import CacheCleared, CacheEvents, RowsRemoved, RowsStored
from prefold.engine.meter import StepInfo
from prefold.errors import FleetError, InputError
from prefold.spec.requests import Generated, Namespace, Readout, Request, Result, Sampling
from prefold.trie import Feed, LiveInput, RowCost, Spool, StreamCost
from prefold.trie.order import encode


def prompt_of(rng) -> np.ndarray:
    """A prompt under one of a few prefixes."""
    return np.concatenate((np.full(6, rng.integers(5)), rng.integers(5, 200, rng.integers(1, 6)))).astype(np.int32)


def reads_of(rng, numbers, sampling=None):
    """The reads of one prompt: several where they have targets."""
    tokens, count = prompt_of(rng), 1 if sampling else rng.integers(1, 4)
    targets = [None if sampling else np.array([i]) for i in range(count)]
    reads = [(next(numbers), Request(tokens, t, sampling=sampling)) for t in targets]
    return tuple(encode(request, b"%d" % number, number) for number, request in reads)


class Told:
    """What a replica would tell of its cache: prompts are stored as they end, and some are removed. Events may be lost,
    come twice, and come late."""

    def __init__(self, rng, epoch):
        self.rng, self.epoch, self.first, self.runs = rng, epoch, 0, {}
        self.sent: list[CacheEvents] = []

    def snapshot(self) -> CacheEvents:
        events = [CacheCleared(), *(RowsStored(run, None, tokens, ns) for run, (tokens, ns) in self.runs.items())]
        found = CacheEvents(self.epoch, self.first, tuple(events))
        self.first += len(events)
        return found

    def change(self, tokens, namespace) -> CacheEvents:
        if self.runs and self.rng.random() < 0.4:
            run = list(self.runs)[self.rng.integers(len(self.runs))]
            del self.runs[run]
            event = RowsRemoved(run)
        else:
            run = self.first + 1_000_000 * self.epoch
            # Rows of which another run has a part would be told as a run that follows it: here prompts are whole.
            if any(int(t[0]) == int(tokens[0]) and n == namespace for t, n in self.runs.values()):
                event = RowsRemoved(next(r for r, (t, n) in self.runs.items() if int(t[0]) == int(tokens[0])))
                del self.runs[event.run]
            else:
                self.runs[run] = (tokens, namespace)
                event = RowsStored(run, None, tokens, namespace)
        found = CacheEvents(self.epoch, self.first, (event,))
        self.first += 1
        self.sent.append(found)
        return found


def sorted_job(rng, call) -> OfflineSource:
    """A job of some requests whose tags are 10,000 and more."""
    count, options = int(rng.integers(1, 60)), LeaseOptions(seconds=1.0, least_cost=10.0, begun_most=(5, 1e9))
    source = OfflineSource(
        StreamCost(rng.integers(4, 9, count), np.zeros(count, int)), ["replica 1"], lambda _: options, call=call
    )
    source._sent = {place: (b"%d" % (10_000 + place), 1) for place in range(count)}
    return source


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["tokens", "last"]), st.booleans())
def test_the_books_balance_in_long_random_runs(seed, kind, both):
    """both: there is a sorted job beside the stream from some time on."""
    rng = np.random.default_rng(seed)
    sampling = Sampling(max_tokens=4) if kind == "tokens" else None
    numbers, epochs = itertools.count(), itertools.count(1)
    call = RunCall(Readout(kind), online=True)
    facts = ReplicaFacts(max_rows=int(rng.integers(8, 40)), max_running=3, cache_rows=60, reports_cache=True)
    live = OnlineSource(call, max_tokens=120, grown_tokens=20, max_age=3.0)
    book = LeaseBook(live, numbers=itertools.count(1), patience=10.0)
    given, answered, blamed, now = {}, [], [], 0.0
    there: dict[str, Told] = {}
    leases: dict[int, tuple] = {}  # those that are over too: their answers come late
    suspects: set[int] = set()
    for step in range(250):
        now += float(rng.exponential(0.3))
        if both and step == 60:
            book.add(job := sorted_job(rng, call), now)
            given |= {int(tag): None for tag, _ in job._sent.values()}
        what = rng.random()
        if what < 0.3 and not live.is_full:
            reads = reads_of(rng, numbers, sampling)
            given |= {read.number: read for read in reads}
            live.put(reads, now)
        elif what < 0.37 and len(there) < 3:
            name = f"replica {next(epochs)}"
            there[name] = Told(rng, int(name.split()[1]))
            book.join(name, facts, now)
        elif what < 0.42 and there:
            name = list(there)[rng.integers(len(there))]
            del there[name]
            gone = [number for n, numbers in leases.values() if n == name for number in numbers]
            died = bool(rng.random() < 0.7)
            for tag in book.lose(name, died=died):
                assert died
                blamed.append(int(tag))
                assert int(tag) in gone
        elif what < 0.75 and leases:
            number = list(leases)[rng.integers(len(leases))]
            name, tags = leases[number]
            some = {place % 10_000: answer_of(kind) for place in tags if rng.random() < 0.6}
            fresh = [int(tag) for tag, _, _ in book.commit(name, number, some, now)]
            assert name in there or not fresh, "an answer of a replica that is gone"
            answered += fresh
        elif there:
            name = list(there)[rng.integers(len(there))]
            told = there[name]
            events = told.change(prompt_of(rng), Namespace())
            fate = rng.random()
            if fate < 0.1:
                continue  # lost
            events = told.sent[-2] if fate < 0.2 and len(told.sent) > 1 else events  # late, or once more
            for _ in range(2 if fate > 0.9 else 1):
                if not live.router.take(name, events):
                    assert live.router.take(name, told.snapshot())
        for lease in book.send(now):
            leases[lease.number] = (lease.replica, numbers_of(lease, live))
            assert lease.replica in there
            if lease.is_suspect:
                suspects |= set(numbers_of(lease, live))
        check_book(book)
    assert len(answered) == len(set(answered)) and not set(answered) & set(blamed)
    assert set(blamed) <= suspects, "only what was under suspicion is given up"
    # To the end: everything that came is answered or given up.
    live.close()
    if not there:
        book.join("last", facts, now)
        there["last"] = Told(rng, 10**6)
    for _ in range(1000):
        now += 1.0
        for lease in book.send(now):
            leases[lease.number] = (lease.replica, numbers_of(lease, live))
        for number, (name, tags) in list(leases.items()):
            fresh = book.commit(name, number, {place % 10_000: answer_of(kind) for place in tags}, now)
            answered += [int(tag) for tag, _, _ in fresh]
            del leases[number]
        check_book(book)
        if not book.num_unanswered:
            break
    assert sorted(answered + blamed) == sorted(given)


def numbers_of(lease, live) -> list[int]:
    """The numbers in the tags of a lease's requests."""
    return [place + 10_000 * (lease.source is not live) for place in lease.places]


def answer_of(kind):
    return [Generated((1, 2), "x", "length", None, 3)] if kind == "tokens" else Result(np.zeros(1))


# ----------------------------------------------------------------------------------------------- on threads


def feed_of(texts, *, sampling=None, pause=0.0):
    """A feed into which a thread puts a request for each text."""
    feed = Feed()

    def put():
        for number, text in enumerate(texts):
            while not feed.has_room:
                time.sleep(0.001)
            tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            feed.put([(Request(tokens, sampling=sampling), number.to_bytes(4, "little"))])
            time.sleep(pause)
        feed.end()

    threading.Thread(target=put, daemon=True).start()
    return feed


def texts_of(count):
    rng = np.random.default_rng(0)
    return [f"prefix {rng.integers(6)} and more, {rng.integers(10**6)}" for _ in range(count)]


def run_all(fleet, feed, kind="last", window=4000, **options):
    some = LiveInput(feed, window, **options)
    results = list(fleet.run(some, Readout(kind)))
    assert len({tag for tag, _ in results}) == len(results), "an answer came twice"
    return {int.from_bytes(tag, "little"): answer for tag, answer in results}


@pytest.mark.parametrize("kind", ["last", "mean", "tokens"])
def test_every_request_of_a_stream_is_answered_once(kind):
    texts = texts_of(400)
    # As slow as to be at work when the second one is there.
    replicas = ThreadReplicas("abc", loads={"c": 0.3}, before=lambda name, tokens: time.sleep(0.001))
    fleet = Fleet(replicas)
    seen = []
    sampling = Sampling(max_tokens=4) if kind == "tokens" else None
    found = run_all(fleet, feed_of(texts, sampling=sampling), kind, see=seen.append)
    fleet.close()
    for number, text in enumerate(texts):
        answer = found[number]
        assert answer[0].text.startswith(text) if kind == "tokens" else answer.values[0] == digest(text.encode())
    assert len(found) == 400 and sum(window.num_requests for window in seen) == 400
    assert fleet.stats.requests == 400 and fleet.stats.tokens == sum(map(len, texts))
    assert sum(one > 0 for one in replicas.given.values()) >= 2


def test_what_a_lost_replica_had_goes_to_others_and_counts_once():
    texts, replicas, lost = texts_of(300), ThreadReplicas("ab"), threading.Event()

    def before(name, tokens):
        if not lost.is_set() and replicas.given[name] > 20:
            lost.set()
            replicas.lose(name, "killed")
            time.sleep(0.2)

    replicas.before = before
    fleet = Fleet(replicas, patience=30)
    found = run_all(fleet, feed_of(texts, sampling=Sampling(max_tokens=2)), "tokens")
    fleet.close()
    assert len(found) == 300 and lost.is_set() and fleet.losses == 1 and fleet.num_moved > 0
    assert fleet.stats.requests == 300 and fleet.stats.tokens == sum(map(len, texts))


def test_a_request_that_two_replicas_die_of_is_an_error_and_the_stream_goes_on():
    texts = [*texts_of(60), "the poison", *texts_of(60)]
    replicas = ThreadReplicas("abcd", returns=True)

    def before(name, tokens):
        if bytes(tokens.astype(np.uint8)) == b"the poison":
            replicas.lose(name, "it died")
            time.sleep(0.5)

    replicas.before = before
    found = run_all(Fleet(replicas), feed_of(texts))
    errors = {number: one for number, one in found.items() if isinstance(one, InputError)}
    assert len(found) == 121 and [*errors] == [60] and errors[60].code == "replicas_lost"
    assert 2 <= len(replicas.killed) <= 5


def test_a_replica_that_hangs_on_a_stream_is_killed():
    hang, notes = threading.Event(), []

    def before(name, tokens):
        if name == "b":
            hang.wait(300)
        time.sleep(0.005)

    replicas = ThreadReplicas("ab", before=before)
    fleet = Fleet(replicas, patience=3.0, notify=notes.append)
    found = run_all(fleet, feed_of(texts_of(200), pause=0.002))
    hang.set()
    fleet.close()
    assert len(found) == 200 and replicas.killed == ["b"]
    assert notes.count("b made no progress for 3 s and is killed") == 1


def test_the_first_answers_come_before_the_last_requests():
    feed, answered = Feed(), threading.Event()
    before_the_last = []

    def put():
        for number in range(30):
            if number == 29:
                before_the_last.append(answered.wait(60))
            feed.put([(Request(np.full(20, number, np.int32)), number.to_bytes(4, "little"))])
        feed.end()

    threading.Thread(target=put, daemon=True).start()
    fleet = Fleet(ThreadReplicas("a"))
    for _ in fleet.run(LiveInput(feed, 4000), Readout("last")):
        answered.set()
    fleet.close()
    assert before_the_last == [True]


def test_all_that_has_come_is_there_when_the_first_requests_leave():
    feed = Feed(1 << 20)
    for number in range(300):
        feed.put([(Request(np.full(20, number, np.int32)), number.to_bytes(4, "little"))])
    fleet = Fleet(ThreadReplicas("a"))
    fleet.online_tick = 5.0  # a slow machine
    for max_tokens, there in ((1 << 20, 300), (1000, 50)):
        source = LiveInput(feed, max_tokens)
        run = FleetRun(fleet)
        run.add_stream(source, RunCall(Readout("last")))
        run._send()
        (online,) = run.online.values()
        assert online.num_waiting == there and (feed.since is None) == (there == 300)
        for number in range(300):
            feed.put([(Request(np.full(20, number, np.int32)), number.to_bytes(4, "little"))])
    fleet.close()


def test_a_job_begins_before_it_is_read_and_the_rest_is_divided():
    texts, spool, feed = texts_of(500), Spool(), Feed(0)
    early = []

    def put():
        for number, text in enumerate(texts):
            request = Request(np.frombuffer(text.encode(), np.uint8).astype(np.int32))
            tag = number.to_bytes(4, "little")
            if feed.has_room:
                early.append(number)
                feed.put([(request, tag)])
            else:
                spool.add(request, tag)
            time.sleep(0.001)
        spool.order()
        feed.end()

    threading.Thread(target=put, daemon=True).start()
    replicas = ThreadReplicas("ab")
    fleet = Fleet(replicas)
    found = run_all(fleet, feed, rest=lambda: spool.windows(max_tokens=4000))
    fleet.close()
    assert found.keys() == set(range(500))
    assert all(found[number].values[0] == digest(text.encode()) for number, text in enumerate(texts))
    assert 20 < len(early) < 500 and spool.num_requests == 500 - len(early)
    assert fleet.stats.requests == 500
    with Spool() as whole:  # each part computed what they have in common, which counts once
        for text in texts:
            whole.add(Request(np.frombuffer(text.encode(), np.uint8).astype(np.int32)))
        assert fleet.stats.rows_computed > fleet.stats.unique_tokens == whole.unique_tokens()


def test_without_replicas_a_stream_ends_with_their_reasons():
    replicas = ThreadReplicas("a", loads={"a": "it has no memory"})
    with pytest.raises(FleetError, match="no memory"):
        run_all(Fleet(replicas), feed_of(texts_of(5)))


@pytest.mark.parametrize("lose", [0, 3])
@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_streams_on_real_engines(tmp_path, kind, lose):
    """Results of one engine; the router knows from the caches' events what is where, also where some are lost."""
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    place = {"threads": 1, "dtype": "float32", "kv_memory": 1 << 20, "cache": CacheOptions(min_overlap=0)}
    llms = {name: LLM(folder, **place) for name in "abc"}
    alone = llms.pop("c").engine
    facts = {name: replace(facts_of(llm), max_rows=64, max_running=8) for name, llm in llms.items()}
    replicas = ThreadReplicas("ab", llms=llms, facts=facts)
    fleet, texts = Fleet(replicas), [text * 2 for text in texts_of(160)]
    sampling = Sampling(max_tokens=5, ignore_eos=True) if kind == "tokens" else None
    held, number, next_event = [], itertools.count(1), fleet.next_event

    def losing(timeout):
        event = next_event(timeout)
        if event is not None and getattr(event[1], "events", None) is not None:
            held.append(event[1].events)
            if lose and next(number) % lose == 0:
                event[1].events = None
        return event

    fleet.next_event = losing
    feed = feed_of(texts, sampling=sampling)
    run = fleet.run(LiveInput(feed, 4000), Readout(kind))
    found = {int.from_bytes(tag, "little"): answer for tag, answer in run}
    fleet.close()
    assert bool(held) == (kind != "mean") and bool(fleet.re_reported) == bool(lose and held)
    with Spool() as spool:
        for place_, text in enumerate(texts):
            tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            spool.add(Request(tokens, sampling=sampling), place_.to_bytes(4, "little"))
        windows = spool.windows(max_tokens=4000)
        for tag, answer in alone.run(windows, Readout(kind)):
            mine = found.pop(int.from_bytes(tag, "little"))
            if kind == "tokens":
                assert mine[0].tokens == answer[0].tokens
            else:
                np.testing.assert_allclose(mine.values, answer.values, atol=1e-4)
    assert not found and fleet.stats.requests == 160
    assert fleet.stats.rows_computed < (1.0 if kind == "mean" else 0.8) * fleet.stats.tokens


def book_of(kind, **facts):
    live = OnlineSource(RunCall(Readout(kind), online=True), max_tokens=10_000, grown_tokens=0)
    book = LeaseBook(live, numbers=itertools.count(1), patience=10.0)
    return book, live, ReplicaFacts(max_rows=64, max_running=4, cache_rows=4000, reports_cache=True, **facts)


def put(live, kind, numbers):
    for number in numbers:
        tokens = np.full(5, number, np.int32)
        sampling = Sampling(max_tokens=4) if kind == "tokens" else None
        live.put((encode(Request(tokens, sampling=sampling), b"%d" % number, number),), 0.0)


def test_a_replica_that_had_nothing_to_do_for_long_does_not_hang():
    book, live, facts = book_of("tokens")
    book.join("a", facts, 0.0)
    put(live, "tokens", [1])
    assert len(list(book.send(100.0))) == 1
    assert book.hung(109.0) == [] and book.hung(111.0) == ["a"]


@pytest.mark.parametrize("kind", ["tokens", "last"])
def test_nothing_runs_beside_suspects(kind):
    book, live, facts = book_of(kind)
    book.join("x", facts, 0.0)
    put(live, kind, [1, 2])
    list(book.send(0.0))
    assert book.lose("x") == []
    book.join("a", facts, 1.0)
    put(live, kind, [3, 4])
    (lease,) = book.send(1.0)
    assert lease.is_suspect and lease.places == [1]
    assert book.lose("a") == [b"1"]
    book.join("b", facts, 2.0)
    (lease,) = book.send(2.0)
    assert lease.is_suspect and lease.places == [2]
    book.commit("b", lease.number, {2: answer_of(kind)}, 3.0)
    certain = {place for lease in book.send(3.0) if not lease.is_suspect for place in lease.places}
    assert certain == {3, 4}


def test_a_replica_takes_others_again_when_suspects_have_run():
    book, live, facts = book_of("last")
    book.join("x", facts, 0.0)
    put(live, "last", [1, 2])
    list(book.send(0.0))
    book.lose("x")
    book.join("a", facts, 1.0)
    for _ in range(2):
        (lease,) = book.send(1.0)
        assert lease.is_suspect and not live.room()
        book.commit("a", lease.number, dict.fromkeys(lease.places, Result(np.zeros(1))), 1.0)
    assert list(book.send(1.0)) == [] and live.room() > 0


def reported(facts):
    """A run of one replica that takes part, and a fleet whose replicas remember who was asked to tell anew."""
    replicas = ThreadReplicas("a")
    fleet = Fleet(replicas)
    run = FleetRun(fleet)
    run.add_stream(LiveInput(Feed(), 1000), RunCall(Readout("tokens")))
    (call,) = run.online
    fleet.ready["a"], run._work["a"] = facts, fleet_module._Work(measured_at=100.0, call=call)
    run.book.join("a", facts, 100.0)
    replicas.re_reported = []
    replicas.report_anew = replicas.re_reported.append
    return run, fleet, replicas


def test_a_replica_whose_events_do_not_follow_is_asked_to_tell_anew():
    run, fleet, replicas = reported(ReplicaFacts(reports_cache=True))
    run._tell_router("a", ReplicaReport(events=CacheEvents(0, 0, (CacheCleared(),))), 101.0)
    assert not replicas.re_reported
    run._tell_router("a", ReplicaReport(events=CacheEvents(0, 5, (RowsRemoved(1),))), 102.0)
    assert replicas.re_reported == ["a"] and fleet.re_reported == 1
    fleet.close()


@pytest.mark.parametrize("overlap, seconds", [(False, 10.0), (True, 2.0)])
def test_seconds_of_steps_that_overlap_count_once(overlap, seconds):
    run, fleet, _ = reported(ReplicaFacts(steps_overlap=overlap))
    told = []
    (online,) = run.online.values()
    online.router.worked = lambda *what: told.append(what)
    steps = [StepInfo(rows=8, path_rows=0, requests_done=0, tokens_done=0, started_at=0.0, seconds=5.0, running=3)] * 2
    run._tell_router("a", ReplicaReport(steps=steps), 102.0)
    assert told == [("a", 10, 6, seconds)]
    fleet.close()


@pytest.mark.parametrize("kind", ["tokens", "last"])
@pytest.mark.parametrize("poison", [(), (17,), (3, 17, 18)])
def test_suspects_of_a_stream_run_in_groups_that_are_divided(kind, poison):
    book, live, facts = book_of(kind)
    facts = replace(facts, max_rows=128, max_running=32)
    numbers, answered, blamed, leases, losses = range(1, 41), [], [], [], 0
    book.join("a", facts, 0.0)
    put(live, kind, numbers)
    list(book.send(0.0))
    assert book.lose("a") == [] and not live.num_waiting and len(book.suspects) == 4
    book.join("a", facts, 0.0)
    while live.num_unanswered:
        leases += book.send(0.0)
        lease = leases.pop(0)
        if lease.is_suspect and set(lease.places) & set(poison):
            blamed += map(int, book.lose("a"))
            losses += 1
            book.join("a", facts, 0.0)
            leases = []
        else:
            answers = dict.fromkeys(lease.places, answer_of(kind))
            answered += [int(tag) for tag, _, _ in book.commit("a", lease.number, answers, 0.0)]
        check_book(book)
    assert sorted(blamed) == list(poison) and sorted(answered) == [n for n in numbers if n not in poison]
    assert losses <= 3 * len(poison), "40 requests in groups of 10, of 2 or 3, and alone"


def test_a_replica_runs_requests_of_one_call_at_a_time_and_calls_take_turns():
    book, texts, facts = book_of("tokens")
    numbers = OnlineSource(RunCall(Readout("last"), online=True), max_tokens=10_000, grown_tokens=0)
    book.add(numbers, 0.0)
    for name in "ab":
        book.join(name, facts, 0.0)
    put(texts, "tokens", range(1, 4))
    first = list(book.send(0.0))
    assert {lease.source for lease in first} == {texts} and {lease.replica for lease in first} == {"a", "b"}
    put(numbers, "last", range(1, 4))
    put(texts, "tokens", range(4, 7))
    sent = [lease.source for lease in book.send(0.5)]
    assert texts in sent and numbers not in sent, "texts have not had their turn"
    put(texts, "tokens", range(7, 40))
    assert list(book.send(1.5)) == [], "the turn is that of numbers, and both replicas have texts"
    for name in "ab":
        for opened in book.open_leases(name, texts):
            answers = dict.fromkeys(opened.lease.places, answer_of("tokens"))
            book.commit(name, opened.lease.number, answers, 1.5)
        sent = list(book.send(1.5))
        assert {(lease.replica, lease.source) for lease in sent} <= {(name, numbers)}
        check_book(book)
        if not numbers.has_waiting:
            break
    assert not numbers.has_waiting and book.is_idle(numbers) is False
    assert {lease.source for lease in book.send(1.6)} <= {texts}, "numbers have nothing to send"
    (name,) = (name for name in "ab" if book.open_leases(name, numbers))
    assert sorted(book.refuse(name, 2.0)) == [b"1", b"2", b"3"] and not numbers.num_unanswered
    check_book(book)
    assert not book.is_idle(texts) and book.is_idle(numbers)
    book.remove(numbers)
    assert name in {lease.replica for lease in book.send(2.0)} and not book.open_leases(name, numbers)
    check_book(book)


def test_one_book_serves_a_stream_and_a_sorted_job_at_once():
    """What a lost replica had of the stream runs with nothing of the sorted job beside it."""
    book, live, facts = book_of("last")
    put(live, "last", range(1, 9))
    book.join("a", facts, 0.0)
    leases = list(book.send(0.0))
    live.close()
    with Spool() as spool:
        for number in range(20):
            spool.add(Request(np.full(6, 50 + number, np.int32)), b"%d" % (100 + number))
        book.add(offline_source(spool.windows(max_tokens=30), live.call, RowCost(), ["a", "b"]))
        leases += book.send(0.0)
        assert {lease.source is live for lease in leases} == {True, False}
        assert book.lose("a") == []
        answered = []
        for name in "bc":
            book.join(name, facts, 0.0)
        while book.num_unanswered:
            for lease in book.send(1.0):
                windows = lease.source.windows(lease)
                assert sum(window.num_requests for window in windows) == len(lease.places)
                leases.append(lease)
            check_book(book)
            for name in "bc":
                own = list(book.replicas[name].open.values())
                assert len(own) < 2 or not any(one.lease.is_suspect for one in own)
                for one in own[:1]:
                    answers = dict.fromkeys(one.lease.places, answer_of("last"))
                    answered += book.commit(name, one.lease.number, answers, 2.0)
        assert any(lease.is_suspect for lease in leases)
        late = (book.commit("a", lease.number, dict.fromkeys(lease.places), 3.0) for lease in leases)
        assert not any(late)
    assert sorted(int(tag) for tag, *_ in answered) == [*range(1, 9), *range(100, 120)]
