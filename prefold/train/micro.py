"""Divides a batch into parts that fit: groups of sequences stay together, and gradients add up to those of the
whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import InputError
from ..model import ModelConfig
from ..prefix import PrefixMap
from ..types import Sharing
from .batch import Examples, TrainBatch


def micro_batches(
    config: ModelConfig,
    sequences: Sequence[Any],
    *,
    max_rows: int,
    prompt_lengths: Sequence[int] | None = None,
    masks: Sequence[Any] | None = None,
    groups: Sequence[int] | None = None,
    sharing: Sharing = "full",
) -> list[TrainBatch]:
    """Returns the sequences in batches of at most `max_rows` rows each; a batch's `numbers` say which it has.

    groups  a number for each sequence: those with the same number come into the same batch, in their order (the two
            of a DPO pair, the completions of a prompt). By default each sequence is a group

    Groups that begin alike lie side by side, so that batches share what they can. Other arguments, and errors, are
    those of `TrainBatch.build`. Raises InputError also for a group of more than `max_rows` rows.
    """
    examples = Examples.build(config, sequences, prompt_lengths=prompt_lengths, masks=masks)
    numbers = np.arange(examples.num_sequences) if groups is None else np.asarray(groups)
    if numbers.shape != (examples.num_sequences,):
        raise InputError(
            f"{numbers.size} group numbers for {examples.num_sequences} sequences",
            field="groups",
            remedy="give one for each sequence",
        )
    parts = _pack(_members(numbers), _CountedRows(examples, sharing), max_rows)
    return [TrainBatch.lay_out(config, examples.take(part), sharing=sharing, numbers=part) for part in parts]


def accumulate(batches: Iterable[TrainBatch], loss: Callable[[TrainBatch], Tensor]) -> float:
    """Returns the sum of the batches' losses; the backward pass of each is run before the next one begins."""
    total = 0.0
    for batch in batches:
        part = loss(batch)
        part.backward()
        total += float(part.detach())
    return total


class _CountedRows:
    """Says which rows of the whole each sequence has, so that the rows of any set of sequences can be counted."""

    def __init__(self, examples: Examples, sharing: Sharing):
        tokens, self.offsets = examples.rows()
        self.of_token = PrefixMap.build(tokens, self.offsets).scatter if sharing != "off" else np.arange(len(tokens))
        self.seen = np.zeros(len(tokens), bool)

    def last(self, sequence: int) -> int:
        return int(self.of_token[self.offsets[sequence + 1] - 1])

    def fresh(self, sequences: np.ndarray) -> np.ndarray:
        """Returns the rows of these sequences that were not yet given to `add`."""
        pieces = [self.of_token[self.offsets[s] : self.offsets[s + 1]] for s in sequences.tolist()]
        rows = np.unique(np.concatenate(pieces))
        return rows[~self.seen[rows]]

    def add(self, rows: np.ndarray) -> None:
        self.seen[rows] = True

    def clear(self) -> None:
        self.seen[:] = False


def _members(numbers: np.ndarray) -> list[np.ndarray]:
    """Returns the sequences of each group."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _pack(groups: list[np.ndarray], rows: _CountedRows, max_rows: int) -> list[np.ndarray]:
    """Returns the sequences of each batch: groups, in the order of the stream, fill one batch after the other."""
    parts: list[list[np.ndarray]] = []
    used = 0
    for group in sorted(groups, key=lambda g: min(map(rows.last, g.tolist()))):
        fresh = rows.fresh(group)
        if not parts or used + len(fresh) > max_rows:
            rows.clear()
            fresh, used = rows.fresh(group), 0
            parts.append([])
        if len(fresh) > max_rows:
            raise InputError(
                f"the group of sequence {group[0]} has {len(fresh)} rows; a batch may have {max_rows}",
                field="max_rows",
                remedy="give a larger max_rows, or make the groups smaller",
            )
        rows.add(fresh)
        used += len(fresh)
        parts[-1].append(group)
    return [np.concatenate(part) for part in parts]
