"""One forward pass over rows of a stream, and its read-out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..model import CausalLM, MediaRows
from ..model.ops import log_sum_exp
from ..schedule.steps import StepResult
from .attend import Path, StepAttend, join
from .batch import Batch
from .pool import mean_of_paths

# Rows of the LM head computed at once: bounds the logits to 256 x vocabulary float32 numbers.
HEAD_ROWS = 256
# Rows of logits that are copied at once, where ranks are counted.
RANKED_ROWS = 32


def head_blocks(rows: int) -> Iterator[slice]:
    """Yields slices of the rows whose logits are wanted, as many rows at a time as may be."""
    for first in range(0, rows, HEAD_ROWS):
        yield slice(first, min(rows, first + HEAD_ROWS))


class Reads:
    """A ticket of a step has what it read, on its way from the device.

    values, greedy  as of StepResult
    """

    def __init__(self, values: Tensor, greedy: Tensor | None = None):
        self._values, self._greedy = _fetch(values), None if greedy is None else _fetch(greedy)
        self._done = torch.cuda.Event() if values.is_cuda else None
        if self._done is not None:
            self._done.record()

    def result(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        return StepResult(self._values.numpy(), None if self._greedy is None else self._greedy.numpy())


def _fetch(tensor: Tensor) -> Tensor:
    """Returns the tensor on the host, or soon to be there."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def run(
    model: CausalLM,
    batch: Batch,
    path: Path,
    media: MediaRows | None = None,
) -> tuple[Reads, Path]:
    """Runs the forward pass of a step, and returns its read-out, not waited for, and the path above the next step.

    On a rank other than 0 what is read of the whole vocabulary is empty.
    """
    config, readout = model.config, batch.step.readout
    attend = StepAttend(batch, path, config.planes, config.scale)
    how = model.arguments(batch.step)
    if media is not None:
        how["media"] = media
    hidden = model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters, **how)
    if readout.kind == "mean":
        values, kept = mean_pool(hidden, batch, path)
        return Reads(values), attend.next_path(kept)
    if readout.kind == "logprobs":
        found = logprobs_of(model, hidden, batch.step.reads, batch.reads, batch.targets, readout.top)
        return Reads(*found), attend.next_path()
    if readout.kind == "logits":
        values = model.logits(hidden, readout.ids)
    elif readout.kind == "head":
        values = model.head(hidden)
    else:
        values = hidden.float()
    return Reads(values), attend.next_path()


def logprobs_of(
    model: CausalLM, hidden: Tensor, places: np.ndarray, reads: Tensor, ids: Tensor, top: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each of `ids`, and whether it is the most likely id of its row; a row's
    log-sum-exp is computed once for all its targets. On a rank other than 0 they are no numbers.

    places  int64 [n], ascending: the row of `hidden` of each
    reads   the same on the device
    top     as of Readout
    """
    columns = () if top is None else (2 + 2 * top,)
    values = torch.empty((len(ids), *columns), dtype=torch.float32, device=hidden.device)
    greedy = torch.empty(len(ids), dtype=torch.bool, device=hidden.device)
    for block in head_blocks(len(hidden)):
        logits = model.logits(hidden[block])
        if model.ranks.rank:
            continue
        some = slice(*np.searchsorted(places, (block.start, block.stop)).tolist())
        values[some], greedy[some] = log_probs(logits, reads[some] - block.start, ids[some], top)
    return values, greedy


def log_probs(logits: Tensor, rows: Tensor, ids: Tensor, top: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each of `ids` in its row of logits float32 [r, vocab], and whether it is the most
    likely id of that row. rows, ids: int64 [n]; top: as of Readout."""
    sums, largest = log_sum_exp(logits)
    found = logits[rows, ids]
    values = found - sums[rows]
    if top is not None:
        few = zip(rows.split(RANKED_ROWS), found.split(RANKED_ROWS), strict=True)
        ranks = 1 + torch.cat([(logits[some] > own[:, None]).sum(-1) for some, own in few])
        best, places = logits.topk(top, -1)
        # A float32 holds every id below 2**24 exactly.
        columns = (values[:, None], ranks[:, None], (best - sums[:, None])[rows], places[rows])
        values = torch.cat([column.float() for column in columns], -1)
    return values, largest[rows] == ids


def mean_pool(hidden: Tensor, batch: Batch, path: Path) -> tuple[Tensor, Tensor]:
    """Returns the mean over the path down to each key in `reads`, and the hidden states of the next path."""
    new = hidden.float() if batch.scatter is None else hidden.float().index_select(0, batch.scatter)
    keys = new if path.hidden is None else torch.cat((path.hidden, new))
    means = keys.new_empty(0, keys.shape[1]) if batch.pool is None else mean_of_paths(keys, batch.pool)
    return means, join(path.hidden, new, batch)
