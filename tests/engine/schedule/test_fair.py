"""What the fair policy does in single cases, each of which one line of it decides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from books import check_books

from prefold.engine.cache import SlotPool
from prefold.engine.schedule import fair
from prefold.engine.schedule.admission import NO_LIMITS, StepLimits
from prefold.engine.schedule.fair import FairAdmission
from prefold.engine.schedule.scheduler import Scheduler
from prefold.spec.requests import Owner, Share

LIVE, BATCH = Owner("a"), Owner("b", True)


def scheduler_of(slots=4000, rows=64, running=8, share_of=lambda tenant: Share(), **options):
    scheduler = Scheduler(SlotPool(slots), max_batch_rows=rows, max_running=running)
    scheduler.admit_by(FairAdmission(share_of, **options))
    return scheduler


def submit(scheduler, key, rows=2, limit=1, owner=LIVE, **options):
    """Submits a prompt that shares nothing with others."""
    first = submit.number = getattr(submit, "number", 0) + 1
    tokens = np.array([first % 1000, first // 1000, *range(rows - 2)], np.int32)
    scheduler.submit(key, tokens, limit=limit, namespace=(first,), owner=owner, **options)


def one_step(scheduler, **limits):
    """Makes a step; returns (rows of live requests, rows of batches) of it, and the keys that ended."""
    limits = StepLimits(**limits)
    assert not scheduler.admit(limits)
    check_books(scheduler)
    step = scheduler.plan(limits)
    if step is None:
        return (0, 0), []
    batch = {node for one in scheduler.running if one.owner.is_batch for node in (*one.leaf.path(), one.tail)}
    rows = sum(count for node, count in step.computed_rows if node in batch)
    scheduler.begin(step)
    ended = scheduler.commit(step, [1] * len(step.consumers), [False] * len(step.consumers))
    return (step.num_rows - rows, rows), [one.key for one in ended]


def run(scheduler, steps, **limits):
    return [key for _ in range(steps) for key in one_step(scheduler, **limits)[1]]


def test_a_weight_counts_for_rows_of_prompts():
    scheduler = scheduler_of(running=1, share_of=lambda tenant: Share(3.0 if tenant == "much" else 1.0))
    for number in range(40):
        for tenant in ("much", "little"):
            submit(scheduler, (tenant, number), rows=20, owner=Owner(tenant))
    ended = Counter(tenant for tenant, _ in run(scheduler, 40))
    assert 28 <= ended["much"] <= 32 and ended.total() == 40


def test_a_quota_of_sequences_holds_and_all_end():
    shares = {"a": Share(max_running=2), "c": Share()}
    scheduler = scheduler_of(share_of=shares.__getitem__)
    for number in range(6):
        submit(scheduler, number, limit=5)
    ended, most = [], 0
    for _ in range(30):
        ended += one_step(scheduler)[1]
        most = max(most, len(scheduler.running))
    assert ended == list(range(6)) and most == 2
    for number in range(6):
        submit(scheduler, number, limit=5)
    shares["a"] = Share(max_running=4)
    scheduler.waiting.read_shares()
    one_step(scheduler)
    assert len(scheduler.running) == 4


def test_shares_are_told_to_the_cache():
    told = []

    class Cache:
        def set_tenants(self, *functions):
            told.append(functions)

    policy = FairAdmission(tenant_of=len)
    policy.read_shares(Cache())
    assert told == [(policy.tenant_of, policy.share_of)]


def test_a_batch_is_admitted_before_others_for_its_share_only():
    scheduler = scheduler_of(running=1, batch_share=0.25)
    for number in range(200):
        submit(scheduler, ("live", number), rows=4)
        submit(scheduler, ("batch", number), rows=4, owner=BATCH)
    ended = Counter(kind for kind, _ in run(scheduler, 100))
    assert 17 <= ended["batch"] <= 22  # a quarter of what the others get


def test_a_batch_that_had_the_engine_alone_has_no_claim_of_before():
    scheduler = scheduler_of(running=1)
    scheduler.waiting._credit = 100.0  # of a time in which it had no room
    for number in range(3):
        submit(scheduler, ("batch", number), owner=BATCH)
    assert len(run(scheduler, 1)) == 1
    submit(scheduler, ("live", 0))
    assert run(scheduler, 1) == [("live", 0)]


@pytest.mark.parametrize("reserve", [True, False])
def test_a_batch_leaves_slots_to_interactive_requests(reserve):
    scheduler = scheduler_of(slots=100, rows=100, running=64)
    for number in range(20):
        submit(scheduler, number, rows=10, limit=10, owner=BATCH, reserve=reserve)
    one_step(scheduler)
    # Of 10 rows each, and 10 that are set aside.
    assert len(scheduler.running) == 3 if reserve else 3 < len(scheduler.running) < 8
    submit(scheduler, "live", rows=20)
    assert "live" in one_step(scheduler)[1]


def test_where_memory_runs_out_the_last_of_a_batch_gives_up_its_rows():
    scheduler = scheduler_of()
    for number in range(2):
        submit(scheduler, ("batch", number), limit=30, owner=BATCH)
    one_step(scheduler)
    for number in range(2):
        submit(scheduler, ("live", number), limit=30)
    one_step(scheduler)
    policy, running = scheduler.waiting, list(scheduler.running)
    victims = []
    while running:
        victims.append(policy.victim(running).key)
        running = [one for one in running if one.key != victims[-1]]
    assert victims == [("batch", 1), ("batch", 0), ("live", 1), ("live", 0)]


def test_rows_of_a_batch_come_first_where_they_are_due_and_the_others_fill_the_step():
    scheduler = scheduler_of(rows=8)
    for number in range(4):
        submit(scheduler, number, limit=50, owner=BATCH)
    one_step(scheduler)
    submit(scheduler, "live", rows=100, limit=2)
    assert one_step(scheduler, batch_rows=3)[0] == (8, 0)
    assert one_step(scheduler, batch_rows=3, batch_first=True)[0] == (5, 3)
    assert one_step(scheduler, batch_rows=3)[0] == (8, 0)


def test_one_that_gave_way_is_next_of_its_owner(monkeypatch):
    monkeypatch.setattr(fair, "_rows_missing", lambda sequence: sequence.leaf.stop)  # as where its rows are gone
    scheduler = scheduler_of(running=4, rows=256)
    for number in range(3):
        submit(scheduler, number, rows=30, limit=9, owner=BATCH)
    one_step(scheduler)
    submit(scheduler, "later, and shorter", rows=2, limit=9, owner=BATCH)
    for number in range(2):
        submit(scheduler, ("live", number), limit=3)
    ended = run(scheduler, 60)
    assert scheduler.stats.preemptions == 1
    assert ended.index(2) < ended.index("later, and shorter")


def test_who_was_given_much_is_not_forgotten_while_others_come():
    scheduler = scheduler_of(running=1, idle_queues=2)
    submit(scheduler, "much", rows=60, limit=100, owner=Owner("much"))
    run(scheduler, 101)
    for number in range(8):
        submit(scheduler, number, owner=Owner(number))
    run(scheduler, 8)
    submit(scheduler, "again", owner=Owner("much"))
    for number in range(10):
        submit(scheduler, ("few", number), owner=Owner("few"))
    assert run(scheduler, 11)[-1] == "again"


def test_rows_of_prompts_are_divided_between_tenants_by_their_weights():
    """A long prompt that came first does not take the whole step."""
    scheduler = scheduler_of(rows=40, share_of=lambda tenant: Share(3.0 if tenant == "much" else 1.0))
    submit(scheduler, "first", rows=400, owner=Owner("little"))
    submit(scheduler, "second", rows=390, owner=Owner("much"))
    computed = Counter()
    for _ in range(4):
        assert not scheduler.admit(NO_LIMITS)
        step = scheduler.plan(NO_LIMITS)
        for one in scheduler.running:
            nodes = {*one.leaf.path(), one.tail}
            computed[one.key] += sum(count for node, count in step.computed_rows if node in nodes)
        scheduler.begin(step)
        scheduler.commit(step, [1] * len(step.consumers), [False] * len(step.consumers))
    assert computed == {"first": 40, "second": 120}


def test_rows_of_batches_do_not_keep_an_interactive_request_waiting():
    scheduler = scheduler_of(rows=20, running=16)
    for number in range(4):
        submit(scheduler, number, rows=60, limit=2, owner=BATCH)
    one_step(scheduler)
    assert sum(one.owner.is_batch for one in scheduler.running) >= 1
    submit(scheduler, "live", rows=10)
    assert "live" in one_step(scheduler)[1]


def test_rows_may_be_given_in_any_order_where_classes_do_not_matter():
    scheduler = scheduler_of()
    policy = scheduler.waiting
    submit(scheduler, "batch", limit=30, owner=BATCH)
    one_step(scheduler)
    assert policy.are_alike(NO_LIMITS)
    assert not policy.are_alike(StepLimits(batch_rows=2))
    submit(scheduler, "live", limit=30)
    one_step(scheduler)
    assert not policy.are_alike(NO_LIMITS)
    scheduler.cancel("batch")
    scheduler.admit()
    assert policy.are_alike(NO_LIMITS)
