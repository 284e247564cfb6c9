"""A worker that computes nothing, and checks what every row would see."""

from __future__ import annotations

import random

import numpy as np

from prefold.engine.cache import SCRATCH
from prefold.engine.schedule.steps import SlotResult, SlotStep, StepResult
from prefold.engine.worker import Facts, Worker
from prefold.errors import OutOfMemoryError
from prefold.spec.requests import Sampling

TROUBLE = ("memory", "start", "result")


def next_token(path: tuple[int, ...]) -> int:
    """A token out of few, so that outputs meet prompts."""
    return (sum((i + 1) * t for i, t in enumerate(path[-3:])) + len(path)) % 4


class FakeWorker(Worker):
    """Keeps the tokens down to each row where a model keeps K/V, and checks what every row would see."""

    def __init__(self, rng: random.Random, depth: int, trouble: float):
        self.facts = Facts(depth=depth, slot_depth=depth, max_positions=60, vocab_size=8)
        self.rng, self.trouble = rng, trouble
        self.content: dict[int, tuple[int, ...]] = {}
        self.given: list[int] = []

    def start(self, message, prepared=None):
        trouble = self.rng.choice(TROUBLE) if self.rng.random() < self.trouble else None
        if not isinstance(message, SlotStep):
            return Ticket(None, None)
        if trouble == "memory":
            raise OutOfMemoryError("made up")
        if trouble == "start":
            raise RuntimeError("made up")
        return Ticket(self.run(message), trouble)

    def run(self, step: SlotStep) -> SlotResult:
        paths = []
        runs = np.stack((step.run_start, step.run_count, step.run_position, step.run_first, step.run_last), 1).tolist()
        for query, (token, position, slot) in enumerate(zip(step.tokens, step.positions, step.slots, strict=True)):
            seen = {}
            for start, count, at, first, last in runs:
                if first <= query < last:
                    assert not set(range(at, at + count)) & set(seen), "two keys of one position"
                    seen |= {at + i: start + i for i in range(count)}
            assert sorted(seen) == list(range(int(position) + 1)), "a key is missing, or one too many"
            above = self.content[seen[int(position) - 1]] if position else ()
            assert all(self.content[seen[i]] == above[: i + 1] for i in range(int(position))), "a key of another path"
            path = (*above, int(token) if token >= 0 else self.given[-1 - int(token)])
            if slot == SCRATCH:
                assert self.content[seen[int(position)]] == path
            else:
                assert seen[int(position)] == slot
                self.content[int(slot)] = path
            paths.append(path)
        read = [paths[step.read_rows[row]] for row in step.reads.tolist()]
        self.given = [next_token(path) for path in read]
        values = tuple(StepResult(np.array([[float(hash(read[i]))] for i in r.consumers])) for r in step.read_outs)
        return SlotResult(np.array(self.given, np.int64), values=values)


class Ticket:
    def __init__(self, result: SlotResult | None, trouble: str | None):
        self._result, self._trouble = result, trouble

    def result(self) -> SlotResult | None:
        trouble, self._trouble = self._trouble, None
        if trouble == "result":
            raise RuntimeError("made up")
        return self._result


def expected(prompt: list[int], sampling: Sampling) -> tuple[int, ...]:
    path = tuple(prompt)
    while len(path) - len(prompt) < sampling.max_tokens and next_token(path) not in sampling.stop_ids:
        path = (*path, next_token(path))
    return path[len(prompt) :]
