"""The router's picture of who holds what, against the caches themselves."""

from __future__ import annotations

import numpy as np
import pytest
from books import check_books
from fake_replicas import held_by
from fleet_books import check_policy_keeps_to_those_allowed, check_router
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.cluster.router import POLICIES, Prompt, ReplicaLoad, Router, Speed, policy_named
from prefold.engine.cache import CacheEvents, CacheOptions, CacheReporter, SlotPool
from prefold.engine.cache.events import CacheCleared, Cut, RowsRemoved, RowsStored
from prefold.engine.schedule.admission import StepLimits
from prefold.engine.schedule.scheduler import Scheduler
from prefold.errors import InputError
from prefold.spec.requests import NO_NAMESPACE


def held_in(scheduler: Scheduler) -> set[tuple]:
    """The rows that a scheduler's tree holds, each as (namespace, the tokens from the root to it)."""
    found = set()
    for node in scheduler.tree.nodes():
        path = node.path()
        tokens = tuple(int(t) for one in path for t in one.tokens)
        namespace = path[0].parent.namespace
        found |= {(namespace, tokens[: node.start + i + 1]) for i in range(node.num_computed)}
    return found


class Replica:
    """A scheduler that makes random tokens, and reports."""

    def __init__(self, rng: np.random.Generator, slots: int, cache: bool, max_pending: int):
        self.rng = rng
        self.scheduler = Scheduler(
            SlotPool(slots), max_batch_rows=8, max_running=4, cache=CacheOptions(min_overlap=2) if cache else None
        )
        self.epoch, self.max_pending, self.keys = 0, max_pending, 0
        self.report()

    def report(self) -> None:
        self.reporter = CacheReporter(self.scheduler.tree, epoch=self.epoch, max_pending=self.max_pending)

    def submit(self) -> None:
        tokens = self.rng.integers(0, 2, self.rng.integers(1, 14)).astype(np.int32)
        self.keys += 1
        self.scheduler.submit(
            self.keys, tokens, limit=int(self.rng.integers(1, 6)), reserve=bool(self.rng.integers(2)),
            samples=int(self.rng.integers(1, 3)), namespace=("a",) if self.rng.random() < 0.2 else (),
        )  # fmt: skip

    def step(self) -> None:
        self.scheduler.admit()
        step = self.scheduler.plan()
        if step is None:
            return
        self.scheduler.begin(step)
        reads = len(step.consumers)
        self.scheduler.commit(step, self.rng.integers(0, 2, reads).tolist(), (self.rng.random(reads) < 0.2).tolist())

    def cancel(self) -> None:
        if self.keys:
            self.scheduler.cancel(int(self.rng.integers(1, self.keys + 1)))

    def restart(self) -> None:
        self.epoch += 1
        old = self.scheduler
        self.scheduler = Scheduler(
            SlotPool(old.pool.num_slots), max_batch_rows=8, max_running=4, cache=old.cache and old.cache.options
        )
        self.report()


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([0, 3, 1 << 16]))
def test_the_picture_is_that_of_the_caches(seed, faults, max_pending):
    rng = np.random.default_rng(seed)
    router = Router()
    replicas = {name: Replica(rng, int(rng.integers(20, 60)), rng.random() < 0.8, max_pending) for name in "abc"}
    for name in replicas:
        router.join(name)
    late: list[tuple[str, CacheEvents]] = []
    keys = iter(range(10**6))
    for _ in range(120):
        name = "abc"[rng.integers(3)]
        replica = replicas[name]
        act = rng.random()
        if act < 0.25:
            replica.submit()
        elif act < 0.75:
            replica.step()
        elif act < 0.8:
            replica.cancel()
        elif act < 0.83 and faults:
            replica.restart()
        elif act < 0.86:
            replica.scheduler.clear()
        elif act < 0.93:
            prompt = Prompt(rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32), limit=4)
            chosen = router.choose(prompt)
            router.send(next(keys), prompt, chosen)
        elif router.in_flight:
            key = list(router.in_flight)[rng.integers(len(router.in_flight))]
            router.end(key, output_rows=int(rng.integers(0, 5)))
        events = replica.reporter.drain() if rng.random() < 0.6 else None
        if events is not None:
            fate = rng.random() if faults else 1.0
            if fate < 0.1:
                continue  # lost
            if fate < 0.2:
                late.append((name, events))
                continue
            if fate < 0.3:
                router.take(name, events)  # twice
            if not router.take(name, events):
                assert faults
                if rng.random() < 0.5:
                    assert router.take(name, replica.reporter.snapshot())
        if late and rng.random() < 0.3:
            router.take(*late.pop(int(rng.integers(len(late)))))
        check_router(router)
    for name, replica in replicas.items():
        events = replica.reporter.drain()
        if faults or (events is not None and not router.take(name, events)):
            assert router.take(name, replica.reporter.snapshot())
        check_router(router)
        assert held_by(router, name) == held_in(replica.scheduler)
    before = {name: held_by(router, name) for name in "ab"}
    router.leave("c")
    check_router(router)
    assert {name: held_by(router, name) for name in "ab"} == before


def test_a_gap_shows_and_a_snapshot_mends_it():
    router = Router()
    router.join("a")
    one, two = np.arange(5, dtype=np.int32), np.arange(5, 9, dtype=np.int32)
    assert router.take("a", CacheEvents(0, 0, (CacheCleared(), RowsStored(1, None, one))))
    assert not router.take("a", CacheEvents(0, 3, (RowsStored(3, 2, two),)))
    assert not router.take("a", CacheEvents(0, 4, (RowsRemoved(1),)))
    assert router.matched_rows(Prompt(np.arange(9))) == {"a": 5}
    assert router.take("a", CacheEvents(0, 7, (CacheCleared(), RowsStored(9, None, np.arange(9)), Cut(9, 10, 4))))
    assert router.take("a", CacheEvents(0, 3, (RowsRemoved(1),)))  # late: it is passed over
    assert router.matched_rows(Prompt(np.arange(9))) == {"a": 9}
    assert router.take("a", CacheEvents(0, 10, (RowsRemoved(9),)))
    assert router.matched_rows(Prompt(np.arange(9))) == {"a": 4}
    assert not router.take("a", CacheEvents(0, 11, (RowsRemoved(9),)))  # it is not held
    assert router.take("a", CacheEvents(1, 0, (CacheCleared(),)))  # it was started again
    assert router.matched_rows(Prompt(np.arange(9))) == {}
    check_router(router)


def test_a_removal_touches_its_sender_only():
    router = Router()
    for name in "ab":
        router.join(name)
        router.take(name, CacheEvents(0, 0, (CacheCleared(), RowsStored(1, None, np.arange(6)))))
    router.take("a", CacheEvents(0, 2, (RowsRemoved(1),)))
    assert router.matched_rows(Prompt(np.arange(6))) == {"b": 6}
    check_router(router)


def test_blocks_are_runs():
    """As vLLM reports them: each block is a run of its own, named by its hash."""
    router = Router()
    router.join("a")
    tokens = np.arange(48)
    blocks = [RowsStored(f"h{i}", f"h{i - 1}" if i else None, tokens[16 * i : 16 * i + 16]) for i in range(3)]
    assert router.take("a", CacheEvents(0, 0, (CacheCleared(), *blocks, blocks[1])))  # the second is told of twice
    assert router.matched_rows(Prompt(tokens)) == {"a": 48}
    assert router.take("a", CacheEvents(0, 5, (RowsRemoved("h1"),)))
    assert router.matched_rows(Prompt(tokens)) == {"a": 16}
    assert router.take("a", CacheEvents(0, 6, (blocks[1],)))
    assert router.matched_rows(Prompt(tokens)) == {"a": 48}
    check_router(router)


def test_an_estimate_is_corrected_by_the_answers():
    router = Router()
    router.join("http", reports=False, capacity=100_000)
    prompts = [Prompt(np.arange(i * 10_000, i * 10_000 + 1000)) for i in range(20)]
    for i, prompt in enumerate(prompts):
        router.send(i, prompt, "http")
        router.end(i, output_rows=1, cached_rows=0)
    assert all(router.matched_rows(prompt) == {"http": 1000} for prompt in prompts)
    router.send("again", prompts[7], "http")
    # It is gone, so all before it are gone as well: 12 prompts fit, and now the next one makes room.
    router.end("again", output_rows=1, cached_rows=0)
    assert [len(router.matched_rows(prompt)) for prompt in prompts] == [0] * 7 + [1] + [0] + [1] * 11
    assert router.members["http"].estimate.capacity == 12_000
    check_router(router)


@pytest.mark.parametrize("says", [True, False])
def test_an_answer_that_says_nothing_of_the_cache_changes_no_estimate(says):
    """Nor do two prompts under way together: the second was only going to find what the first one brings."""
    router = Router()
    router.join("http", reports=False, capacity=100_000)
    prompts = [Prompt(np.append(np.arange(1000), [5000 + i])) for i in range(6)]
    for pair in (prompts[:2], prompts[2:4], prompts[4:]):
        for prompt in pair:
            router.send(id(prompt), prompt, "http")
        for prompt in pair:
            held = router.in_flight[id(prompt)].estimated_rows
            router.end(id(prompt), output_rows=1, cached_rows=held if says else None)
    assert router.members["http"].estimate.capacity == 100_000
    assert all(router.matched_rows(prompt) == {"http": 1001} for prompt in prompts)
    check_router(router)


def test_a_hot_prefix_is_copied_when_waiting_costs_more():
    router = Router()
    for name in "ab":
        router.join(name, speed=Speed(prefill=1e-3, decode=1e-2))
    prefix = np.arange(100)
    router.take("a", CacheEvents(0, 0, (CacheCleared(), RowsStored(1, None, prefix))))
    places = []
    for i in range(200):
        prompt = Prompt(np.concatenate((prefix, [5000 + i] * 10)))
        places.append(router.choose(prompt))
        router.send(i, prompt, places[-1])
    # A request takes 0.01 s, the prefix 0.1 s, which counts three times: it moves after about 30 requests.
    first_copy = places.index("b")
    assert 27 <= first_copy <= 33 and 80 <= places.count("b") <= 100


def test_what_generates_keeps_others_waiting_only_where_there_is_no_room():
    router = Router()
    for name in "ab":
        router.join(name, speed=Speed(prefill=1e-3, decode=1e-2), capacity=1000)
    router.take("a", CacheEvents(0, 0, (CacheCleared(), RowsStored(1, None, np.arange(100)))))
    prompt = Prompt(np.arange(100), limit=100)
    places = []
    for i in range(14):
        places.append(router.choose(prompt))
        router.send(i, prompt, places[-1])
    assert places[:6] == ["a"] * 6 and "b" in places[6:12]  # ten outputs fill its room


def test_cold_work_goes_where_least_waits():
    router = Router()
    router.join("slow", speed=Speed(prefill=3e-3))
    router.join("fast", speed=Speed(prefill=1e-3))
    places = []
    for i in range(40):
        prompt = Prompt(np.full(100, i))
        places.append(router.choose(prompt))
        router.send(i, prompt, places[-1])
    assert 29 <= places.count("fast") <= 32


def test_load_falls_as_work_is_done():
    load = ReplicaLoad(Speed(prefill=0.001, decode=0.01))
    load.send(100, 50)
    load.send(200, 50)
    assert load.seconds == pytest.approx(1.3)
    load.work(150, 10, 0.25)
    assert load.remaining_rows == (150, 90)
    load.end((100, 50), (100, 5))  # it ended early
    assert load.remaining_rows == (150, 45)
    load.work(150, 45, 0.6)
    load.end((200, 50), (200, 50))
    assert load.remaining_rows == (0, 0) and load.seconds == 0
    load.send(10, 10)
    load.end((10, 10), (10, 3))  # nobody told of steps
    assert load.remaining_rows == (0, 0)


def test_speed_is_learned():
    rng = np.random.default_rng(0)
    speed = Speed(1e-4, 1e-3)
    for _ in range(100):
        prefill, decode = int(rng.integers(0, 500)), int(rng.integers(1, 40))
        speed.measure(prefill, decode, 3e-4 * prefill + 2e-3 * decode)
    assert speed.prefill == pytest.approx(3e-4) and speed.decode == pytest.approx(2e-3)
    speed = Speed(1e-4, 1e-3)
    for _ in range(100):
        speed.measure(100, 10, 0.04)  # in one proportion only
    assert speed.prefill * 100 + speed.decode * 10 == pytest.approx(0.04)


def test_expected_outputs_are_learned():
    router = Router()
    router.join("a")
    assert router.expected_output(100) == 100
    for i in range(200):
        router.send(i, Prompt(np.arange(4), limit=100), "a")
        router.end(i, output_rows=20)
    assert 20 <= router.expected_output(100) <= 27
    assert router.expected_output(0) == 0


def test_what_a_lost_replica_had_comes_back():
    router = Router()
    router.join("a")
    router.join("b")
    for i in range(6):
        router.send(i, Prompt(np.arange(i + 1)), "ab"[i % 2])
    assert router.leave("a") == [0, 2, 4] and router.replicas == ["b"]
    check_router(router)
    router.join("c")
    assert router.choose(Prompt(np.arange(3)), among=["c"]) == "c"
    assert router.leave("b") == [1, 3, 5] and router.leave("c") == []
    assert router.choose(Prompt(np.arange(3))) is None and not router.index.roots


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_among_those_allowed(name):
    check_policy_keeps_to_those_allowed(name)


def test_round_robin_takes_turns():
    router = Router(policy_named("round-robin"))
    for name in "abc":
        router.join(name)
    chosen = []
    for i in range(6):
        chosen.append(router.choose(Prompt(np.arange(3))))
        router.send(i, Prompt(np.arange(3)), chosen[-1])
    assert chosen == list("abcabc")


def test_errors_name_what_is_wrong():
    router = Router()
    router.join("a")
    with pytest.raises(InputError, match="already"):
        router.join("a")
    router.send(1, Prompt(np.arange(3)), "a")
    with pytest.raises(InputError, match="already sent"):
        router.send(1, Prompt(np.arange(3)), "a")
    with pytest.raises(InputError, match="no policy 'best'"):
        policy_named("best")


@pytest.mark.parametrize("output, cached, done", [(0, 100, 20), (0, 0, 120), (0, None, 120), (None, None, 0)])
def test_what_ended_requests_took_is_not_taken_for_work_on_others(output, cached, done):
    """Of two prompts of 120 rows one ends, of which `done` rows were computed; 60 of the other are."""
    router = Router()
    router.join("a")
    for key in range(2):
        router.send(key, Prompt(np.full(120, key, np.int32)), "a")
    router.worked("a", done + 60, 0, 1.0)
    router.end(0, output_rows=output, cached_rows=cached)
    assert router.load("a").remaining_rows == (60, 0)


@pytest.mark.parametrize("computed", [0, 4])
def test_rows_that_are_kept_below_rows_to_come(computed):
    """A prompt goes on from a text that ends while few of the prompt's own rows are computed, or none."""
    replica, router = Replica(np.random.default_rng(0), 60, True, 1 << 16), Router()
    scheduler, prompt = replica.scheduler, np.array([*range(8), 20, 21], np.int32)
    router.join("a")

    def compare() -> None:
        events = replica.reporter.drain()
        assert events is None or router.take("a", events)
        assert held_by(router, "a") == held_in(scheduler)
        check_books(scheduler)

    scheduler.submit("text", prompt[:2], limit=9)
    for number in range(8):
        if computed and number == 6:
            scheduler.submit("prompt", prompt, limit=1)
        step = scheduler.admit(StepLimits(3)) or scheduler.plan(StepLimits(3))
        scheduler.begin(step)
        if not computed and number == 7:
            scheduler.submit("prompt", prompt, limit=1)
            scheduler.admit(StepLimits(3))
        scheduler.commit(step, [2 + number], [number == 7])
        compare()
    (running,) = scheduler.running
    assert sum(node.num_computed for node in running.leaf.path()) == 2 + computed
    assert (NO_NAMESPACE, tuple(range(9))) in held_in(scheduler)
    while scheduler.has_work:
        replica.step()
        compare()
