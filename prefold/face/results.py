"""Defines what the methods of LLM return. Every class has `to_dict`, for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..errors import InputError
from ..types import Generated, Jsonable


@dataclass(frozen=True, slots=True, eq=False)
class Ranking(Jsonable):
    """A ranking says how well documents answer a query.

    Iterating over it gives pairs (index of a document, its score), the best first; its length is that of `order`.

    scores  float64 [documents]: the score of each document, in the order given; NaN for one that is in `errors`
    order   indices of the documents, best first, at most `top_n` of them
    errors  {index: what is wrong with that document}; empty unless errors="return" was asked for
    """

    scores: np.ndarray
    order: list[int]
    errors: dict[int, InputError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return ((index, float(self.scores[index])) for index in self.order)


@dataclass(frozen=True, slots=True)
class Classification(Jsonable):
    """A classification holds the most probable label, and the probability of every label."""

    label: str
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Score(Jsonable):
    """A score says how likely a continuation, or a whole text, is.

    logprob   natural logarithm of the probability of all of it
    logprobs  float32 [tokens]: natural logarithm of the probability of each of its tokens
    greedy    whether every token is the model's first choice
    """

    logprob: float
    logprobs: np.ndarray
    greedy: bool

    def __repr__(self) -> str:
        return f"Score(logprob={self.logprob:.4f}, greedy={self.greedy}, {len(self.logprobs)} tokens)"


@dataclass(frozen=True, slots=True)
class Piece(Jsonable):
    """A piece is some more text of a sample.

    sample  number of the sample, from 0
    text    the text; empty in the last piece of a sample
    done    in the last piece of a sample its result, else None
    """

    sample: int
    text: str
    done: Generated | None = None
