"""Typed questions of decisions, and the answers made from the probabilities of their options.

Two APIs name the same three kinds. System One writes {name: question} with the types noul, choice and score, and
`criteria`. OpenAI writes a list of questions with the types predicate, choice and score, and `choices` or `levels`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..errors import InputError
from ..text.valid import plain_json
from .results import DecisionAnswer

Kind = Literal["noul", "choice", "score"]
KINDS: tuple[Kind, ...] = ("noul", "choice", "score")
MOST_OPTIONS = 255
Option = str | bool
_FIELDS = {"noul": ("instructions", "criteria"), "choice": ("instructions", "criteria", "choices"),
           "score": ("instructions", "criteria", "levels")}  # fmt: skip
_PLACE = re.compile(r"questions\[\d+\]")
_LOOKS = {
    "noul": '{"type": "noul", "instructions": "Is a refund requested?"}',
    "choice": '{"type": "choice", "instructions": "Which tone?", "criteria": {"calm": null, "angry": "insults"}}',
    "score": '{"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "this week", "today"]}',
}


@dataclass(frozen=True)
class Question:
    """A typed question. Its options have the order of the prompt.

    Attributes:
        name: the name of its answer
        kind: "noul" (yes or no; OpenAI: predicate), "choice" or "score"
        instructions: a text or a JSON value
        options: the values of a choice, the levels "0", "1", ... of a score, or "true" and "false"
        descriptions: a text, a JSON value or None for each option; for a score, the texts of the levels
    """

    name: str
    kind: Kind
    instructions: Any
    options: tuple[Option, ...]
    descriptions: tuple[Any, ...]

    @property
    def words(self) -> list[str]:
        """Return the options as the prompt writes them."""
        return [option if isinstance(option, str) else str(option).lower() for option in self.options]

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that a prompt writes about the question."""
        parts = [self.kind, self.instructions, self.options, self.descriptions]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def place_of(self, value: object, field: str) -> int:
        """Return the index of a true answer among the options. Raise InputError for a value that is no true answer.

        Args:
            value: For a noul: true or false, yes or no, 1 or 0. For a choice: an option. For a score: the number of a
                level from 0, or its text (only the text if the texts are numbers). Numbers may be given as text.
            field: The name of the column that holds the value, for errors.
        """
        word, places = _word(value), self._places
        place = places.get(word.lower() if self.kind == "noul" else word) if word is not None else None
        if self.kind == "choice":  # true and "true" can be two different options
            same = [i for i, one in enumerate(self.options) if type(one) is type(value) and one == value]
            place = same[0] if same else place
        if place is None:
            message = f"{field!r} is {value!r:.100}, which is not an option of the question {self.name!r}"
            remedy = f"give one of {', '.join(places)}"
            if len(remedy) > 1000:
                remedy = f"{remedy[:1000]}, ..."
            raise InputError(message, field=field, remedy=remedy, code="out_of_range")
        return place

    @cached_property
    def _places(self) -> dict[str, int]:
        """Return {true answer, as text: index of its option}."""
        if self.kind == "noul":
            return {"true": 0, "false": 1, "yes": 0, "no": 1, "1": 0, "0": 1}
        words, places = self.words, {}
        if self.kind == "score":
            texts = [text if isinstance(text, str) else "" for text in self.descriptions]
            are_numbers = any(text.strip().lstrip("+-").replace(".", "", 1).isdigit() for text in texts)
            places = {} if are_numbers else {word: i for i, word in enumerate(words)}
            words = [text or str(i) for i, text in enumerate(texts)] if not are_numbers else texts
        # A text that two options share is ambiguous, so it names neither.
        return places | {word: i for i, word in enumerate(words) if words.count(word) == 1}

    def note(self) -> list[object]:
        """Return a JSON list from which `from_note` restores what an answer needs of the question."""
        return [self.name, self.kind, list(self.options), list(self.descriptions) if self.kind == "score" else []]

    @classmethod
    def from_note(cls, note: Sequence[Any]) -> Question:
        name, kind, options, descriptions = note
        return cls(name, kind, None, tuple(options), tuple(descriptions))

    def answer(
        self, probabilities: np.ndarray, label_mass: float | None, argmax_is_label: bool | None
    ) -> DecisionAnswer:
        """Return the answer to the question.

        Args:
            probabilities: Probability of each option, float64 [options]. They sum to 1.
            label_mass: Probability of all labels over the vocabulary; None: a head was read.
            argmax_is_label: Whether the most likely token is a label; None: a head was read.
        """
        of = dict(zip(self.options, probabilities.tolist(), strict=True))
        value: Any
        if self.kind == "noul":
            value, of = of["true"] >= of["false"], {"true": of["true"], "false": of["false"]}
            confidence = abs(2.0 * of["true"] - 1.0)
        elif self.kind == "choice":
            value = max(of, key=of.__getitem__)
            confidence = max(0.0, (of[value] - 1 / len(of)) / (1 - 1 / len(of)))
        else:
            levels = np.arange(len(of))
            value = float(levels @ probabilities)
            # Mean distance from the most likely level, divided by the mean distance of uniform levels from their mean.
            distance = float(np.abs(levels - int(np.argmax(probabilities))) @ probabilities)
            confidence = max(0.0, 1.0 - distance / float(np.abs(levels - levels.mean()).mean()))
        legend = dict(zip(map(str, self.options), self.descriptions, strict=True)) if self.kind == "score" else None
        return DecisionAnswer(self.kind, value, of, confidence, label_mass, argmax_is_label, legend)

    def example(self, label_mass: float | None) -> DecisionAnswer:
        """Return an answer whose value has the type of all values: a text if any option is a text."""
        texts = [isinstance(option, str) for option in self.options]
        return self.answer(np.eye(len(texts))[texts.index(True) if True in texts else 0], label_mass, None)


def field_of(name: str) -> str:
    """Return the field of a question in errors. A question without a name is called by its index, "questions[0]"."""
    return name if _PLACE.fullmatch(name) else f"questions[{name!r}]"


def _word(value: object) -> str | None:
    """Return a true answer as text, or None if the type is wrong.

    A whole number may come as 5.0, as tables write it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).lower()
    if isinstance(value, (int, float, np.integer, np.floating)):
        return str(int(value)) if value == value // 1 else str(value)
    return None


def read_questions(questions: object) -> tuple[list[Question], dict[str, InputError]]:
    """Return (the questions, {name of a wrong question: its error}).

    Raise InputError for any other value, and if there are no questions.

    Args:
        questions: {name: question}, or a list of questions; a question of a list without a `name` is called by its
            index from 0.
    """
    named = _named(questions)
    good, errors = [], {}
    for name, question in named:
        try:
            good.append(_read(name, question))
        except InputError as error:
            errors[name] = error
    return good, errors


def _named(questions: object) -> list[tuple[str, object]]:
    remedy = "give {name: question}, or a list of questions"
    if isinstance(questions, Mapping):
        named = list(questions.items())
    elif isinstance(questions, Sequence) and not isinstance(questions, (str, bytes)):
        names = [question.get("name") if isinstance(question, Mapping) else None for question in questions]
        named = [(str(i) if n is None else n, q) for i, (n, q) in enumerate(zip(names, questions, strict=True))]
    else:
        message = f"'questions' is of type {type(questions).__name__}"
        raise InputError(message, field="questions", remedy=remedy, code="wrong_type")
    if not named:
        raise InputError("'questions' is empty", field="questions", remedy="ask at least one", code="empty")
    seen: set[str] = set()
    for name, _ in named:
        if not isinstance(name, str) or not name:
            message = f"a question has the name {name!r:.80}"
            raise InputError(message, field="questions", remedy="give it a text as its name", code="wrong_type")
        if name in seen:
            message = f"two questions are called {name!r}"
            raise InputError(message, field="questions", remedy="give each question its own name", code="duplicate")
        seen.add(name)
    return named


def _read(name: str, question: object) -> Question:
    field = field_of(name)
    if not isinstance(question, Mapping):
        message = f"the question {name!r} is of type {type(question).__name__}"
        raise InputError(message, field=field, remedy=f"write it as {_LOOKS['noul']}", code="wrong_type")
    kind: Any = {"predicate": "noul"}.get(question.get("type", ""), question.get("type"))
    if kind not in KINDS:
        message = f"the question {name!r} has the type {kind!r:.80}"
        remedy = "use noul (or predicate), choice or score"
        raise InputError(message, field=f"{field}.type", remedy=remedy, code="wrong_type")
    for key in question:
        if key not in ("type", "name", *_FIELDS[kind]):
            message = f"the question {name!r} has the unknown field {key!r:.80}"
            remedy = f"leave it out; a {kind} question looks like {_LOOKS[kind]}"
            raise InputError(message, field=f"{field}.{key}", remedy=remedy, code="unknown_field")
    parts = {key: plain_json(value, f"{field}.{key}") for key, value in question.items()}
    instructions, criteria = parts.get("instructions"), parts.get("criteria")
    if kind == "noul":
        return Question(name, kind, instructions, ("true", "false"), _of_noul(name, criteria, field))
    options, descriptions = _options(name, kind, parts, field)
    if not 2 <= len(options) <= MOST_OPTIONS:
        message = f"the question {name!r} has {len(options)} option{'' if len(options) == 1 else 's'}"
        raise InputError(message, field=field, remedy=f"give it 2 to {MOST_OPTIONS}", code="out_of_range")
    for i, option in enumerate(options):
        if any(type(other) is type(option) and other == option for other in options[:i]):
            message = f"the question {name!r} has the option {option!r} twice"
            raise InputError(message, field=field, remedy="give each option once", code="duplicate")
    return Question(name, kind, instructions, tuple(options), tuple(descriptions))


def _of_noul(name: str, criteria: object, field: str) -> tuple[object, ...]:
    """Return the descriptions of true and of false."""
    if criteria is not None and not (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}):
        message = f"the question {name!r} has criteria that do not describe true and false"
        remedy = 'write {"true": "...", "false": "..."}, or leave them out'
        raise InputError(message, field=f"{field}.criteria", remedy=remedy, code="wrong_type")
    return tuple((criteria or {}).get(option) for option in ("true", "false"))


def _options(name: str, kind: Kind, parts: Mapping[str, Any], field: str) -> tuple[list[Option], list[object]]:
    """Return (the options of a choice or score, their descriptions)."""
    own = "choices" if kind == "choice" else "levels"
    given = [key for key in ("criteria", own) if parts.get(key) is not None]
    wrong = InputError(
        f"the question {name!r} has {'no criteria' if not given else f'wrong {given[0]}'}",
        field=f"{field}.{given[0] if given else 'criteria'}",
        remedy=f"a {kind} question looks like {_LOOKS[kind]}",
        code="wrong_type" if given else "missing_field",
    )
    if len(given) != 1:
        raise wrong
    value = parts[given[0]]
    if given[0] == own:  # OpenAI's form: [{"value": ..., "description": ...}] or [{"label": ..., "description": ...}]
        key, kinds = ("value", (str, bool)) if kind == "choice" else ("label", (str,))
        if not isinstance(value, list) or not all(
            isinstance(part, dict) and isinstance(part.get(key), kinds) and part.keys() <= {key, "description"}
            for part in value
        ):
            raise wrong
        descriptions = [part.get("description") for part in value]
        if kind == "choice":
            return [part[key] for part in value], descriptions
        labels = [part[key] for part in value]
        told = zip(labels, descriptions, strict=True)
        return [str(i) for i in range(len(value))], [one if said is None else f"{one}: {said}" for one, said in told]
    if kind == "choice" and isinstance(value, dict):
        return list(value), list(value.values())
    if kind == "score" and isinstance(value, list):
        return [str(i) for i in range(len(value))], value
    raise wrong
