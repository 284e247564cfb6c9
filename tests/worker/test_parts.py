"""What features add to a worker: messages, facts, rows in place of embeddings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny import tiny_checkpoint

from prefold.checkpoint import resolve
from prefold.engine.schedule.steps import Message, StreamStep
from prefold.engine.worker import CompletedTicket, Facts
from prefold.model import MediaRows
from prefold.spec.plugins import load_plugins
from prefold.trie import MEDIA_BASE
from prefold.worker import parts as protocol
from prefold.worker.parts import WorkerPart, add_part
from prefold.worker.torch.load import load_model
from prefold.worker.torch.worker import TorchWorker


@dataclass(frozen=True, slots=True)
class Count(Message):
    most: int


@dataclass(frozen=True, slots=True)
class Counting:
    layers: int


@pytest.fixture
def model(tmp_path):
    checkpoint = resolve(str(tiny_checkpoint(tmp_path, "llama", tokenizer=False)))
    return load_model(checkpoint, dtype=torch.float32, device="cpu")


def test_a_feature_adds_messages_facts_and_rows(model, keep):
    load_plugins()  # into the table itself
    keep(protocol.MAKERS)
    values = torch.full((1, model.config.hidden), 0.5)

    def media(tokens):
        at = np.flatnonzero(tokens >= MEDIA_BASE)
        return MediaRows(torch.from_numpy(at), values.expand(len(at), -1)) if len(at) else None

    def count(worker, message):
        return CompletedTicket(min(message.most, len(worker.model.layers)))

    @add_part
    def part(model, checkpoint, seed):
        return WorkerPart({Count: count}, Counting(len(model.layers)), media)

    worker = TorchWorker(model)
    assert worker.start(Count(100)).result() == len(model.layers)
    assert worker.start(Count(1)).result() == 1
    assert worker.facts.of(Counting) == Counting(len(model.layers))
    assert Facts().of(Counting) is None

    tokens = np.array([5, MEDIA_BASE + 3, 7], np.int32)
    rows = np.arange(3)
    step = StreamStep(tokens, rows.astype(np.int32), 0, np.full(3, 3), rows.astype(np.int32), read_rows=rows)
    found = worker.start(step).result().values
    with torch.inference_mode():
        embedded = model.embedding.clone()
    model.embedding = torch.nn.Parameter(embedded.index_copy(0, torch.tensor([9]), values))
    plain = StreamStep(np.array([5, 9, 7], np.int32), *(getattr(step, name) for name in step.__slots__[1:]))
    np.testing.assert_allclose(found, TorchWorker(model).start(plain).result().values, atol=1e-6)


def test_a_message_of_no_part_is_an_error(model):
    worker = TorchWorker(model)
    with pytest.raises(TypeError, match="Count is no message to this worker"):
        worker.start(Count(1))
    assert worker.facts.of(Counting) is None


def test_rooms_are_attached_without_torch():
    code = "import sys; from prefold.spec.plugins import load_plugins; load_plugins(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys; from prefold.checkpoint import resolve; sys.exit('prefold.features.looped' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
