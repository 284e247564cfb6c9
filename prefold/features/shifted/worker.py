"""Copies of K/V to other positions in PyTorch. Keys are rotated by the angles between the positions; values stay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...engine.worker import DONE, Ticket
from ...worker.parts import WorkerPart
from ...worker.torch.attention.store import KVStore
from ...worker.torch.device import send
from ...worker.torch.model import CausalLM
from ...worker.torch.worker import TorchWorker
from .chunks import MoveRows, ShiftedFacts


def shifted_part(model: CausalLM) -> WorkerPart:
    """Return the worker part that moves rows."""
    return WorkerPart({MoveRows: _move}, ShiftedFacts(model.config.fixed))


def _move(worker: TorchWorker, message: MoveRows) -> Ticket:
    assert worker.store is not None
    move_rows(worker.model, worker.store, message)
    return DONE


def move_rows(model: CausalLM, store: KVStore, message: MoveRows) -> None:
    """Copy the K/V of slots to other slots, for rows at other positions, in all planes of this rank."""
    sources, slots = (send(array, store.device) for array in (message.sources, message.slots))
    positions = send(np.concatenate((message.positions, message.new_positions)), store.device)
    angles: dict[int, Tensor] = {}  # planes with the same settings have the same table
    for plane, table in enumerate(model.cos_sin(positions)):
        if id(table) not in angles:
            angles[id(table)] = between(*table.chunk(2))
        k, v = store.read(plane, sources)
        store.write(plane, slots, turn(k, angles[id(table)]), v)


def between(before: Tensor, after: Tensor) -> Tensor:
    """Return cosines and sines of the angles between two positions of each row, float32 [rows, dim].

    The tables are those by which keys are rotated, so they include the rounding of large angles. A factor on cosines
    and sines (as in YaRN) cancels out, because the keys already have it.

    Args:
        before: cosines and sines of the old positions, [rows, dim]
        after: cosines and sines of the new positions, [rows, dim]
    """
    (cos, sin), (new_cos, new_sin) = before.chunk(2, -1), after.chunk(2, -1)
    size = cos * cos + sin * sin
    return torch.cat(((new_cos * cos + new_sin * sin) / size, (new_sin * cos - new_cos * sin) / size), -1)


def turn(k: Tensor, cos_sin: Tensor) -> Tensor:
    """Return keys [rows, heads, dim], rotated in float32 by the angles of `between`, in their own dtype."""
    cos, sin = cos_sin[:, None, :].chunk(2, -1)
    a, b = k.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(k.dtype)
