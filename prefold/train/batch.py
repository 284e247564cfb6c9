"""Lays sequences to train on out as one step of a row stream, and parts large batches into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.schedule.steps import LAST, Reads, StreamStep, folded
from ..errors import InputError
from ..model import ModelConfig
from ..spec.requests import SHARING_MODES, Sharing
from ..trie import PrefixMap, Trie, check_ragged
from ..trie.ragged import ragged_ranges
from ..worker.torch.rows import Batch, prepare, row_attention_of


@dataclass(frozen=True, eq=False)
class Examples:
    """An Examples holds checked sequences, and which of their tokens are targets: learned from, or read.

    tokens      int32 [N], offsets int64 [B + 1]: sequence s is tokens[offsets[s]:offsets[s + 1]]
    is_target   bool [N]; a target is read at the token before it, so a sequence's first token is none
    """

    tokens: np.ndarray
    offsets: np.ndarray
    is_target: np.ndarray

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        sequences: Sequence[Any],
        *,
        prompt_lengths: Sequence[int] | None = None,
        masks: Sequence[Any] | None = None,
    ) -> Examples:
        """Returns the examples that sequences of token ids make.

        sequences       token ids, each a list, array or tensor
        prompt_lengths  one number for each sequence: the tokens after its first so many are targets
        masks           one truth value for each token of each sequence: whether it is a target

        With neither of them all tokens but the first of each sequence are targets. Raises InputError, naming the
        sequence, where there is nothing to learn from, or a sequence does not fit the model.
        """
        arrays = [np.asarray(tokens) for tokens in sequences]
        if not arrays:
            raise InputError("there are no sequences", field="sequences", remedy="give at least one")
        offsets = np.cumsum([0, *map(len, arrays)])
        flat = np.concatenate([a if len(a) else np.zeros(0, np.int64) for a in arrays])
        tokens, offsets = check_ragged(flat, offsets, vocab_size=config.vocab_size)
        if masks is not None:
            if prompt_lengths is not None:
                raise InputError("both prompt_lengths and masks are given", field="masks", remedy="give one of them")
            is_target = _from_masks(masks, offsets)
        else:
            is_target = _from_lengths([1] * len(arrays) if prompt_lengths is None else prompt_lengths, offsets)
        examples = cls(tokens, offsets, is_target)
        longest = int(np.argmax(examples.num_rows))
        if (rows := int(examples.num_rows[longest])) > config.max_positions:
            raise InputError(
                f"sequence {longest} has {rows} tokens before its last target; the model takes {config.max_positions}",
                field="sequences",
                remedy="shorten it",
                code="too_long",
            )
        return examples

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> np.ndarray:
        """Returns how many tokens of each sequence come before its last target, int64 [B]: only these need rows."""
        rows = np.where(self.is_target, np.arange(len(self.tokens)), 0)
        return np.maximum.reduceat(rows, self.offsets[:-1]) - self.offsets[:-1]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of each sequence before its last target: int32 tokens, int64 offsets [B + 1]."""
        lengths = self.num_rows
        return self.tokens[ragged_ranges(self.offsets[:-1], lengths)], np.concatenate(([0], np.cumsum(lengths)))

    def take(self, numbers: np.ndarray) -> Examples:
        """Returns the sequences with these numbers, in their order."""
        lengths = np.diff(self.offsets)[numbers]
        index = ragged_ranges(self.offsets[:-1][numbers], lengths)
        return Examples(self.tokens[index], np.concatenate(([0], np.cumsum(lengths))), self.is_target[index])


@dataclass(frozen=True, eq=False, repr=False)
class TrainBatch:
    """A TrainBatch is what one forward and backward pass computes: rows, and the targets that are read at them, as
    pairs (row, id).

    sharing         "full": the trie's rows; "mlp": attention over the sequences as they are, all else over the
                    trie's rows; "off": the sequences as they are
    step            the rows, as the engine knows them: one step of the whole stream, nothing carried
    num_tokens      rows of the sequences without sharing
    numbers         int64 [sequences]: the numbers of its sequences among those that were given
    target_offsets  int64 [sequences + 1]: the targets of sequence s are target_offsets[s] .. target_offsets[s + 1],
                    here and in every array of targets, in the order of its tokens
    target_ids      int64 [targets]
    target_reads    int64 [targets]: where in step.read_rows the row is at which each is read
    """

    config: ModelConfig
    sharing: Sharing
    step: StreamStep
    num_tokens: int
    numbers: np.ndarray
    target_offsets: np.ndarray
    target_ids: np.ndarray
    target_reads: np.ndarray
    _prepared: dict[tuple[torch.device, torch.dtype], Batch] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        sequences: Sequence[Any],
        *,
        prompt_lengths: Sequence[int] | None = None,
        masks: Sequence[Any] | None = None,
        sharing: Sharing = "full",
    ) -> TrainBatch:
        """Returns the batch of sequences. The arguments but `sharing`, and the errors, are those of
        `Examples.build`."""
        examples = Examples.build(config, sequences, prompt_lengths=prompt_lengths, masks=masks)
        return cls.lay_out(config, examples, sharing=sharing)

    @classmethod
    def lay_out(
        cls, config: ModelConfig, examples: Examples, *, sharing: Sharing = "full", numbers: np.ndarray | None = None
    ) -> TrainBatch:
        """Returns the batch of examples that have been checked. numbers: their names in the batch, by default 0, 1, 2,
        ..."""
        if sharing not in SHARING_MODES:
            raise InputError(
                f"sharing is {sharing!r}", field="sharing", remedy=f"give one of {', '.join(SHARING_MODES)}"
            )
        tokens, offsets = examples.rows()
        trie = Trie.build(tokens, offsets, share=sharing == "full")
        fold = None if sharing == "off" else PrefixMap.build(tokens, offsets)
        targets = np.flatnonzero(examples.is_target)
        target_offsets = np.searchsorted(targets, examples.offsets)
        # A target is read at the token before it. Sequences lie closer together here than in `examples`, because the
        # tokens after their last targets are left out.
        moved = np.repeat(offsets[:-1] - examples.offsets[:-1], np.diff(target_offsets))
        at = targets - 1 + moved
        step = _step(trie, at if fold is None or sharing == "mlp" else fold.scatter[at])
        if fold is not None and sharing == "mlp":
            step = folded(step, fold)
        return cls(
            config=config,
            sharing=sharing,
            step=step,
            num_tokens=len(tokens),
            numbers=np.arange(examples.num_sequences) if numbers is None else numbers,
            target_offsets=target_offsets,
            target_ids=examples.tokens[targets].astype(np.int64),
            target_reads=step.read_out.rows.astype(np.int64),
        )

    def __repr__(self) -> str:
        counts = f"{self.num_sequences} sequences, {self.num_tokens} tokens, {self.num_targets} targets"
        return f"TrainBatch({counts}, {self.num_rows} rows, sharing={self.sharing!r})"

    @property
    def num_sequences(self) -> int:
        return len(self.numbers)

    @property
    def num_targets(self) -> int:
        return len(self.target_ids)

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the position-wise layers."""
        return self.step.num_rows

    def prepared(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Returns the step as tensors and attention plans, made once for each device and dtype of queries, keys and
        values."""
        if (device, dtype) not in self._prepared:
            attention = row_attention_of(self.config, dtype, device)
            self._prepared[device, dtype] = prepare(self.step, self.config, attention)
        return self._prepared[device, dtype]

    def target_counts(self, device: torch.device) -> Tensor:
        """Returns how many targets each sequence has, int64 [sequences]."""
        return torch.from_numpy(np.diff(self.target_offsets)).to(device)

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` [targets] over each sequence's targets, [sequences]."""
        owner = torch.repeat_interleave(self.target_counts(values.device))
        return values.new_zeros(self.num_sequences).index_add(0, owner, values)

    def means(self, values: Tensor) -> Tensor:
        """Returns the mean of `values` [targets] over each sequence's targets, [sequences]."""
        return self.sums(values) / self.target_counts(values.device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Returns the part of `values` [targets] that belongs to each sequence."""
        return list(values.split(np.diff(self.target_offsets).tolist()))


def dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of queries, keys and values of a model of this dtype: under autocast that of linear layers."""
    autocast = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    return torch.get_autocast_dtype(device.type) if autocast else dtype


def _step(trie: Trie, at: np.ndarray) -> StreamStep:
    """Return all rows of a stream as one step. at: the row at which each target is read"""
    read_rows, reads = np.unique(at, return_inverse=True)
    return StreamStep(
        tokens=trie.tokens,
        positions=trie.positions,
        path=0,
        end=trie.end.copy(),  # a copy, because torch does not take read-only arrays
        key_positions=trie.positions,
        read_rows=read_rows,
        read_out=Reads(LAST, reads),
    )


def _from_lengths(prompt_lengths: Sequence[int], offsets: np.ndarray) -> np.ndarray:
    lengths = np.diff(offsets)
    prompts = np.asarray(prompt_lengths)
    if prompts.shape != lengths.shape:
        raise InputError(
            f"{len(prompts)} prompt lengths for {len(lengths)} sequences",
            field="prompt_lengths",
            remedy="give one for each sequence",
        )
    for s in np.flatnonzero((prompts < 1) | (prompts >= lengths))[:1].tolist():
        raise InputError(
            f"sequence {s} has {lengths[s]} tokens and a prompt of {prompts[s]}: nothing to read or to learn",
            field="prompt_lengths",
            remedy="a prompt has at least one token, and at least one follows it",
        )
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return position >= np.repeat(prompts, lengths)


def _from_masks(masks: Sequence[Any], offsets: np.ndarray) -> np.ndarray:
    lengths = np.diff(offsets)
    if len(masks) != len(lengths):
        raise InputError(
            f"{len(masks)} masks for {len(lengths)} sequences", field="masks", remedy="give one for each sequence"
        )
    parts = [np.asarray(mask).astype(bool) for mask in masks]

    def fail(s: int, message: str, remedy: str) -> None:
        raise InputError(f"sequence {s}{message}", field="masks", remedy=remedy)

    for s, (mask, length) in enumerate(zip(parts, lengths.tolist(), strict=True)):
        if mask.shape != (length,):
            fail(
                s, f" has {length} tokens and a mask of shape {list(mask.shape)}", "give one truth value for each token"
            )
        if mask[0]:
            fail(s, "'s first token is a target", "leave it out, since a target is read at the token before it")
        if not mask.any():
            fail(s, " has no target", "leave it out, or name what is learned from it")
    return np.concatenate(parts)


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
    """Returns batches of at most `max_rows` rows that together have all sequences; their `numbers` say which.

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
    """A _CountedRows knows which rows of the whole stream each sequence has, so that the rows of any set of sequences
    can be counted."""

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
