"""Defines what tasks answer and what the methods of LLM return. Every class has `to_dict`, for JSON.

A task's answer to an item is an `Answer`. Lines of JSON, columns of tables, bodies of HTTP responses, the command line
and Python read its fields.
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

# Put before the name of a column that is made of an answer's content, if the name is taken.
PREFIX = "answer_"
# Fields that are vectors of float32 numbers: in a line they are lists, nested so many deep.
VECTORS = {"embedding": 1, "embeddings": 2}


class Answer(Jsonable):
    """A task's answer to an item.

    Attributes:
        num_tokens: tokens of the item's prompts
        numbers: the fields that hold what the model computed. They are real numbers, even if all of them are whole
        unlisted: the fields that output lines never have: only HTTP responses or Python show them
    """

    __slots__ = ()
    num_tokens: int
    numbers: ClassVar[tuple[str, ...]] = ()
    unlisted: ClassVar[frozenset[str]] = frozenset()

    def line(self) -> dict[str, Any]:
        """Return {name: value} of the fields in an output line, without optional fields that are None."""
        line = {}
        for name, is_optional in _listed(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None or not is_optional:
                line[name] = value.tolist() if isinstance(value, np.ndarray) and name not in VECTORS else value
        return line

    def columns(self, every: bool = False) -> dict[str, object]:
        """Return {column: value} of the answer in a table that people read. A value is a number, a text, true or false,
        a vector, or None. every: whether the probability of each label or option has a column of its own"""
        return {name: value for name, value in self.line().items() if name in self.numbers}


@cache
def _listed(kind: type[Answer]) -> list[tuple[str, bool]]:
    """Return (name, whether it has a default) of each field that an output line may have."""
    names = fields(kind)  # type: ignore[arg-type]
    return [(entry.name, entry.default is not MISSING) for entry in names if entry.name not in kind.unlisted]


def all_finite(value: Any) -> bool:
    """Return whether no number in a value is NaN or infinite. An answer is checked by its `numbers`."""
    if isinstance(value, Answer):
        for name in value.numbers:
            part = getattr(value, name)
            if part is not None and not all_finite(part):
                return False
        return True
    if isinstance(value, dict):
        return all_finite([*value.values()])
    if isinstance(value, (list, tuple)):
        # One call for each log-probability of a long text would take long.
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
        """Return the vectors, a row for each text."""
        return self.embeddings


@dataclass(frozen=True, slots=True)
class Relevance(Answer):
    """How well one document answers a query."""

    score: float
    num_tokens: int = 0
    image_notes: list[str] | None = None
    cached_tokens: int | None = None  # tokens of the prompt that were in the KV store; None: unknown

    numbers: ClassVar = ("score",)
    unlisted: ClassVar = frozenset({"cached_tokens"})


@dataclass(frozen=True, slots=True, eq=False)
class Ranking(Answer):
    """A ranking says how well documents answer a query.

    Iterating over it gives pairs (index of a document, its score), the best first; its length is the length of `order`.

    scores      float64 [documents]: the score of each document, in the order given; NaN for one that is in `errors`
    order       indices of the documents, best first, at most `top_n` of them
    errors      {index: what is wrong with that document}; empty unless errors="return" was asked for
    num_tokens  tokens of all prompts
    documents   the documents in that order, if they were asked for
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
    """A classification holds the most probable label, and the probability of every label.

    logprobs    {label: its log-likelihood}; None for a classification head
    logits      {label: the head's logit}; None without a classification head
    num_tokens  tokens of all prompts
    """

    label: str
    probabilities: dict[str, float]
    logprobs: dict[str, float] | None = None
    logits: dict[str, float] | None = None
    num_tokens: int = 0
    image_notes: list[str] | None = None

    numbers: ClassVar = ("probabilities", "logprobs", "logits")

    def columns(self, every: bool = False, prefix: str = "p_") -> dict[str, object]:
        """Return the label, its probability `p`, and with `every` the probability of each label, {prefix}{label}."""
        own: dict[str, object] = {"label": self.label, "p": self.probabilities.get(self.label, 0.0)}
        return own | {prefix + label: p for label, p in self.probabilities.items() if every}


@dataclass(frozen=True, slots=True, eq=False)
class Score(Answer):
    """A score says how likely a continuation, or a whole text, is.

    logprob     natural logarithm of the probability of all of it
    logprobs    float32 [tokens]: natural logarithm of the probability of each of its tokens
    greedy      whether every token is the model's first choice
    num_tokens  tokens scored
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
    """The score of a whole text. num_bytes: of the text in UTF-8; None for token ids"""

    num_bytes: int | None


Token = dict[str, Any]  # "id", "logprob", "top", with a tokenizer "token"; "bytes" of a part of a letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Answer):
    """One generated text of an item.

    Attributes:
        text: None without a tokenizer
        tokens: the ids, if they were asked for or there is no text
        reasoning_tokens: how many tokens are reasoning, if that was asked for
        stop: the text or id that ended it
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
    """What was generated for an item. A line has the fields of a single choice beside the others.

    Attributes:
        num_generated: tokens of all choices
        cached_tokens: tokens of the prompt that were not computed for it
        approximate_tokens: tokens of the prompt whose K/V was computed at other positions and copied; None: none
        prompt_ids: the prompt's tokens, if they were asked for
        thinks: whether the prompt ends with <think>; None: the model does not think, or that was not asked for
        prompt: an entry for each token of the prompt, with its "rank", if they were asked for
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
        type: "noul" (yes or no), "choice" or "score"
        value: of a noul whether it is true; of a choice the most likely option; of a score the mean level, from 0
        probabilities: {option: probability}; of a noul {"true": p, "false": 1 - p}, of a score by level "0", "1", ...
        confidence: from 0 (all options are equally likely) to 1, as transformers defines it for choices and scores
        label_mass: probability of all labels over the whole vocabulary; None: a head was read
        argmax_is_label: whether the most likely token is one of the labels; None: a head was read
        legend: of a score {level: its text}
        review: whether the probability of the most likely option is below the threshold; None: there is no threshold
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
        """Return {name of a field: its value as JSON has it}, without fields that are None.

        If an option is the text "true" and another the boolean true, `probabilities` is a list of {"value": ...,
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
        """Return the columns beside the answer's value; see `columns` of Decision. name: of the question"""
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
    """The answers to the questions about one state: a mapping from a question's name to its DecisionAnswer.

    Attributes:
        answers: {name of a question: its answer}, in the order of the questions
        errors: {name of a question that cannot be answered: why}
        num_tokens: tokens of all prompts
        cached_tokens: tokens of the prompts that were in the KV store; None: unknown
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
        """Return a column NAME with the value of each question, and NAME_p, the probability of this value (score:
        NAME_confidence), and NAME_review, whether the answer is doubtful, if there is a threshold. With `every` there
        are also the probability of each option, NAME_p_OPTION, NAME_confidence and NAME_label_mass. A question with the
        name of one of these columns is called answer_NAME.
        """
        beside = {name: answer.beside(name, every) for name, answer in self.answers.items()}
        taken = {column for columns in beside.values() for column in columns}
        own: dict[str, object] = {}
        for name, answer in self.answers.items():
            own[f"{PREFIX}{name}" if name in taken else name] = answer.value
            own |= beside[name]
        return own


# {task: the classes of its answers}; a Choice is part of a Generation
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
    """A piece is some more text of a sample.

    sample  number of the sample, from 0
    text    the text; empty in the last piece of a sample
    done    in the last piece of a sample its result, else None
    """

    sample: int
    text: str
    done: Generated | None = None
