"""Numeric runs of the real engine over a worker that computes with hashes: run as a script, it imports no torch.

What a row gives is a hash of its path, so a row that sees one key too many or too few, or that is read for somebody
else, gives something that nobody expects.
"""

from __future__ import annotations

import random
import sys
import threading
import zlib
from collections import deque
from itertools import pairwise

import numpy as np

from prefold.engine import EngineOptions, ModelEngine
from prefold.engine.schedule.steps import StepResult, StreamStep
from prefold.engine.worker import Facts, Worker
from prefold.errors import OutOfMemoryError
from prefold.spec.requests import Namespace, Readout, Request
from prefold.trie import Spool

WIDTH = 3
ADAPTERS = ("first", "second")
KINDS = ("last", "mean", "head", "logits", "logprobs")


def given(path: tuple[int, ...], salt: str = "") -> np.ndarray:
    """What a row at the end of a path gives, float32 [WIDTH]."""
    return np.array([zlib.crc32(repr((path, salt, i)).encode()) / 2**32 for i in range(WIDTH)], np.float32)


def expected(readout: Readout, request: Request) -> tuple[np.ndarray, np.ndarray | None]:
    path, targets = tuple(request.tokens.tolist()), [] if request.targets is None else request.targets.tolist()
    adapter = request.namespace.adapter
    if readout.kind == "mean":
        return mean(path, adapter), None
    if readout.kind == "logprobs":
        first = len(path) - len(targets)
        found = [given(path[: first + t + 1], adapter + str(token)) for t, token in enumerate(targets)]
        return np.array([f[0] for f in found], np.float32), np.array([f[1] > 0.5 for f in found], bool)
    return given(path, adapter + (str(readout.ids) if readout.kind == "logits" else "")), None


def mean(path: tuple[int, ...], adapter: str) -> np.ndarray:
    return np.mean([given(path[: i + 1], adapter) for i in range(len(path))], axis=0, dtype=np.float32)


class HashWorker(Worker):
    """Keeps of each stream the path, as tuples; of a step that does not fit nothing changes."""

    def __init__(self, depth: int, most: int, rng: random.Random):
        self.facts = Facts(depth=depth, max_rows=1 << 20, adapters=ADAPTERS)
        self.most = most  # rows of a step for which there is memory
        self.rng = rng
        self.paths: dict[int, list[tuple[int, ...]]] = {}
        self.adapter: dict[int, int | None] = {}  # that the path of each stream was computed with
        self.in_flight: dict[int, deque[HashTicket]] = {}
        self.steps: list[StreamStep] = []
        self.fails_at: int | None = None  # the step that ends in an error
        self.threads: set[int] = set()

    def prepare(self, message: StreamStep) -> object:
        self.threads.add(threading.get_ident())
        return ("prepared", message)

    def start(self, message: StreamStep, prepared: object = None) -> HashTicket:
        assert prepared is None or prepared[1] is message
        begun = self.in_flight.setdefault(message.stream, deque())
        assert len(begun) < self.facts.depth, "more steps are in flight than the worker takes"
        if len(self.steps) == self.fails_at:
            self.fails_at = None
            raise RuntimeError("the device is gone")
        if len(message.end) - message.path > self.most:
            raise OutOfMemoryError("no more")
        assert not message.path or message.adapter == self.adapter[message.stream]
        self.adapter[message.stream] = message.adapter
        keys, self.paths[message.stream] = run(message, self.paths.get(message.stream, []))
        self.steps.append(message)
        ticket = HashTicket(self, message, keys)
        begun.append(ticket)
        return ticket

    def forget(self, stream: int) -> None:
        self.paths.pop(stream, None)
        self.in_flight.pop(stream, None)


class HashTicket:
    def __init__(self, worker: HashWorker, message: StreamStep, keys: list[tuple[int, ...]]):
        self.worker, self.message, self.keys = worker, message, keys

    def result(self) -> StepResult:
        assert self.worker.in_flight[self.message.stream].popleft() is self, (
            "results are asked for in the order of the steps"
        )
        step, reads = self.message, self.message.read_out
        readout = reads.readout
        adapter = "" if step.adapter is None else ADAPTERS[step.adapter]
        if readout.kind == "mean":
            return StepResult(rows_of([mean(self.keys[key], adapter) for key in reads.rows]))
        stream_rows = step.read_rows if step.fold is None else step.fold.gather[step.read_rows]
        read = [self.keys[step.path + row] for row in stream_rows]
        if readout.kind == "logprobs":
            found = [given(read[r], adapter + str(t)) for r, t in zip(reads.rows, reads.targets.tolist(), strict=True)]
            return StepResult(np.array([f[0] for f in found], np.float32), np.array([f[1] > 0.5 for f in found], bool))
        salt = adapter + (str(readout.ids) if readout.kind == "logits" else "")
        return StepResult(rows_of([given(read[row], salt) for row in reads.rows]))


def rows_of(found: list[np.ndarray]) -> np.ndarray:
    return np.stack(found) if found else np.empty((0, WIDTH), np.float32)


def run(step: StreamStep, path: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The path of every key of a step, and those that stay for the next."""
    assert len(path) >= step.path, "the step goes on with rows that are not there"
    keys = path[: step.path]
    tokens = step.tokens if step.fold is None else step.tokens[step.fold.scatter]
    positions = step.positions if step.fold is None else step.positions[step.fold.scatter]
    assert len(step.end) == len(step.key_positions) == step.path + len(tokens)
    for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
        at = len(keys)
        above = [keys[j] for j in range(at) if step.end[j] > at]
        assert [len(seen) for seen in above] == list(range(1, position + 1)), "a path lacks a row, or has one too many"
        assert all(a == b[: len(a)] for a, b in pairwise(above))
        assert step.key_positions[at] == position
        keys.append((*(above[-1] if above else ()), token))
    arrays = (step.tokens, step.end, step.keep, step.read_out.rows, step.read_out.targets)
    assert not any(value.dtype.hasobject for value in arrays)
    return keys, [keys[j] for j in step.keep]


def random_requests(rng: random.Random, readout: Readout) -> list[Request]:
    found: list[list[int]] = []
    requests = []
    adapters = ["", "", *ADAPTERS] if rng.random() < 0.3 else [""]
    for _ in range(rng.randint(1, 25)):
        stem = rng.choice(found) if found and rng.random() < 0.8 else []
        tokens = stem[: rng.randint(0, len(stem))] + [rng.randrange(4) for _ in range(rng.randint(0, 7))]
        tokens = tokens or [rng.randrange(4)]
        found.append(tokens)
        targets = None
        if readout.kind == "logprobs" and rng.random() < 0.9:
            targets = np.array([rng.randrange(9) for _ in range(rng.randint(1, len(tokens)))], np.int32)
        requests.append(Request(np.array(tokens, np.int32), targets, namespace=Namespace(rng.choice(adapters))))
    return requests


def check(readout: Readout, request: Request, result) -> None:
    values, greedy = expected(readout, request)
    np.testing.assert_allclose(result.values, values, atol=1e-6)
    assert (result.greedy is None) == (greedy is None)
    assert greedy is None or np.array_equal(result.greedy, greedy)


class Run:
    """One run of random requests through an engine, a result at a time."""

    def __init__(self, engine: ModelEngine, rng: random.Random):
        self.engine, self.rng = engine, rng
        self.readout = Readout(rng.choice(KINDS), (1, 2))
        self.requests = random_requests(rng, self.readout)
        self.sharing = rng.choice(["full", "full", "mlp", "off"])
        self.spool = Spool()
        for number, request in enumerate(self.requests):
            self.spool.add(request, str(number).encode())
        self.max_tokens = rng.choice([5, 20, 60, 1 << 20])
        self.left = set(range(len(self.requests)))
        self.told = []
        windows = self.spool.windows(max_tokens=self.max_tokens, share=self.sharing == "full")
        rows = rng.choice([None, 1, 3, 10, 1000])
        self.results = engine.run(
            windows, self.readout, sharing=self.sharing, max_batch_rows=rows, on_step=self.told.append
        )

    def advance(self) -> bool:
        found = next(self.results, None)
        if found is None:
            assert not self.left, "requests without a result"
            self.close()
            return False
        number = int(found[0])
        self.left.remove(number)
        check(self.readout, self.requests[number], found[1])
        return True

    def close(self) -> None:
        self.results.close()
        self.spool.close()


def trace(seed: int) -> None:
    """Runs that come together, are left early or end in an error; afterwards one more, alone."""
    rng = random.Random(seed)
    worker = HashWorker(rng.choice([1, 2]), rng.choice([1, 2, 7, 1000, 1000]), rng)
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=rng.choice([None, 4, 1000])))
    runs = [Run(engine, rng)]
    if rng.random() < 0.5:  # steps of two runs take turns
        runs.append(Run(engine, rng))
    if rng.random() < 0.2:
        worker.fails_at = rng.randint(0, 5)
    while runs:
        current = rng.choice(runs)
        try:
            goes_on = current.advance()
        except RuntimeError as error:
            assert str(error) == "the device is gone"
            goes_on = False
        if goes_on and rng.random() < 0.01:
            current.close()
            goes_on = False
        if not goes_on:
            runs.remove(current)
            current.spool.close()
    engine.call(lambda: None)  # what was asked for before is done
    assert not worker.paths, "a run that has ended leaves no path"
    alone(engine, worker, rng)


def alone(engine: ModelEngine, worker: HashWorker, rng: random.Random) -> None:
    worker.fails_at = None
    before, steps = engine.reset_stats(), len(worker.steps)
    assert before.steps == steps or before.steps < steps  # steps of runs that were left are not counted
    run = Run(engine, rng)
    while run.advance():
        pass
    stats, steps = engine.stats, worker.steps[steps:]
    prompts = [(request.namespace, *request.tokens.tolist()) for request in run.requests]
    # A prompt that comes twice in a row is read twice, and counts once where both reads are in one window.
    once = [prompt for before, prompt in pairwise([(), *prompts]) if prompt != before]
    assert len(once) <= stats.requests <= len(prompts)
    assert sum(len(prompt) - 1 for prompt in once) <= stats.tokens <= sum(len(prompt) - 1 for prompt in prompts)
    if run.max_tokens == 1 << 20:
        assert stats.requests == len(once) and stats.tokens == sum(len(prompt) - 1 for prompt in once)
    assert stats.steps == len(steps) == len(run.told)
    assert stats.rows_computed == sum(step.num_rows for step in steps) == sum(info.rows for info in run.told)
    assert sum(info.requests_done for info in run.told) == stats.requests
    assert sum(info.tokens_done for info in run.told) == stats.tokens
    if run.sharing == "full":
        unique = len({prompt[: i + 1] for prompt in prompts for i in range(1, len(prompt))})
        assert stats.unique_tokens == unique <= stats.rows_computed
        if run.max_tokens == 1 << 20:
            assert stats.rows_computed == unique, "every unique token is computed once, in halves too"
    engine.call(lambda: None)  # what was asked for before is done
    assert not worker.paths and not worker.in_flight
    assert worker.threads.isdisjoint({threading.get_ident()}), "steps are prepared beside the one that runs"


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        try:
            trace(number)
        except BaseException:
            print(f"trace {number}", file=sys.stderr)
            raise
    assert "torch" not in sys.modules, "the engine needs torch"
