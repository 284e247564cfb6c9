"""Copies of K/V to other positions in the native executor. Keys are rotated by the angles between the positions."""

from __future__ import annotations

import numpy as np

from ...engine.worker import DONE, Ticket
from ...worker.native.model import NativeModel
from ...worker.native.worker import NativeWorker
from ...worker.parts import WorkerPart
from .chunks import MoveRows, ShiftedFacts


def shifted_part(model: NativeModel) -> WorkerPart:
    """Return the worker part that moves rows."""
    return WorkerPart({MoveRows: _move}, ShiftedFacts(model.config.fixed))


def _move(worker: NativeWorker, message: MoveRows) -> Ticket:
    """Copy the K/V of slots to other slots, for rows at other positions, in all planes."""
    store, angles = worker.store, worker.model.angles
    assert store is not None and angles is not None
    last = int(max(message.positions.max(initial=0), message.new_positions.max(initial=0)))
    tables = angles.covering(last + 1)
    turns = [between(table[message.positions], table[message.new_positions]) for table in tables]
    for number, plane in enumerate(store.planes):
        keys, values = plane.read(message.sources.astype(np.int64))
        store.write(number, message.slots, turn(keys, turns[angles.table_of[number]]), values)
    return DONE


def between(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return cosines and sines of the angles between two positions of each row, float32 [rows, dim].

    The tables are those by which keys are rotated, so they include the rounding of large angles. A factor on cosines
    and sines (as in YaRN) cancels out, because the keys already have it.

    Args:
        before: cosines and sines of the old positions, [rows, dim]
        after: cosines and sines of the new positions, [rows, dim]
    """
    half = before.shape[1] // 2
    (cos, sin), (new_cos, new_sin) = np.split(before, [half], 1), np.split(after, [half], 1)
    size = cos * cos + sin * sin
    return np.concatenate(((new_cos * cos + new_sin * sin) / size, (new_sin * cos - new_cos * sin) / size), 1)


def turn(keys: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Return keys [rows, heads, dim], rotated in float32 by the angles of `between`, in their own dtype."""
    half = cos_sin.shape[1] // 2
    cos, sin = np.split(cos_sin[:, None, :], [half], 2)
    a, b = np.split(keys.astype(np.float32), [half], 2)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), 2).astype(keys.dtype)
