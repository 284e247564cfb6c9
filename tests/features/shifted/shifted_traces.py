"""Random traces of requests whose chunks are reused at other positions, and a store that knows who may see what."""

from __future__ import annotations

import random

import numpy as np
from books import check_books
from traces import CheckedStore, next_token

from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.cache.events import CacheReporter
from prefold.engine.schedule.generate_step import GenerateStep
from prefold.features.shifted.options import ShiftedReuse
from prefold.features.shifted.scheduler import RowMove, ShiftingScheduler
from prefold.trie import MEDIA_BASE, SPAN_BASE

IMAGES = [list(range(SPAN_BASE + 10 * i, SPAN_BASE + 10 * i + 3)) for i in range(2)]
IMAGES += [list(range(MEDIA_BASE + 10 * i, MEDIA_BASE + 10 * i + 2)) for i in range(2)]
# What prompts are put together of, so that they have much in common at other places.
TEXTS = [[10 * i + k % 7 for k in range(6 + i)] for i in range(1, 6)]


class ShiftedStore(CheckedStore):
    """A store that knows which rows were copied, or see one that was, and for whom: nobody else may see them."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: dict[int, object] = {}  # by slot: the request that it was copied or computed for

    def seen_behind(self, tokens: list[int], query: int) -> int:
        return next((ids[-1] - tokens[query] for ids in IMAGES if tokens[query] in ids and ids[0] >= SPAN_BASE), 0)

    def move(self, moved: RowMove, prompt: list[int], namespace: tuple) -> None:
        message = moved.message
        read = {}
        for source, old, new in zip(message.sources, message.positions, message.new_positions, strict=True):
            where, path = self.content[int(source)]
            assert self.owner.get(int(source)) is None, "a copy of a copy"
            assert where == namespace, "rows of another namespace"
            assert len(path) - 1 == old, "not the position that the row was computed at"
            assert path[-1] == prompt[new] < MEDIA_BASE
            before = [t for t in path if t >= MEDIA_BASE]
            assert before == [t for t in prompt[:new] if t >= MEDIA_BASE], "rows that had other images before them"
            read[int(new)] = path
        assert len(set(message.slots.tolist())) == len(message.slots)
        for slot, new in zip(message.slots.tolist(), message.new_positions.tolist(), strict=True):
            self.content[slot] = (namespace, tuple(prompt[: new + 1]))
            self.owner[slot] = moved.key

    def run(self, step: GenerateStep, given: list[int]) -> None:
        super().run(step, given)
        message, seen_by = step.message, {}
        self.owner.update(dict.fromkeys(message.slots.tolist()))
        for query, slot in enumerate(message.slots.tolist()):
            seen = [
                start + i
                for start, count, first, last in zip(
                    message.run_start, message.run_count, message.run_first, message.run_last, strict=True
                )
                if first <= query < last
                for i in range(count)
            ]
            owners = {self.owner[int(s)] for s in seen if self.owner.get(int(s)) is not None and s != slot}
            assert len(owners) <= 1, "rows that see what was copied for two requests"
            self.owner[slot] = next(iter(owners), None)
            seen_by[query] = self.owner[slot]
        for number, sequence in enumerate(step.consumers):
            owner = seen_by[int(message.read_rows[message.reads[number]])]
            assert owner in (None, sequence.key), "a token that was read from what was copied for another"


class Trace:
    """A scheduler in tiny memory with all that may happen to it."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.shifted = ShiftedReuse(
            min_tokens=rng.choice([4, 5, 6]),
            recompute=rng.choice([0, 1, 3]),
            max_matches=rng.choice([1, 9]),
            min_share=rng.choice([0.0, 0.0, 0.5]),
            window=rng.choice([12, 100]),
        )
        self.scheduler = ShiftingScheduler(
            # Room for the longest request beside the longest prompt that is pinned.
            SlotPool(rng.randint(112, 140)),
            max_batch_rows=rng.randint(4, 12),
            max_running=rng.randint(1, 8),
            cache=CacheOptions(min_overlap=rng.choice([0, 4]), shifted=self.shifted),
            holds_rows=lambda ids: np.ones(len(ids), bool),
        )
        self.reporter = CacheReporter(self.scheduler.tree)
        self.store = ShiftedStore()
        self.prompts: dict[int, tuple[list[int], tuple]] = {}
        self.moved: dict[int, int] = {}
        self.ended: dict[tuple[int, int], list[int]] = {}
        self.limits: dict[int, tuple[int, int]] = {}
        self.cancelled: set[int] = set()
        self.pinned: tuple[tuple, np.ndarray] | None = None

    def submit(self) -> None:
        rng = self.rng
        parts = [rng.choice(IMAGES) if rng.random() < 0.15 else rng.choice(TEXTS) for _ in range(rng.randint(1, 4))]
        prompt = [t for part in parts for t in part] + [rng.randrange(9)]
        if self.prompts and rng.random() < 0.2:
            prompt = rng.choice(list(self.prompts.values()))[0]
        key, samples, limit = len(self.prompts), rng.randint(1, 2), rng.choice([1, 4, 20])
        namespace = (None, rng.choice(["", "", "another"]))
        self.prompts[key], self.limits[key] = (prompt, namespace), (samples, limit)
        self.scheduler.submit(
            key, np.array(prompt, np.int32), limit=limit, samples=samples, namespace=namespace,
            reserve=rng.random() < 0.5, shifts=rng.random() < 0.8,
        )  # fmt: skip

    def step(self) -> bool:
        for _, error in self.scheduler.admit():
            raise error
        for moved in self.scheduler.moves:
            assert moved.key not in self.moved, "rows were copied twice"
            self.moved[moved.key] = len(moved)
            self.store.move(moved, *self.prompts[moved.key])
        self.scheduler.moves.clear()
        self.check()
        step = self.scheduler.plan()
        if step is None:
            return False
        self.store.run(step, [])
        self.scheduler.begin(step)
        self.check()
        tokens = [next_token(path, s.sample) for s, path in zip(step.consumers, self.store.paths, strict=True)]
        for done in self.scheduler.commit(step, tokens, [False] * len(tokens)):
            self.ended[done.key, done.sample] = list(done.tokens)
        self.check()
        return True

    def check(self) -> None:
        check_books(self.scheduler)
        apart = self.scheduler.apart
        for node in self.scheduler.tree.nodes():
            assert node not in apart
            for slot in node.slots[: node.num_computed].tolist():
                assert self.store.owner.get(slot) is None, "a row in the trie that is no exact one"

    def anything(self) -> None:
        kind = self.rng.random()
        if kind < 0.15:
            self.submit()
        elif kind < 0.17 and self.prompts:
            key = self.rng.randrange(len(self.prompts))
            self.cancelled.add(key)
            self.scheduler.cancel(key)
        elif kind < 0.2:
            self.scheduler.cache.evict(self.rng.randint(1, 30))
        elif kind < 0.22 and self.prompts:
            if self.pinned is None:
                prompt, namespace = self.prompts[self.rng.randrange(len(self.prompts))]
                self.pinned = namespace, np.array(prompt, np.int32)
                self.scheduler.cache.pin(*self.pinned)
            else:
                self.scheduler.cache.unpin(*self.pinned)
                self.pinned = None
        elif kind < 0.24:
            self.reporter.drain()
        else:
            self.step()
        self.check()
