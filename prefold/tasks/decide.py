"""Decisions: typed questions about a state, answered with a probability for each option. Nothing is generated.

Each question of a state is a prompt. All prompts of a state share the rows of the state, so these are computed once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from ..checkpoint import Checkpoint
from ..checkpoint.identity import model_identity
from ..errors import InputError
from ..spec.calibration import Calibration, QuestionCalibration
from ..spec.fields import checked
from ..spec.requests import Namespace, Request, Result
from ..spec.task import DecideOptions
from ..text.decisions import (
    VLLM_LABELS,
    DecisionEncoder,
    DecisionSettings,
    Encode,
    ImageNames,
    Rendered,
    ShownQuestion,
    check_template,
    default_prompt,
    image_field,
    is_temperature,
    vllm_prompt,
    written,
)
from ..text.media import ImageIds, Picture, TextWithImages, notes_in, refuse_images
from ..text.valid import plain_json, valid_text
from .base import Inputs, Task, TextBatch, Work, attempt, work_of
from .calibration import Judgement
from .classify import softmax
from .conversations import variables
from .questions import KINDS, Question, read_questions
from .readers import LabelReader, Reader
from .results import Decision, DecisionAnswer

# getter of (the ids of a prompt, the marks: positions before which answers are read); call it after `encode`
MarkedIds = Callable[[], tuple[np.ndarray, list[int]]]


@dataclass(frozen=True)
class DecideItem:
    """A state with the questions about it.

    Attributes:
        state: a text or a JSON value
        questions: {name: question} or a list of questions; None: the task's questions
        images: for a model that sees images: a list of images, which come before the state; or {name: image}, where
            each image takes the place of its name in the state or in a question
        instructions: the system message, a text for all questions
        chat_template_kwargs: {name: value}, further variables for the chat template
        adapter: the LoRA adapter; None: the task's
        salt: as in Request
    """

    state: Any
    questions: Any = None
    images: Any = None
    instructions: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    adapter: str | None = None
    salt: str = ""


@dataclass(frozen=True)
class _Asked:
    """What all prompts of an item have in common.

    Attributes:
        state: the state, with names in place of images
        system: the text of the system message; None: no system message
        variables: further variables for the chat template
        pictures: {name: image}
        salt: as in Request
    """

    state: object
    system: str | None
    variables: Mapping[str, object]
    pictures: Mapping[str, Picture]
    salt: str


class DecideTask(Task):
    """Answers to typed questions about states. Items are DecideItem, a mapping with its fields, or a bare state.

    The answer is a Decision. Each question has its own prompt, unless the checkpoint's template writes all questions of
    a state into one prompt. Every option has a label of one token. The probability of an option is the softmax over the
    logits of these labels, divided by the temperature of the question's kind. A wrong question is an error of that
    question alone. If no question of an item can be asked, the whole item fails.
    """

    name = "decide"
    item_type = DecideItem

    def __init__(
        self, inputs: Inputs, options: DecideOptions, settings: DecisionSettings, reader: Reader | None = None
    ):
        """Raise InputError for questions that cannot be asked about any state, and for a wrong template.

        Args:
            reader: the Reader of a decision head; None: read the logits of labels
        """
        if inputs.tokenizer is None:
            raise InputError("decisions need a tokenizer", field="tokenizer", remedy="use a checkpoint that has one")
        self.inputs = inputs
        if options.prompt_style == "vllm" and reader is not None:
            message = "the model has a decision head, which does not work with vLLM's prompt"
            raise InputError(message, field="prompt_style", remedy="leave it out")
        if options.prompt_style == "vllm":
            # vLLM ignores decision.json.
            settings = DecisionSettings(labels=VLLM_LABELS, adapter=settings.adapter)
        if options.template is not None:
            check_template(options.template)
            settings = replace(settings, template=options.template, write=None)
        if options.temperature is not None:
            settings = replace(settings, temperature={**settings.temperature, **_temperatures(options.temperature)})
        if settings.is_own and options.first is not None:
            message = "first works with the default prompt only, and the model has its own template"
            raise InputError(message, field="first", remedy="leave it out, or give a template that has this order")
        if not settings.is_own and not inputs.tokenizer.chat_templates:
            message = "the checkpoint has no chat template, which the default prompt of decisions needs"
            raise InputError(message, field="template", remedy="give a template", code="no_chat_template")
        self.settings = settings
        self.encoder = DecisionEncoder(inputs.tokenizer, settings)
        self.write = vllm_prompt if options.prompt_style == "vllm" else default_prompt
        self.first: Literal["state", "question"] = options.first or "state"
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
        """Return whether answers have the field `review`."""
        return self.review_below is not None or self.calibration is not None

    def source(self, checkpoint: Checkpoint) -> dict[str, str | None]:
        """Return the model, prompt format and adapter that probabilities depend on, as fields of a Calibration."""
        settings, identity = self.settings, model_identity(checkpoint)
        order = [self.write.__name__, self.first] if settings.template is None else []
        labels = {kind: [*settings.labels_of(kind)] for kind in KINDS}
        parts = [order, self.encoder.source, labels, settings.noul_options, settings.escapes, {**settings.temperature}]
        prompt = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
        own = {"model": identity["name"], "model_digest": identity["digest"], "prompt": prompt}
        return own | {"adapter": self.inputs.adapter}

    def calibrate(self, calibration: Calibration, checkpoint: Checkpoint) -> None:
        """Correct all answers by a calibration.

        Raise InputError if its model, prompt or questions differ from the task's.
        """
        calibration.check_source(**self.source(checkpoint))  # type: ignore[arg-type]
        if self.questions:
            calibration.check_names([question.name for question in self.questions])
        self.calibration = calibration
        for question in self.questions:
            self._calibration_of(question)

    def fitted(self, judgements: Sequence[Judgement], precision: float, checkpoint: Checkpoint) -> Calibration:
        """Return the calibration of the questions that have enough true answers."""
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

    @property
    def example(self) -> Decision:
        mass = 0.0 if isinstance(self.reader, LabelReader) else None
        found = {} if self.calibration is None else self.calibration.questions
        return Decision({q.name: self._marked(q.example(mass), found.get(q.name)) for q in self.questions})

    def swapped(self) -> DecideTask | None:
        """Return the task with state and question in the other order, or None if a template fixes the order."""
        if self.settings.is_own:
            return None
        other = copy(self)
        other.first = "question" if self.first == "state" else "state"
        return other

    def _as_item(self, item: Any) -> Any:
        """Convert a value to an item. A mapping without the field `state` is itself the state."""
        if isinstance(item, self.item_type) or (isinstance(item, Mapping) and "state" in item):
            return item
        return self.item_type(item)

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        if item.questions is not None and self.questions:
            message = "the item has its own questions, but the options have questions for all items"
            raise InputError(message, field="questions", remedy="leave them out of the items, or of the options")
        if self.calibration is not None and item.adapter not in (None, self.calibration.adapter):
            message = f"the calibration was not made with the adapter {item.adapter!r}"
            remedy = "leave the calibration out, or make one for each adapter"
            raise InputError(message, field="adapter", remedy=remedy, code="calibration_mismatch")
        questions, errors = (self.questions, {}) if item.questions is None else read_questions(item.questions)
        if not questions and not errors:
            message = "there are no questions"
            raise InputError(message, field="questions", remedy="give some (--questions FILE)", code="missing_option")
        asking = self._asking(item)
        asked = []
        for question in questions:
            error = attempt(self._check, question) if item.questions is not None else None
            if isinstance(error, InputError):
                errors[question.name] = error
            else:
                asked.append(question)
        groups = [asked] if self.encoder.takes_all and asked else [[question] for question in asked]
        shown: set[str] = set()
        makers = [(group, attempt(self._prompt, asking, group, batch, shown)) for group in groups]
        unused = asking.pictures.keys() - shown
        if unused and len(asked) == len(questions) and not any(isinstance(maker, InputError) for _, maker in makers):
            name = next(name for name in asking.pictures if name in unused)
            message = f"the name {name!r:.100} of an image occurs neither in the state nor in a question"
            raise InputError(message, field="images", remedy="write it where the image belongs", code="image_count")

        def make() -> Work:
            requests, answered, prompts = [], [], []
            tokens = 0
            for group, maker in makers:
                made = maker if isinstance(maker, InputError) else attempt(self._requests, group, maker, asking.salt)
                if isinstance(made, InputError):
                    errors.update({question.name: made for question in group})
                else:
                    own, size, about = made
                    requests += own
                    tokens += size
                    answered += group
                    prompts.append([len(group), len(own), about])
            if not requests:
                raise next(iter(errors.values()))
            note: dict[str, Any] = {"tokens": tokens}
            if any(prompt != [1, 1, None] for prompt in prompts):
                note["prompts"] = prompts
            if item.questions is not None or len(answered) < len(self.questions):
                note["questions"] = [question.note() for question in answered]
            if errors:
                note["errors"] = {name: error.to_dict() for name, error in errors.items()}
            return work_of(requests, list(asking.pictures.values()), **note)

        return make

    def _check(self, question: Question) -> None:
        """Raise InputError if the question cannot be read, or differs from the calibrated question of its name."""
        self.reader.check(question)
        self._calibration_of(question)

    def _asking(self, item: DecideItem) -> _Asked:
        """Return the content that all prompts of an item share. Raise InputError for a wrong state, image or option."""
        given: object = item.state
        images: object = item.images
        if isinstance(given, TextWithImages):
            images = list(given.images)
            given = given.text
        state: object = plain_json(given, "state")
        if not images and (state in (None, "") or (isinstance(state, str) and state.isspace())):
            message = f"'state' is {'null' if state is None else 'empty'}"
            raise InputError(message, field="state", remedy="give it a text or a JSON value", code="empty")
        state = self.inputs.bounded(state, "state", not images and self.truncate, left=self.truncate == "left")
        state, named = self._placed(state, images)
        pictures: dict[str, Picture] = {}
        if named:
            if self.settings.write is not None:
                message = "the model's decision head reads text only"
                raise InputError(message, field="images", remedy="leave images out", code="unsupported")
            if self.inputs.images is None:
                raise refuse_images(named[0][2])
            read = self.inputs.images.read([(image, field) for _, image, field in named])
            pictures = {name: picture for (name, _, _), picture in zip(named, read, strict=True)}
        system = None if item.instructions is None else valid_text(item.instructions, "instructions")
        values = variables(item.chat_template_kwargs)
        if self.settings.is_own and (system or values):
            name = "instructions" if system else "chat_template_kwargs"
            message = f"{name!r} needs the chat template, but the model has its own template"
            raise InputError(message, field=name, remedy="leave it out", code="unsupported")
        if values.get("enable_thinking"):
            message = "the answer is read at the start of the reply, so the model cannot think first"
            remedy = "leave enable_thinking out"
            raise InputError(message, field="chat_template_kwargs", remedy=remedy, code="unsupported")
        return _Asked(state, system or None, values, pictures, checked(str, item.salt, "salt"))

    def _placed(self, state: object, images: object) -> tuple[object, list[tuple[str, object, str]]]:
        """Return (the state with names in place of images, (name, image, field) of each image)."""
        if images is None or (isinstance(images, (list, tuple, dict)) and not images):
            return state, []
        if isinstance(images, Mapping):
            if not all(isinstance(name, str) and name for name in images):
                message = "a name in 'images' is not a text, or is empty"
                raise InputError(message, field="images", remedy='give {"img-1": image}', code="wrong_type")
            return state, [(name, image, image_field(name)) for name, image in images.items()]
        if not isinstance(images, (list, tuple)):
            remedy = "give a list of images, or {name: image}"
            raise InputError("'images' is not a list", field="images", remedy=remedy, code="wrong_type")
        if self.settings.template is not None and not isinstance(state, str):
            message = "a list of images needs a state that is a text, with this template"
            remedy = "give {name: image}, and write the names in the state"
            raise InputError(message, field="images", remedy=remedy, code="unsupported")
        make = ImageNames(state)
        names = [make.of(f"images[{i}]") for i in range(len(images))]
        text, place = written(state), getattr(getattr(self.inputs.images, "processor", None), "placeholder", None)
        if place is not None and isinstance(state, str) and place in text:
            pieces = text.split(place)
            if len(pieces) != len(names) + 1:
                message = f"there are {len(names)} images for {len(pieces) - 1} places in the state ({place})"
                raise InputError(message, field="images", remedy="give one image for each place", code="image_count")
            text = "".join(piece + name for piece, name in zip(pieces, [*names, ""], strict=True))
        else:
            text = "".join(names) + text
        return text, [(name, image, image_field(name)) for name, image in zip(names, images, strict=True)]

    def _prompt(self, asking: _Asked, group: list[Question], batch: TextBatch, shown: set[str]) -> MarkedIds:
        """Add the prompt of a group of questions to the batch. The names of its images are added to `shown`."""
        rendered = self._render(asking, asking.state, group)
        shown.update(rendered.shown)
        if rendered.shown:
            return partial(self._pictured, asking, rendered)
        plain = self.encoder.is_plain(rendered.text)
        text, state = rendered.text, asking.state
        get = partial(_at_end, batch.add(text, _lines(text, state))) if plain else partial(self.encoder.encode, text)
        if not self.truncate or not isinstance(state, str):
            return get
        return lambda: self._cut(asking, state, group, *get())

    def _pictured(self, asking: _Asked, rendered: Rendered) -> tuple[np.ndarray, list[int]]:
        """Return (the ids of a prompt with images, its marks)."""
        pictures, media = [asking.pictures[name] for name in rendered.shown], []

        def expand(text: str, encode: Encode) -> np.ndarray:
            ids, own = self.inputs.images.encode(text, pictures, asking.salt, "state", encode)
            media.extend(own)
            return ids

        ids, marks = self.encoder.encode(rendered.text, expand)
        return ImageIds.of(ids, tuple(media)), marks

    def _cut(
        self, asking: _Asked, state: str, group: list[Question], ids: np.ndarray, marks: list[int]
    ) -> tuple[np.ndarray, list[int]]:
        """Return (ids, marks) with the state cut so that the prompt fits.

        Return the prompt unchanged if nothing of the state would be left.
        """
        over = self.inputs.over(ids.size)
        if not over:
            return ids, marks
        return self.inputs.cut(
            state,
            lambda text: self.encoder.encode(self._render(asking, text, group).text),
            ids.size - over,
            (ids, marks),
            left=self.truncate == "left",
            size=lambda marked: int(marked[0].size),
        )

    def _render(self, asking: _Asked, state: object, group: list[Question]) -> Rendered:
        """Return the prompt of a group of questions.

        Args:
            state: the state of `asking`, or a part of it
        """
        names = tuple(asking.pictures)
        if self.settings.write is not None:
            return self.encoder.written(state, [self._variables(question) for question in group])
        if self.settings.template is None:
            (question,) = group
            kind, options, said = self._ordered(question)
            labels = self.settings.labels_of(question.kind)[: len(options)]
            message = self.write(state, kind, question.instructions, options, labels, said, self.first)
            parts = self.inputs.images is not None
            return self.encoder.message(message, names, parts=parts, system=asking.system, variables=asking.variables)
        questions = [self._variables(question) for question in group]
        return self.encoder.templated(names, state=state, question=questions[0], questions=questions)

    def _ordered(self, question: Question) -> tuple[str, list[str], list[object]]:
        """Return (kind, options, descriptions) of a question, in the order of the prompt."""
        words, said = question.words, list(question.descriptions)
        if question.kind == "noul" and self.settings.noul_options[0] == "false":
            words, said = words[::-1], said[::-1]
        return question.kind, words, said

    def _variables(self, question: Question) -> ShownQuestion:
        """Return a question in the form that templates receive."""
        kind, options, said = self._ordered(question)
        labels = self.settings.labels_of(question.kind)[: len(options)]
        return {"name": question.name, "type": kind, "instructions": question.instructions, "options": options,
                "labels": list(labels), "descriptions": said}  # fmt: skip

    def _requests(self, group: list[Question], get: MarkedIds, salt: str) -> tuple[list[Request], int, object]:
        """Return (the requests of a prompt, its number of tokens, the reader's note)."""
        ids, marks = get()
        count = sum(map(self.reader.marks, group))
        if len(marks) != count:
            message = f"the template marks {len(marks)} places, and the model reads {count}"
            remedy = "write <|mark|> once for each question"
            raise InputError(message, field="template", remedy=remedy)
        places, note = self.reader.places(marks, ids.size), self.reader.note(ids, marks)
        requests = [self.inputs.request(ids[:place], "state") for place in places]
        if salt:
            requests = [replace(request, namespace=Namespace(salt=salt)) for request in requests]
        return requests, max(places), note

    def finish(self, note: Any, results: Sequence[Result]) -> Decision:
        questions = [Question.from_note(one) for one in note["questions"]] if "questions" in note else self.questions
        answers, rows, asked = {}, iter(results), iter(questions)
        cached: list[int | None] = []
        for count, reads, about in note.get("prompts") or [(1, 1, None)] * len(questions):
            group, read = list(islice(asked, count)), list(islice(rows, reads))
            cached.append(
                max((result.cached_tokens for result in read if result.cached_tokens is not None), default=None)
            )
            values = [np.asarray(result.values, dtype=np.float64) for result in read]
            scored = self.reader.all_scores(group, values, about)
            for question, (scores, mass, is_label) in zip(group, scored, strict=True):
                calibration = None if self.calibration is None else self.calibration.questions.get(question.name)
                temperature = self.settings.temperature.get(question.kind, 1.0)
                p = softmax(scores / (temperature if calibration is None else temperature * calibration.temperature))
                if question.kind == "noul" and self.settings.noul_options[0] == "false":
                    p = p[::-1]
                answers[question.name] = self._marked(question.answer(p, mass, is_label), calibration)
        errors = {name: InputError(e["message"], field=e.get("field"), remedy=e.get("remedy", ""), code=e["code"])
                  for name, e in note.get("errors", {}).items()}  # fmt: skip
        known = None if None in cached else sum(cached)  # type: ignore[arg-type]
        return Decision(answers, errors, note["tokens"], notes_in(note), cached_tokens=known)

    def _marked(self, answer: DecisionAnswer, calibration: QuestionCalibration | None) -> DecisionAnswer:
        """Set `review` of an answer if its question has a threshold or a calibration.

        A calibration without a threshold marks every answer as doubtful.
        """
        if self.review_below is None and calibration is None:
            return answer
        threshold = self.review_below if calibration is None or self.review_below is not None else calibration.threshold
        return replace(answer, review=threshold is None or max(answer.probabilities.values()) < threshold)


def _at_end(get: Callable[[], np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Return (the ids of a prompt, one mark at its end)."""
    ids = get()
    return ids, [ids.size]


def _lines(text: str, state: object) -> list[int]:
    """Return two offsets in a prompt: of the state, and of the first text after the state."""
    said = written(state)
    start = text.find(said)
    if start < 0:
        return []
    after = start + len(said)
    rest = text[after:]
    return [start, after + len(rest) - len(rest.lstrip())]


def _temperatures(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(kind in KINDS and is_temperature(t) for kind, t in values.items()):
        message = f"temperature is {values!r:.80}"
        raise InputError(message, field="temperature", remedy='give {"noul": 1.0, "choice": 1.0, "score": 1.0}')
    return dict(values)
