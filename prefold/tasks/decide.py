"""Decisions: typed questions about a state, answered with a probability for each option. Nothing is generated.

Each question of a state is a prompt. The prompts of a state share the state, so its rows are computed once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from ..checkpoint import Checkpoint
from ..checkpoint.identity import model_identity
from ..errors import InputError
from ..spec.calibration import Calibration, QuestionCalibration
from ..spec.fields import checked
from ..spec.requests import Readout, Request, Result
from ..spec.task import DecideOptions
from ..text.decisions import (
    DecisionEncoder,
    DecisionSettings,
    check_template,
    default_prompt,
    is_temperature,
    vllm_prompt,
)
from ..text.valid import plain_json
from .base import Inputs, Task, TextBatch, Work, attempt, work_of
from .calibration import Judgement
from .classify import softmax
from .questions import KINDS, Question, read_questions
from .results import Answer, Decision, DecisionAnswer

# Returns (the ids of a prompt, the places before which its answers are read), once the batch is encoded.
MarkedIds = Callable[[], tuple[np.ndarray, list[int]]]
# vLLM's labels (0.32): a question of any kind has at most 26 options there.
_VLLM_LABELS = {"noul": ("yes", "no"), "score": tuple("0123456789")}


@dataclass(frozen=True)
class DecideItem:
    """A DecideItem is a state with the questions about it.

    state      a text or a JSON value
    questions  {name: question} or a list of questions; None: those of the task
    adapter    the LoRA adapter; None: the task's
    """

    state: Any
    questions: Any = None
    adapter: str | None = None


class Reader(Protocol):
    """What reads the scores of a question's options from a row."""

    readout: Readout

    def check(self, question: Question) -> object:
        """Raise InputError if the options of a question cannot be read."""

    def scores(self, question: Question, values: np.ndarray) -> tuple[np.ndarray, float | None, bool | None]:
        """Return (the score of each option, in the order of the prompt, float64 [options]; the probability of all
        labels over the vocabulary; whether the most likely token is a label). None: there are no labels.

        values: float64, what the read-out gave
        """
        ...


# {architecture: makes the Reader of its decision head}. A feature enters its heads here.
HEADS: dict[str, Callable[[Checkpoint], Reader]] = {}


class LabelReader:
    """A LabelReader reads the logits of the options' labels, one token each."""

    def __init__(self, settings: DecisionSettings, encoder: DecisionEncoder, questions: Sequence[Question]):
        """questions: those of the task, whose labels alone are read; empty: all labels are"""
        self._settings = settings
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
        labels, count = self._settings.labels_of(question.kind), len(question.options)
        if len(labels) < count:
            raise too_many_options(question, len(labels))
        ids = self._ids_of(tuple(labels[:count]))
        if ids is None:
            used = ", ".join(map(repr, labels[:count]))
            message = f"the labels {used} of the question {question.name!r} are not distinct single tokens here"
            remedy = "give other labels in decision.json beside the weights (with --url: name the model's --tokenizer)"
            raise InputError(message, field=f"questions[{question.name!r}]", remedy=remedy)
        return ids

    def _find_ids(self, labels: tuple[str, ...]) -> list[int] | None:
        ids = [self._label_ids.get(label) for label in labels]
        return None if None in ids or len({*ids}) < len(ids) else ids  # type: ignore[return-value]

    def scores(self, question: Question, values: np.ndarray) -> tuple[np.ndarray, float, bool]:
        labels = self.check(question)
        scores = values[[self._column[id] for id in labels]]
        return scores, min(1.0, float(np.exp(scores - values[-2]).sum())), int(values[-1]) in labels


def too_many_options(question: Question, most: int) -> InputError:
    """Return the error of a question with more options than the model reads."""
    message = f"the question {question.name!r} has {len(question.options)} options"
    remedy = f"give at most {most}, as many as the model reads for a {question.kind} question"
    return InputError(message, field=f"questions[{question.name!r}]", remedy=remedy, code="out_of_range")


class DecideTask(Task):
    """A DecideTask answers questions about states. Items are DecideItem, a mapping with its fields, or a bare state.

    The answer is a Decision. Each question is a prompt of its own, unless the checkpoint's template writes all
    questions of a state into one. The probability of an option is the softmax over the logits of the options' labels,
    each of them one token, divided by the temperature of the question's kind. A question that is wrong is an error of
    this question alone. If no question of an item can be asked, the item has the error.
    """

    name = "decide"
    example: Answer = Decision({})
    item_type = DecideItem

    def __init__(
        self, inputs: Inputs, options: DecideOptions, settings: DecisionSettings, reader: Reader | None = None
    ):
        """Raise InputError for questions that cannot be asked of any state, and for a wrong template.

        reader: of a decision head; None: the logits of labels are read
        """
        if inputs.tokenizer is None:
            raise InputError("decisions need a tokenizer", field="tokenizer", remedy="use a checkpoint that has one")
        self.inputs = inputs
        if options.prompt_style == "vllm":
            settings = replace(settings, labels={**_VLLM_LABELS, **settings.labels}, template=None)
        if options.template is not None:
            check_template(options.template)
            settings = replace(settings, template=options.template)
        if options.temperature is not None:
            settings = replace(settings, temperature={**settings.temperature, **_temperatures(options.temperature)})
        if settings.template is not None and options.first is not None:
            message = "first is for the default prompt, and the model has a template of its own"
            raise InputError(message, field="first", remedy="leave it out, or give a template that has this order")
        if settings.template is None and not inputs.tokenizer.chat_templates:
            message = "the checkpoint has no chat template, which the default prompt of decisions is written in"
            raise InputError(message, field="template", remedy="give a template", code="no_chat_template")
        self.settings = settings
        self.encoder = DecisionEncoder(inputs.tokenizer, settings)
        self.write = vllm_prompt if options.prompt_style == "vllm" else default_prompt
        self.first = options.first or "state"
        self.truncate = options.truncate
        self.questions: list[Question] = []
        errors: dict[str, InputError] = {}
        if options.questions is not None:
            self.questions, errors = read_questions(options.questions)
        self.reader = reader or LabelReader(settings, self.encoder, self.questions)
        self.readout = self.reader.readout
        for question in self.questions:
            error = attempt(self.reader.check, question)
            if isinstance(error, InputError):
                errors[question.name] = error
        for error in errors.values():
            raise error
        self.calibration: Calibration | None = None
        self.review_below: float | None = None
        if options.review_below is not None:
            self.review_below = checked(float, options.review_below, "review_below", least=0, most=1, quoted=False)

    @property
    def marks(self) -> bool:
        """Return whether answers say if they are doubtful."""
        return self.review_below is not None or self.calibration is not None

    def source(self, checkpoint: Checkpoint) -> dict[str, str | None]:
        """Return what the probabilities depend on beside the questions, as the fields of a Calibration."""
        settings, identity = self.settings, model_identity(checkpoint)
        order = [self.write.__name__, self.first] if settings.template is None else []
        labels = {kind: [*settings.labels_of(kind)] for kind in KINDS}
        parts = [order, self.encoder.source, labels, settings.noul_options, settings.escapes, {**settings.temperature}]
        prompt = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
        own = {"model": identity["name"], "model_digest": identity["digest"], "prompt": prompt}
        return own | {"adapter": self.inputs.adapter}

    def calibrate(self, calibration: Calibration, checkpoint: Checkpoint) -> None:
        """Correct all answers by a calibration. Raise InputError if it was made with another model, prompt or
        question."""
        calibration.check_source(**self.source(checkpoint))  # type: ignore[arg-type]
        if self.questions:
            calibration.check_names([question.name for question in self.questions])
        self.calibration = calibration
        for question in self.questions:
            self._calibration_of(question)

    def fitted(self, judgements: Sequence[Judgement], precision: float, checkpoint: Checkpoint) -> Calibration:
        """Return the calibration of those questions whose answers had enough true ones beside them."""
        named = {question.name: question for question in self.questions}
        applied = {} if self.calibration is None else self.calibration.questions
        questions = {
            one.name: one.calibration(named[one.name], applied.get(one.name))
            for one in judgements
            if one.fit is not None
        }
        source: Any = self.source(checkpoint)
        return Calibration(questions=questions, precision=precision, **source)

    def _calibration_of(self, question: Question) -> QuestionCalibration | None:
        if self.calibration is None:
            return None
        return self.calibration.of_question(question.name, question.digest, question.options)

    def _as_item(self, item: Any) -> Any:
        """Return a value as an item. A mapping without the field `state` is a state."""
        if isinstance(item, self.item_type) or (isinstance(item, Mapping) and "state" in item):
            return item
        return self.item_type(item)

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        if item.questions is not None and self.questions:
            message = "the item has questions of its own, and all items are asked the same"
            raise InputError(message, field="questions", remedy="leave them out of the items, or of the options")
        if self.settings.adapter is not None and item.adapter is None and self.inputs.adapter is None:
            folder = self.settings.adapter
            message = f"decision.json says that the model decides with the LoRA adapter in its folder {folder!r}"
            remedy = "load that folder (--adapter NAME=FOLDER, adapters={name: folder}), and name it"
            raise InputError(message, field="adapter", remedy=remedy, code="missing_option")
        if self.calibration is not None and item.adapter not in (None, self.calibration.adapter):
            message = f"the calibration was not made with the adapter {item.adapter!r}"
            remedy = "leave the calibration out, or make one for each adapter"
            raise InputError(message, field="adapter", remedy=remedy, code="calibration_mismatch")
        questions, errors = (self.questions, {}) if item.questions is None else read_questions(item.questions)
        if not questions and not errors:
            message = "there are no questions"
            raise InputError(message, field="questions", remedy="give some (--questions FILE)", code="missing_option")
        state = plain_json(item.state, "state")
        if state in (None, "") or (isinstance(state, str) and state.isspace()):
            message = f"'state' is {'null' if state is None else 'empty'}"
            raise InputError(message, field="state", remedy="give it a text or a JSON value", code="empty")
        state = self.inputs.bounded(state, "state", self.truncate, left=self.truncate == "left")
        asked = []
        for question in questions:
            error = attempt(self._check, question) if item.questions is not None else None
            if isinstance(error, InputError):
                errors[question.name] = error
            else:
                asked.append(question)
        groups = [asked] if self.encoder.takes_all and asked else [[question] for question in asked]
        makers = [(group, attempt(self._prompt, state, group, batch)) for group in groups]

        def make() -> Work:
            requests, answered = [], []
            for group, maker in makers:
                made = maker if isinstance(maker, InputError) else attempt(self._requests, group, maker)
                if isinstance(made, InputError):
                    errors.update({question.name: made for question in group})
                else:
                    requests += made
                    answered += group
            if not requests:
                raise next(iter(errors.values()))
            note: dict[str, Any] = {}
            if item.questions is not None or len(answered) < len(self.questions):
                note["questions"] = [question.note() for question in answered]
            if errors:
                note["errors"] = {name: error.to_dict() for name, error in errors.items()}
            return work_of(requests, **note)

        return make

    def _check(self, question: Question) -> None:
        """Raise InputError for a question that cannot be read, or that is not the calibrated one of its name."""
        self.reader.check(question)
        self._calibration_of(question)

    def _prompt(self, state: object, group: list[Question], batch: TextBatch) -> MarkedIds:
        """Add the prompt of a group of questions about a state to a batch."""
        text = self._render(state, group)
        plain = self.encoder.is_plain(text)
        get = partial(_at_end, batch.add(text)) if plain else partial(self.encoder.encode, text)
        if not self.truncate or not isinstance(state, str):
            return get
        return lambda: self._cut(state, group, *get())

    def _cut(
        self, state: str, group: list[Question], ids: np.ndarray, marks: list[int]
    ) -> tuple[np.ndarray, list[int]]:
        """Return a prompt whose state is cut so that it fits; the prompt as it is if nothing of the state would be
        left."""
        over = self.inputs.over(ids.size)
        if not over:
            return ids, marks
        return self.inputs.cut(
            state,
            lambda text: self.encoder.encode(self._render(text, group)),
            ids.size - over,
            (ids, marks),
            left=self.truncate == "left",
            size=lambda marked: int(marked[0].size),
        )

    def _render(self, state: object, group: list[Question]) -> str:
        """Return the text of the prompt of a group of questions."""
        if self.settings.template is None:
            (question,) = group
            kind, options, said = self._ordered(question)
            labels = self.settings.labels_of(question.kind)[: len(options)]
            message = self.write(state, kind, question.instructions, options, labels, said, self.first)
            return self.encoder.message(message)
        questions = [self._variables(question) for question in group]
        return self.encoder.templated(state=state, question=questions[0], questions=questions)

    def _ordered(self, question: Question) -> tuple[str, list[str], list[object]]:
        """Return the kind, the options and the descriptions of a question, in the order of the prompt."""
        words, said = question.words, list(question.descriptions)
        if question.kind == "noul" and self.settings.noul_options[0] == "false":
            words, said = words[::-1], said[::-1]
        return question.kind, words, said

    def _variables(self, question: Question) -> dict[str, object]:
        """Return a question as templates see it."""
        kind, options, said = self._ordered(question)
        labels = self.settings.labels_of(question.kind)[: len(options)]
        return {"name": question.name, "type": kind, "instructions": question.instructions, "options": options,
                "labels": list(labels), "descriptions": said}  # fmt: skip

    def _requests(self, group: list[Question], get: MarkedIds) -> list[Request]:
        ids, marks = get()
        if len(marks) != len(group):
            message = f"the template marks {len(marks)} places for {len(group)} questions"
            raise InputError(message, field="template", remedy="write <|mark|> once for each question")
        return [self.inputs.request(ids[:mark], "state") for mark in marks]

    def finish(self, note: Any, results: Sequence[Result]) -> Decision:
        questions = [Question.from_note(one) for one in note["questions"]] if "questions" in note else self.questions
        answers = {}
        for question, result in zip(questions, results, strict=True):
            values = np.asarray(result.values, dtype=np.float64)
            scores, mass, is_label = self.reader.scores(question, values)
            calibration = None if self.calibration is None else self.calibration.questions.get(question.name)
            temperature = self.settings.temperature.get(question.kind, 1.0)
            p = softmax(scores / (temperature if calibration is None else temperature * calibration.temperature))
            if question.kind == "noul" and self.settings.noul_options[0] == "false":
                p = p[::-1]
            answers[question.name] = self._marked(question.answer(p, mass, is_label), calibration)
        errors = {name: InputError(e["message"], field=e.get("field"), remedy=e.get("remedy", ""), code=e["code"])
                  for name, e in note.get("errors", {}).items()}  # fmt: skip
        cached = [result.cached_tokens for result in results]
        known = None if None in cached else sum(cached)  # type: ignore[arg-type]
        return Decision(answers, errors, note["tokens"], cached_tokens=known)

    def _marked(self, answer: DecisionAnswer, calibration: QuestionCalibration | None) -> DecisionAnswer:
        """Return an answer that says whether it is doubtful, if there is a threshold for its question."""
        if self.review_below is None and calibration is None:
            return answer
        threshold = self.review_below if calibration is None or self.review_below is not None else calibration.threshold
        return replace(answer, review=threshold is None or max(answer.probabilities.values()) < threshold)


def _at_end(get: Callable[[], np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Return the ids of a prompt that is read at its end."""
    ids = get()
    return ids, [ids.size]


def _temperatures(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(kind in KINDS and is_temperature(t) for kind, t in values.items()):
        message = f"temperature is {values!r:.80}"
        raise InputError(message, field="temperature", remedy='give {"noul": 1.0, "choice": 1.0, "score": 1.0}')
    return dict(values)
