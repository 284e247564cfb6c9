"""A fleet of threads in place of an engine: the same answers, once each, whatever becomes of its replicas."""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_jobs import FakeEngine
from fake_replicas import SlowEngine, ThreadReplicas, count_patience
from job_tables import check_complete, table_job
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.cluster import fleet as fleet_module
from prefold.cluster.fleet import Fleet, FleetRun
from prefold.cluster.native_host import ReplicaHost, facts_of
from prefold.cluster.replicas import ReplicaFacts, ReplicaReady, ReplicaReport, Replicas, RunCall, requests_of
from prefold.errors import FleetError, InputError
from prefold.jobs.report.progress import Progress
from prefold.jobs.run import run_job
from prefold.spec.requests import GenerationStats, Namespace, Readout, Request, Sampling, Stats
from prefold.trie import Feed, LiveInput, Spool
from prefold.trie.order import encode
from prefold.trie.window import cut_into_windows


def filled(num=400, generate=False, **options) -> Spool:
    rng = np.random.default_rng(0)
    spool = Spool(**options)
    for number in range(num):
        tokens = np.concatenate(([97 + number % 5] * 12, rng.integers(97, 123, rng.integers(1, 20))))
        sampling = Sampling(max_tokens=5, seed=number) if generate else None
        spool.add(Request(tokens, None, sampling=sampling), b"tag %d" % number)
    return spool


def plain(found) -> list:
    """Answers that can be compared, by tag."""
    return sorted((tag, a.values.tolist() if hasattr(a, "values") else a) for tag, a in found)


def expected(num=400, generate=False) -> list:
    with filled(num, generate) as spool:
        windows = spool.windows(max_tokens=500)
        engine = FakeEngine()
        return plain(engine.run(windows, Readout("tokens" if generate else "last")))


def run(fleet, spool, generate=False, **options):
    windows = spool.windows(max_tokens=500)
    return fleet.run(windows, Readout("tokens" if generate else "last"), **options)


@pytest.mark.parametrize("memory_bytes", [3000, 1 << 20])
@pytest.mark.parametrize("generate", [False, True])
def test_a_fleet_answers_as_one_engine_does(generate, memory_bytes):
    replicas = ThreadReplicas("abc")
    steps = []
    with closing(Fleet(replicas)) as fleet, filled(generate=generate, memory_bytes=memory_bytes) as spool:
        for _ in range(2):  # one run after the other
            assert plain(run(fleet, spool, generate, on_step=steps.append)) == expected(generate=generate)
        unique = spool.unique_tokens()
    assert fleet.stats.requests == 800 and sum(step.requests_done for step in steps) == 800
    assert all(replicas.given.values()), "one of three had nothing to do"
    if not generate:
        assert fleet.stats.unique_tokens == 2 * unique


def test_leases_continue_the_stream_of_their_replica():
    """A replica computes what its windows do not share with what it had last: few rows, as they are consecutive."""
    replicas = ThreadReplicas("ab")
    with closing(Fleet(replicas)) as fleet, filled() as spool:
        list(run(fleet, spool))
        rows = spool.unique_tokens()
    computed = 0
    for _, windows in replicas.runs:
        computed += sum(w.unique_tokens + w.common - truth for w, truth in zip(windows, in_truth(windows), strict=True))
    assert rows <= computed <= rows + (1 + fleet.steals) * 32


def in_truth(windows) -> list[int]:
    """How many leading tokens each window has in common with the one that its replica was given before."""
    found, last = [], np.zeros(0, np.int32)
    for window in windows:
        first = window.request(0).tokens
        length = min(len(first), len(last))
        differ = np.flatnonzero(first[:length] != last[:length])
        found.append(int(differ[0]) if len(differ) else length)
        last = window.request(window.num_requests - 1).tokens
    return found


@pytest.mark.parametrize("early", [False, True])
def test_a_job_on_a_fleet_computes_equal_records_once(tmp_path, early):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [f"common part of all {i % 40}" for i in range(400)]
    source.write_text("".join(json.dumps({"text": text, "k": str(i)}) + "\n" for i, text in enumerate(texts)))
    replicas = ThreadReplicas("abc")
    with closing(Fleet(replicas)) as fleet:
        job = table_job(source, out, llm=SimpleNamespace(engine=fleet), early=early)
        stats = run_job(job, Progress()).stats
    check_complete(source, out)
    computed = sum(replicas.given.values())
    assert (stats.requests, stats.repeats) == (400, 400 - computed)
    assert computed == 40 or (early and computed <= 80)  # what the feed had answered before the spool is sent once more


def test_a_job_that_began_as_a_stream_goes_on_with_no_wrong_path():
    """What a lost replica had of the stream comes between two leases of what is known: it leaves another path."""
    rng = np.random.default_rng(0)
    documents = rng.integers(10, 200, (4, 40))
    spool, feed, release = Spool(), Feed(0), threading.Event()

    def before(name, tokens):
        time.sleep(0.0005)
        if name == "b":
            release.wait(300)

    replicas = ThreadReplicas("ab", before=before)
    with closing(Fleet(replicas)) as fleet, spool:
        while fleet.num_ready < 2 and (event := fleet.next_event(60.0)) is not None:
            if isinstance(event[1], ReplicaReady):
                fleet.meet(event[0], event[1].facts)

        def put():
            for number in range(6):
                feed.put([(Request(np.array([number + 1] * 30, np.int32)), b"live %d" % number)])
            for number in range(300):
                tokens = np.concatenate((documents[number % 4], rng.integers(10, 200, 4))).astype(np.int32)
                spool.add(Request(tokens), b"%d" % number)
            feed.end()

        threading.Thread(target=put, daemon=True).start()
        answers = fleet.run(LiveInput(feed, 1 << 20, lambda: spool.windows(max_tokens=1000)), Readout("last"))
        found = [next(answers)[0] for _ in range(60)]
        replicas.lose("b", "gone")
        found += [tag for tag, _ in answers]
        release.set()
    assert len(set(found)) == len(found) == 306
    assert len([1 for name, _ in replicas.runs if name == "a"]) == 1 and fleet.num_moved


def test_a_replica_goes_on_with_no_other_prompts_path():
    """Whatever it is told: wrong rows would give wrong numbers, and nobody would notice."""
    found = []
    engine = SlowEngine()

    def run(windows, *_, **__):
        for window in windows:
            found.append(window)
            yield from ()

    engine.run = run
    with closing(ReplicaHost(SimpleNamespace(engine=engine), ReplicaFacts())) as host:
        host.begin(RunCall(Readout("last")))
        prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 9, 9, 9], [9, 9, 8], [9, 9, 8]]
        for number, tokens in enumerate(prompts):
            one = encode(
                Request(np.array(tokens), namespace=Namespace("fr" if number == 4 else "")), bytes(15) + bytes([number])
            )
            (window,) = cut_into_windows([one], max_tokens=99, is_sorted=True)
            host.give([replace(window, common=3 if number else 0)])
        deadline = time.monotonic() + 60
        while len(found) < len(prompts) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert [window.common for window in found] == [0, 3, 0, 2, 0]


@pytest.mark.parametrize("generate", [False, True])
def test_a_replica_that_is_lost_loses_nothing_and_repeats_nothing(generate):
    lost = threading.Event()

    def before(name, tokens):
        time.sleep(0.0005)
        if name == "b" and replicas.given["b"] > 60 and not lost.is_set():
            lost.set()
            threading.Thread(target=replicas.lose, args=("b", "out of luck")).start()

    notes = []
    replicas = ThreadReplicas("abc", before=before)
    with closing(Fleet(replicas, notify=notes.append)) as fleet, filled(generate=generate) as spool:
        assert plain(run(fleet, spool, generate)) == expected(generate=generate)
    assert lost.is_set() and fleet.num_moved and notes == ["b is lost: out of luck"]


def test_a_replica_that_comes_back_works_again():
    replicas = ThreadReplicas("a", returns=True)
    with closing(Fleet(replicas)) as fleet, filled() as spool:
        found = []
        for answer in run(fleet, spool):
            found.append(answer)
            if len(found) == 100:
                replicas.lose("a", "restarted")
        assert plain(found) == expected()
    assert len([1 for _, windows in replicas.runs if windows]) == 2  # it holds nothing of what it was given before


@pytest.mark.parametrize("dies", [0, 60])
def test_a_replica_that_hangs_is_killed_once(monkeypatch, dies):
    """Also where it takes longer to die than the fleet has patience."""
    hangs, release, notes, kills = threading.Event(), threading.Event(), [], []

    def before(name, tokens):
        if name == "b" and replicas.given["b"] > 40:
            hangs.set()
            release.wait(300)

    class Slow(ThreadReplicas):
        def kill(self, name):
            kills.append(name)
            threading.Thread(target=self._die, args=(name, now() + dies)).start()

        def _die(self, name, end):
            while now() < end:
                time.sleep(0.005)
            self.lose(name, "killed")

    replicas = Slow("ab", before=before)
    with closing(Fleet(replicas, patience=25, notify=notes.append)) as fleet, filled() as spool:
        now = count_patience(monkeypatch, fleet, hangs.is_set)
        assert plain(run(fleet, spool)) == expected()
    release.set()
    assert kills == replicas.killed == ["b"]
    assert [note for note in notes if "made no progress" in note] == ["b made no progress for 25 s and is killed"]


def test_an_engine_that_fails_is_a_replica_that_is_lost():
    def before(name, tokens):
        if name == "b" and replicas.given["b"] > 40:
            raise RuntimeError("the card is gone")

    notes = []
    replicas = ThreadReplicas("ab", before=before)
    with closing(Fleet(replicas, notify=notes.append)) as fleet, filled() as spool:
        assert plain(run(fleet, spool)) == expected()
    assert "b failed: RuntimeError: the card is gone" in notes


def test_a_request_that_two_replicas_die_of_is_an_error():
    poison = None

    def before(name, tokens):
        if tokens.tolist() == poison:
            raise RuntimeError("no such kernel")

    with filled() as spool:
        (bad,) = spool.order().read(200, 201)
        poison = np.frombuffer(bad.key, ">i4").tolist()
    replicas = ThreadReplicas("abc", before=before, returns=True)
    with closing(Fleet(replicas)) as fleet, filled() as spool:
        found = dict(run(fleet, spool))
    (error,) = [answer for answer in found.values() if isinstance(answer, InputError)]
    assert isinstance(found[bad.tag], InputError) and error.code == "replicas_lost" and 2 <= len(replicas.killed) <= 5
    good = [pair for pair in expected() if pair[0] != bad.tag]
    assert plain((tag, answer) for tag, answer in found.items() if tag != bad.tag) == good


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_out_of_reach_counts_as_no_loss_and_blames_nobody(stream):
    """The same request is there when a replica dies, when one is out of reach, and when others die. (At its first death
    it may lie too far behind to have begun.)"""
    with filled() as spool:
        (bad,) = spool.order().read(200, 201)
    poison, fates = np.frombuffer(bad.key, ">i4").tolist(), itertools.chain([True, False], itertools.repeat(True))
    out_of_reach = []

    def before(name, tokens):
        if tokens.tolist() == poison:
            out_of_reach.append(not (died := next(fates)))
            threading.Thread(target=replicas.lose, args=(name, "gone"), kwargs={"died": died}).start()
            time.sleep(0.5)

    notes = []
    replicas = ThreadReplicas("ab", before=before, returns=True)
    with closing(Fleet(replicas, notify=notes.append)) as fleet, filled() as spool:
        if stream:
            feed = Feed()
            for one in spool.order().read(0, 400):
                feed.put([(Request(np.frombuffer(one.key, ">i4").astype(np.int32)), one.tag)])
            feed.end()
            found = dict(fleet.run(LiveInput(feed, 1000), Readout("last")))
        else:
            found = dict(run(fleet, spool))
        assert fleet.losses == out_of_reach.count(False) in range(2, 6)
    assert out_of_reach.count(True) == 1 and found[bad.tag].code == "replicas_lost"
    assert sum("runs, but messages to or from it were lost: gone" in note for note in notes) == 1
    assert plain((t, a) for t, a in found.items() if t != bad.tag) == [p for p in expected() if p[0] != bad.tag]


@pytest.mark.parametrize("stream", [False, True])
def test_further_reads_of_a_prompt_do_not_count_it_again(stream):
    """Each prompt is read twice, as for two labels of one token: two answers, and its tokens once."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(97, 123, 8 + i % 9).astype(np.int32) for i in range(60)]
    reads = [(Request(tokens), b"%d/%d" % (i, part)) for i, tokens in enumerate(prompts) for part in range(2)]
    with closing(Fleet(ThreadReplicas("ab"))) as fleet, Spool() as spool:
        if stream:
            feed = Feed()
            for place in range(0, 120, 2):
                feed.put(reads[place : place + 2])
            feed.end()
            found = list(fleet.run(LiveInput(feed, 1000), Readout("last")))
        else:
            for request, tag in reads:
                spool.add(request, tag)
            found = list(run(fleet, spool))
        assert sorted(tag for tag, _ in found) == sorted(tag for _, tag in reads)
        assert fleet.stats.requests == 60 and fleet.stats.tokens == sum(map(len, prompts))


def test_work_begins_while_others_load():
    loaded = threading.Event()
    replicas = ThreadReplicas("ab", loads={"b": loaded})
    with closing(Fleet(replicas)) as fleet, filled() as spool:
        assert sum(1 for _ in run(fleet, spool)) == 400 and replicas.given == {"a": 400, "b": 0}
        loaded.set()


def test_a_replica_that_cannot_start_is_reported_and_the_others_go_on():
    notes = []
    replicas = ThreadReplicas("ab", loads={"b": "there is no such model"})
    with closing(Fleet(replicas, notify=notes.append)) as fleet, filled() as spool:
        assert plain(run(fleet, spool)) == expected()
    assert notes == ["b is lost: there is no such model"]


def test_a_fleet_without_replicas_is_an_error_that_says_why():
    replicas = ThreadReplicas("ab", loads={"a": "no room", "b": "no such model"})
    reasons = r"no replica is left\n  a: no room\n  b: no such model"
    with closing(Fleet(replicas)) as fleet, filled() as spool, pytest.raises(FleetError, match=reasons):
        list(run(fleet, spool))


def test_a_replica_with_other_weights_is_refused():
    notes = []
    facts = {"b": ReplicaFacts({"prefold": "2"}, max_rows=64)}
    replicas = ThreadReplicas("ab", facts=facts, loads={"b": 0.2})
    replicas.before = lambda name, tokens: time.sleep(0.002)
    with closing(Fleet(replicas, notify=notes.append)) as fleet, filled() as spool:
        assert plain(run(fleet, spool)) == expected()
    assert notes[0] == "b is lost: refused, because it has prefold 2 (others: 1)" and replicas.killed == ["b"]
    assert not replicas.given["b"]


def test_a_run_that_is_left_or_stopped_leaves_nothing_behind():
    replicas = ThreadReplicas("ab")
    with closing(Fleet(replicas)) as fleet, filled() as spool:
        answers = run(fleet, spool)
        next(answers)
        answers.close()
        assert list(run(fleet, spool, stopping=lambda: True)) == []
        assert plain(run(fleet, spool)) == expected()


def test_real_engines(tmp_path):
    """Two engines of one model: the numbers and the text of one engine, rows computed once but for the cuts."""
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    llms = {name: LLM(folder, threads=1, dtype="float32", kv_memory=1 << 22) for name in "abc"}
    alone = llms.pop("c").engine
    facts = {name: replace(facts_of(llm), max_rows=64, max_running=8) for name, llm in llms.items()}
    replicas = ThreadReplicas("ab", llms=llms, facts=facts)
    with closing(Fleet(replicas)) as fleet, filled(120) as spool:
        numbers = dict(run(fleet, spool))
        for tag, result in alone.run(spool.windows(max_tokens=500), Readout("last")):
            assert np.abs(numbers.pop(tag).values - result.values).max() < 1e-4
        assert not numbers and fleet.stats.unique_tokens == spool.unique_tokens()
        assert 0 <= fleet.stats.rows_computed - fleet.stats.unique_tokens <= (1 + fleet.steals) * 32
    with closing(Fleet(ThreadReplicas("ab", llms=llms, facts=facts))) as fleet, filled(120, generate=True) as spool:
        texts = {tag: answer[0].tokens for tag, answer in run(fleet, spool, generate=True)}
        windows = spool.windows(max_tokens=500)
        alone.reset_stats()
        assert texts == {tag: answer[0].tokens for tag, answer in alone.run(windows, Readout("tokens"))}
        assert fleet.stats.generation.generated_tokens == sum(map(len, texts.values()))
        assert fleet.stats.unique_tokens == alone.stats.unique_tokens == alone.stats.rows_computed
        again = fleet.stats.generation.prefill_rows - spool.unique_tokens()
        assert fleet.stats.rows_computed - fleet.stats.unique_tokens == again > 0


@pytest.mark.parametrize("early", [False, True])
def test_the_summary_counts_what_two_replicas_computed(tmp_path, early):
    """One of two is lost in the middle: rows and tokens that it had computed for nobody are no unique tokens, and in no
    answer. early: the first requests run while the others are read."""
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    llms = {name: LLM(folder, threads=1, dtype="float32", kv_memory=1 << 22) for name in "abc"}
    alone = llms.pop("c").engine
    facts = {name: replace(facts_of(llm), max_rows=64, max_running=8) for name, llm in llms.items()}
    spool, seen = Spool(), []

    def before(name, tokens):
        seen.append(name)
        time.sleep(0.01)
        if name == "b" and seen.count("b") == 10:
            replicas.lose("b", "killed")

    replicas = ThreadReplicas("ab", llms=llms, facts=facts, before=before)
    with filled(200, generate=True) as whole, closing(Fleet(replicas)) as fleet, spool:
        while fleet.num_ready < 2 and (event := fleet.next_event(60.0)) is not None:
            if isinstance(event[1], ReplicaReady):
                fleet.meet(event[0], event[1].facts)
        feed = Feed()
        for place, one in enumerate(whole.order().read(0, 200)):
            request = Request(one.tokens, sampling=Sampling(max_tokens=5, seed=place))
            if early and place % 3 == 0:
                feed.put([(request, one.tag)])
            else:
                spool.add(request, one.tag)
        feed.end()
        source = LiveInput(feed, 1 << 16, lambda: spool.windows(max_tokens=500))
        answers = fleet.run(source if early else source.rest(), Readout("tokens"))
        texts = {tag: one.tokens for tag, (one,) in answers}
        assert len(texts) == 200 and fleet.losses == 1 and fleet.num_moved
        for _ in alone.run(whole.windows(max_tokens=1 << 16), Readout("tokens")):
            pass
        stats, outputs = fleet.stats, sum(len(tokens) for tokens in texts.values())
        assert stats.generation.generated_tokens == outputs == alone.stats.generation.generated_tokens
        assert stats.unique_tokens == alone.stats.unique_tokens == whole.unique_tokens() + outputs - 200
        assert stats.rows_computed > stats.unique_tokens


class AtOnce(Replicas):
    """Says everything before anybody asks, an answer a report."""

    def __init__(self):
        super().__init__({"a": lambda: None})

    def start(self, tell):
        self.tell = tell
        tell("a", ReplicaReady(ReplicaFacts()))

    def order(self, name, method, *arguments):
        for number, place, request in requests_of(*arguments) if method == "give" else ():
            self.tell("a", ReplicaReport([(number, place, len(request.tokens))]))

    kill = lambda self, name: None  # noqa: E731
    close = lambda self: None  # noqa: E731


def test_many_answers_at_once():
    with closing(Fleet(AtOnce())) as fleet, filled() as spool:
        lengths = {tag: length for tag, length in run(fleet, spool)}
        assert sorted(lengths.values()) == sorted(spool.order().lengths.tolist())


def test_an_empty_job():
    with closing(Fleet(ThreadReplicas("a"))) as fleet, Spool() as spool:
        assert list(run(fleet, spool)) == []


def test_a_run_that_is_left_ends_on_its_replicas():
    replicas = ThreadReplicas("ab")
    with closing(Fleet(replicas)) as fleet, filled() as spool:
        answers = run(fleet, spool)
        next(answers)
        assert any(host._run is not None for host in replicas.hosts.values())
        answers.close()
        assert all(host._run is None for host in replicas.hosts.values())


def test_what_a_lost_replica_had_not_answered_counts_as_computed_again():
    with closing(Fleet(ThreadReplicas("a"))) as fleet, filled() as spool:
        one = FleetRun(fleet)
        one.add_job(spool.windows(max_tokens=100), RunCall(Readout("tokens")))
        fleet.stats = Stats(unique_tokens=100, generation=GenerationStats())
        one._counted_rows = True
        one._count_loss(fleet_module._Work(reported_rows=50, answered_rows=20))
        assert fleet.stats.unique_tokens == 70 and fleet.stats.generation.recomputed_rows == 30
        one._count_loss(None)
        one._count_loss(fleet_module._Work(reported_rows=5, answered_rows=20))
        assert fleet.stats.unique_tokens == 70 and fleet.stats.generation.recomputed_rows == 30
