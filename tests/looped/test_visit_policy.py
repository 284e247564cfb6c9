"""Interactive requests and batches in schedules of visits, and what they find kept."""

from __future__ import annotations

import numpy as np
import pytest
from visit_books import check_visits
from visit_traces import FakeWorker, check_alone, run_step

from prefold.cache import CacheOptions, CacheReporter, SlotPool
from prefold.looped.cache import VisitNode
from prefold.looped.scheduler import VisitOptions, VisitScheduler
from prefold.looped.sequence import ExitRecord
from prefold.schedule.admission import StepLimits
from prefold.schedule.fair import FairAdmission
from prefold.types import Exits, Owner

VISITS = VisitOptions((0, 1, 0), 2)
PROMPT = [1, 0, 1, 1, 0, 1]


def fair(decided: dict, **options) -> VisitScheduler:
    """Two sequences of a batch run, an interactive one waits."""
    scheduler = VisitScheduler(SlotPool(400), VISITS, **{"max_batch_rows": 64, "max_running": 8} | options)
    scheduler.admit_by(FairAdmission())
    prompt = np.array(PROMPT, np.int32)
    for key in ("batch", "other"):
        decided[key] = ExitRecord()
        scheduler.submit(key, prompt, limit=6, owner=Owner(is_batch=True), exit_record=decided[key])
        scheduler.admit()
    decided["live"] = ExitRecord()
    scheduler.submit("live", prompt[::-1].copy(), limit=6, exit_record=decided["live"])
    return scheduler


def rows_of(step) -> list[tuple]:
    """Whose rows a step has, and how many."""
    found = [(take.sequence.key, take.rows) for _, take, _ in step.takes]
    if (decode := step.decode) is not None:
        found += [(decode.batch.sequences[number].key, 1) for number in decode.members.tolist()]
    return found


def keys_of(step) -> set:
    return {key for key, _ in rows_of(step)}


@pytest.mark.parametrize("batch_rows", [0, 1])
@pytest.mark.parametrize("after", [0, 12])
def test_rows_of_batches_are_bounded(batch_rows, after):
    """While batches may have few rows, steps are those of the interactive request; then they go on with all."""
    decided: dict = {}
    scheduler, worker, ended = fair(decided), FakeWorker(2), {}
    for _ in range(after):
        run_step(scheduler, worker, ended, [])
    while ("live", 0) not in ended:
        scheduler.admit(StepLimits(batch_rows=batch_rows))
        step = scheduler.plan()
        keys = keys_of(step)
        assert "live" in keys and len(keys) <= 1 + batch_rows
        assert sum(rows for key, rows in rows_of(step) if key != "live") <= batch_rows
        scheduler.begin(step)
        result, tokens = worker.run(step)
        for done in scheduler.commit(step, tokens, [False] * len(tokens), result):
            ended[done.key, done.sample] = list(done.tokens)
    while scheduler.has_work:
        run_step(scheduler, worker, ended, [])
    for key, prompt in (("batch", PROMPT), ("other", PROMPT), ("live", PROMPT[::-1])):
        check_alone(prompt, 0, 6, Exits(1.0), VISITS, ended[key, 0], decided[key])


def test_batches_that_may_have_no_rows_stay_as_they_are():
    """Where the policy gives rows to nobody who runs, nobody is preempted, and nobody is told that memory is short."""
    decided: dict = {}
    scheduler, worker, ended, failed = fair(decided), FakeWorker(2), {}, []
    while ("live", 0) not in ended:
        run_step(scheduler, worker, ended, failed, StepLimits(batch_rows=0))
    assert not run_step(scheduler, worker, ended, failed, StepLimits(batch_rows=0))
    assert {sequence.key for sequence in scheduler.running} == {"batch", "other"}
    assert not failed and not scheduler.stats.preemptions
    while scheduler.has_work:
        run_step(scheduler, worker, ended, failed)
    for key in ("batch", "other"):
        check_alone(PROMPT, 0, 6, Exits(1.0), VISITS, ended[key, 0], decided[key])


def test_a_batch_makes_way():
    """Where as many run as may, one of a batch gives up its place to an interactive request."""
    scheduler = fair({}, max_running=3)
    scheduler.submit("more", np.array([1, 1], np.int32), limit=6)
    scheduler.admit()
    assert {sequence.key for sequence in scheduler.running} == {"batch", "live", "more"}
    assert scheduler.stats.preemptions == 1
    check_visits(scheduler)


def cached(slots: int, **settings) -> VisitScheduler:
    options = {"max_batch_rows": 64, "max_running": 8, "cache": CacheOptions(min_overlap=0)} | settings
    return VisitScheduler(SlotPool(slots), VISITS, **options)


def run_to_end(scheduler: VisitScheduler, worker: FakeWorker, failed: list | None = None) -> dict:
    ended: dict = {}
    while scheduler.has_work:
        assert run_step(scheduler, worker, ended, [] if failed is None else failed) or not scheduler.has_work
    return ended


def test_a_step_does_not_look_at_what_is_kept(monkeypatch):
    scheduler, worker = cached(300), FakeWorker(2)
    for number in range(8):
        scheduler.submit(number, np.array([number, 1, 2, 3], np.int32), limit=3)
    run_to_end(scheduler, worker)
    kept = sum(node.num_slots for node in scheduler.tree.nodes())
    assert scheduler.pool.used_slots == scheduler.cache.num_slots == kept > 0
    scheduler.submit("next", np.array([9, 1], np.int32), limit=2)
    scheduler.admit()
    with monkeypatch.context() as patched:
        patched.setattr(VisitNode, "num_slots", property(lambda node: pytest.fail("nodes are looked at")))
        scheduler.begin(scheduler.plan())


def test_who_waits_for_room_does_not_empty_the_cache():
    scheduler, worker, ended = cached(200), FakeWorker(2), {}
    for number in range(4):
        scheduler.submit(("kept", number), np.array([number, 1, 2, 3], np.int32), limit=2)
    run_to_end(scheduler, worker)
    kept = scheduler.cache.num_slots
    scheduler.submit("long", np.array([7, 1], np.int32), limit=40)
    run_step(scheduler, worker, ended, [])
    scheduler.submit("big", np.array([8, 1], np.int32), limit=40)
    for _ in range(20):
        run_step(scheduler, worker, ended, [])
    assert scheduler.num_waiting == 1 and scheduler.cache.num_slots == kept
    ended |= run_to_end(scheduler, worker)
    assert set(ended) == {("long", 0), ("big", 0)}


@pytest.mark.parametrize("order", [("runs", "other"), ("other", "runs")])
def test_visits_of_a_route_that_nobody_takes_any_more_make_room(order):
    """A prompt that is in use has rows of another route, from before or since. They go before the one that runs is told
    that memory is too small."""
    scheduler, worker, ended, failed = cached(100), FakeWorker(2), {}, []
    reporter = CacheReporter(scheduler.tree)
    prompt, decided = np.array([0, 1, 2] * 4, np.int32), {"runs": ExitRecord(), "other": ExitRecord()}
    rules = {"runs": Exits(1.0, route=(0, 1, 0)), "other": Exits(1.0, route=(1, 1, 0))}
    limits = {"runs": 20, "other": 1}
    for key in order:
        scheduler.submit(key, prompt, limit=limits[key], reserve=False, exits=rules[key], exit_record=decided[key])
        while key == "other" and (key, 0) not in ended:
            run_step(scheduler, worker, ended, failed)
        run_step(scheduler, worker, ended, failed)
    ended |= run_to_end(scheduler, worker, failed)
    assert not failed
    for key, rule in rules.items():
        check_alone(prompt.tolist(), 0, limits[key], rule, VISITS, ended[key, 0], decided[key])
    assert reporter.drain() is not None
