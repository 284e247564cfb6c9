"""Chunks that are reused at other positions, in random traces: who meets rows that were copied, what is copied where,
and that all books agree."""

from __future__ import annotations

import numpy as np
import pytest
from books import check_books
from hypothesis import given, settings
from hypothesis import strategies as st
from shifted_traces import IMAGES, ShiftedStore, Trace
from traces import expected, next_token

from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.schedule.fair import FairAdmission
from prefold.features.shifted.chunks import MAX_FAILED_STEPS
from prefold.features.shifted.options import ShiftedReuse
from prefold.features.shifted.scheduler import RowMove, ShiftingScheduler


def test_random_traces():
    """Every sequence that was not cancelled has the tokens that it has alone, and what the traces are for happens."""
    traces = [run_trace(seed) for seed in range(17, 20)]
    moved, requests = (sum(len(getattr(trace, name)) for trace in traces) for name in ("moved", "prompts"))
    assert moved > requests / 20 and sum(trace.scheduler.stats.preemptions for trace in traces)


@pytest.mark.slow
@settings(max_examples=200)
@given(seed=st.integers(0, 10**6))
def test_many_random_traces(seed):
    run_trace(seed)


def run_trace(seed: int) -> Trace:
    """Returns a random trace that has run to its end, with all sequences compared with those that are made alone."""
    trace = Trace(seed)
    for _ in range(100):
        trace.anything()
    for _ in range(2000):
        if not trace.step() and not trace.scheduler.has_work:
            break
    assert not trace.scheduler.has_work
    for key, (samples, limit) in trace.limits.items():
        if key in trace.cancelled:
            continue
        prompt, _ = trace.prompts[key]
        for sample in range(samples):
            path, made = tuple(prompt), []
            while len(made) < limit:
                made.append(next_token(path, sample))
                path = (*path, made[-1])
            assert trace.ended[key, sample] == made
    return trace


def scheduler_of(slots: int = 300, **shifted) -> ShiftingScheduler:
    options = {"min_tokens": 8, "recompute": 2, "min_share": 0.0} | shifted
    return ShiftingScheduler(
        SlotPool(slots),
        max_batch_rows=64,
        max_running=8,
        cache=CacheOptions(min_overlap=0, shifted=ShiftedReuse(**options)),
        holds_rows=lambda ids: np.ones(len(ids), bool),
    )


def finish(scheduler: ShiftingScheduler) -> list[RowMove]:
    """Runs what there is; what was copied on the way."""
    found = []
    while True:
        scheduler.admit()
        found += scheduler.moves
        scheduler.moves.clear()
        check_books(scheduler)
        step = scheduler.plan()
        if step is None:
            return found
        scheduler.begin(step)
        scheduler.commit(step, [1] * len(step.consumers), [False] * len(step.consumers))
        check_books(scheduler)


def ask(scheduler, key, tokens, shifts=True, **options) -> list[RowMove]:
    scheduler.submit(key, np.array(tokens, np.int32), limit=2, shifts=shifts, **options)
    return finish(scheduler)


A, B, C = ([100 * n + i for i in range(12)] for n in (1, 2, 3))


def test_what_is_copied():
    scheduler = scheduler_of()
    assert ask(scheduler, 0, [*A, *B, 7]) == []
    (moved,) = ask(scheduler, 1, [*C, *B, 9, *A, 8])
    # The first two rows of each chunk are computed anew.
    assert moved.message.new_positions.tolist() == [*range(14, 24), *range(27, 37)]
    assert moved.message.positions.tolist() == [*range(14, 24), *range(2, 12)]
    assert moved.key == 1


def test_exact_prefixes_come_first():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    (moved,) = ask(scheduler, 1, [*A, 5, *B, 7])
    assert moved.message.new_positions.tolist() == list(range(15, 25))
    assert scheduler.stats.cross_window_hits == 12


def test_a_prompt_that_was_copied_is_not_kept():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    rows = scheduler.cache.rows
    ask(scheduler, 1, [*C, *B, 9])
    # What precedes the first copy is exact, and kept.
    assert scheduler.cache.rows == rows + 14
    before = scheduler.stats.prefill_rows
    ask(scheduler, 2, [*C, *B, 9], shifts=False)
    assert scheduler.stats.prefill_rows - before == 25 - 14
    assert ask(scheduler, 3, [*C, *B, 9, 4]) == []


def test_a_tenant_is_not_charged_for_rows_that_were_copied(monkeypatch):
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    scheduler.admit_by(FairAdmission())
    charged, admitted = [], scheduler.waiting.note_admission
    monkeypatch.setattr(
        scheduler.waiting, "note_admission", lambda sequence, rows: (charged.append(rows), admitted(sequence, rows))
    )
    ask(scheduler, 1, [*A, 4], shifts=False)  # the rows of A are there
    (moved,) = ask(scheduler, 2, [*C, *B, 9])
    assert charged == [1, 25 - len(moved)] and len(moved) == 10


def test_one_namespace():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7], namespace=("one",))
    assert ask(scheduler, 1, [*C, *B, 9], namespace=("two",)) == []
    assert len(ask(scheduler, 2, [*C, *B, 9], namespace=("one",))) == 1


@pytest.mark.parametrize("image", IMAGES[1:3])
def test_the_same_images_before(image):
    scheduler = scheduler_of()
    ask(scheduler, 0, [*IMAGES[0], *A, *B, 7])
    assert ask(scheduler, 1, [5, *A, 7]) == []
    assert ask(scheduler, 2, [5, *image, *A, 7]) == []
    assert ask(scheduler, 3, [5, *image, *IMAGES[0], *A, 7]) == []
    (moved,) = ask(scheduler, 4, [5, *IMAGES[0], *A, 7])
    assert moved.message.new_positions.tolist() == list(range(6, 16))


def test_no_chunk_reaches_into_an_image():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A[:6], *IMAGES[2], *A[6:], 7])
    assert ask(scheduler, 1, [5, *A[:6], *IMAGES[2], *A[6:], 7]) == []


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ({"min_tokens": 13}, 0),
        ({"recompute": 12}, 0),
        ({"recompute": 11}, 2),
        ({"recompute": 0}, 24),
        ({"max_matches": 1}, 10),
        ({"min_share": 0.63}, 20),
        ({"min_share": 0.65}, 0),
        ({"window": 24}, 10),
        ({"window": 23}, 9),
        ({"window": 19}, 0),
    ],
)
def test_bounds(options, copied):
    scheduler = scheduler_of(**options)
    ask(scheduler, 0, [*A, *B, 7])
    prompt = [*C, *B, 9, *A, 8]  # 24 of 38 tokens
    assert sum(map(len, ask(scheduler, 1, prompt))) == copied


def test_rows_that_others_wait_for_are_exact():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    for key in (1, 2):
        scheduler.submit(key, np.array([*C, *B, 9], np.int32), limit=2, shifts=True)
    assert finish(scheduler) == []
    assert scheduler.stats.in_step_hits == 25


def test_the_first_row_is_computed():
    scheduler = scheduler_of(recompute=0)
    ask(scheduler, 0, [*A, *B, 7])
    (moved,) = ask(scheduler, 1, [*B, 9])
    assert moved.message.new_positions.tolist() == list(range(1, 12))


def test_the_last_row_is_computed():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    (moved,) = ask(scheduler, 1, [5, *A])
    assert moved.message.new_positions.tolist() == list(range(3, 12))


def test_a_chunk_over_several_nodes():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    ask(scheduler, 1, [*A, 5], shifts=False)  # cuts the node behind A
    (moved,) = ask(scheduler, 2, [*C, *A, *B, 9])
    assert moved.message.new_positions.tolist() == list(range(14, 36))
    assert moved.message.positions.tolist() == list(range(2, 24))


def test_all_samples_see_what_was_copied():
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    (moved,) = ask(scheduler, 1, [*C, *B, 9], samples=3)
    assert len(moved) == 10
    assert not scheduler.apart


def test_what_is_kept_stays():
    """Where the exact prefix is too short to be used, its rows are computed again, and what is kept below stays."""
    scheduler = scheduler_of(recompute=0, min_tokens=16)
    scheduler.cache.options = CacheOptions(min_overlap=16)
    ask(scheduler, 0, [*A, A[4], A[5], *B, *C, 7])
    kept = scheduler.cache.rows
    # What is before the chunk is before it here too, but belongs to the prefix that both have in common.
    (moved,) = ask(scheduler, 1, [*A[:6], *B, *C, 9])
    assert moved.message.new_positions.tolist() == list(range(6, 30))
    assert scheduler.cache.rows == kept
    assert len(ask(scheduler, 2, [5, *B, *C, 9])) == 1


def test_rows_that_were_copied_are_kept_like_those_that_were_used():
    scheduler = scheduler_of(slots=100)
    ask(scheduler, 0, [*A, 7], shifts=False)
    ask(scheduler, 1, [*B, 7], shifts=False)
    for i in range(6):  # each with rows that nobody asks for again
        other = [1000 + 20 * i + k for k in range(17)]
        assert len(ask(scheduler, 2 + i, [*other, *A, 8])) == 1
    assert ask(scheduler, 9, [3, *B, 8]) == []
    assert len(ask(scheduler, 10, [4, *A, 8])) == 1


def test_text_that_repeats_itself_is_given_up():
    """A block of equal tokens is met at each position of a text of such tokens, and nowhere in a chunk that is long
    enough."""
    scheduler = scheduler_of(slots=3000)
    ask(scheduler, 0, [*A, *[5] * 7, *B, 7])
    looks, around = [], scheduler.chunks._around
    scheduler.chunks._around = lambda *asked: looks.append(asked) or around(*asked)
    assert ask(scheduler, 1, [*C, *[5] * 2000, 8]) == []
    assert len(looks) == MAX_FAILED_STEPS


def test_copied_rows_are_given_up_and_computed():
    """With room for one of two requests the other is preempted, gives up what was copied, and goes on later."""
    scheduler, store = scheduler_of(slots=109), ShiftedStore()
    prompts = {0: [*A, *B, 7], 1: [*C, *B, 9], 2: [8, *C, *B, 9]}
    ended, lost, moved = {}, False, []
    for keys, limit in (((0,), 1), ((1, 2), 50)):
        for key in keys:
            prompt = np.array(prompts[key], np.int32)
            scheduler.submit(key, prompt, limit=limit, reserve=False, shifts=True, namespace=("n",))
        while scheduler.has_work:
            assert not scheduler.admit()
            for one in scheduler.moves:
                store.move(one, prompts[one.key], ("n",))
                moved.append(one.key)
            scheduler.moves.clear()
            check_books(scheduler)
            lost |= any(node.lost and not node.num_computed for node in scheduler.apart)
            step = scheduler.plan()
            store.run(step, [])
            scheduler.begin(step)
            tokens = [next_token(path, s.sample) for s, path in zip(step.consumers, store.paths, strict=True)]
            for done in scheduler.commit(step, tokens, [False] * len(tokens)):
                ended[done.key] = list(done.tokens)
            check_books(scheduler)
        scheduler.cache.pin(("n",), np.array(prompts[0], np.int32))
    assert moved == [1, 2] and lost
    for key, limit in ((1, 50), (2, 50)):
        assert ended[key] == expected(prompts[key], 0, limit, lambda path, sample: False, 200)


def test_a_request_that_was_begun_is_not_shifted():
    """With room for one of two requests: the second is preempted, and goes on from rows that are computed."""
    scheduler = scheduler_of()
    ask(scheduler, 0, [*A, *B, 7])
    scheduler.submit(1, np.array([*C, *B, 9], np.int32), limit=4, shifts=False, outputs={0: [1, 2]})
    assert finish(scheduler) == []
