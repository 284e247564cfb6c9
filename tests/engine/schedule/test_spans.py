"""Random texts with images in them, in tiny memory: no step, cut, split or eviction ends within a span, and what every
row sees is what it sees uncut."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from books import check_books
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traces import CheckedStore, expected, next_token

from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.schedule.scheduler import Scheduler
from prefold.engine.schedule.windows import WindowPlanner
from prefold.errors import InputError, OutOfMemoryError
from prefold.spec.requests import Readout, Request
from prefold.trie import MEDIA_BASE, SPAN_BASE, Spool, clear_of_span, longest_span, span_starts

# Sizes of the images, as spans and as rows that see what was before them.
SIZES = (1, 2, 4, 7)
SPANS = [list(range(SPAN_BASE + 10 * i, SPAN_BASE + 10 * i + size)) for i, size in enumerate(SIZES)]
# Ids as they are handed out, with one unused between two.
SPANS.append(list(range(SPANS[-1][-1] + 2, SPANS[-1][-1] + 5)))
ROWS = [list(range(MEDIA_BASE + 10 * i, MEDIA_BASE + 10 * i + size)) for i, size in enumerate(SIZES)]
LONGEST = max(SIZES)
STARTS = {ids[0]: len(ids) for ids in SPANS}


def random_prompt(rng: random.Random, found: list[list[int]]) -> list[int]:
    """Text, images and the beginnings of other prompts; images next to each other too, first and last too."""
    parts: list[list[int]] = []
    if found and rng.random() < 0.7:
        stem = rng.choice(found)
        parts.append(stem[: clear_of_span(np.array(stem), rng.randint(0, len(stem)))])
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        text = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        parts.append(rng.choice(SPANS) if kind < 0.4 else rng.choice(ROWS) if kind < 0.5 else text)
    found.append([token for part in parts for token in part])
    return found[-1]


def span_of(tokens: list[int], at: int) -> tuple[int, int]:
    """Where the span that a token is in begins and ends, found from the list of all spans."""
    for ids in SPANS:
        if tokens[at] in ids:
            first = at - ids.index(tokens[at])
            return first, first + len(ids)
    return at, at + 1


def whole(tokens: list[int]) -> None:
    """Fails where the tokens begin or end within a span."""
    at = 0
    while at < len(tokens):
        first, stop = span_of(tokens, at)
        assert first == at and stop <= len(tokens), "a part of a span"
        assert tokens[at:stop] == list(range(tokens[at], tokens[at] + stop - at))
        at = stop


# ------------------------------------------------------------------------------------------------------- the ids


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6))
def test_ids_say_where_spans_are(seed):
    tokens = random_prompt(random.Random(seed), [])
    starts = span_starts(np.array(tokens, np.int32))
    wanted = [span_of(tokens, at)[0] for at in range(len(tokens))]
    assert wanted == list(range(len(tokens))) if starts is None else starts.tolist() == wanted
    for cut in range(len(tokens) + 1):
        clear = clear_of_span(np.array(tokens, np.int32), cut)
        assert clear == (cut if cut == len(tokens) else wanted[cut])
    sizes = [stop - first for first, stop in {span_of(tokens, i) for i, t in enumerate(tokens) if t >= SPAN_BASE}]
    assert longest_span(np.array(tokens, np.int32)) == max(sizes, default=0)


# -------------------------------------------------------------------------------------------------- the stream


def seen_by(path: tuple[int, ...], tokens: list[int]) -> set[tuple[int, ...]]:
    """The rows, as paths, that the last row of a path sees, where the path goes on as `tokens`."""
    stop = span_of(tokens, len(path) - 1)[1]
    return {tuple(tokens[: i + 1]) for i in range(stop)}


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
def test_steps_of_a_stream_end_between_spans(sharing, seed):
    rng = random.Random(seed)
    found: list[list[int]] = []
    prompts = [random_prompt(rng, found) for _ in range(rng.randint(1, 8))]
    most = rng.randint(LONGEST, 25)
    goes_on = {tuple(p[: i + 1]): p for p in prompts for i in range(len(p))}
    computed = []
    carried: list[tuple[int, ...]] = []
    with Spool() as spool:
        for prompt in prompts:
            spool.add(Request(np.array(prompt, np.int32)))
        follows = False
        for window in spool.windows(max_tokens=rng.choice([10, 60, 1000]), share=sharing == "full"):
            scheduler = WindowPlanner(
                window, Readout("last"), sharing=sharing, max_batch_rows=most, follows=follows and sharing == "full"
            )
            follows, done = True, []
            while (step := scheduler.plan()) is not None:
                scheduler.commit(step)
                parts = [step]
                while parts:
                    part = parts.pop(0)
                    if rng.random() < 0.3 and part.stop - part.start > 1:
                        try:
                            parts[:0] = scheduler.halves(part)
                            continue
                        except OutOfMemoryError:
                            assert part.stop - part.start in STARTS.values()
                    carried = check_part(scheduler, part, carried, goes_on, most)
                    computed += carried[-(part.stop - part.start) :]
                    carried = [carried[j] for j in part.message.keep]
                    done += part.requests.tolist()
            assert sorted(done) == list(range(window.num_requests))
    if sharing == "full" and len(prompts) == 1:
        assert len(computed) == len(set(computed)) == len(goes_on)
    assert set(computed) == set(goes_on)


def check_part(scheduler, part, carried, goes_on, most) -> list[tuple[int, ...]]:
    """The path of every key of a step, whose rows see what they see uncut."""
    message = part.message
    rows = scheduler.trie.tokens[part.start : part.stop].tolist()
    assert len(rows) <= most
    whole(rows)
    keys = carried[: message.path]
    begin = np.arange(len(message.end)) if message.first is None else message.first
    depths = scheduler.trie.positions[part.start : part.stop].tolist()
    for row, depth in zip(rows, depths, strict=True):
        at = len(keys)
        above = [keys[j] for j in range(at) if message.end[j] > at]
        assert [len(path) for path in above] == list(range(1, depth + 1)), "a path lacks a row, or has one too many"
        keys.append((*(above[-1] if above else ()), row))
    for i in range(message.path, len(keys)):
        seen = [keys[j] for j in range(len(keys)) if begin[j] <= i < message.end[j]]
        assert len(seen) == len(set(seen))
        assert set(seen) == seen_by(keys[i], goes_on[keys[i]])
    return keys


def test_a_window_goes_on_before_the_span_that_is_read():
    """The second window's prompt ends with the image that the first one's goes on behind."""
    with Spool() as spool:
        for tail in ([], [1, 1, 1]):
            spool.add(Request(np.array([0, *SPANS[3], *tail], np.int32)))
        first, second = spool.windows(max_tokens=8, share=True)
    assert second.common == 8
    scheduler = WindowPlanner(second, Readout("last"), sharing="full", max_batch_rows=100, follows=True)
    assert scheduler.plan().start == 8
    again = WindowPlanner(first, Readout("last"), sharing="full", max_batch_rows=100)
    assert again.plan().stop == 8
    lengths = np.diff(first.offsets)
    assert clear_of_span(first.tokens, int(lengths[0]) - 1) == 1


# ------------------------------------------------------------------------------------------------------- slots


class SpanStore(CheckedStore):
    """A store whose rows of spans see those behind them in their span; every span is in one step."""

    def seen_behind(self, tokens: list[int], query: int) -> int:
        _, stop = span_of(tokens, query)
        assert stop <= len(tokens) and tokens[query:stop] == list(range(tokens[query], tokens[query] + stop - query))
        return stop - query - 1


class Trace:
    """A scheduler in tiny memory with all that may happen to it."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        cache = CacheOptions(min_overlap=rng.choice([0, 4]), policy=rng.choice(["lru", "lfu"]))
        self.given = {token for ids in (*SPANS, *ROWS) for token in ids} if rng.random() < 0.4 else set()
        self.scheduler = Scheduler(
            SlotPool(rng.randint(45, 90)),
            max_batch_rows=rng.randint(LONGEST, LONGEST + 8),
            max_running=rng.randint(1, 6),
            cache=cache if rng.random() < 0.7 else None,
            holds_rows=lambda ids: np.array([int(i) in self.given for i in ids], bool),
        )
        self.store = SpanStore()
        self.found: list[list[int]] = []
        self.asked: dict[int, tuple[list[int], int, int]] = {}
        self.ended: dict[tuple[int, int], list[int]] = {}
        self.cancelled: set[int] = set()
        self.idle = 0

    def submit(self) -> None:
        prompt = random_prompt(self.rng, self.found)[:40]
        prompt = prompt[: clear_of_span(np.array([*prompt, 0]), len(prompt))]
        while prompt and span_of(prompt, len(prompt) - 1)[1] > len(prompt):
            prompt.pop()
        if not prompt:
            return
        key, limit, samples = len(self.asked), self.rng.randint(1, 5), self.rng.randint(1, 2)
        self.asked[key] = (prompt, limit, samples)
        self.scheduler.submit(
            key, np.array(prompt, np.int32), limit=limit, samples=samples, reserve=self.rng.random() < 0.5
        )

    def step(self) -> None:
        for _, error in self.scheduler.admit():
            raise error
        check_books(self.scheduler)
        step = self.scheduler.plan()
        if step is None:
            self.idle += 1
            return
        self.idle = 0
        message = step.message
        assert 0 < step.num_rows <= self.scheduler.max_batch_rows
        images = message.tokens[message.tokens >= MEDIA_BASE].tolist()
        assert set(images) <= self.given, "rows of an image that the tower has not given yet"
        new = [int(t) for t, slot in zip(message.tokens, message.slots, strict=True) if t >= SPAN_BASE and slot]
        for first, stop in pairwise([*(i for i, t in enumerate(new) if t in STARTS), len(new)]):
            assert new[first:stop] == list(range(new[first], new[first] + STARTS[new[first]]))
        assert not new or new[0] in STARTS, "a span begins in its middle"
        self.store.run(step, [])
        self.scheduler.begin(step)
        check_books(self.scheduler)
        tokens = [next_token(path, s.sample) for s, path in zip(step.consumers, self.store.paths, strict=True)]
        for done in self.scheduler.commit(step, tokens, [False] * len(tokens)):
            self.ended[done.key, done.sample] = list(done.tokens)
        check_books(self.scheduler)

    def anything(self) -> None:
        kind, cache = self.rng.random(), self.scheduler.cache
        if kind < 0.3:
            self.submit()
        elif kind < 0.35 and self.asked:
            key = self.rng.randrange(len(self.asked))
            self.cancelled.add(key)
            self.scheduler.cancel(key)
        elif kind < 0.45:
            self.given |= set(self.rng.choice([*SPANS, *ROWS]))
        elif kind < 0.5 and cache is not None:
            cache.evict(self.rng.randint(1, 10))
        elif kind < 0.55 and cache is not None and self.found:
            prompt = np.array(self.rng.choice(self.found), np.int32)
            pinned = cache.pin((), prompt[: self.rng.randint(1, len(prompt))])
            check_books(self.scheduler)
            assert clear_of_span(prompt, pinned) == pinned
            cache.unpin((), prompt[:pinned])
        else:
            self.step()
        check_books(self.scheduler)


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6))
def test_random_traces_over_slots(seed):
    trace = Trace(seed)
    for _ in range(40):
        trace.anything()
    trace.given |= {token for ids in (*SPANS, *ROWS) for token in ids}
    for _ in range(2000):
        if not trace.scheduler.has_work:
            break
        trace.step()
        assert trace.idle < 2, "requests wait, and no step can be made"
    assert not trace.scheduler.has_work
    for key, (prompt, limit, samples) in trace.asked.items():
        for sample in range(samples):
            if key not in trace.cancelled:
                alone = expected(prompt, sample, limit, lambda path, sample: False)
                assert trace.ended[key, sample] == alone


def test_a_span_waits_for_a_step_that_it_opens():
    """Seven rows do not fit beside the row of a sequence that generates in steps of seven: they come first, alone."""
    scheduler = Scheduler(SlotPool(60), max_batch_rows=7, max_running=4, holds_rows=lambda ids: np.ones(len(ids), bool))
    scheduler.submit("text", np.array([1, 2], np.int32), limit=9)
    store = SpanStore()

    def step() -> list[int]:
        scheduler.admit()
        planned = scheduler.plan()
        store.run(planned, [])
        scheduler.begin(planned)
        scheduler.commit(planned, [1] * len(planned.consumers), [False] * len(planned.consumers))
        check_books(scheduler)
        return sorted(planned.message.tokens.tolist())

    assert step() == [1, 2]
    scheduler.submit("image", np.array([0, 0, *SPANS[3], 2], np.int32), limit=2)
    assert step() == [0, 0, 1], "the text before it and the sequence that generates: the span has no room"
    assert step() == SPANS[3]
    assert step() == [1, 2]
    assert step() == [1, 1]


def test_others_go_on_while_a_tower_runs():
    held: set[int] = set()
    scheduler = Scheduler(
        SlotPool(60),
        max_batch_rows=20,
        max_running=4,
        holds_rows=lambda ids: np.array([int(i) in held for i in ids], bool),
    )
    scheduler.submit("image", np.array([0, *ROWS[3], 2], np.int32), limit=1)
    scheduler.submit("text", np.array([1, 2], np.int32), limit=9)
    scheduler.admit()
    step = scheduler.plan()
    assert sorted(step.message.tokens.tolist()) == [0, 1, 2]
    scheduler.begin(step)
    scheduler.commit(step, [1], [False])
    held |= set(ROWS[3][:3])  # rows that see what was before them may be taken in parts
    scheduler.admit()
    step = scheduler.plan()
    assert sorted(step.message.tokens.tolist()) == [1, *ROWS[3][:3]]
    scheduler.begin(step)
    scheduler.commit(step, [1], [False])
    scheduler.cancel("text")
    assert scheduler.plan() is None and scheduler.has_work, "all wait for the tower"


@example(7)
@given(st.integers(1, 7))
def test_eviction_takes_the_rest_of_a_span(rows):
    scheduler = Scheduler(
        SlotPool(60), max_batch_rows=30, max_running=4, cache=CacheOptions(min_overlap=0),
        holds_rows=lambda ids: np.ones(len(ids), bool),
    )  # fmt: skip
    scheduler.submit("a", np.array([0, 1, *SPANS[3]], np.int32), limit=1)
    scheduler.admit()
    step = scheduler.plan()
    scheduler.begin(step)
    scheduler.commit(step, [1], [False])
    assert scheduler.cache.rows == 9
    assert scheduler.cache.evict(rows) == 7
    check_books(scheduler)
    assert scheduler.cache.rows == 2


def test_a_prompt_that_is_too_long_for_memory_is_refused():
    scheduler = Scheduler(SlotPool(5), max_batch_rows=30, max_running=4)
    with pytest.raises(InputError, match="KV store"):
        scheduler.submit("a", np.array(SPANS[3], np.int32), limit=1)
