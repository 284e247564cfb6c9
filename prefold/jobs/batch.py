"""OpenAI batch lines: requests to the URLs of `wire.ENDPOINTS`, one per line, each with a custom_id.

A line that cannot be assigned to a request gets an error and a null response. Examples are bad JSON, a missing or
repeated custom_id, and an unknown url. A line with a wrong body gets a response of status 400 that holds the error.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import InputError, record_error
from ..tasks.results import Answer
from ..text.valid import valid_text
from ..wire import ENDPOINTS, KINDS, openai_error
from ..wire.body import renamed
from .record import ParsedRecord, Record, TextSet, error_object

_OTHER_MODELS = 20  # maximum names of other models that are counted separately
_LINE_ERRORS = {
    "duplicate_custom_id", "unknown_url", "invalid_line", "mismatched_url", "batch_expired", "batch_cancelled",
    "batch_failed",
}  # fmt: skip
_STATUS = {"model_not_found": 404}
# {URL that is often asked for but not served: what to do instead}
_OTHER_URLS = {"/v1/moderations": "classify the texts: prefold classify FILE --labels ..."}


def is_batch_line(data: dict[str, Any]) -> bool:
    """Return whether a record has the fields of a batch line."""
    return "custom_id" in data and "url" in data and "body" in data


def add_usage(total: Counter[str], usage: Mapping[str, Any]) -> None:
    """Add the usage of a response to `total`. The endpoints have different names for the same counts.

    Args:
        total: Numbers of tokens: `input`, `output`, and the parts of the input that are `cached` and `approximate`.
    """
    total["input"] += usage.get("prompt_tokens", 0) or usage.get("input_tokens", 0)
    total["output"] += usage.get("completion_tokens", 0) or usage.get("output_tokens", 0)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    total["cached"] += details.get("cached_tokens", 0)
    total["approximate"] += details.get("approximate_tokens", 0)


class _Body(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Line(msgspec.Struct):
    """The fields of an output line that are read. Other fields are ignored."""

    response: _Response | None


_read_line = msgspec.json.Decoder(_Line).decode


def split_lines(lines: Path, good: Path, bad: Path) -> tuple[Counter[str], Counter[str]]:
    """Split the output lines of a batch into a file of answers and a file of errors.

    Return (number of lines: "output" and "error"; usage of the answers).
    """
    counts, usage = Counter[str](), Counter[str]()
    with lines.open("rb") as file, good.open("wb") as answers, bad.open("wb") as errors:
        for line in file:
            response = _read_line(line).response
            is_error = response is None or response.status_code != 200
            counts["error" if is_error else "output"] += 1
            (errors if is_error else answers).write(line)
            if response is not None and not is_error:
                add_usage(usage, response.body.usage or {})
    return counts, usage


class OpenAIBatch:
    """The RecordAdapter of OpenAI batch lines.

    Attributes:
        other_models: {model named by a request that is not the served one: number of requests}
        usage: sum of the usage of all answers
    """

    columns: Collection[str] | None = None

    def __init__(
        self,
        served: str,
        *,
        seed: str = "",
        sampling: Mapping[str, Any] | None = None,
        adapters: Collection[str] = (),
        names: Collection[str] | None = None,
        endpoint: str | None = None,
        fingerprint: str | None = None,
    ):
        """Prepare the adapter.

        Args:
            served: The model's name in responses.
            seed: Makes the ids of responses different from the ids of other jobs.
            sampling: {field of Sampling: value} for generation requests that omit the field.
            adapters: Names of LoRA adapters. A line whose model is one of them runs with that adapter.
            names: Names of the model that a line may ask for; None: any name.
            endpoint: The URL that all lines must have; None: any URL that is served.
            fingerprint: The system_fingerprint of generated texts; None: no such field.
        """
        self.served = served
        self.seed = seed
        self.sampling = sampling or {}
        self.adapters = frozenset(adapters)
        self.names, self.endpoint = names, endpoint
        self._about = {} if fingerprint is None else {"system_fingerprint": fingerprint}
        self.other_models: Counter[str] = Counter()
        self.usage: Counter[str] = Counter()
        self._ids = TextSet()

    def read(self, record: Record) -> ParsedRecord:
        parsed = ParsedRecord()
        if record.error is not None or record.data is None:
            parsed.error = record.error
            return parsed
        try:
            self._read(parsed, record.data)
        except Exception as error:
            parsed.error = record_error(error)
        return parsed

    def _read(self, parsed: ParsedRecord, data: dict[str, Any]) -> None:
        custom_id = _custom_id(data)
        parsed.meta = {"id": custom_id}
        if not self._ids.add(json.dumps(custom_id)):
            message = f"custom_id {custom_id!r} was used by an earlier record"
            remedy = "give each record its own custom_id"
            raise InputError(message, field="custom_id", remedy=remedy, code="duplicate_custom_id")
        url, body = _request(data)
        if self.endpoint not in (None, url):
            message, remedy = f"url is {url}, and the batch is for {self.endpoint}", f"use {self.endpoint}"
            raise InputError(message, field="url", remedy=remedy, code="mismatched_url")
        kind = ENDPOINTS[url]
        parsed.task = KINDS[kind].task
        parsed.items, meta = self.items(kind, body)
        parsed.meta |= {"kind": kind, **meta}
        model = body.get("model")
        if not isinstance(model, str | None):
            message = f"'model' is {model!r:.100}, not a text"
            raise InputError(message, field="model", remedy="give the name of a model", code="wrong_type")
        if model in self.adapters:
            parsed.meta["model"] = model
            parsed.items = [item | {"adapter": model} for item in parsed.items]
        elif model is not None and self.names is not None and model not in self.names:
            remedy = f"ask for one of {', '.join((self.served, *sorted(self.adapters)))}"
            message = f"the model {model!r:.100} is not served here"
            raise InputError(message, field="model", remedy=remedy, code="model_not_found")
        elif model is not None and model != self.served:
            is_counted = model in self.other_models or len(self.other_models) < _OTHER_MODELS
            self.other_models[model if is_counted else "others"] += 1

    def items(self, kind: str, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (the task's items for a body, the meta of its response). Raise InputError for a wrong body."""
        return KINDS[kind].of(body, in_batch=True).read(self.sampling)

    def line(self, number: int, meta: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
        model = meta.get("model", self.served)
        body = KINDS[meta["kind"]].response(meta | self._about, answers, model=model, id=self._digest(number))
        add_usage(self.usage, body.get("usage") or {})
        return self._response(number, meta["id"], 200, body)

    def error_line(self, number: int, meta: dict[str, Any] | None, error: InputError) -> dict[str, Any]:
        custom_id = None if meta is None else meta["id"]
        if meta is None or error.code in _LINE_ERRORS:
            details = error_object(error) | {"record": number}
            line_id = f"batch_req_{self._digest(number)}"
            return {"id": line_id, "custom_id": custom_id, "response": None, "error": details}
        if "kind" in meta:
            error = error.renamed(renamed(error.field, KINDS[meta["kind"]].fields_of(meta)))
        status, body = openai_error(_STATUS.get(error.code, 400), str(error), error.code, error.field)
        return self._response(number, custom_id, status, body)

    def _response(self, number: int, custom_id: str | int | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
        digest = self._digest(number)
        response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
        return {"id": f"batch_req_{digest}", "custom_id": custom_id, "response": response, "error": None}

    def _digest(self, number: int) -> str:
        return hashlib.blake2b(f"{self.seed}:{number}".encode(), digest_size=12).hexdigest()


def _custom_id(data: dict[str, Any]) -> str | int:
    """Return the line's custom_id. A whole number stays a number in the response."""
    custom_id = data.get("custom_id")
    if isinstance(custom_id, int) and not isinstance(custom_id, bool):
        return custom_id
    if not isinstance(custom_id, str) or not custom_id:
        problem = "is missing" if custom_id is None else "is empty" if custom_id == "" else "is not a text"
        remedy = "give each line its own custom_id"
        raise InputError(f"custom_id {problem}", field="custom_id", remedy=remedy, code="invalid_line")
    return valid_text(custom_id, "custom_id")


def _request(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (url, body) of a batch line. Raise InputError for a wrong line, and for a URL that is not served."""
    url, method, body = data.get("url"), data.get("method", "POST"), data.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        kind = _OTHER_URLS.get(url) if isinstance(url, str) else None
        remedy = kind or f"use one of {', '.join(ENDPOINTS)}"
        raise InputError(f"url {url!r:.100} is not served", field="url", remedy=remedy, code="unknown_url")
    if method != "POST":
        message = f"method {method!r:.100} is not served"
        raise InputError(message, field="method", remedy='use "POST"', code="invalid_line")
    if not isinstance(body, dict):
        remedy = "give the request's parameters as an object"
        raise InputError("body is not an object", field="body", remedy=remedy, code="invalid_line")
    return url, body
