"""Answers of tasks, which methods of LLM return. Every class has `to_dict`, for JSON.

The answer of a task to an item is an `Answer`. Its fields become JSON lines, table columns, HTTP responses, the output
of the command line, and Python results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import isfinite
from typing import Any, ClassVar, Literal

import numpy as np

from ..errors import InputError
from ..spec.requests import Generated, Jsonable

# Prefix for a column whose name comes from an answer's content and is taken already.
PREFIX = "answer_"
# {field with float32 vectors: nesting depth of its lists in an output line}
VECTORS = {"embedding": 1, "embeddings": 2}


class Answer(Jsonable):
    """The answer of a task to an item.

    Attributes:
        num_tokens: tokens of the item's prompts
        numbers: fields with computed values. These are real numbers, even if all of them are whole
        unlisted: fields that only HTTP responses and Python show. Output lines never have them
    """

    __slots__ = ()
    num_tokens: int
    numbers: ClassVar[tuple[str, ...]] = ()
    unlisted: ClassVar[frozenset[str]] = frozenset()

    def line(self) -> dict[str, Any]:
        """Return {name: value} of the fields in an output line. Optional fields that are None are left out."""
        line = {}
        for name, is_optional in _listed(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None or not is_optional:
                line[name] = value.tolist() if isinstance(value, np.ndarray) and name not in VECTORS else value
        return line

    def columns(self, every: bool = False) -> dict[str, object]:
        """Return {column: value} of the answer, for tables that people read.

        Args:
            every: Add a column for the probability of each label or option.

        Returns:
            Values that are a number, a text, true or false, a vector, or None.
        """
        return {name: value for name, value in self.line().items() if name in self.numbers}


@cache
def _listed(kind: type[Answer]) -> list[tuple[str, bool]]:
    """Return (name, whether it has a default) of each field that an output line may have."""
    names = fields(kind)  # type: ignore[arg-type]
    return [(entry.name, entry.default is not MISSING) for entry in names if entry.name not in kind.unlisted]


def all_finite(value: Any) -> bool:
    """Return whether no number in a value is NaN or infinite. For an answer, check its `numbers`."""
    if isinstance(value, Answer):
        for name in value.numbers:
            part = getattr(value, name)
            if part is not None and not all_finite(part):
                return False
        return True
    if isinstance(value, dict):
        return all_finite([*value.values()])
    if isinstance(value, (list, tuple)):
        # A recursive call for every log-probability of a long text would be slow.
        return all(map(isfinite if {*map(type, value)} == {float} else all_finite, value))
    if isinstance(value, (float, np.floating, np.ndarray)):
        return bool(np.isfinite(value).all())
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Embedding(Answer):
    """The vector of a text, float32 [dimensions]."""

    embedding: np.ndarray
    num_tokens: int = 0
    image_notes: list[str] | None = None

    numbers: ClassVar = ("embedding",)

    @property
    def vectors(self) -> np.ndarray:
        """Return the vector as the only row of a matrix."""
        return self.embedding[None]


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingList(Answer):
    """The vectors of a list of texts, float32 [texts, dimensions]."""

    embeddings: np.ndarray
    num_tokens: int = 0
    image_notes: list[str] | None = None

    numbers: ClassVar = ("embeddings",)

    @property
    def vectors(self) -> np.ndarray:
        """Return the vectors, one row for each text."""
        return self.embeddings


@dataclass(frozen=True, slots=True)
class Relevance(Answer):
    """The score of one document for a query."""

    score: float
    num_tokens: int = 0
    image_notes: list[str] | None = None
    cached_tokens: int | None = None  # prompt tokens found in the KV store; None: unknown

    numbers: ClassVar = ("score",)
    unlisted: ClassVar = frozenset({"cached_tokens"})


@dataclass(frozen=True, slots=True, eq=False)
class Ranking(Answer):
    """The scores of documents for a query, and their order.

    Iteration yields pairs (index of a document, its score), the best first. The length is the length of `order`.

    Attributes:
        scores: Score of each document in the given order, float64 [documents]; NaN for a document in `errors`.
        order: Indices of the documents, the best first, at most `top_n`.
        errors: {index: why the document has no score}; empty unless errors="return".
        num_tokens: Tokens of all prompts.
        documents: The documents in the order of `order`, if they were asked for; else None.
        image_notes: Notes on images, for example that only the first frame was used; None: no notes.
        cached_tokens: Prompt tokens found in the KV store; None: unknown.

    Example:
        ranking = llm.rerank("what causes tides", documents)
        best = documents[ranking.order[0]]
    """

    scores: np.ndarray
    order: list[int]
    errors: dict[int, InputError] = field(default_factory=dict)
    num_tokens: int = 0
    documents: list[Any] | None = None
    image_notes: list[str] | None = None
    cached_tokens: int | None = None

    numbers: ClassVar = ("scores",)
    unlisted: ClassVar = frozenset({"errors", "cached_tokens"})

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return ((index, float(self.scores[index])) for index in self.order)


@dataclass(frozen=True, slots=True)
class Classification(Answer):
    """The most probable label of a text, and the probability of every label.

    Attributes:
        label: The most probable label.
        probabilities: {label: probability}. They sum to 1, except for multi-label and regression heads.
        logprobs: {label: its log-likelihood}; None with a classification head.
        logits: {label: the head's logit}; None without a classification head.
        num_tokens: Tokens of all prompts.
        image_notes: Notes on images, for example that only the first frame was used; None: no notes.

    Example:
        found = llm.classify("I want my money back", ["complaint", "praise"])
        print(found.label, found.probabilities[found.label])
    """

    label: str
    probabilities: dict[str, float]
    logprobs: dict[str, float] | None = None
    logits: dict[str, float] | None = None
    num_tokens: int = 0
    image_notes: list[str] | None = None

    numbers: ClassVar = ("probabilities", "logprobs", "logits")

    def columns(self, every: bool = False, prefix: str = "p_") -> dict[str, object]:
        """Return the columns of the answer: `label`, and its probability `p`.

        Args:
            every: Add a column {prefix}{label} for the probability of each label.
            prefix: The prefix of these columns.
        """
        own: dict[str, object] = {"label": self.label, "p": self.probabilities.get(self.label, 0.0)}
        return own | {prefix + label: p for label, p in self.probabilities.items() if every}


@dataclass(frozen=True, slots=True, eq=False)
class Score(Answer):
    """The log-probability of a continuation, or of a whole text.

    Attributes:
        logprob: Natural logarithm of the probability of all tokens together.
        logprobs: Natural logarithm of the probability of each token, float32 [tokens].
        greedy: Every token is the model's most likely choice.
        num_tokens: Number of tokens scored.
        image_notes: Notes on images, for example that only the first frame was used; None: no notes.

    Example:
        one = llm.score("The capital of France is", " Paris")
        print(one.logprob, one.greedy)
    """

    logprob: float
    logprobs: np.ndarray
    greedy: bool
    num_tokens: int = 0
    image_notes: list[str] | None = None

    numbers: ClassVar = ("logprob", "logprobs")

    def columns(self, every: bool = False) -> dict[str, object]:
        return {"logprob": self.logprob, "greedy": self.greedy}

    def __repr__(self) -> str:
        return f"Score(logprob={self.logprob:.4f}, greedy={self.greedy}, {len(self.logprobs)} tokens)"


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class TextScore(Score):
    """The score of a whole text."""

    num_bytes: int | None  # size of the text in UTF-8; None for token ids


Token = dict[str, Any]  # "id", "logprob", "top"; with a tokenizer also "token" and "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Answer):
    """One generated text of an item.

    Attributes:
        text: None without a tokenizer
        tokens: the ids, if they were asked for or there is no text
        reasoning_tokens: number of reasoning tokens, if it was asked for
        stop: the stop string or token id that ended the text
        logprobs: an entry for each token, if they were asked for
    """

    text: str | None = None
    tokens: list[int] | None = None
    reasoning_tokens: int | None = None
    finish_reason: Literal["stop", "length", "cancelled"]
    stop: str | int | None = None
    logprobs: list[Token] | None = None

    numbers: ClassVar = ("logprobs",)
    unlisted: ClassVar = frozenset({"reasoning_tokens"})

    def columns(self, every: bool = False) -> dict[str, object]:
        own: dict[str, object] = {"tokens": self.tokens} if self.text is None else {"text": self.text}
        return {**own, "finish_reason": self.finish_reason}


@dataclass(frozen=True, slots=True)
class Generation(Answer):
    """The generated texts of an item. In an output line, the fields of a single choice stand beside the other fields.

    Attributes:
        num_generated: tokens of all choices
        cached_tokens: prompt tokens that were not computed for this item
        approximate_tokens: prompt tokens whose K/V was computed at other positions and copied; None: none
        prompt_ids: token ids of the prompt, if they were asked for
        thinks: whether the prompt ends with <think>; None: the model does not think, or it was not asked for
        prompt: an entry with a "rank" for each prompt token, if they were asked for
    """

    choices: tuple[Choice, ...]
    num_tokens: int = 0
    num_generated: int = 0
    cached_tokens: int = 0
    approximate_tokens: int | None = None
    image_notes: list[str] | None = None
    prompt_ids: list[int] | None = None
    thinks: bool | None = None
    prompt: list[Token] | None = None

    numbers: ClassVar = ("choices", "prompt")
    unlisted: ClassVar = frozenset({"prompt_ids", "thinks", "prompt"})

    def line(self) -> dict[str, Any]:
        line = Answer.line(self)
        choices = line.pop("choices")
        return (choices[0].line() if len(choices) == 1 else {"choices": [one.line() for one in choices]}) | line

    def columns(self, every: bool = False) -> dict[str, object]:
        own = [choice.columns() for choice in self.choices]
        return {**(own[0] if len(own) == 1 else {"choices": own}), "num_generated": self.num_generated}


@dataclass(frozen=True, slots=True)
class DecisionAnswer(Jsonable):
    """The answer to one question about a state.

    Attributes:
        type: "noul" (yes or no), "choice" or "score".
        value: For a noul, whether it is true. For a choice, the most likely option. For a score, the mean level, from
            0.
        probabilities: {option: probability}. For a noul {"true": p, "false": 1 - p}; for a score by level "0", "1", ...
        confidence: From 0 (all options are equally likely) to 1, as transformers defines it for choices and scores.
        label_mass: Probability of all labels over the whole vocabulary; None: a decision head was read.
        argmax_is_label: Whether the most likely token is one of the labels; None: a decision head was read.
        legend: For a score, {level: its text}.
        review: Whether the probability of the most likely option is below the threshold; None: there is no threshold.
    """

    type: Literal["noul", "choice", "score"]
    value: bool | str | float
    probabilities: dict[Any, float]
    confidence: float
    label_mass: float | None = None
    argmax_is_label: bool | None = None
    legend: dict[str, Any] | None = None
    review: bool | None = None

    def to_dict(self) -> dict[str, object]:
        """Return {name of a field: its JSON value}, without fields that are None.

        If both the text "true" and the boolean true are options, `probabilities` is a list of {"value": ...,
        "probability": ...}.
        """
        of: Any = {
            str(option).lower() if isinstance(option, bool) else option: p for option, p in self.probabilities.items()
        }
        if len(of) < len(self.probabilities):
            of = [{"value": option, "probability": p} for option, p in self.probabilities.items()]
        whole = {name: getattr(self, name) for name in self.__dataclass_fields__} | {"probabilities": of}
        return {name: value for name, value in whole.items() if value is not None}

    def beside(self, name: str, every: bool) -> dict[str, float | bool]:
        """Return the columns beside the answer's value (see `Decision.columns`).

        Args:
            name: The name of the question.
            every: Add the columns that exist only with scores="all".
        """
        own: dict[str, float | bool] = {}
        if self.type != "score":
            own[f"{name}_p"] = max(self.probabilities.values())
        if self.type == "score" or every:
            own[f"{name}_confidence"] = self.confidence
        if self.review is not None:
            own[f"{name}_review"] = self.review
        if every:
            of: Any = self.to_dict()["probabilities"]
            pairs = of.items() if isinstance(of, dict) else ((str(p["value"]), p["probability"]) for p in of)
            own |= {f"{name}_p_{option}": p for option, p in pairs}
            own |= {} if self.label_mass is None else {f"{name}_label_mass": self.label_mass}
        return own


@dataclass(frozen=True, slots=True)
class Decision(Answer, Mapping[str, DecisionAnswer]):
    """The answers to the questions about one state, as a mapping from the name of a question to its DecisionAnswer.

    The key of a question that failed raises the question's InputError.

    Attributes:
        answers: {name of a question: its answer}, in the order of the questions.
        errors: {name of a question that failed: its InputError}.
        num_tokens: Tokens of all prompts.
        image_notes: Notes on images, for example that only the first frame was used; None: no notes.
        cached_tokens: Prompt tokens found in the KV store; None: unknown.

    Example:
        decision = llm.decide("I was charged twice.", {"refund": {"type": "noul", "instructions": "A refund?"}})
        print(decision["refund"].value, decision["refund"].probabilities["true"])
    """

    answers: dict[str, DecisionAnswer]
    errors: dict[str, InputError] = field(default_factory=dict)
    num_tokens: int = 0
    image_notes: list[str] | None = None
    cached_tokens: int | None = None

    numbers: ClassVar = ("probabilities",)
    unlisted: ClassVar = frozenset({"errors", "cached_tokens"})

    @property
    def probabilities(self) -> list[dict[Any, float]]:
        """Return the probabilities of each answer."""
        return [answer.probabilities for answer in self.answers.values()]

    def __getitem__(self, name: str) -> DecisionAnswer:
        if name in self.errors:
            raise self.errors[name]
        return self.answers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def line(self) -> dict[str, Any]:
        own: dict[str, Any] = {name: answer.to_dict() for name, answer in self.answers.items()}
        own |= {name: {"error": error.to_dict()} for name, error in self.errors.items()}
        return {**Answer.line(self), "answers": own}

    def columns(self, every: bool = False) -> dict[str, object]:
        """Return the columns of each question, for tables that people read.

        A question whose name equals the name of one of these columns is called answer_NAME.

        Args:
            every: Also return the columns that are marked with (every).

        Returns:
            For each question NAME:

            - NAME: the value
            - NAME_p: the probability of the value; not for a score
            - NAME_confidence: the confidence; for a score, else (every)
            - NAME_review: whether the answer is doubtful, if there is a threshold
            - NAME_p_OPTION: (every) the probability of each option
            - NAME_label_mass: (every) the probability of all labels, if labels were read
        """
        beside = {name: answer.beside(name, every) for name, answer in self.answers.items()}
        taken = {column for columns in beside.values() for column in columns}
        own: dict[str, object] = {}
        for name, answer in self.answers.items():
            own[f"{PREFIX}{name}" if name in taken else name] = answer.value
            own |= beside[name]
        return own


# {task: classes of its answers}. A Choice is part of a Generation.
ANSWERS: dict[str, tuple[type[Answer], ...]] = {
    "embed": (Embedding, EmbeddingList),
    "rerank": (Relevance, Ranking),
    "classify": (Classification,),
    "score": (Score, TextScore),
    "generate": (Choice, Generation),
    "decide": (Decision,),
}


def names_in_lines(task: str) -> set[str]:
    """Return the names of all fields that a task's answers may have in an output line."""
    return {name for kind in ANSWERS[task] for name, _ in _listed(kind)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Piece(Jsonable):
    """The next piece of a sample's text, as `LLM.stream` yields it.

    Attributes:
        sample: Number of the sample, from 0.
        text: The new text; empty in the last piece of a sample.
        done: The sample's result in its last piece, else None.

    Example:
        for piece in llm.stream("Once upon a time", max_tokens=10):
            print(piece.text, end="")
    """

    sample: int
    text: str
    done: Generated | None = None
