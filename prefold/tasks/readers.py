"""Readers of decisions: which rows of a prompt are read, and how the numbers become scores of a question's options.

A model without a decision head is read at the labels of the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import InputError
from ..spec.plugins import load_plugins
from ..spec.requests import Readout
from ..text.decisions import DecisionEncoder, DecisionSettings
from .questions import KINDS, Question, field_of

T = TypeVar("T")


class Reader:
    """A reader of the scores of a question's options from rows of its prompt.

    Attributes:
        readout: what is read of a row
        settings: how the model is asked
        max_length: the most tokens of a prompt that the head was made for; None: as many as the model takes
    """

    readout: Readout
    settings: DecisionSettings
    max_length: int | None = None

    def check(self, question: Question) -> object:
        """Raise InputError if the options of a question cannot be read."""

    def marks(self, question: Question) -> int:
        """Return how many rows are read for a question: its prompt has as many marks."""
        return 1

    def scores(self, question: Question, values: Sequence[np.ndarray]) -> tuple[np.ndarray, float | None, bool | None]:
        """Return (the score of each option, in the order of the prompt, float64 [options]; the probability of all
        labels over the vocabulary; whether the most likely token is a label). None: there are no labels.

        values: float64, what the read-out gave before each mark
        """
        raise NotImplementedError

    def places(self, marks: Sequence[int], size: int) -> Sequence[int]:
        """Return how many tokens of a prompt stand before each read: by default before each mark.

        size: tokens of the prompt
        """
        return marks

    def note(self, ids: np.ndarray, marks: Sequence[int]) -> object:
        """Return what `all_scores` has to know of a prompt, as JSON; None: nothing."""
        return None

    def all_scores(
        self, questions: Sequence[Question], values: Sequence[np.ndarray], note: Any
    ) -> Sequence[tuple[np.ndarray, float | None, bool | None]]:
        """Return `scores` of all questions of a prompt. values: at all of its places; note: as of `note`"""
        rows = iter(values)
        return [self.scores(question, list(islice(rows, self.marks(question)))) for question in questions]


# {an architecture, or the name of a file beside the weights: makes the reader of a checkpoint, or None if the file
# belongs to another reader}
Table = Mapping[str, Callable[[Checkpoint], T | None]]

# The Readers of decision heads. Features enter their heads here.
HEADS: dict[str, Callable[[Checkpoint], Reader | None]] = {}


def head_of(checkpoint: Checkpoint) -> Reader | None:
    """Return the Reader of a model's decision head; None if the model has none, and is asked for labels."""
    return entry_of(checkpoint, HEADS)


def entry_of(checkpoint: Checkpoint, table: Table[T]) -> T | None:
    """Return what a table makes for a checkpoint, by its architecture first; None if the table has nothing for it."""
    entries = (table[name](checkpoint) for name in names_of(checkpoint, table))
    return next((entry for entry in entries if entry is not None), None)


def names_of(checkpoint: Checkpoint, table: Table[T]) -> list[str]:
    """Return the entries of a table that may be a checkpoint's, its architecture first.

    A model without weights here, such as one on a server, has no files.
    """
    load_plugins()
    names = checkpoint.config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    names = [name for name in table if name == architecture or name in files_of(checkpoint, table)]
    if checkpoint.format == "dummy":
        names = [name for name in names if name == architecture]
    return sorted(names, key=lambda name: name != architecture)


def files_of(checkpoint: Checkpoint, table: Table[T]) -> list[str]:
    """Return the files that a checkpoint has among those in a table."""
    return [name for name in table if checkpoint.file(name) is not None]


class LabelReader(Reader):
    """A LabelReader reads the logits of the options' labels, one token each."""

    def __init__(self, settings: DecisionSettings, encoder: DecisionEncoder, questions: Sequence[Question]):
        """questions: the task's questions, whose labels are read; empty: all labels are read"""
        self.settings = settings
        self._ids_of = cache(self._find_ids)
        every = [label for kind in KINDS for label in settings.labels_of(kind)]
        used = [label for one in questions for label in settings.labels_of(one.kind)[: len(one.options)]]
        ids = {label: encoder.label_id(label) for label in dict.fromkeys(used or every)}
        self._label_ids = {label: id for label, id in ids.items() if id is not None}
        columns = dict.fromkeys(self._label_ids.values())
        self._column = {id: place for place, id in enumerate(columns)}
        self.readout = Readout("logits", tuple(columns), sums=True)

    def check(self, question: Question) -> list[int]:
        """Return the ids of a question's labels. Raise InputError if the model does not have as many, each a token."""
        labels, count = self.settings.labels_of(question.kind), len(question.options)
        if len(labels) < count:
            raise too_many_options(question, len(labels))
        ids = self._ids_of(tuple(labels[:count]))
        if ids is None:
            used = ", ".join(map(repr, labels[:count]))
            message = f"the labels {used} of the question {question.name!r} are not distinct single tokens here"
            remedy = "give other labels in decision.json beside the weights (with --url: name the model's --tokenizer)"
            raise InputError(message, field=field_of(question.name), remedy=remedy)
        return ids

    def _find_ids(self, labels: tuple[str, ...]) -> list[int] | None:
        ids = [self._label_ids.get(label) for label in labels]
        return None if None in ids or len({*ids}) < len(ids) else ids  # type: ignore[return-value]

    def scores(self, question: Question, values: Sequence[np.ndarray]) -> tuple[np.ndarray, float, bool]:
        labels, (read,) = self.check(question), values
        scores = read[[self._column[id] for id in labels]]
        return scores, min(1.0, float(np.exp(scores - read[-2]).sum())), int(read[-1]) in labels


def too_many_options(question: Question, most: int) -> InputError:
    """Return the error of a question with more options than the model reads."""
    message = f"the question {question.name!r} has {len(question.options)} options"
    remedy = f"give at most {most}, as many as the model reads for a {question.kind} question"
    return InputError(message, field=field_of(question.name), remedy=remedy, code="out_of_range")
