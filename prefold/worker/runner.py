"""The runner: one forward pass, and its read-outs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..device import on, send
from ..model import CausalLM
from ..model.ops import log_sum_exp
from ..types import Readout
from .attend import Path, StepAttend, join
from .batch import Batch

__all__ = ["Output", "Runner", "head_blocks"]

# Rows of the LM head computed at once: bounds the logits to 256 x vocabulary float32 numbers.
HEAD_ROWS = 256


def head_blocks(rows: int) -> Iterator[slice]:
    """The rows whose logits are wanted, as many at a time as may be."""
    for first in range(0, rows, HEAD_ROWS):
        yield slice(first, min(rows, first + HEAD_ROWS))


@dataclass(frozen=True, slots=True)
class Output:
    """What a step read out. values: [done sequences, ...], or one log-probability a pair with `greedy`."""

    values: np.ndarray
    greedy: np.ndarray | None = None


class Reads:
    """What a step reads out, on its way from the device; `output` waits for it.

    values, greedy  as of Output, or what they are rows of
    rows            which rows of the values; None: all
    """

    def __init__(self, values: Tensor, greedy: Tensor | None = None, rows: np.ndarray | None = None):
        self._values, self._greedy, self._rows = _fetch(values), None if greedy is None else _fetch(greedy), rows
        self._done = torch.cuda.Event() if values.is_cuda else None
        if self._done is not None:
            self._done.record()

    def output(self) -> Output:
        if self._done is not None:
            self._done.synchronize()
        values = self._values.numpy()
        return Output(
            values if self._rows is None else values[self._rows],
            None if self._greedy is None else self._greedy.numpy(),
        )


def _fetch(tensor: Tensor) -> Tensor:
    """The tensor on the host, or soon to be there."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Runner:
    """Runs steps. Holds the model and nothing else: the path is an argument and a return value."""

    def __init__(self, model: CausalLM):
        self.model = model

    def run(self, batch: Batch, path: Path, readout: Readout, targets: np.ndarray) -> tuple[Output, Path]:
        """targets: the window's target ids. Returns what was read and the path above the next step."""
        reads, path = self.start(batch, path, readout, targets)
        return reads.output(), path

    def start(self, batch: Batch, path: Path, readout: Readout, targets: np.ndarray) -> tuple[Reads, Path]:
        """`run`, without waiting for the device: the next step may be started before this one's output is asked for."""
        with on(self.model.device), torch.inference_mode():
            return self._start(batch, path, readout, targets)

    def _start(self, batch: Batch, path: Path, readout: Readout, targets: np.ndarray) -> tuple[Reads, Path]:
        config = self.model.config
        attend = StepAttend(batch, path, config.planes, config.scale)
        hidden = self.model(batch.tokens, batch.positions, attend, batch.read_rows)
        if readout.kind == "mean":
            values, kept = mean_pool(hidden, batch, path)
            return Reads(values), attend.next_path(kept)
        if readout.kind == "logprobs":
            return self._logprobs(hidden, batch, targets), attend.next_path()
        if readout.kind == "logits":
            values = self.model.logits(hidden, readout.ids)
        elif readout.kind == "head":
            values = self.model.head(hidden)
        else:
            values = hidden.float()
        return Reads(values, rows=batch.step.done_reads), attend.next_path()

    @torch.inference_mode()
    def follow(self, batch: Batch, path: Path, readout: Readout) -> Path:
        """What `run` needs of a rank other than 0: its share of the step, and of the logits that are read."""
        config = self.model.config
        attend = StepAttend(batch, path, config.planes, config.scale)
        hidden = self.model(batch.tokens, batch.positions, attend, batch.read_rows)
        if readout.kind == "logprobs":
            for rows in head_blocks(len(hidden)):
                self.model.logits(hidden[rows])
        elif readout.kind == "logits":
            self.model.logits(hidden, readout.ids)
        return attend.next_path()

    def _logprobs(self, hidden: Tensor, batch: Batch, targets: np.ndarray) -> Reads:
        """log softmax at each pair's row and target; a row's log-sum-exp is computed once for all its pairs."""
        step = batch.step
        reads, ids = send(step.pair_reads, hidden.device), send(targets[step.pair_targets], hidden.device)
        values = torch.empty(len(ids), dtype=torch.float32, device=hidden.device)
        greedy = torch.empty(len(ids), dtype=torch.bool, device=hidden.device)
        for block in head_blocks(len(hidden)):
            logits = self.model.logits(hidden[block])
            pairs = slice(*np.searchsorted(step.pair_reads, (block.start, block.stop)).tolist())
            rows, wanted = reads[pairs] - block.start, ids[pairs]
            sums, largest = log_sum_exp(logits)
            values[pairs] = logits[rows, wanted] - sums[rows]
            greedy[pairs] = largest[rows] == wanted
        return Reads(values, greedy)


def mean_pool(hidden: Tensor, batch: Batch, path: Path) -> tuple[Tensor, Tensor]:
    """Mean over each done sequence's rows, and the hidden states of the next path.

    The sum over a sequence is the sum over the keys its last row sees. A key adds its hidden state
    to every row from itself to its end, so all sums are one running sum of differences; in float64,
    where adding and later subtracting loses nothing that float32 would show.
    """
    step = batch.step
    new = hidden.float() if batch.scatter is None else hidden.float().index_select(0, batch.scatter)
    keys = new if path.hidden is None else torch.cat((path.hidden, new))
    if len(step.done):
        end = send(step.end, hidden.device)
        sums = torch.zeros(len(keys) + 1, keys.shape[1], dtype=torch.float64, device=hidden.device)
        sums[:-1] = keys
        sums.index_add_(0, end, -keys.double())
        done = send(step.done_reads, hidden.device)
        lengths = send(step.key_positions[step.done_reads] + 1, hidden.device)
        means = (sums.cumsum(0)[done] / lengths[:, None]).float()
    else:
        means = keys.new_empty(0, keys.shape[1])
    return means, join(path.hidden, new, batch)
