"""Who is admitted next: classes, tenants' shares, quotas, ageing, on traces of many kinds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from books import check_books
from counts import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import expected, prompts_of, run_to_end

from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.schedule.admission import InOrder, StepLimits
from prefold.engine.schedule.fair import MAX_PASSED, RESERVED_SHARE, FairAdmission
from prefold.engine.schedule.fair import _OwnerQueue as queue_type
from prefold.engine.schedule.scheduler import Scheduler
from prefold.spec.requests import Owner, Share


class CheckedAdmission(FairAdmission):
    """A FairAdmission whose sums over running outputs, which are kept from one admission to the next, are checked."""

    def _tag(self, queue):
        tag = super()._tag(queue)
        assert tag == queue.tag
        return tag


def fair_scheduler(slots=200, rows=64, running=16, share_of=lambda tenant: Share(), batch_share=0.02, **options):
    scheduler = Scheduler(SlotPool(slots), max_batch_rows=rows, max_running=running, **options)
    scheduler.admit_by(CheckedAdmission(share_of, batch_share=batch_share))
    return scheduler


def prompt(*tokens):
    return np.array(tokens, np.int32)


def one_step(scheduler, **limits):
    """Makes a step; returns the keys of the requests that ended."""
    limits = StepLimits(**limits)
    assert not scheduler.admit(limits)
    check_books(scheduler)
    step = scheduler.plan(limits)
    if step is None:
        return []
    scheduler.begin(step)
    return [done.key for done in scheduler.commit(step, [1] * len(step.consumers), [False] * len(step.consumers))]


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 20),
    slots=st.integers(26, 120),
    rows=st.integers(2, 40),
    running=st.integers(1, 9),
    reserve=st.booleans(),
    cached=st.sampled_from([None, "lru"]),
    tenants=st.integers(1, 4),
    batches=st.sampled_from([0.0, 0.5, 1.0]),
    quota=st.sampled_from([None, 1, 3]),
    batch_rows=st.sampled_from([None, 1, 5]),
    share_ahead=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_everybody_ends_with_what_they_make_alone(
    seed, count, slots, rows, running, reserve, cached, tenants, batches, quota, batch_rows, share_ahead
):
    rng = np.random.default_rng(seed)
    shares = {tenant: Share(float(rng.integers(1, 4)), quota) for tenant in range(tenants)}
    cache = cached and CacheOptions(policy=cached, min_overlap=0)
    scheduler = fair_scheduler(
        slots, rows, running, shares.__getitem__, float(rng.choice([0.0, 0.02, 0.5])), cache=cache
    )
    left, asked, cancelled = list(enumerate(prompts_of(rng, count))), {}, set()

    def stop_at(path, sample):
        return len(path) > 4 and (sum(path) + sample) % 3 == 0

    def arrive(step=None):
        for _ in range(int(rng.integers(0, 4))):
            if left:
                key, tokens = left.pop(0)
                samples, limit = int(rng.integers(1, 3)), int(rng.integers(1, 12))
                owner = Owner(int(rng.integers(tenants)), bool(rng.random() < batches))
                scheduler.submit(
                    key, tokens, samples=samples, limit=limit, reserve=reserve, namespace=(owner.tenant,), owner=owner
                )
                asked[key] = (tokens, samples, limit)
        if asked and rng.random() < 0.1:
            key = int(rng.choice(list(asked)))
            scheduler.cancel(key)
            cancelled.add(key)
        if rng.random() < 0.05:
            shares[0] = Share(float(rng.integers(1, 4)), quota)
            scheduler.waiting.read_shares()
        if rng.random() < 0.05:  # and back, with all that wait and run
            scheduler.admit_by(InOrder())
            fair = CheckedAdmission(shares.__getitem__)
            scheduler.admit_by(fair)
            scheduler.admit_by(fair)  # which changes nothing
        for tenant, share in shares.items():
            mine = [one for one in scheduler.running if one.owner == Owner(tenant)]
            assert share.max_running is None or len(mine) <= share.max_running or quota != share.max_running

    ended, options = {}, {"ahead": lambda: rng.random() < share_ahead, "limits": StepLimits(batch_rows=batch_rows)}
    while left:
        arrive()
        ended |= run_to_end(scheduler, stop_at, arrive, **options)
    ended |= run_to_end(scheduler, stop_at, **options)
    assert not scheduler.has_work and not len(scheduler.waiting)
    for key, (tokens, samples, limit) in asked.items():
        for sample in range(samples):
            if key not in cancelled:
                assert ended.pop((key, sample)) == expected(tokens, sample, limit, stop_at)
    assert {key for key, _ in ended} <= cancelled
    assert scheduler.pool.used_slots == (scheduler.cache.rows if scheduler.cache else 0)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    weights=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    limit=st.sampled_from([1, 6]),
)
def test_shares_hold(seed, weights, limit):
    """Tenants that always have something waiting get rows by their weights, whatever the sizes of their requests."""
    rng = np.random.default_rng(seed)
    scheduler = fair_scheduler(4000, 64, 8, lambda tenant: Share(float(weights[tenant])))
    sizes = [int(rng.integers(2, 30)) for _ in weights]
    rows, number, largest = Counter(), 0, max(sizes) + limit
    for _ in range(150):
        for tenant, size in enumerate(sizes):
            while sum(one.owner.tenant == tenant for one in scheduler.waiting) < 10:
                number += 1
                tokens = prompt(number, *rng.integers(0, 9, size - 1))
                owner = Owner(tenant)
                scheduler.submit((tenant, number), tokens, limit=limit, namespace=(tenant,), owner=owner)
        for tenant, _ in one_step(scheduler):
            rows[tenant] += sizes[tenant] + limit
    # Each is at most what runs at once, and one request more, from its part.
    total = sum(rows.values())
    for tenant, weight in enumerate(weights):
        part = total * weight / sum(weights)
        assert abs(rows[tenant] - part) <= 2 * scheduler.max_running * largest


def test_one_who_comes_to_a_flood_is_next():
    scheduler = fair_scheduler(4000, 32, 4)
    for number in range(500):
        scheduler.submit(("flood", number), prompt(1, number // 256, number % 256), limit=4, owner=Owner("a"))
    for _ in range(40):
        one_step(scheduler)
    scheduler.submit(("few", 0), prompt(2, 2, 2), limit=4, owner=Owner("b"))
    steps = 0
    while ("few", 0) not in one_step(scheduler):
        steps += 1
    assert steps <= 2 * 4  # who runs ends, and then it is admitted before all others


def test_what_was_not_used_gives_no_claim():
    """One who was away for long does not keep the others waiting when it is back."""
    scheduler = fair_scheduler(4000, 32, 4)
    for tenant in "ab":
        scheduler.submit((tenant, -1), prompt(1), limit=1, owner=Owner(tenant))
    for number in range(300):
        scheduler.submit(("b", number), prompt(1, number // 256, number % 256), limit=1, owner=Owner("b"))
        one_step(scheduler)
    for tenant in "ab":
        for number in range(1000, 1040):
            scheduler.submit((tenant, number), prompt(3, number // 256, number % 256), limit=1, owner=Owner(tenant))
    ended = [tenant for _ in range(10) for tenant, _ in one_step(scheduler)]
    assert 0.4 < ended.count("a") / len(ended) < 0.6


def test_outputs_count_while_they_are_made():
    scheduler = fair_scheduler(4000, 32, 2)
    scheduler.submit(("a", "long"), prompt(1, 1), limit=300, owner=Owner("a"))
    for _ in range(60):
        one_step(scheduler)
    scheduler.submit(("a", "short"), prompt(1, 2), limit=1, owner=Owner("a"))
    for number in range(90):
        scheduler.submit(("b", number), prompt(2, number), limit=1, owner=Owner("b"))
    ended = []
    while ("a", "short") not in ended:
        ended += one_step(scheduler)
    assert 40 < len(ended) < 80  # of 2 rows each, while "a" had 60 and gets another one with each of them


def test_interactive_requests_go_before_batches_and_batches_get_their_part():
    scheduler = fair_scheduler(4000, 64, 8, batch_share=0.1)
    rows, number = Counter(), 0
    for _ in range(600):
        for is_batch in (False, True):
            while scheduler.waiting.num_waiting(batch=is_batch) < 20:
                number += 1
                owner = Owner("a", is_batch)
                scheduler.submit((is_batch, number), prompt(number // 256, number % 256, 1, 1), limit=1, owner=owner)
        for is_batch, _ in one_step(scheduler):
            rows[is_batch] += 4
    assert 0.05 < rows[True] / rows[False] < 0.15


def test_a_batch_leaves_room_and_gives_way():
    scheduler = fair_scheduler(1000, 64, 8)
    for number in range(20):
        scheduler.submit(("batch", number), prompt(1, number), limit=30, owner=Owner("a", True))
    one_step(scheduler)
    assert len(scheduler.running) == (1 - RESERVED_SHARE) * 8
    for number in range(6):
        scheduler.submit(("live", number), prompt(2, number), limit=3, owner=Owner("b"))
    one_step(scheduler)
    assert Counter(one.key[0] for one in scheduler.running) == {"live": 6, "batch": 2}
    assert scheduler.stats.preemptions == 4
    ended = [key for _ in range(200) for key in one_step(scheduler)]
    assert len(ended) == 26 and [kind for kind, _ in ended[:6]] == ["live"] * 6


def test_a_batch_borrows_the_sequences_that_are_left_to_others_and_gives_them_back():
    scheduler = fair_scheduler(1000, 64, 8)
    for number in range(20):
        scheduler.submit(("batch", number), prompt(1, number), limit=30, owner=Owner("a", True))
    one_step(scheduler, lends=True)
    assert len(scheduler.running) == 8
    scheduler.submit(("live", 0), prompt(2, 0), limit=3, owner=Owner("b"))
    one_step(scheduler)
    assert Counter(one.key[0] for one in scheduler.running) == {"live": 1, "batch": 7}
    ended = [key for _ in range(200) for key in one_step(scheduler)]
    assert len(ended) == 21 and ended[0] == ("live", 0)
    check_books(scheduler)


def test_rows_of_batches_may_be_few_or_none():
    scheduler = fair_scheduler(1000, 64, 16)
    for number in range(6):
        scheduler.submit(("batch", number), prompt(1, number), limit=30, owner=Owner("a", True))
    scheduler.submit(("live", 0), prompt(2, 2), limit=30, owner=Owner("b"))
    one_step(scheduler)
    made = lambda: sorted(len(one.tail.tokens) for one in scheduler.running if one.owner.is_batch)  # noqa: E731
    for _ in range(3):
        one_step(scheduler, batch_rows=2)
    assert made() == [2] * 6  # they take turns
    one_step(scheduler, batch_rows=0)
    assert made() == [2] * 6 and max(len(one.tail.tokens) for one in scheduler.running) == 5
    scheduler.cancel(("live", 0))
    scheduler.admit()
    assert scheduler.plan(StepLimits(batch_rows=0)) is None  # nobody may have rows
    assert scheduler.plan().num_rows == 6


def test_who_has_fewer_rows_to_compute_is_preferred_but_not_for_ever():
    scheduler = fair_scheduler(4000, 64, 2)
    shared = range(20)
    scheduler.submit("first", prompt(*shared, 0), limit=8, owner=Owner("a"))
    one_step(scheduler)
    scheduler.submit("other", prompt(50, *shared), limit=1, owner=Owner("a"))
    for number in range(3 * MAX_PASSED):
        scheduler.submit(number, prompt(*shared, 1 + number), limit=1, owner=Owner("a"))
    order = []
    while "other" not in order:
        order += one_step(scheduler)
    order.remove("other")
    assert len([key for key in order if key != "first"]) == MAX_PASSED


@pytest.mark.parametrize("tenants", [1, 1000])
def test_many_who_wait_cost_little(tenants):
    def drive(policy):
        scheduler = Scheduler(SlotPool(20_000), max_batch_rows=256, max_running=256)
        scheduler.admit_by(policy)
        for number in range(1000):
            tokens = prompt(number // 256, number % 256)
            scheduler.submit(number, tokens, limit=1, owner=Owner(number % tenants))
        while scheduler.has_work:
            scheduler.admit()
            step = scheduler.plan()
            scheduler.begin(step)
            scheduler.commit(step, [0] * len(step.consumers), [False] * len(step.consumers))

    assert lines_run(lambda: drive(FairAdmission())) < 2 * lines_run(lambda: drive(InOrder()))


def test_rows_of_outputs_are_added_up_once_however_many_are_admitted(monkeypatch):
    sums, count = [], queue_type.num_output_rows.fget
    monkeypatch.setattr(queue_type, "num_output_rows", property(lambda queue: sums.append(queue) or count(queue)))
    scheduler = Scheduler(SlotPool(2000), max_batch_rows=1000, max_running=300)
    scheduler.admit_by(FairAdmission())
    for number in range(300):
        scheduler.submit(number, prompt(number, 1), limit=4)
    sums.clear()
    scheduler.admit()
    assert len(scheduler.running) == 300 and len(sums) == 1
