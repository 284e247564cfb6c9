"""Requests for decisions: OpenAI's /v1/decisions, and /v1/systemone of Jev, vLLM and transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from ..errors import InputError
from ..tasks.results import Decision, DecisionAnswer
from ..text.decisions import ImageNames
from ..text.media import image_in
from .body import OBJECTS, Batchable, Ignored, Settings, doc
from .numbers import Result

MOST_QUESTIONS = 400
_TEXT_PARTS = ("input_text", "output_text", "text")


class Deciding(Batchable, kw_only=True):
    """The body of a request for decisions: one state, and questions about it."""

    task = "decide"
    missing = ("{!r} is missing", "give {}")
    may_be_empty = True

    @classmethod
    def usage(cls, answers: Sequence[Decision]) -> Result:
        tokens = sum(answer.num_tokens for answer in answers)
        cached = sum(answer.cached_tokens or 0 for answer in answers)
        return {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens,
        }


class SystemOne(Deciding):
    """Answer typed questions about a state, each with its probabilities."""

    state: Annotated[Any, doc("A text, or a JSON value.")]
    questions: Annotated[Any, doc("{name: {type, instructions, criteria}}; type: noul, choice or score.", "object")]
    instructions: Annotated[Any, doc("A text for all questions: the system message.", "string")] = None
    images: Annotated[Any, doc("URLs or data URLs. They are put before the state, as in vLLM.", "array")] = None
    assets: Annotated[
        Any, doc("{name: {type: image, format, data_base64}}. An image replaces every use of its name.", "object")
    ] = None
    chat_template_kwargs: Annotated[Any, doc("Further variables for the chat template.", "object")] = None
    cache_salt: Annotated[Any, doc("Requests share a prefix only if their salts are equal.", "string")] = None

    fields: ClassVar = {"salt": "cache_salt"}
    unsupported: ClassVar = {"audio": ([],), "videos": ([],)}
    remedies: ClassVar = Settings.remedies | {"audio": "leave audio out", "videos": "leave videos out"}

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], Result]:
        if not isinstance(self.questions, Mapping):
            remedy = "give {name: question}"
            raise InputError("'questions' is not an object", field="questions", remedy=remedy, code="wrong_type")
        _check_count(len(self.questions))
        if self.images and self.assets:
            message = "there are both 'images' and 'assets'"
            raise InputError(message, field="assets", remedy="give one of them", code="unsupported")
        item: Result = {"state": self.state, "questions": self.questions}
        given = {"instructions": self.instructions, "chat_template_kwargs": self.chat_template_kwargs}
        given |= {"images": _listed(self.images) or _assets(self.assets), "salt": self.cache_salt}
        return [item | {name: value for name, value in given.items() if value}], {}

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Decision]) -> Result:
        (decision,) = answers
        of = _all(decision)
        diagnostics = {name: known for name, answer in of.items() if (known := _diagnostics(answer))}
        more = {"diagnostics": diagnostics} if diagnostics else {}  # as in vLLM
        return {"answers": {name: _system_one(answer) for name, answer in of.items()}, **more}


class Decisions(Deciding):
    """Answer questions about an input, in their order, as OpenAI's API does."""

    input: Annotated[Any, doc("A text, or messages and calls.", anyOf=[{"type": "string"}, OBJECTS])]
    questions: Annotated[Any, doc("1 to 400 questions of the types predicate, choice and score.", **OBJECTS)]
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    safety_identifier: Ignored = None

    fields: ClassVar = {"state": "input"}

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], Result]:
        if not isinstance(self.questions, list) or not all(isinstance(one, Mapping) for one in self.questions):
            remedy = "give a list of questions"
            raise InputError(
                "'questions' is not a list of objects", field="questions", remedy=remedy, code="wrong_type"
            )
        _check_count(len(self.questions))
        questions, names, labels = {}, [], []
        pictures = _Pictures([self.input, self.questions])
        for i, one in enumerate(self.questions):
            name = one.get("name")
            names.append(name)
            # Names are optional here, and two questions may have the same name.
            key = name if isinstance(name, str) and name and name not in questions else f"questions[{i}]"
            parts = {part: value for part, value in one.items() if part != "name"}
            if isinstance(parts.get("instructions"), list):
                parts["instructions"] = pictures.joined(parts["instructions"], f"questions[{i}].instructions")
            questions[key] = parts
            levels = parts.get("levels")
            labels.append([level.get("label") for level in levels if isinstance(level, Mapping)] if levels else None)
        item = {"state": pictures.state(self.input), "questions": questions}
        return [item | ({"images": pictures.found} if pictures.found else {})], {"names": names, "labels": labels}

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Decision]) -> Result:
        (decision,) = answers
        named = zip(meta["names"], meta["labels"], _all(decision).values(), strict=True)
        return {"answers": [{**_openai(answer, labels), "name": name} for name, labels, answer in named]}


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_QUESTIONS:
        remedy = f"ask 1 to {MOST_QUESTIONS}"
        raise InputError(f"'questions' has {count} questions", field="questions", remedy=remedy, code="too_many")


def _all(decision: Decision) -> dict[str, DecisionAnswer]:
    """Return the answers to all questions. Raise the InputError of the first question that failed."""
    for error in decision.errors.values():
        raise error
    return decision.answers


def _diagnostics(answer: DecisionAnswer) -> Result:
    """Return the fields of an answer that System One's API does not have."""
    labels = {"label_mass": answer.label_mass, "argmax_is_label": answer.argmax_is_label}
    known = {} if answer.label_mass is None else labels
    return known if answer.review is None else known | {"review": answer.review}


def _system_one(answer: DecisionAnswer) -> Result:
    """Return an answer in System One's form."""
    if answer.type == "noul":
        return {"type": "noul", "noul": answer.probabilities["true"]}
    own = {"legend": answer.legend} if answer.type == "score" else {}
    of = {"confidence": answer.confidence, "probabilities": answer.to_dict()["probabilities"]}
    return {"type": answer.type, answer.type: answer.value, **own, **of}


def _openai(answer: DecisionAnswer, labels: Sequence[str] | None) -> Result:
    """Return an answer in OpenAI's form, without its name.

    Args:
        labels: The labels of a score's levels.
    """
    if answer.type == "noul":
        return {"type": "predicate", "probability": answer.probabilities["true"]}
    if answer.type == "choice":
        of: list[Result] = [{"value": value, "probability": p} for value, p in answer.probabilities.items()]
        return {"type": "choice", "choice": answer.value, "confidence": answer.confidence, "probabilities": of}
    levels = enumerate(zip(labels or (), answer.probabilities.values(), strict=True))
    of = [{"value": i, "label": label, "probability": p} for i, (label, p) in levels]
    return {"type": "score", "score": answer.value, "confidence": answer.confidence, "probabilities": of}


def _listed(images: object) -> list[object]:
    """Return the values of `images`: URLs, or images in the form of chat messages."""
    if images in (None, [], {}):
        return []
    if not isinstance(images, list):
        raise InputError("'images' is not a list", field="images", remedy="give a list of URLs", code="wrong_type")
    values = []
    for i, image in enumerate(images):
        value = image if isinstance(image, str) else image_in(image, f"images[{i}]")
        if value is None and isinstance(image, Mapping) and isinstance(image.get("url"), str):
            value = image
        if value is None:
            remedy = 'give a URL or a data URL: "data:image/png;base64,..."'
            raise InputError(f"images[{i}] is not an image", field=f"images[{i}]", remedy=remedy, code="wrong_type")
        values.append(value)
    return values


def _assets(assets: object) -> dict[str, object]:
    """Return {name: image} of `assets`."""
    if assets in (None, [], {}):
        return {}
    remedy = 'give {"img-1": {"type": "image", "format": "png", "data_base64": "..."}}'
    if not isinstance(assets, Mapping):
        raise InputError("'assets' is not an object", field="assets", remedy=remedy, code="wrong_type")
    images: dict[str, object] = {}
    for name, asset in assets.items():
        own = asset if isinstance(asset, Mapping) else {}
        if own.get("type", "image") != "image" or not isinstance(own.get("data_base64"), str):
            field = f"assets[{name!r:.100}]"
            raise InputError(f"{field} is not an image", field=field, remedy=remedy, code="wrong_type")
        images[name] = f"data:image/{own.get('format', 'png')};base64,{own['data_base64']}"
    return images


def state_of(items: object) -> tuple[object, dict[str, object]]:
    """Return (the state made from OpenAI's `input`, {name: image} of the images in it).

    A single user message stays as it is. Otherwise each item becomes a paragraph that starts with its role. Raise
    InputError for items of other kinds.
    """
    pictures = _Pictures(items)
    return pictures.state(items), pictures.found


class _Pictures:
    """Renders items and parts as texts. A name replaces each image.

    Args:
        beside: Everything that the names will be part of, so that they are chosen unique.
    """

    def __init__(self, beside: object):
        self.found: dict[str, object] = {}  # {name: image}
        self._beside = beside
        self._names: ImageNames | None = None

    def _named(self, image: object, field: str) -> str:
        if self._names is None:
            self._names = ImageNames(self._beside)
        name = self._names.of(field)
        self.found[name] = image
        return name

    def state(self, items: object) -> object:
        """Return the state made from OpenAI's `input`: its text, or one text of all messages, calls and outputs."""
        if not isinstance(items, list):
            return items
        if not items:
            raise InputError("'input' is empty", field="input", remedy="give it a text or a message", code="empty")
        names: dict[object, object] = {}  # {call_id: name} of the calls so far
        written = [self._item(item, f"input[{i}]", names) for i, item in enumerate(items)]
        if len(written) == 1 and written[0][0] == "user":
            return written[0][1]
        return "\n\n".join(f"{role}: {text}" for role, text in written)

    def _item(self, item: object, field: str, names: dict[object, object]) -> tuple[str, str]:
        """Return (role, text) of an item."""
        if not isinstance(item, Mapping):
            remedy = 'give {"role": "user", "content": "..."}'
            raise InputError(f"{field!r} is not an object", field=field, remedy=remedy, code="wrong_type")
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") in ("user", "developer", "system", "assistant"):
            return item["role"], self.joined(item.get("content"), f"{field}.content")
        if kind in ("function_call", "custom_tool_call"):
            given = item.get("arguments" if kind == "function_call" else "input", "")
            names[item.get("call_id")] = item.get("name")
            return "assistant", f"calls {item.get('name')}({given})"
        if kind in ("function_call_output", "custom_tool_call_output"):
            if item.get("call_id") not in names:
                remedy = "give the call before its output"
                message = f"{field!r} is the output of a call that is not in the input"
                raise InputError(message, field=f"{field}.call_id", remedy=remedy)
            return f"{names[item['call_id']]} returns", self.joined(item.get("output"), f"{field}.output")
        message = f"{field!r} is of the type {kind!r:.80}" if kind != "message" else f"{field!r} has no known role"
        remedy = "give messages of user, developer, system or assistant, and calls with their outputs"
        raise InputError(message, field=field, remedy=remedy, code="unsupported")

    def joined(self, content: object, field: str) -> str:
        """Return a text, or the joined text of parts. JSON parts are written as JSON."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise InputError(
                f"{field!r} is not a text", field=field, remedy="give a text or a list of parts", code="wrong_type"
            )
        texts: list[str] = []
        is_text = False
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if (image := self._image(part, f"{field}[{i}]")) is not None:
                texts.append(self._named(image, f"{field}[{i}]"))
                is_text = False
                continue
            if is_text:
                texts.append("\n")
            is_text = True
            if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind == "refusal" and isinstance(part.get("refusal"), str):
                texts.append(part["refusal"])
            elif kind == "input_json" and isinstance(part.get("data"), (dict, list)):
                texts.append(json.dumps(part["data"], ensure_ascii=False))
            else:
                message = f"{field}[{i}] is of the type {kind!r:.80}"
                remedy = "give parts of the types input_text, input_image and input_json"
                raise InputError(message, field=f"{field}[{i}]", remedy=remedy, code="unsupported")
        return "".join(texts)

    def _image(self, part: object, field: str) -> object:
        """Return the image of a part, or None for any other part."""
        image = image_in(part, field)
        if isinstance(image, Mapping) and "url" not in image:
            image = image.get("file_id")
            if not isinstance(image, str):
                remedy = 'give {"type": "input_image", "image_url": "data:image/png;base64,..."}'
                raise InputError(f"{field} has no image_url", field=field, remedy=remedy, code="unsupported")
        return image
