"""A store that knows what each slot holds, and checks what every row of a step would see."""

from __future__ import annotations

import numpy as np
from books import check_books

from prefold.engine.cache import SCRATCH
from prefold.engine.schedule.admission import NO_LIMITS, StepLimits
from prefold.engine.schedule.generate_step import GenerateStep
from prefold.engine.schedule.scheduler import Scheduler
from prefold.engine.schedule.steps import SlotResult


class CheckedStore:
    """Slot -> (namespace, the tokens from the root up to that row). `run` stands for the model: the token that follows
    a path is a function of the path and the sample, so that any wrong key shows."""

    def __init__(self) -> None:
        self.content: dict[int, tuple] = {}

    def seen_behind(self, tokens: list[int], query: int) -> int:
        """How many of the rows behind it a row sees, which are then in the same step."""
        return 0

    def run(self, step: GenerateStep, given: list[int]) -> None:
        """given: the tokens of the reads of the step before, where the scheduler has not been told of them."""
        paths: list[tuple] = []
        message = step.message
        keys = [
            (int(s), int(c), int(p), int(f), int(la))
            for s, c, p, f, la in zip(
                message.run_start,
                message.run_count,
                message.run_position,
                message.run_first,
                message.run_last,
                strict=True,
            )
        ]
        namespace_of = {q: ns for ns, first, last in step.namespaces for q in range(first, last)}
        new_slots = [int(s) for s in message.slots if s != SCRATCH]
        assert len(set(new_slots)) == len(new_slots)
        for query, (token, position, slot) in enumerate(
            zip(message.tokens, message.positions, message.slots, strict=True)
        ):
            seen: dict[int, int] = {}
            for start, count, at, first, last in keys:
                if first <= query < last:
                    for i in range(count):
                        assert at + i not in seen, "two keys of one position"
                        seen[at + i] = start + i
            namespace = namespace_of[query]
            if slot != SCRATCH:
                assert seen[int(position)] == slot
            behind = self.seen_behind(message.tokens.tolist(), query)
            assert sorted(seen) == list(range(int(position) + 1 + behind)), "a key is missing, or one too many"
            for i in range(1, behind + 1):
                assert seen[int(position) + i] == message.slots[query + i], "a key of another row"
            above = [seen[p] for p in range(int(position))]
            path = ()
            if above:
                where, path = self.content[above[-1]]
                assert where == namespace
                for depth, key in enumerate(above):
                    assert self.content[key] == (namespace, path[: depth + 1]), "a key of another path"
            path = (*path, int(token) if token >= 0 else given[-1 - int(token)])
            if slot == SCRATCH:
                assert self.content[seen[int(position)]] == (namespace, path)
            else:
                self.content[int(slot)] = (namespace, path)
            paths.append(path)
        self.paths = [paths[message.read_rows[row]] for row in message.reads]  # of each read


def next_token(path: tuple, sample: int) -> int:
    """A token out of few, so that outputs meet prompts."""
    return (sum((i + 1) * t for i, t in enumerate(path[-3:])) + sample + len(path)) % 3


def run_to_end(
    scheduler: Scheduler,
    stop_at=lambda path, sample: False,
    on_step=lambda step: None,
    most=5000,
    ahead=lambda: False,
    failed: list | None = None,
    limits: StepLimits = NO_LIMITS,
):
    """All that ended: {(key, sample): tokens}; checks the books after every step. ahead: asked for each step whether
    the next is planned before its tokens are told."""
    store = scheduler.__dict__.setdefault("checked_store", CheckedStore())  # it outlives a run, as a KV store does
    ended: dict[tuple, list[int]] = {}
    flight = None

    def land(step, tokens, stops):
        for done in scheduler.commit(step, tokens, stops, SlotResult(np.array(tokens))):
            assert (done.key, done.sample) not in ended
            ended[done.key, done.sample] = list(done.tokens)
        check_books(scheduler)
        on_step(step)

    for _ in range(most):
        for key, error in scheduler.admit(limits):
            assert failed is not None, error
            failed.append((key, error))
        check_books(scheduler)
        step = scheduler.plan(limits)
        assert_equal_steps(step, scheduler.plan(limits))
        assert_equal_steps(step, laid_out(scheduler, limits))
        check_books(scheduler)
        is_ahead = ahead()
        if flight is not None and (step is None or not is_ahead):
            land(*flight)
            flight = None
            continue
        if step is None:
            break
        assert step.num_rows <= scheduler.max_batch_rows
        store.run(step, [] if flight is None else flight[1])
        tokens, stops = [], []
        for sequence, path in zip(step.consumers, store.paths, strict=True):
            tokens.append(next_token(path, sequence.sample))
            stops.append(stop_at(path, sequence.sample))
        before, flight = flight, None
        scheduler.begin(step)
        check_books(scheduler)
        if is_ahead:
            flight = (step, tokens, stops)
            if before is not None:
                land(*before)
        else:
            land(step, tokens, stops)
    else:
        raise AssertionError("the work does not end")
    return ended


def laid_out(scheduler: Scheduler, limits: StepLimits) -> GenerateStep | None:
    """Returns the step that a scheduler plans where it keeps nothing of the step before."""
    repeated, scheduler._repeated = scheduler._repeated, None
    step = scheduler.plan(limits)
    scheduler._repeated = repeated
    return step


def assert_equal_steps(one: GenerateStep | None, other: GenerateStep | None) -> None:
    """Two plans of the same books are equal in all they say, but for whether something was kept of the step before."""
    if one is None or other is None:
        assert one is other
        return
    for a, b in ((one, other), (one.message, other.message)):
        for name in a.__slots__:
            was, now = getattr(a, name), getattr(b, name)
            is_same = name in ("message", "ids", "follows")
            assert is_same or (np.array_equal(was, now) if isinstance(was, np.ndarray) else was == now), name


def expected(prompt, sample: int, limit: int | None, stop_at, context: int = 64) -> list[int]:
    """What a sequence makes when it is alone."""
    path, out = tuple(int(t) for t in prompt), []
    while limit is None or len(out) < limit:
        if stop_at(path, sample):
            break
        out.append(next_token(path, sample))
        path = (*path, out[-1])
        assert len(path) < context
    return out


def prompts_of(rng: np.random.Generator, count: int, longest: int = 9, vocabulary: int = 3) -> list[np.ndarray]:
    return [rng.integers(0, vocabulary, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]
