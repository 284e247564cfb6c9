"""A worker that only notes which images it is to encode, and a desk and an engine over it."""

from __future__ import annotations

import numpy as np
from generating import AtOnce

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.meter import Meter
from prefold.engine.schedule.steps import SlotResult, SlotStep
from prefold.engine.worker import Facts, Worker
from prefold.features.images.config import TowerConfig
from prefold.features.images.scheduler import ImageScheduler
from prefold.features.images.steps import DropImages, EncodedImage, EncodeImage, ImageFacts
from prefold.features.images.table import MediaTable
from prefold.trie import MEDIA_BASE

# Of one row a patch: six pieces of work, in the two stages of three layers.
TOWER = TowerConfig("gemma3", 4, 3, 1, 4, image_size=8, patch_size=4, merge=1, output=5)
PIECES, ROWS = 6, 4


class Noting(Worker):
    """Has the rows that it was told to make, and complains of a step with others."""

    facts = Facts(vocab_size=8, max_positions=200, span_rows=ROWS, features=(ImageFacts(TOWER, 10),))

    def __init__(self) -> None:
        self.done: dict[int, int] = {}  # pieces of images
        self.made: dict[int, np.ndarray] = {}
        self.told: list[tuple[int, int]] = []
        self.fails: set[int] = set()
        self.takes = lambda pieces: None
        self.steps: list[SlotStep] = []

    def start(self, message, prepared=None):
        if isinstance(message, EncodeImage):
            return Ticket(self.encode(message))
        if isinstance(message, DropImages):
            for first in message.firsts:
                assert first in self.done or first in self.made
                self.done.pop(first, None)
                self.made.pop(first, None)
        if isinstance(message, SlotStep):
            there = {i for ids in self.made.values() for i in ids.tolist()}
            assert {i for i in message.tokens.tolist() if i >= MEDIA_BASE} <= there
            self.steps.append(message)
            return Ticket(SlotResult(np.ones(len(message.reads), np.int64)))
        return Ticket(None)

    def encode(self, message: EncodeImage) -> EncodedImage:
        first = int(message.ids[0])
        assert (message.tiles is not None) == (first not in self.done)
        assert self.done.get(first, 0) < message.stop <= PIECES
        self.told.append((first, message.stop - self.done.get(first, 0)))
        self.takes(self.told[-1][1])
        self.done[first] = message.stop
        if message.stop < PIECES:
            return EncodedImage(False)
        del self.done[first]
        self.made[first] = message.ids
        return EncodedImage(True, "made up" if first in self.fails else None)


class Ticket:
    def __init__(self, result):
        self.result = lambda: result


def desk_of(memory: int = 1000) -> tuple[ImageScheduler, Noting, MediaTable, Meter]:
    worker, table, meter = Noting(), MediaTable(), Meter()
    desk = ImageScheduler(worker, table, memory, meter)
    desk.pool = AtOnce()
    return desk, worker, table, meter


def finish(desk: ImageScheduler):
    """Runs the tower for all that is wanted, or until it fails."""
    for _ in range(4 * PIECES):
        failed = desk.advance(100.0)
        if failed is not None:
            return failed
    return None


def take(table: MediaTable, key: str, salt: str = "", load=lambda: np.zeros((1, 3, 2, 2), np.float32)):
    return table.medium(key.encode(), tiles=1, rows_per_tile=ROWS, span=True, load=load, salt=salt)


def engine_of(worker: Noting) -> ModelEngine:
    generation = GenerateOptions(kv_memory=100)
    return ModelEngine(worker, EngineOptions(max_batch_rows=20, generation=generation))
