"""Convert training sequences to the rows of one step, and split large batches into micro-batches."""

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
    """Checked sequences of token ids, with a mask of the targets: the tokens whose log-probabilities are computed.

    A target's log-probability is read at the token before it, so the first token of a sequence cannot be a target. Make
    examples with `Examples.build`.

    Attributes:
        tokens: int32 [N], the tokens of all sequences, one after the other.
        offsets: int64 [B + 1]. Sequence s is `tokens[offsets[s]:offsets[s + 1]]`.
        is_target: bool [N], True for targets.
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
        """Check sequences and mark their targets.

        Without `prompt_lengths` and `masks`, all tokens but the first of each sequence are targets.

        Args:
            config: The config of the model.
            sequences: The token ids of each sequence, as a list, array or tensor.
            prompt_lengths: One number per sequence. All tokens of sequence s after the first `prompt_lengths[s]` are
                targets.
            masks: For each sequence one boolean per token, True for targets. Pass either this or `prompt_lengths`.

        Returns:
            The examples.

        Raises:
            InputError: A sequence has no target, is too long for the model, or has a token outside the vocabulary; or
                the arguments do not fit together. The message names the sequence.

        Example:
            >>> examples = Examples.build(model.config, [[5, 8, 2], [5, 9, 7, 2]], prompt_lengths=[1, 1])
            >>> examples.num_sequences
            2
        """
        arrays = [np.asarray(tokens) for tokens in sequences]
        if not arrays:
            raise InputError("there are no sequences", field="sequences", remedy="pass at least one sequence")
        offsets = np.cumsum([0, *map(len, arrays)])
        flat = np.concatenate([a if len(a) else np.zeros(0, np.int64) for a in arrays])
        tokens, offsets = check_ragged(flat, offsets, vocab_size=config.vocab_size)
        if masks is not None:
            if prompt_lengths is not None:
                raise InputError(
                    "both prompt_lengths and masks are given", field="masks", remedy="pass only one of them"
                )
            is_target = _from_masks(masks, offsets)
        else:
            is_target = _from_lengths([1] * len(arrays) if prompt_lengths is None else prompt_lengths, offsets)
        examples = cls(tokens, offsets, is_target)
        longest = int(np.argmax(examples.num_rows))
        if (rows := int(examples.num_rows[longest])) > config.max_positions:
            raise InputError(
                f"sequence {longest} has {rows} tokens before its last target; the maximum is {config.max_positions}",
                field="sequences",
                remedy="shorten the sequence",
                code="too_long",
            )
        return examples

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> np.ndarray:
        """The number of tokens of each sequence before its last target, int64 [B]. Only these tokens become rows."""
        rows = np.where(self.is_target, np.arange(len(self.tokens)), 0)
        return np.maximum.reduceat(rows, self.offsets[:-1]) - self.offsets[:-1]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each sequence before its last target: tokens int32 [n], offsets int64 [B + 1]."""
        lengths = self.num_rows
        return self.tokens[ragged_ranges(self.offsets[:-1], lengths)], np.concatenate(([0], np.cumsum(lengths)))

    def take(self, numbers: np.ndarray) -> Examples:
        """Select sequences.

        Args:
            numbers: int64 [n], the indices of the sequences.

        Returns:
            These sequences, in the order of `numbers`.
        """
        lengths = np.diff(self.offsets)[numbers]
        index = ragged_ranges(self.offsets[:-1][numbers], lengths)
        return Examples(self.tokens[index], np.concatenate(([0], np.cumsum(lengths))), self.is_target[index])


@dataclass(frozen=True, eq=False, repr=False)
class TrainBatch:
    """The input of one forward and backward pass: the rows to compute, and the targets to read at these rows.

    Make batches with `TrainBatch.build` or `micro_batches`. In every array of targets, the targets of sequence s are
    `target_offsets[s]:target_offsets[s + 1]`, in the order of its tokens.

    Attributes:
        config: The config of the model.
        sharing: "full": the rows are the rows of the trie. "mlp": position-wise layers compute the rows of the trie,
            but attention runs over whole sequences. "off": every token of every sequence is a row.
        step: All rows, as one step. Nothing was computed before them.
        num_tokens: The number of rows that `sharing="off"` would compute.
        numbers: int64 [sequences], the index of each sequence in the arguments of `micro_batches` or `build`.
        target_offsets: int64 [sequences + 1], the first target of each sequence, then the number of targets.
        target_ids: int64 [targets], the token id of each target.
        target_reads: int64 [targets], the index in `step.read_rows` of the row at which each target is read.
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
        """Lay sequences out as one batch.

        Args:
            config: The config of the model.
            sequences: The token ids of each sequence, as a list, array or tensor.
            prompt_lengths: As in `Examples.build`.
            masks: As in `Examples.build`.
            sharing: As in `TrainBatch`.

        Returns:
            The batch.

        Raises:
            InputError: As in `Examples.build`, or `sharing` is unknown.

        Example:
            >>> batch = TrainBatch.build(model.config, [prompt + answer for answer in answers],
            ...                          prompt_lengths=[len(prompt)] * len(answers))
            >>> loss = sft_loss(logprobs(model, batch))
        """
        examples = Examples.build(config, sequences, prompt_lengths=prompt_lengths, masks=masks)
        return cls.lay_out(config, examples, sharing=sharing)

    @classmethod
    def lay_out(
        cls, config: ModelConfig, examples: Examples, *, sharing: Sharing = "full", numbers: np.ndarray | None = None
    ) -> TrainBatch:
        """Lay checked examples out as one batch.

        Args:
            config: The config of the model.
            examples: The examples.
            sharing: As in `TrainBatch`.
            numbers: int64 [sequences], the value of `TrainBatch.numbers`. None: 0, 1, 2, ...

        Returns:
            The batch.

        Raises:
            InputError: `sharing` is unknown.
        """
        if sharing not in SHARING_MODES:
            raise InputError(
                f"sharing is {sharing!r}", field="sharing", remedy=f"use one of {', '.join(SHARING_MODES)}"
            )
        tokens, offsets = examples.rows()
        trie = Trie.build(tokens, offsets, share=sharing == "full")
        fold = None if sharing == "off" else PrefixMap.build(tokens, offsets)
        targets = np.flatnonzero(examples.is_target)
        target_offsets = np.searchsorted(targets, examples.offsets)
        # A target is read at the token before it. Sequences start earlier in `tokens` than in `examples.tokens`,
        # because the tokens from each sequence's last target on are left out.
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
        """The number of rows that the position-wise layers compute."""
        return self.step.num_rows

    def prepared(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Return the step as tensors and attention plans. The batch caches them by device and dtype.

        Args:
            device: The device of the model.
            dtype: The dtype of queries, keys and values.

        Returns:
            The prepared step.
        """
        if (device, dtype) not in self._prepared:
            attention = row_attention_of(self.config, dtype, device)
            self._prepared[device, dtype] = prepare(self.step, self.config, attention)
        return self._prepared[device, dtype]

    def target_counts(self, device: torch.device) -> Tensor:
        """Return the number of targets of each sequence, int64 [sequences]."""
        return torch.from_numpy(np.diff(self.target_offsets)).to(device)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [targets] over the targets of each sequence, [sequences]."""
        owner = torch.repeat_interleave(self.target_counts(values.device))
        return values.new_zeros(self.num_sequences).index_add(0, owner, values)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of `values` [targets] over the targets of each sequence, [sequences]."""
        return self.sums(values) / self.target_counts(values.device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return one tensor per sequence: the part of `values` [targets] that belongs to its targets."""
        return list(values.split(np.diff(self.target_offsets).tolist()))


def dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of queries, keys and values: the autocast dtype under autocast, else the model's `dtype`."""
    autocast = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    return torch.get_autocast_dtype(device.type) if autocast else dtype


def _step(trie: Trie, at: np.ndarray) -> StreamStep:
    """Return all rows of a stream as one step. Target i is read at row `at[i]`, int64 [targets]."""
    read_rows, reads = np.unique(at, return_inverse=True)
    return StreamStep(
        tokens=trie.tokens,
        positions=trie.positions,
        path=0,
        end=trie.end.copy(),  # torch does not accept read-only arrays
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
            remedy="pass one per sequence",
        )
    for s in np.flatnonzero((prompts < 1) | (prompts >= lengths))[:1].tolist():
        raise InputError(
            f"sequence {s} has {lengths[s]} tokens and a prompt of {prompts[s]}, so it has no target",
            field="prompt_lengths",
            remedy="a prompt needs at least one token, and at least one token after it",
        )
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return position >= np.repeat(prompts, lengths)


def _from_masks(masks: Sequence[Any], offsets: np.ndarray) -> np.ndarray:
    lengths = np.diff(offsets)
    if len(masks) != len(lengths):
        raise InputError(
            f"{len(masks)} masks for {len(lengths)} sequences", field="masks", remedy="pass one per sequence"
        )
    parts = [np.asarray(mask).astype(bool) for mask in masks]

    def fail(s: int, message: str, remedy: str) -> None:
        raise InputError(f"sequence {s}{message}", field="masks", remedy=remedy)

    for s, (mask, length) in enumerate(zip(parts, lengths.tolist(), strict=True)):
        if mask.shape != (length,):
            fail(s, f" has {length} tokens and a mask of shape {list(mask.shape)}", "pass one boolean per token")
        if mask[0]:
            fail(s, "'s first token is a target", "set it to False, because a target is read at the token before it")
        if not mask.any():
            fail(s, " has no target", "leave the sequence out, or mark a target in its mask")
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
    """Split sequences into batches of at most `max_rows` rows.

    Groups are sorted in the order of the trie, so that groups with a common prefix share its rows in one batch.

    Args:
        config: The config of the model.
        sequences: The token ids of each sequence, as a list, array or tensor.
        max_rows: Maximum number of rows of a batch.
        prompt_lengths: As in `Examples.build`.
        masks: As in `Examples.build`.
        groups: int [sequences], the group of each sequence. All sequences of a group are in the same batch, in their
            order. Groups are DPO pairs, or the completions of a prompt. None: each sequence is a group.
        sharing: As in `TrainBatch`.

    Returns:
        The batches. Their `numbers` are the indices of their sequences.

    Raises:
        InputError: As in `TrainBatch.build`; or a group has more than `max_rows` rows.

    Example:
        >>> batches = micro_batches(model.config, sequences, prompt_lengths=lengths, max_rows=4096)
        >>> count = sum(batch.num_targets for batch in batches)
        >>> loss = accumulate(batches, lambda batch: sft_loss(logprobs(model, batch), count=count))
    """
    examples = Examples.build(config, sequences, prompt_lengths=prompt_lengths, masks=masks)
    numbers = np.arange(examples.num_sequences) if groups is None else np.asarray(groups)
    if numbers.shape != (examples.num_sequences,):
        raise InputError(
            f"{numbers.size} group numbers for {examples.num_sequences} sequences",
            field="groups",
            remedy="pass one per sequence",
        )
    parts = _pack(_members(numbers), _CountedRows(examples, sharing), max_rows)
    return [TrainBatch.lay_out(config, examples.take(part), sharing=sharing, numbers=part) for part in parts]


def accumulate(batches: Iterable[TrainBatch], loss: Callable[[TrainBatch], Tensor]) -> float:
    """Compute the loss and its gradients batch by batch, so that only one batch is in memory. Gradients add up.

    Args:
        batches: The batches, usually from `micro_batches`.
        loss: Returns the loss of a batch, a tensor [] with gradients.

    Returns:
        The sum of the losses.

    Example:
        >>> optimizer.zero_grad()
        >>> total = accumulate(batches, lambda batch: sft_loss(logprobs(model, batch), count=count))
        >>> optimizer.step()
    """
    total = 0.0
    for batch in batches:
        part = loss(batch)
        part.backward()
        total += float(part.detach())
    return total


class _CountedRows:
    """Counts the rows that a batch needs, from the stream of all sequences."""

    def __init__(self, examples: Examples, sharing: Sharing):
        tokens, self.offsets = examples.rows()
        self.of_token = PrefixMap.build(tokens, self.offsets).scatter if sharing != "off" else np.arange(len(tokens))
        self.seen = np.zeros(len(tokens), bool)

    def last(self, sequence: int) -> int:
        return int(self.of_token[self.offsets[sequence + 1] - 1])

    def fresh(self, sequences: np.ndarray) -> np.ndarray:
        """Return the rows of these sequences that `add` has not added since the last `clear`."""
        pieces = [self.of_token[self.offsets[s] : self.offsets[s + 1]] for s in sequences.tolist()]
        rows = np.unique(np.concatenate(pieces))
        return rows[~self.seen[rows]]

    def add(self, rows: np.ndarray) -> None:
        self.seen[rows] = True

    def clear(self) -> None:
        self.seen[:] = False


def _members(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each group's sequences."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _pack(groups: list[np.ndarray], rows: _CountedRows, max_rows: int) -> list[np.ndarray]:
    """Return the indices of each batch's sequences. Groups fill one batch after the other, in stream order."""
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
                f"the group of sequence {group[0]} has {len(fresh)} rows; the maximum is {max_rows}",
                field="max_rows",
                remedy="use a larger max_rows or smaller groups",
            )
        rows.add(fresh)
        used += len(fresh)
        parts[-1].append(group)
    return [np.concatenate(part) for part in parts]
