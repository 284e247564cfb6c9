"""Bodies of requests as structs. The declaration of a field defines its parsing and its OpenAPI description."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from ..engine.schedule.generate_step import NO_OWNER
from ..errors import InputError
from ..spec.fields import explained, kind_of, near
from ..spec.requests import Owner, Readout
from ..spec.task import option_of
from ..tasks.results import Answer

T = TypeVar("T")
# {msgspec's name of a type: what to give}, in the words of `spec.fields.checked`
_REMEDIES = {
    "bool": "true or false", "str": "a text", "int": "a whole number", "float": "a number", "array": "a list",
    "object": "an object",
}  # fmt: skip
_BOUNDS = {">=": ", {} or more", ">": ", more than {}", "<=": ", at most {}"}


def doc(text: str, kind: str | None = None, **schema: Any) -> Meta:
    """Return the OpenAPI description of a field, with a schema of its values if its type is Any."""
    return Meta(description=text, extra_json_schema=({"type": kind} if kind else {}) | schema or None)


def doc_of_option(name: str, **schema: Any) -> Meta:
    """Return the description of a generation option.

    Args:
        schema: For options that are not numbers.
    """
    option = option_of("generate", name)
    least, most = option.metadata["least"], option.metadata["most"]
    bounds = {"exclusiveMinimum" if option.metadata["above"] else "minimum": least, "maximum": most}
    kind = {int: "integer", float: "number", bool: "boolean"}.get(kind_of(option) or object)
    limits = {"type": kind, **{name: bound for name, bound in bounds.items() if bound is not None}} if kind else {}
    return doc(explained(option), **(schema or limits))


IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
IDS_OR_LISTS = {"anyOf": [IDS, {"type": "array", "items": IDS}]}
OBJECTS = {"type": "array", "items": {"type": "object"}}
TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Model = Annotated[Any, doc("A served name, or the name of an adapter (default: the model).", "string")]
Ignored = Annotated[Any, doc("Accepted and ignored.")]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16, description="Repeated in the response."),
]
METADATA_REMEDY = "give an object of at most 16 texts of up to 512 characters, with names of up to 64"


class Word(StrEnum):
    """An enumeration whose words match in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return next((word for word in cls if isinstance(value, str) and value.lower() == word.lower()), None)


class Body(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a request. Its fields are the fields of the class; null means a field's default.

    A value of type Any is checked by the task, as in a record. `sent` writes a body for another server.

    Attributes:
        unsupported: {refused field: values that change nothing and are accepted}
        batch: {field refused in a line of a batch: (values that change nothing, the remedy)}
        remedies: {field: remedy if the field is refused, missing or wrong}
        missing: (message, remedy) of a missing required field
        may_be_empty: a required field may be an empty text or list
        is_listed: the error of an unknown field lists all fields
        is_strict: a text is refused if a number is expected
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    batch: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}
    missing: ClassVar[tuple[str, str]] = ("{!r} is missing", "give it")
    may_be_empty: ClassVar[bool] = False
    is_listed: ClassVar[bool] = True
    is_strict: ClassVar[bool] = True

    @property
    def sent(self) -> dict[str, Any]:
        """Return the body as a JSON object, without fields that have their defaults."""
        sent: dict[str, Any] = msgspec.to_builtins(self)
        return sent

    @classmethod
    def of(cls, body: Mapping[str, Any], *, in_batch: bool = False) -> Self:
        """Parse the JSON object of a request. Raise InputError, naming the wrong field."""
        fields, refused, remedies = cls.__struct_encode_fields__, cls.unsupported, cls.remedies
        if in_batch:
            refused = {**refused, **{name: values for name, (values, _) in cls.batch.items()}}
            remedies = {**remedies, **{name: remedy for name, (_, remedy) in cls.batch.items()}}
        values = {name: value for name, value in body.items() if value is not None}
        required, nested = _parts(cls)
        missing = [name for name in required if name not in values]
        for name, value in list(values.items()):
            if name in refused and value in refused[name]:
                del values[name]
            elif name in refused or name not in fields:
                if missing and name not in refused and not near(name, missing):
                    break  # the missing field is the better error: the body is probably meant for another path
                remedy = remedies.get(name, "leave it out")
                if name in refused:
                    message = f"{cls.missing[0].partition(' ')[0].format(name)} is not supported"
                elif cls.is_listed:
                    message, remedy = f"unknown field {name!r:.100}", f"the fields are {', '.join(fields)}"
                else:
                    likely = near(name, missing, " if not, ") or near(name, fields, " if not, ")
                    message, remedy = f"unknown parameter {name!r:.100}", likely + remedy
                raise InputError(message, field=name[:100], remedy=remedy, code="unsupported")
        for name in required:
            if name in missing:
                message, remedy = (text.format(name) for text in cls.missing)
                raise InputError(message, field=name, remedy=remedy, code="missing_field")
            if not cls.may_be_empty and values[name] in ("", []):
                message, remedy = f"{name!r} is empty", "give at least one text"
                raise InputError(message, field=name, remedy=remedy, code="empty")
        values |= {name: kind.of(values[name]) for name, kind in nested.items() if isinstance(values.get(name), dict)}
        return converted(values, cls, remedies=cls.remedies, strict=cls.is_strict)


@cache
def _parts(kind: type[Body]) -> tuple[list[str], dict[str, type[Body]]]:
    """Return (the required fields, {field: its type, if the type is a Body})."""
    fields = msgspec.structs.fields(kind)
    kinds = {
        entry.name: [part for part in (entry.type, *get_args(entry.type)) if isinstance(part, type)] for entry in fields
    }
    nested = {name: part for name, parts in kinds.items() for part in parts if issubclass(part, Body)}
    return [entry.encode_name for entry in fields if entry.required], nested


@dataclass
class TaskOrder:
    """The work of a request for a task, and how its response is made.

    A server sets `owner`, `num_bytes`, `salt_prefix` and `computes`.
    """

    task: str  # name of the task
    items: Sequence[Any]  # items of the task
    make: Callable[[list[Any]], Any] = list  # make(answers to the items) -> the body of the response
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the task for this request
    # {field of an item: its name in the request}, if the names differ
    fields: Mapping[str, str] = field(default_factory=dict)
    share: bool = True  # prompts may share rows with earlier and later requests
    echo: Any = None  # Echo of prompts that are scored beside their continuations
    readout: Readout | None = None  # overrides the task's read-out; None: the task's
    events: Any = None  # makes the events of a streamed response; None: not streamed
    owner: Owner = NO_OWNER
    num_bytes: int = 0  # size of the body
    salt_prefix: str = ""  # requests share prefixes only within this prefix
    computes: bool = True  # False: only the prompts are needed, the engine computes nothing


@dataclass(frozen=True)
class ServedModel:
    """The served model and the settings of the server that a TaskOrder needs besides the body."""

    llm: Any  # the served LLM
    model: str = ""  # the model's name in the response
    id: str = ""  # unique text for the response's id
    fingerprint: str = ""  # system_fingerprint of generated texts
    max_logprobs: int = 0  # maximum number of most likely tokens that may be listed


class Settings(Body, kw_only=True):
    """The fields that all requests to OpenAI's and vLLM's paths have."""

    model: Model = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="Cut a prompt to this many tokens (-1: to the model's limit).")] | None
    ) = None
    cache_prompt: Annotated[bool, doc("false: share no prefix with earlier or later requests.")] = True
    priority: Ignored = None
    request_id: Ignored = None
    user: Ignored = None

    batch: ClassVar = {
        "truncate_prompt_tokens": ((), "leave it out, and give --truncate to cut long prompts"),
        "cache_prompt": ((True,), "leave it out"),
    }
    remedies: ClassVar = {
        "truncate_prompt_tokens": "give a number of tokens, or -1 for the model's limit",
        "max_chunks_per_doc": "give max_tokens_per_doc", "rank_fields": "give the text of each document alone",
    }  # fmt: skip
    is_listed = False

    def options(self, task: str) -> dict[str, Any]:
        """Return the task's options for `truncate_prompt_tokens`, a parameter of vLLM. Raise InputError if it is 0."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return {}
        if limit == 0:
            name = "truncate_prompt_tokens"
            raise InputError(f"{name!r} is 0", field=name, remedy=self.remedies[name], code="wrong_type")
        # Generated text follows the end of the prompt, so cut the start.
        truncation = {"truncate": "left" if task == "generate" else True}
        return truncation if limit < 0 else truncation | {"max_length": limit}


class Batchable(Settings, kw_only=True):
    """The body of a request that may also be a line of a batch."""

    task: ClassVar[str]  # name of the task
    fields: ClassVar[Mapping[str, str]] = {}  # {field of an item: its name in the request}, if the names differ
    prefix: ClassVar[str | None] = None  # start of the response's id; None: no id and no time

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (items of the task, a JSON `meta` for the response). Raise InputError for wrong values.

        Args:
            defaults: {field of Sampling: value}, overrides OpenAI's defaults.
        """
        raise NotImplementedError

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Any]) -> dict[str, Any]:
        """Return the response without its id, time, model and usage."""
        raise NotImplementedError

    @classmethod
    def usage(cls, answers: Sequence[Any]) -> dict[str, Any]:
        """Return the `usage` of the response: its numbers of tokens.

        Args:
            answers: The task's answer to each item.
        """
        tokens = sum([answer.num_tokens for answer in answers])
        return {"prompt_tokens": tokens, "total_tokens": tokens}

    @classmethod
    def response(cls, meta: Mapping[str, Any], answers: Sequence[Answer], *, model: str, id: str) -> dict[str, Any]:
        """Return the response.

        Args:
            model: The model's name in the response.
            id: The end of the response's id, after the prefix.
        """
        head = {} if cls.prefix is None else {"id": cls.prefix + id, "created": int(time.time())}
        return head | cls.body(meta, answers) | {"model": model, "usage": cls.usage(answers)}

    @classmethod
    def fields_of(cls, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Return {field of an item: its name in the request}."""
        return {**cls.fields, **({"grammar": meta["format"]} if "format" in meta else {})}

    def order(self, served: ServedModel) -> TaskOrder:
        """Return the TaskOrder of the request. Raise InputError for wrong values."""
        return self.ordered(served, *self.read({}))

    def ordered(self, served: ServedModel, items: Sequence[Any], meta: dict[str, Any], **values: Any) -> TaskOrder:
        """Return the TaskOrder of these items.

        Args:
            meta: The second result of `read`.
            values: Further fields of the TaskOrder.
        """
        make = partial(self.response, meta, model=served.model, id=served.id)
        options, fields = self.options(self.task), self.fields_of(meta)
        return TaskOrder(self.task, items, make, options, fields, self.cache_prompt, **values)


def converted(
    value: Any, kind: type[T], field: str = "", *, remedies: Mapping[str, str] | None = None, strict: bool = True
) -> T:
    """Convert a value to a type. Raise InputError, naming the wrong field. Nulls in unknown fields are ignored.

    Args:
        value: The value, as parsed from JSON.
        kind: The type.
        field: The name of the value itself, for errors.
        remedies: {field: remedy}.
        strict: Refuse a text if a number is expected.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        # The path ends the message: "... - at `$.metadata`", or "... - at `key` in `$.metadata`" for a wrong key.
        # There is no path if the whole value is wrong.
        fault, mark, path = str(error).rpartition("`$")
        fault, path = (fault, path) if mark else (path, "")
        path, missing = path.rstrip("`").partition("[...]")[0], re.search("required field `(.*)`", fault)
    place = (field + path).lstrip(".")
    top = re.split(r"[.\[]", place)[0]
    remedy = (remedies or {}).get(top)
    if missing:
        place = f"{place}.{missing[1]}".lstrip(".")
        raise InputError(f"{place!r} is missing", field=place, remedy=remedy or "give it", code="missing_field")
    if unknown := re.search("unknown field `(.*)`", fault):
        if isinstance(inner := _at(value, path), dict) and inner.get(unknown[1], "") is None:
            value = deepcopy(value)
            inner = _at(value, path)
            for name in [name for name, part in inner.items() if part is None]:
                del inner[name]
            return converted(value, kind, field, remedies=remedies, strict=strict)
        place = f"{place}.{unknown[1]}".lstrip(".")[:100]
        raise InputError(f"{place!r} is not supported", field=place, remedy="leave it out", code="unsupported")
    message, remedy = f"{place!r:.200} is {_at(value, path)!r:.100}", remedy or _remedy(fault, kind, path[1:])
    raise InputError(message, field=place[:100], remedy=remedy, code="wrong_type")


def _at(value: Any, path: str) -> Any:
    """Return the part of a value at a path of msgspec, or None."""
    for step in re.findall(r"\w+", path):
        value = value[int(step)] if isinstance(value, list) else value.get(step) if isinstance(value, dict) else None
    return value


def _remedy(fault: str, kind: Any, name: str) -> str:
    """Return the remedy for a wrong field of a struct.

    Args:
        fault: The message of msgspec.
    """
    types = [entry.type for entry in msgspec.structs.fields(kind) if entry.name == name]
    for word in (part for entry_type in types for part in (entry_type, *get_args(entry_type))):
        if isinstance(word, type) and issubclass(word, Word):
            return f"give one of {', '.join(member.value for member in word)}"
    expected = re.search(r"Expected `([a-z]+).*?`(?: ([<>]=?) ([\d.e+-]+))?", fault)
    if expected is None:
        return "leave it out"
    bound = _BOUNDS[expected[2]].format(f"{float(expected[3]):g}") if expected[2] else ""
    return f"give {_REMEDIES.get(expected[1], expected[1])}{bound}"


def renamed(field: str | None, names: Mapping[str, str]) -> str | None:
    """Return a request's name for a field of an item. For example, "text[3]" is "inputs[3]" in a request to TEI.

    Any part of a grammar is called by the parameter that sets the grammar.
    """
    name, bracket, index = (field or "").partition("[")
    if name.partition(".")[0] == "grammar":
        return names.get("grammar", name)
    return field and names.get(name, name) + bracket + index
