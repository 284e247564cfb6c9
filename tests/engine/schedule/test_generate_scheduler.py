"""The generation scheduler on random traces: every request ends once, with what it would have made alone."""

from __future__ import annotations

import numpy as np
import pytest
from books import check_books
from counts import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import expected, prompts_of, run_to_end

from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.schedule.admission import StepLimits
from prefold.engine.schedule.scheduler import Scheduler
from prefold.errors import InputError


def scheduler_of(slots=200, rows=64, running=16, **options):
    return Scheduler(SlotPool(slots), max_batch_rows=rows, max_running=running, **options)


def stop_of(modulus):
    """Ends a sequence at a place that its path decides."""
    return lambda path, sample: len(path) > 4 and (sum(path) + sample) % modulus == 0


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 14),
    slots=st.integers(26, 120),
    rows=st.integers(1, 40),
    running=st.integers(1, 9),
    sharing=st.booleans(),
    reserve=st.booleans(),
    cached=st.sampled_from([None, "lru", "lfu", "priority"]),
    most_tokens=st.sampled_from([None, 0, 9]),
    overlap=st.sampled_from([0, 4]),
    is_sorted=st.booleans(),
    share_ahead=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_random_traces(
    seed, count, slots, rows, running, sharing, reserve, cached, most_tokens, overlap, is_sorted, share_ahead
):
    rng = np.random.default_rng(seed)
    cache = cached and CacheOptions(policy=cached, max_tokens=most_tokens, min_overlap=overlap)
    scheduler = scheduler_of(slots, rows, running, cache=cache)
    stop_at = stop_of(int(rng.integers(2, 5)))
    prompts = prompts_of(rng, count)
    if is_sorted:
        prompts.sort(key=lambda p: p.tolist())
    asked = {}
    left = list(enumerate(prompts))
    cancelled = set()

    def arrive(step=None):
        for _ in range(int(rng.integers(0, 4))):
            if left:
                key, prompt = left.pop(0)
                samples = int(rng.integers(1, 4)) if rng.random() < 0.3 else 1
                limit = int(rng.integers(1, 15))
                namespace = (*(("a",) if rng.random() < 0.2 else ()), *(() if sharing else (key,)))
                scheduler.submit(
                    key, prompt, samples=samples, limit=limit, reserve=reserve, namespace=namespace, priority=key % 3
                )
                asked[key] = (prompt, samples, limit)
        if asked and rng.random() < 0.1:
            key = int(rng.choice(list(asked)))
            scheduler.cancel(key)
            cancelled.add(key)

    def ahead():
        return rng.random() < share_ahead

    ended = {}
    while left:
        arrive()
        ended |= run_to_end(scheduler, stop_at, arrive, ahead=ahead)
    ended |= run_to_end(scheduler, stop_at, ahead=ahead)
    assert not scheduler.has_work
    for key, (prompt, samples, limit) in asked.items():
        for sample in range(samples):
            if key not in cancelled:
                assert ended.pop((key, sample)) == expected(prompt, sample, limit, stop_at)
    assert {key for key, _ in ended} <= cancelled
    kept = scheduler.cache.rows if scheduler.cache else 0
    assert scheduler.pool.used_slots == kept


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(40, 60),
    rows=st.integers(1, 20),
    cached=st.booleans(),
    ahead=st.booleans(),
)
def test_unknown_lengths_are_preempted_and_end(seed, slots, rows, cached, ahead):
    rng = np.random.default_rng(seed)
    scheduler = scheduler_of(slots, rows, cache=CacheOptions(min_overlap=0) if cached else None)
    stop_at = lambda path, sample: len(path) >= 24  # noqa: E731
    prompts = prompts_of(rng, 8)
    for key, prompt in enumerate(prompts):
        scheduler.submit(key, prompt, limit=1000, reserve=False)
    ended = run_to_end(scheduler, stop_at, ahead=lambda: ahead)
    assert ended == {(k, 0): expected(p, 0, None, stop_at) for k, p in enumerate(prompts)}


def test_preemption_is_counted():
    scheduler = scheduler_of(slots=40, rows=16)
    for key in range(6):
        scheduler.submit(key, np.array([1, 2, key], np.int32), limit=1000, reserve=False)
    run_to_end(scheduler, lambda path, sample: len(path) >= 24)
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.recomputed_rows > 0


def test_rows_ahead_of_an_end_are_discarded():
    """One that ends by its length needs no row ahead; one that ends by what it says has one in vain."""
    for limit, rows, discarded in ((5, 4, 0), (1000, 6, 1)):
        scheduler = scheduler_of()
        scheduler.submit("a", np.array([1, 2], np.int32), limit=limit, reserve=False)
        ended = run_to_end(scheduler, lambda path, sample: len(path) == 7, ahead=lambda: True)
        assert ended == {("a", 0): expected([1, 2], 0, 5, lambda path, sample: False)}
        assert scheduler.stats.discarded_rows == discarded
        assert scheduler.stats.decode_rows == rows


@pytest.mark.parametrize("ahead", [True, False])
def test_room_that_a_step_under_way_will_make_is_waited_for(ahead):
    """One has its last token on its way when the other has no room to grow, and nobody else is there to make some."""
    scheduler = scheduler_of(slots=34)
    scheduler.submit("a", np.array([0], np.int32), limit=17)
    scheduler.submit("b", np.array([1], np.int32), limit=30, reserve=False)
    ended = run_to_end(scheduler, ahead=lambda: ahead)
    assert not scheduler.stats.preemptions
    assert {key: len(tokens) for key, tokens in ended.items()} == {("a", 0): 17, ("b", 0): 30}


def test_shared_rows_are_computed_once():
    shared = list(range(20))
    scheduler = scheduler_of(slots=2000, rows=16, running=16)
    for key in range(8):
        scheduler.submit(key, np.array([*shared, 30 + key, 1], np.int32), limit=5)
    run_to_end(scheduler)
    stats = scheduler.stats
    assert stats.prefill_rows == 20 + 8 * 2
    assert stats.decode_rows == 8 * 4
    assert stats.recomputed_rows == 0
    assert scheduler.stats.kv_bytes_peak == 20 + 8 * 2 + 8 * 4
    assert scheduler.stats.kv_bytes_unshared_peak == 8 * 26


def test_identical_prompts_and_samples_share_all_but_their_tails():
    scheduler = scheduler_of(slots=500, rows=64)
    prompt = np.arange(10, dtype=np.int32)
    scheduler.submit("a", prompt, samples=3, limit=4)
    scheduler.submit("b", prompt, limit=4)
    ended = run_to_end(scheduler)
    assert len(ended) == 4
    assert scheduler.stats.prefill_rows == 10


def test_a_node_is_free_in_the_step_of_its_last_need():
    scheduler = scheduler_of(slots=100, rows=64)
    scheduler.submit("short", np.array([1, 2, 3, 4], np.int32), limit=1)
    scheduler.submit("long", np.array([1, 2, 5], np.int32), limit=6)
    used = []
    run_to_end(scheduler, on_step=lambda step: used.append(scheduler.pool.used_slots))
    assert used[0] == 3 + 5  # [3, 4] has gone, [1, 2], [5] and the tail's five are held
    assert used[-1] == 0


def test_a_waiting_prompt_holds_its_prefix():
    scheduler = scheduler_of(slots=100, rows=64, running=1)
    for key in range(3):
        scheduler.submit(key, np.array([1, 2, 3, 4, key], np.int32), limit=2)
    run_to_end(scheduler)
    assert scheduler.stats.prefill_rows == 4 + 3
    assert scheduler.stats.first_admission_hits == 8


def test_warm_cache():
    scheduler = scheduler_of(slots=100, rows=64, cache=CacheOptions(min_overlap=0))
    prompt = np.array([0, 1, 2, 0, 1], np.int32)
    scheduler.submit("first", prompt, limit=4)
    answer = run_to_end(scheduler)["first", 0]
    before = scheduler.stats.prefill_rows
    scheduler.submit("second", np.array([*prompt, *answer[:-1], 7], np.int32), limit=1)
    scheduler.submit("again", prompt, limit=1)
    run_to_end(scheduler)
    assert scheduler.stats.prefill_rows - before == 1 + 1  # the new token, and the last row of `again` once more
    assert scheduler.stats.cross_window_hits == 8 + 5


def test_what_is_kept_and_not_reused_leaves_no_trace():
    """Kernels round by where keys lie: with too little to reuse, a step must look as it would without a cache."""
    rng = np.random.default_rng(0)
    prompts = [np.array([1, 2, 3, *rng.integers(4, 50, size)], np.int32) for size in rng.integers(2, 12, 9)]
    seen = {}
    for name, cache in (("off", None), ("lru", CacheOptions(min_overlap=16))):
        scheduler = scheduler_of(slots=2000, rows=8, cache=cache)
        seen[name] = []
        for key, prompt in enumerate(prompts):
            steps = []
            scheduler.submit(key, prompt, limit=6)
            run_to_end(scheduler, on_step=steps.append)
            base = steps[0].message.slots[0] & ~1  # keys are read in pairs
            for step in (step.message for step in steps):
                arrays = (step.slots - base, step.run_start - base, step.run_count, step.run_position)
                seen[name].append([a.tolist() for a in (*arrays, step.run_first, step.run_last)])
        assert scheduler.stats.cross_window_hits == 0
    assert seen["off"] == seen["lru"]
    assert all(len(runs) == 1 for *_, runs in seen["off"][-3:])  # a sequence that generates alone reads one run


def test_who_leaves_before_it_runs_takes_nothing_along():
    """Prompts that begin with the same few tokens, too few to use, are kept side by side below them."""
    scheduler = scheduler_of(slots=400, cache=CacheOptions())
    for key in range(4):
        scheduler.submit(key, np.array([1, *range(10 + 50 * key, 50 + 50 * key)], np.int32), limit=1)
        run_to_end(scheduler)
    kept = scheduler.cache.rows
    assert kept == 1 + 4 * 40
    scheduler.submit("left", np.array([1, 5, 6], np.int32), limit=1)
    check_books(scheduler)
    scheduler.cancel("left")
    check_books(scheduler)
    assert scheduler.cache.rows == kept


def test_a_long_prompt_uses_what_was_too_little_for_one_that_waits_too():
    scheduler = scheduler_of(slots=400, cache=CacheOptions())
    prompt = np.array([1, *range(10, 50)], np.int32)
    scheduler.submit("first", prompt, limit=1)
    run_to_end(scheduler)
    before = scheduler.stats.prefill_rows
    scheduler.submit("short", np.array([1, 5], np.int32), limit=1)
    scheduler.submit("long", prompt, limit=1)
    run_to_end(scheduler)
    assert scheduler.stats.prefill_rows - before == 2 + 1  # both rows of the short one, the last of the long one again
    check_books(scheduler)


def test_what_waited_for_its_time_to_live_is_gone_for_who_comes_then():
    now = [0.0]
    scheduler = scheduler_of(cache=CacheOptions(min_overlap=0, ttl=60), clock=lambda: now[0])
    prompt = np.arange(50, dtype=np.int32)
    for key in range(2):
        now[0] += 36_000
        before = scheduler.stats.prefill_rows
        scheduler.submit(key, prompt, limit=1)
        run_to_end(scheduler)
        assert scheduler.stats.prefill_rows - before == 50


def test_namespaces_share_nothing():
    scheduler = scheduler_of(slots=100)
    prompt = np.array([0, 1, 2], np.int32)
    scheduler.submit("a", prompt, limit=1, namespace=("x",))
    scheduler.submit("b", prompt, limit=1, namespace=("y",))
    run_to_end(scheduler)
    assert scheduler.stats.prefill_rows == 6


def test_what_never_fits_is_refused():
    scheduler = scheduler_of(slots=10)
    with pytest.raises(InputError, match="kv_memory"):
        scheduler.submit("a", np.arange(8, dtype=np.int32), limit=4)
    scheduler.submit("b", np.arange(8, dtype=np.int32), limit=3)
    scheduler.submit("c", np.arange(8, dtype=np.int32), limit=99, reserve=False)
    failed = []
    ended = run_to_end(scheduler, failed=failed)
    assert list(ended) == [("b", 0)]
    assert [key for key, _ in failed] == ["c"]
    assert scheduler.pool.used_slots == 0


def test_commit_wants_the_step_that_was_begun():
    scheduler = scheduler_of()
    scheduler.submit("a", np.array([1], np.int32), limit=2)
    scheduler.admit()
    step = scheduler.plan()
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.commit(step, [1], [False])
    scheduler.begin(step)
    scheduler.commit(step, [1], [False])
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.commit(step, [1], [False])
    check_books(scheduler)


def test_steps_are_committed_in_their_order():
    scheduler = scheduler_of()
    scheduler.submit("a", np.array([1], np.int32), limit=9)
    scheduler.admit()
    first = scheduler.plan()
    scheduler.begin(first)
    second = scheduler.plan()
    scheduler.begin(second)
    with pytest.raises(ValueError, match="oldest step in flight"):
        scheduler.commit(second, [2], [False])
    scheduler.commit(first, [1], [False])
    scheduler.commit(second, [2], [False])
    assert next(iter(scheduler.running)).tokens == [1, 2]


def test_what_is_submitted_again_goes_on_from_what_it_made():
    """After `clear` only the samples that have not ended run, each behind its own tokens."""
    scheduler = scheduler_of(cache=CacheOptions(min_overlap=0))
    prompt = np.array([1, 2, 0], np.int32)
    scheduler.submit("a", prompt, samples=3, limit=7)
    run_to_end(scheduler)
    scheduler.clear()
    check_books(scheduler)
    assert not scheduler.has_work and not scheduler.cache.rows and not scheduler.pool.used_slots
    wanted = {sample: expected(prompt, sample, 7, lambda path, sample: False) for sample in range(3)}
    scheduler.submit("a", prompt, limit=7, outputs={0: wanted[0][:4], 2: []})
    assert run_to_end(scheduler) == {("a", 0): wanted[0], ("a", 2): wanted[2]}
    assert scheduler.stats.recomputed_rows == 4


def test_what_is_cancelled_before_it_runs_is_gone_at_once():
    scheduler = scheduler_of()
    for key in ("a", "b"):
        scheduler.submit(key, np.array([1, 2], np.int32), limit=3)
        scheduler.cancel(key)
        assert not scheduler.has_work and scheduler.num_waiting == 0
    scheduler.submit("c", np.array([1, 2], np.int32), limit=3)
    assert list(run_to_end(scheduler)) == [("c", 0)]


def run_short(scheduler: Scheduler, count: int, namespace) -> None:
    """Runs so many short requests, from the first arrival to the last end."""
    for key in range(count):
        scheduler.submit(key, np.array([key // 256, key % 256], np.int32), limit=1, namespace=namespace(key))
    while True:
        scheduler.admit()
        step = scheduler.plan()
        if step is None:
            return
        scheduler.begin(step)
        scheduler.commit(step, [0] * len(step.consumers), [False] * len(step.consumers))


def test_many_namespaces_cost_what_one_does():
    def lines(namespace) -> int:
        return lines_run(lambda: run_short(scheduler_of(4000, 256, 256), 1000, namespace))

    assert lines(lambda key: (key,)) < 1.5 * lines(lambda key: ())


def test_many_who_wait_are_left_at_once():
    scheduler = scheduler_of(slots=1000, rows=16)
    for key in range(5000):
        scheduler.submit(key, np.array([key // 256, key % 256, 1], np.int32), limit=20)
    scheduler.admit()
    scheduler.begin(scheduler.plan())
    assert lines_run(lambda: [scheduler.cancel(key) for key in range(5000)]) < 100 * 5000
    check_books(scheduler)
    assert scheduler.num_waiting == 0 and scheduler.pool.used_slots == 0


def test_who_waits_for_room_does_not_empty_the_cache():
    scheduler = scheduler_of(slots=100, cache=CacheOptions(min_overlap=0))
    scheduler.submit("kept", np.arange(45, dtype=np.int32), limit=1)
    run_to_end(scheduler)
    assert scheduler.cache.rows == 45
    scheduler.submit("runs", np.array([50, 51], np.int32), limit=43)
    step = scheduler.admit() or scheduler.plan()
    scheduler.begin(step)
    scheduler.commit(step, [1], [False])
    scheduler.submit("big", np.array([60, 61], np.int32), limit=79)
    for _ in range(3):
        assert not scheduler.admit()
    assert scheduler.num_waiting == 1 and scheduler.cache.rows == 45
    scheduler.cancel("runs")
    assert not scheduler.admit() and not scheduler.num_waiting
    check_books(scheduler)


def test_a_step_has_at_most_as_many_rows_as_it_is_planned_with():
    """Neither limit stays: the next step has its own."""
    scheduler = Scheduler(SlotPool(200), max_batch_rows=64, max_running=8)
    for key in range(3):
        scheduler.submit(key, np.array([key, *range(10, 29)], np.int32), limit=1)
    assert not scheduler.admit(StepLimits(30))
    assert len(scheduler.running) == 2, "the third would wait for room in a step"
    assert [scheduler.plan(StepLimits(most)).num_rows for most in (30, 7)] == [30, 7]
    assert scheduler.plan().num_rows == 40
    assert not scheduler.admit() and scheduler.plan().num_rows == 60


@pytest.mark.parametrize("reserve", [False, True])
def test_a_step_of_the_same_sequences_follows_the_one_before(reserve):
    scheduler = scheduler_of(200)
    for key, prompt in enumerate(([1, 2, 3], [1, 2, 4, 5], [6])):
        scheduler.submit(key, np.array(prompt, np.int32), limit=24, reserve=reserve)
    follows = []
    run_to_end(scheduler, on_step=lambda step: follows.append(step.message.follows))
    # The prompts' step, and the first one after it; without a reserve all slots but one were claimed with the prompts,
    # so that the step of the sixteenth output row is laid out anew, as are those beside a sequence that has ended.
    assert follows[:2] == [False, False] and sum(follows) >= 18, follows


def test_a_step_beside_a_sequence_that_comes_is_laid_out_anew():
    scheduler = scheduler_of(200)
    scheduler.submit("first", np.array([1, 2, 3], np.int32), limit=9)
    follows = []

    def on_step(step):
        follows.append(step.message.follows)
        if len(follows) == 4:
            scheduler.submit("second", np.array([1, 2, 5], np.int32), limit=4)

    run_to_end(scheduler, on_step=on_step)
    assert follows == [False, False, True, True, False, False, True, True, False], follows
