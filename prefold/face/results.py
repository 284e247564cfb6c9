"""What the methods of LLM give back. Every one of them has `to_dict`, for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..errors import InputError
from ..types import Generated, Jsonable

__all__ = ["Classification", "Piece", "Ranking", "Score"]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking(Jsonable):
    """How well documents answer a query. Its length is that of `order`; iterating it gives (index of a document, its
    score) pairs, the best first.

    scores  float64 [documents]: of each document, in the order given; NaN for one that is in `errors`
    order   indices of the documents, best first, at most `top_n` of them
    errors  {index: what is wrong with that document}, where errors="return" was asked for
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
    """The most probable label, and every label's probability."""

    label: str
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Score(Jsonable):
    """How likely a continuation, or a whole text, is.

    logprob   of all of it (natural logarithm)
    logprobs  float32 [tokens]: of each of its tokens
    greedy    whether every token is the model's first choice
    """

    logprob: float
    logprobs: np.ndarray
    greedy: bool

    def __repr__(self) -> str:
        return f"Score(logprob={self.logprob:.4f}, greedy={self.greedy}, {len(self.logprobs)} tokens)"


@dataclass(frozen=True, slots=True)
class Piece(Jsonable):
    """Some more text of a sample; `done` with its last piece, whose text is empty."""

    sample: int
    text: str
    done: Generated | None = None
