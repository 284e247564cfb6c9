"""Readers of decisions: which rows of a prompt are read, and how their values become scores of a question's options.

If a model has no decision head, the logits of the options' labels are read.
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
        readout: the Readout of the rows
        settings: how the prompt is written
        max_length: maximum tokens of a prompt that the head was made for; None: the model's limit
    """

    readout: Readout
    settings: DecisionSettings
    max_length: int | None = None

    def check(self, question: Question) -> object:
        """Raise InputError if the options of a question cannot be read."""

    def marks(self, question: Question) -> int:
        """Return how many rows are read for a question. Its prompt has this many marks."""
        return 1

    def scores(self, question: Question, values: Sequence[np.ndarray]) -> tuple[np.ndarray, float | None, bool | None]:
        """Return (score of each option, probability of all labels, whether the most likely token is a label).

        The scores have the order of the prompt, float64 [options]. The probability is over the whole vocabulary. The
        last two are None if there are no labels.

        Args:
            values: the values that were read before each mark, float64
        """
        raise NotImplementedError

    def places(self, marks: Sequence[int], size: int) -> Sequence[int]:
        """Return the number of tokens before each read (default: before each mark).

        Args:
            size: tokens of the prompt
        """
        return marks

    def note(self, ids: np.ndarray, marks: Sequence[int]) -> object:
        """Return a JSON value that `all_scores` needs for this prompt, or None."""
        return None

    def all_scores(
        self, questions: Sequence[Question], values: Sequence[np.ndarray], note: Any
    ) -> Sequence[tuple[np.ndarray, float | None, bool | None]]:
        """Return `scores` of all questions of a prompt.

        Args:
            values: the values that were read from the prompt, in order
            note: the result of `note` for the prompt
        """
        rows = iter(values)
        return [self.scores(question, list(islice(rows, self.marks(question)))) for question in questions]


# {architecture, or name of a file beside the weights: function that makes the reader of a checkpoint, or None if the
# file belongs to another reader}
Table = Mapping[str, Callable[[Checkpoint], T | None]]

# The Readers of decision heads. Features register their heads here.
HEADS: dict[str, Callable[[Checkpoint], Reader | None]] = {}


def head_of(checkpoint: Checkpoint) -> Reader | None:
    """Return the Reader of a model's decision head, or None if the model has no head and labels are read."""
    return entry_of(checkpoint, HEADS)


def entry_of(checkpoint: Checkpoint, table: Table[T]) -> T | None:
    """Return the object that a function of a table makes for a checkpoint, or None. Its architecture comes first."""
    entries = (table[name](checkpoint) for name in names_of(checkpoint, table))
    return next((entry for entry in entries if entry is not None), None)


def names_of(checkpoint: Checkpoint, table: Table[T]) -> list[str]:
    """Return the keys of a table that match a checkpoint, its architecture first.

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
    """Return the files of a checkpoint that are keys of a table."""
    return [name for name in table if checkpoint.file(name) is not None]


class LabelReader(Reader):
    """A reader of the logits of the options' labels, one token each.

    Args:
        questions: the task's questions, whose labels are read; empty: read all labels
    """

    def __init__(self, settings: DecisionSettings, encoder: DecisionEncoder, questions: Sequence[Question]):
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
        """Return the ids of a question's labels.

        Raise InputError if the model has too few labels, or if the labels are not distinct single tokens.
        """
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
    """Return the error of a question with more options than the model can read."""
    message = f"the question {question.name!r} has {len(question.options)} options"
    remedy = f"give at most {most}, as many as the model reads for a {question.kind} question"
    return InputError(message, field=field_of(question.name), remedy=remedy, code="out_of_range")
