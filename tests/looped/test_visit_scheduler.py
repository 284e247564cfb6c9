"""Schedules of visits: whatever runs beside a request, it takes the route and gives the tokens that it gives alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from visit_books import check_visits
from visit_traces import FakeWorker, check_alone, run_step

from prefold.cache import CacheOptions, SlotPool
from prefold.errors import InputError
from prefold.looped import scheduler as scheduling
from prefold.looped.decode import Decoding
from prefold.looped.scheduler import VisitOptions, VisitScheduler
from prefold.looped.sequence import ExitRecord, LoopedSequence
from prefold.types import Exits, Share

ORDERS = [(0, 1, 0, 1), (0, 0, 0), (1, 0, 1), (0, 1, 2, 0)]


def some_visits(draw) -> VisitOptions:
    order = draw(st.sampled_from(ORDERS))
    return VisitOptions(
        order, max(order) + 1, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([False, False, True])),
        keys=draw(st.sampled_from(["last", "project"])), refill=draw(st.booleans()),
        group=draw(st.sampled_from(["block", "template"])), patience=draw(st.sampled_from([1, 4, 16])),
        step_visits=draw(st.sampled_from([1, 2, 3, 8])),
    )  # fmt: skip


def some_exits(draw, visits: VisitOptions) -> Exits:
    most = len(visits.order)
    route = draw(st.none() | st.lists(st.integers(0, visits.blocks - 1), min_size=1, max_size=most).map(tuple))
    fewest = draw(st.integers(1, most))
    return Exits(
        draw(st.sampled_from([None, 1.0, 0.2, 0.5])), fewest, draw(st.none() | st.integers(fewest, most)),
        prompts=draw(st.booleans()) and not (visits.routed and route is None), route=route,
    )  # fmt: skip


@st.composite
def traces(draw):
    """Options, the size of the store and of steps, and what is done: a request, some steps, or a request ends."""
    visits = some_visits(draw)
    rules = [some_exits(draw, visits) for _ in range(draw(st.integers(1, 3)))]
    doings = draw(st.lists(st.tuples(st.sampled_from("sssspc"), st.integers(0, 2**31)), min_size=2, max_size=14))
    cache = draw(st.sampled_from([None, CacheOptions(min_overlap=0), CacheOptions(min_overlap=2, max_tokens=12)]))
    slots = draw(st.sampled_from([90, 200, 1000]))
    return visits, rules, doings, cache, slots, draw(st.sampled_from([1, 3, 7, 64])), draw(st.booleans())


def run_trace(trace, on_end=check_alone) -> VisitScheduler:
    visits, rules, doings, cache, slots, rows, reserve = trace
    scheduler = VisitScheduler(SlotPool(slots), visits, max_batch_rows=rows, max_running=4, cache=cache)
    worker, asked, ended, failed = FakeWorker(visits.blocks), {}, {}, []
    for number, (what, seed) in enumerate(doings):
        rng = np.random.default_rng(seed)
        if what == "s":
            prompt = rng.integers(0, 2, rng.integers(1, 7)).astype(np.int32)
            exits, limit, samples = rules[rng.integers(len(rules))], int(rng.integers(1, 6)), int(rng.integers(1, 3))
            decided = ExitRecord()
            try:
                scheduler.submit(
                    number, prompt, limit=limit, samples=samples, reserve=reserve, exits=exits, exit_record=decided
                )
            except InputError:
                assert (len(prompt) + (limit - 1) * reserve) * (len(visits.order) + 2) > slots
                continue
            asked[number] = prompt, limit, samples, exits, decided
        elif what == "c" and asked:
            key = list(asked)[rng.integers(len(asked))]
            scheduler.cancel(key)
            if any((key, sample) not in ended for sample in range(asked[key][2])):
                del asked[key]
        else:
            for _ in range(int(rng.integers(1, 12))):
                run_step(scheduler, worker, ended, failed)
        check_visits(scheduler)
    steps = 0
    while scheduler.has_work:
        assert run_step(scheduler, worker, ended, failed) or not scheduler.has_work
        steps += 1
        assert steps < 5000, "the work does not end"
    lost = {key for key, _ in failed}
    for key, (prompt, limit, samples, exits, decided) in asked.items():
        if key in lost:
            continue
        effective = exits if exits.threshold is not None else replace(exits, threshold=1.0)
        for sample in range(samples):
            on_end(prompt.tolist(), sample, limit, effective, visits, ended[key, sample], decided)
    assert scheduler.pool.used_slots == (0 if cache is None else scheduler.cache.num_slots)
    return scheduler


@settings(max_examples=60)
@given(traces())
def test_traces(trace):
    run_trace(trace)


@pytest.mark.slow
@settings(max_examples=1000)
@given(traces())
def test_many_traces(trace):
    run_trace(trace)


def shared(
    visits: VisitOptions, rules: list[Exits], prompts: list[list[int]], limit: int = 3, **options
) -> VisitScheduler:
    """Runs these prompts, the i-th with the i-th rule; each must give what it gives alone."""
    scheduler = VisitScheduler(SlotPool(2000), visits, **{"max_batch_rows": 64, "max_running": 16} | options)
    worker, ended, decided = FakeWorker(visits.blocks), {}, [ExitRecord() for _ in rules]
    for number, (prompt, exits) in enumerate(zip(prompts, rules, strict=True)):
        scheduler.submit(number, np.array(prompt, np.int32), limit=limit, exits=exits, exit_record=decided[number])
    while scheduler.has_work:
        run_step(scheduler, worker, ended, [])
    for number, (prompt, exits) in enumerate(zip(prompts, rules, strict=True)):
        exits = exits if exits.threshold is not None else replace(exits, threshold=1.0)
        check_alone(prompt, 0, limit, exits, visits, ended[number, 0], decided[number])
    return scheduler


VISITS = VisitOptions((0, 1, 0), 2)
PROMPT = [1, 0, 1, 1, 0, 1]


def test_block_calls_are_the_distinct_rows_and_route_prefixes():
    routes = [(0, 1, 0), (0, 1, 1), (0, 1, 1), (1, 1, 0), (0,)]
    stats = shared(VISITS, [Exits(route=route) for route in routes], [PROMPT] * 5, limit=1).stats
    prefixes = {route[: t + 1] for route in routes for t in range(len(route))}
    assert stats.block_calls == len(PROMPT) * len(prefixes)


@pytest.mark.parametrize("exits", [Exits(), Exits(0.5, prompts=True), Exits(max_visits=2, prompts=True)])
@pytest.mark.parametrize("cache", [None, CacheOptions(min_overlap=0)])
def test_a_route_that_goes_on_from_the_end_of_another(exits, cache):
    """Where a route ends its rows have not left, unless they would have: longer routes go on from them."""
    routes = [(0,), (0, 1), (0, 1, 0), (0, 1, 1)]
    shared(VISITS, [replace(exits, route=route) for route in routes], [PROMPT] * 4, cache=cache)


def test_rows_that_left_are_counted_and_hold_nothing():
    whole = shared(VISITS, [Exits()], [PROMPT], limit=9).stats
    some = shared(VISITS, [Exits(max_visits=2)], [PROMPT], limit=9, slot_bytes=10).stats
    assert whole.block_calls == (len(PROMPT) + 8) * 3 and whole.block_calls_saved == 0
    assert (some.block_calls, some.block_calls_saved) == (len(PROMPT) * 3 + 8 * 2, 8)
    assert some.kv_bytes_freed == 80


# --------------------------------------------------------------------------- each part of the key is needed

WITHOUT = {
    "the seed's id": lambda self, unit: (len(self.route), unit),
    "one plane a block": lambda self, unit: (unit,),
    "the route alone": lambda self, unit: tuple(sorted((*self.route, unit))),
}


@pytest.mark.parametrize("key", WITHOUT)
def test_without_the_route_prefix_routes_collide(key, monkeypatch):
    """0, 1, 0 and 1, 1, 0 have other histories before their third visit, which the seed's id (2, 0) does not tell."""
    rules = [Exits(route=(0, 1, 0)), Exits(route=(1, 1, 0)), Exits(route=(1, 0, 0))]
    shared(VISITS, rules, [PROMPT] * 3)

    def go_on(self, unit):
        prefix = WITHOUT[key](self, unit)
        self.route.append(unit)
        self.prefixes.append(prefix)
        for node in self.nodes():
            node.visit(prefix).users += 1

    monkeypatch.setattr(LoopedSequence, "go_on", go_on)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        shared(VISITS, rules, [PROMPT] * 3)


@pytest.mark.parametrize(
    "rules",
    [
        [Exits(0.2, prompts=True), Exits(0.6, prompts=True)],
        [Exits(0.5, prompts=True), Exits(0.5)],
        [Exits(max_visits=1, prompts=True), Exits()],
        [Exits(0.9, 1, prompts=True), Exits(0.9, 3, prompts=True)],
    ],
)
def test_without_the_exit_rule_rows_of_other_rules_are_taken(rules, monkeypatch):
    shared(VISITS, rules, [PROMPT] * 2)
    monkeypatch.setattr(scheduling, "rule_of", lambda exits: ())
    with pytest.raises(AssertionError):
        shared(VISITS, rules, [PROMPT] * 2)


# ------------------------------------------------------------------------------------ who waits, and who goes first


def test_rows_of_other_visits_join_where_their_block_is_the_same():
    """With refill, a sequence that begins a row takes the place of one that left."""
    steps = {}
    for refill in (True, False):
        visits = VisitOptions((0, 0, 0, 0), 1, refill=refill)
        prompts = [[0, 1, number % 2] for number in range(6)]
        rules = [Exits(0.5)] * 6
        steps[refill] = shared(visits, rules, prompts, limit=12, max_batch_rows=6).stats.steps
    assert steps[True] < steps[False]


def test_nobody_waits_for_long():
    """Where many want one block, those who want another come to it after `patience` steps at most."""
    visits = VisitOptions((0, 0, 0, 0), 2, patience=3)
    scheduler = VisitScheduler(SlotPool(4000), visits, max_batch_rows=4, max_running=16)
    worker, longest = FakeWorker(2), 0
    for number in range(12):
        route = (1, 1, 1, 1) if number == 5 else None
        scheduler.submit(number, np.array([number % 3, 1], np.int32), limit=8, exits=Exits(route=route))
    while scheduler.has_work:
        run_step(scheduler, worker, {}, [])
        longest = max([longest, *(one.steps_waited for one in scheduler.running if one.key == 5)])
    assert longest <= 3 + 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("step_visits", [1, 3, 8])
@pytest.mark.parametrize("group", ["block", "template"])
def test_generation_goes_over_arrays(group, step_visits, monkeypatch):
    """Rows of sequences that generate are laid out at once; how many visits a step makes changes no block call."""
    visits = VisitOptions((0, 1, 0, 1, 0), 2, group=group, step_visits=step_visits)
    prompts = [[0, 1, number % 2, number % 3] for number in range(7)]
    rules = [Exits(0.3, 2), Exits(0.3, 2), Exits(), Exits(max_visits=3), Exits(0.6, 2, route=(1, 0, 1))]
    rules += [Exits(1.0, visits=(2, 3, 5, 2, 4, 5)), Exits(0.5)]
    lay_out, made = Decoding.lay_out, []

    def counted(self, draft, first):
        made.append(len(draft.members))
        return lay_out(self, draft, first)

    monkeypatch.setattr(Decoding, "lay_out", counted)
    several = shared(visits, rules, prompts, limit=7).stats
    assert len(made) > 20 // step_visits and max(made) > 1  # each is laid out twice
    single = shared(replace(visits, step_visits=1), rules, prompts, limit=7, max_batch_rows=3).stats
    for name in ("block_calls", "block_calls_saved", "kv_bytes_freed", "decode_rows"):
        assert getattr(several, name) == getattr(single, name), name


@pytest.mark.parametrize("step_visits", [1, 2])
def test_prompts_and_rows_that_are_generated_go_together(step_visits):
    """A step has rows of prompts beside those of sequences that generate, where both go to one block next."""
    visits = VisitOptions((0, 1, 0, 1), 2, step_visits=step_visits)
    scheduler = VisitScheduler(SlotPool(5000), visits, max_batch_rows=16, max_running=16)
    worker, ended, together, decided = FakeWorker(2), {}, 0, [ExitRecord() for _ in range(6)]
    prompts = [[number, *range(7)] for number in range(6)]
    for number, prompt in enumerate(prompts):
        tokens = np.array(prompt, np.int32)
        scheduler.submit(number, tokens, limit=20, exits=Exits(0.3, 2), exit_record=decided[number])
    while scheduler.has_work:
        scheduler.admit()
        step = scheduler.plan()
        together += bool(step is not None and step.takes and step.decode is not None and len(step.decode.members))
        run_step(scheduler, worker, ended, [])
    assert together
    for number, prompt in enumerate(prompts):
        check_alone(prompt, 0, 20, Exits(0.3, 2), visits, ended[number, 0], decided[number])


@pytest.mark.parametrize("refill", [True, False])
def test_rows_make_several_visits_in_a_step(refill):
    """A step ends where no more than half of the sequences would go on, and others can take the places of the rest;
    without refill it ends with the last row."""
    visits = VisitOptions((0,) * 6, 1, refill=refill, step_visits=6)
    prompts, limit = [[0, 1, number % 2] for number in range(6)], 13
    rules = [Exits(1.0, visits=(1 if number < 4 else 6,) * (limit - 1)) for number in range(6)]
    seen: set[tuple[int, ...]] = set()
    submit = VisitScheduler.commit

    class Watched(VisitScheduler):
        def commit(self, step, result, tokens, ended):
            done = submit(self, step, result, tokens, ended)
            if step.decode is not None:
                seen.add(tuple(sorted(one.visit for one in self.running)))
            return done

    scheduler = Watched(SlotPool(2000), visits, max_batch_rows=64, max_running=16)
    worker, ended, decided = FakeWorker(1), {}, [ExitRecord() for _ in rules]
    for number, (prompt, exits) in enumerate(zip(prompts, rules, strict=True)):
        scheduler.submit(number, np.array(prompt, np.int32), limit=limit, exits=exits, exit_record=decided[number])
    while scheduler.has_work:
        run_step(scheduler, worker, ended, [])
    for number, (prompt, exits) in enumerate(zip(prompts, rules, strict=True)):
        check_alone(prompt, 0, limit, exits, visits, ended[number, 0], decided[number])
    between = {one for one in seen if any(one)}
    assert ((0, 0, 0, 0, 1, 1) in between) if refill else not between


@pytest.mark.parametrize("mode", ["prompt", "cancel"])
def test_a_step_that_is_not_run_keeps_nothing(mode):
    """Slots for visits that rows perhaps do not make are given back where another step is run in its place."""
    visits = VisitOptions((0, 1, 0, 1), 2, step_visits=8)
    scheduler = VisitScheduler(SlotPool(2000), visits, max_batch_rows=64, max_running=8)
    worker, ended, decided = FakeWorker(2), {}, [ExitRecord() for _ in range(4)]
    for number in range(3):
        prompt = np.array([number % 2, 1, 0], np.int32)
        scheduler.submit(number, prompt, limit=9, exits=Exits(0.5, 2), exit_record=decided[number])
    scheduler.admit()
    while (step := scheduler.plan()).message.rounds is None:
        run_step(scheduler, worker, ended, [])
        scheduler.admit()
    used = scheduler.pool.used_slots
    assert len(step.message.rounds.blocks) > 1
    if mode == "cancel":
        scheduler.cancel(2)
        check_visits(scheduler)
        assert scheduler.pool.used_slots < used
    else:
        scheduler.submit(3, np.array([1, 1], np.int32), limit=9, exits=Exits(0.5, 2), exit_record=decided[3])
    while scheduler.has_work:
        run_step(scheduler, worker, ended, [])
    for number in range(2 if mode == "cancel" else 4):
        prompt = [1, 1] if number == 3 else [number % 2, 1, 0]
        check_alone(prompt, 0, 9, Exits(0.5, 2), visits, ended[number, 0], decided[number])


def test_tails_grow():
    """Long outputs, and more sequences than there were places."""
    visits = VisitOptions((0, 1, 0), 2)
    prompts = [[number % 2, number % 3, 1] for number in range(20)]
    shared(visits, [Exits(0.5, 2)] * 20, prompts, limit=20, max_batch_rows=32, max_running=20)


def test_steps_that_become_smaller():
    """Where a step may have fewer rows than sequences run, those who waited longest have them."""
    scheduler = VisitScheduler(SlotPool(2000), VISITS, max_batch_rows=64, max_running=8)
    worker, ended, decided = FakeWorker(2), {}, [ExitRecord() for _ in range(8)]
    for number in range(8):
        prompt = np.array([number % 2, 1, number % 3], np.int32)
        scheduler.submit(number, prompt, limit=9, exits=Exits(0.4, 2), exit_record=decided[number])
    longest = 0
    while len(ended) < 8:
        scheduler.max_batch_rows = 3 if all(one.ready for one in scheduler.running) else 64
        run_step(scheduler, worker, ended, [])
        longest = max([longest, *(one.steps_waited for one in scheduler.running)])
    assert longest <= 8
    for number in range(8):
        check_alone([number % 2, 1, number % 3], 0, 9, Exits(0.4, 2), VISITS, ended[number, 0], decided[number])


def test_what_was_decided_is_taken_again():
    """A request that comes back with its tokens takes the same route and leaves after the same visits."""
    visits = VisitOptions((0, 1, 0, 1), 2, routed=True)
    scheduler = VisitScheduler(SlotPool(500), visits, max_batch_rows=16, max_running=4)
    worker, ended, decided, prompt = FakeWorker(2), {}, ExitRecord(), np.array(PROMPT, np.int32)
    scheduler.submit("a", prompt, limit=6, exits=Exits(0.4), exit_record=decided)
    while scheduler.has_work and len(decided.tails.get(0, ())) < 3:
        run_step(scheduler, worker, ended, [])
    (sequence,) = scheduler.running
    made, route, tails = list(sequence.tokens), decided.route, list(decided.tails[0])
    scheduler.clear()
    scheduler.submit("a", prompt, limit=6, exits=Exits(0.4), exit_record=decided, outputs={0: made})
    while scheduler.has_work:
        run_step(scheduler, worker, ended, [])
    assert decided.route == route and decided.tails[0][: len(tails)] == tails
    check_alone(PROMPT, 0, 6, Exits(0.4), visits, ended["a", 0], decided)


def test_a_request_that_can_never_run():
    scheduler = VisitScheduler(SlotPool(20), VISITS, max_batch_rows=16, max_running=4)
    with pytest.raises(InputError, match=r"7 rows at 3 visits, 21 slots, the KV store holds 20"):
        scheduler.submit(0, np.zeros(7, np.int32), limit=1)


def test_what_runs_counts_for_its_tenant():
    """Slots that rows of running sequences hold are part of what a tenant has when rows are evicted."""
    scheduler = VisitScheduler(
        SlotPool(500), VISITS, max_batch_rows=64, max_running=4, cache=CacheOptions(min_overlap=0)
    )
    scheduler.cache.set_tenants(lambda namespace: namespace[0], lambda tenant: Share())
    worker = FakeWorker(2)

    def use(key, tenant, rows, limit):
        tokens = np.arange(rows, dtype=np.int32) + 100 * key
        scheduler.submit(key, tokens, limit=limit, namespace=(tenant, ""), exits=Exits(0.3))

    use(0, "small", 12, 1)
    use(1, "runs", 3, 1)
    while scheduler.has_work:
        run_step(scheduler, worker, {}, [])
    assert scheduler.cache.accounts.next(0.0).tenant == "small"
    use(2, "runs", 8, 30)
    for _ in range(30):
        run_step(scheduler, worker, {}, [])
    small, runs = (scheduler.cache.accounts.of(tenant) for tenant in ("small", "runs"))
    assert runs.rows < small.rows and runs.num_slots > small.num_slots == 12 * 3
    assert scheduler.cache.accounts.next(0.0) is runs
