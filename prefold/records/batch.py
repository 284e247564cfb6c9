"""OpenAI batch lines: /v1/embeddings, /v1/chat/completions and /v1/completions (see `completions.py`), and as vLLM's
batch runner has them /v1/score and /rerank.

A line that cannot be sent anywhere (bad JSON, no or a second custom_id, an unknown url) has a null
response and an error; one whose body is refused has a response with status 400 and the error in it.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..api.completions import chat_body, completion_body, read_chat, read_completion, usage_of
from ..errors import InputError, record_error
from .adapter import Parsed
from .fields import as_text
from .lines import error_object
from .record import Record
from .recordset import TextSet

__all__ = ["LANES", "OpenAIBatch", "is_batch_line"]

# url -> the lane (task) that answers it
LANES = {
    "/v1/embeddings": "embed",
    "/v1/score": "rerank",
    "/score": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/chat/completions": "generate",
    "/v1/completions": "generate",
}
_LINE_ERRORS = {"duplicate_custom_id", "unknown_url", "invalid_line"}
_IGNORED = {"user", "model", "priority", "request_id"}


def is_batch_line(data: dict[str, Any]) -> bool:
    return "custom_id" in data and "url" in data and "body" in data


class OpenAIBatch:
    """The adapter for batch lines.

    served        the model's name in responses; what requests call it is counted in `other_models`
    seed          makes the ids of one job different from another's
    sampling      {field of Sampling: value} of completions that do not say otherwise
    adapters      names of LoRA adapters: a completion whose model is one of them is its
    """

    columns = None

    def __init__(
        self,
        served: str,
        *,
        seed: str = "",
        sampling: Mapping[str, Any] | None = None,
        adapters: Collection[str] = (),
    ):
        self.served = served
        self.seed = seed
        self.sampling = sampling or {}
        self.adapters = frozenset(adapters)
        self.other_models: Counter[str] = Counter()
        self._ids = TextSet()

    def read(self, record: Record) -> Parsed:
        parsed = Parsed()
        if record.error is not None or record.data is None:
            parsed.error = record.error
            return parsed
        try:
            parsed.meta = {"id": _custom_id(record.data)}
            if not self._ids.add(parsed.meta["id"]):
                message = f"custom_id {parsed.meta['id']!r} was used by an earlier record"
                raise InputError(message, field="custom_id", remedy="make it unique", code="duplicate_custom_id")
            url, body = _request(record.data)
            parsed.lane = LANES[url]
            self._read_body(parsed, url, body)
            model = body.get("model")
            if not isinstance(model, str | None):
                raise InputError(f"model is {model!r:.100}", field="model", remedy="give a name", code="wrong_type")
            if parsed.lane == "generate" and model in self.adapters:
                parsed.meta["model"] = model
                parsed.items = [item | {"adapter": model} for item in parsed.items]
            elif model is not None and model != self.served:
                self.other_models[model] += 1
        except Exception as error:
            parsed.error = record_error(error)
        return parsed

    def _read_body(self, parsed: Parsed, url: str, body: dict[str, Any]) -> None:
        if LANES[url] == "generate":
            read = read_chat if "chat" in url else read_completion
            parsed.items, meta = read(body, self.sampling)
        else:
            parsed.items, meta = _READERS.get(url, _rerank)(body)
        parsed.meta |= meta

    def line(self, number: int, meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
        model = {"model": meta.get("model", self.served)}
        if meta["kind"] in _COMPLETIONS:
            prefix, make = _COMPLETIONS[meta["kind"]]
            head = {"id": self._id(prefix, number), "created": int(time.time())}
            return self._response(number, meta["id"], 200, head | model | make(results) | {"usage": usage_of(results)})
        tokens = sum(result["num_tokens"] for result in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = _BODIES[meta["kind"]](meta, results) | model | {"usage": usage}
        return self._response(number, meta["id"], 200, body)

    def error_line(self, number: int, meta: dict[str, Any] | None, error: InputError) -> dict[str, Any]:
        custom_id = None if meta is None else meta["id"]
        details = error_object(error)
        if meta is None or error.code in _LINE_ERRORS:
            details["message"] = f"record {number}: {details['message']}"
            return {"id": self._id("batch_req", number), "custom_id": custom_id, "response": None, "error": details}
        field = self._field(meta, error.field) if "kind" in meta else error.field
        message = f"record {number}: {error}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": error.code}}
        return self._response(number, custom_id, 400, body)

    @staticmethod
    def _field(meta: dict[str, Any], field: str | None) -> str | None:
        """The request's name for a field of the task's."""
        score = {"query": "text_1", "document": "text_2", "documents": "text_2"}
        completion = {"stop_ids": "stop_token_ids", "salt": "cache_salt"}
        chat = completion | {"logprobs": "top_logprobs"}
        names = {"embeddings": {"text": "input"}, "score": score, "chat": chat, "completion": completion}
        name, bracket, index = (field or "").partition("[")
        if name.partition(".")[0] == "grammar":
            return meta.get("format", name)
        return field and names.get(meta["kind"], {}).get(name, name) + bracket + index

    def _response(self, number: int, custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": self._id("req", number), "body": body}
        return {"id": self._id("batch_req", number), "custom_id": custom_id, "response": response, "error": None}

    def _id(self, prefix: str, number: int) -> str:
        return f"{prefix}_{hashlib.blake2b(f'{self.seed}:{number}'.encode(), digest_size=12).hexdigest()}"


# ------------------------------------------------------------------------------------------- requests


def _custom_id(data: dict[str, Any]) -> str:
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        what = "is missing" if custom_id is None else "is not a text"
        raise InputError(f"custom_id {what}", field="custom_id", remedy="give each line its own", code="invalid_line")
    return as_text(custom_id, "custom_id")


def _request(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    url, method, body = data.get("url"), data.get("method", "POST"), data.get("body")
    if not isinstance(url, str) or url not in LANES:
        known = ", ".join(LANES)
        raise InputError(f"url {url!r} is not served", field="url", remedy=f"use one of {known}", code="unknown_url")
    if method != "POST":
        raise InputError(f"method {method!r} is not served", field="method", remedy='use "POST"', code="invalid_line")
    if not isinstance(body, dict):
        raise InputError("body is not an object", field="body", remedy="give it the request", code="invalid_line")
    return url, body


def _check_keys(body: dict[str, Any], known: set[str]) -> None:
    for key in body:
        if key == "truncate_prompt_tokens" and body[key] is not None:
            remedy = "leave it out, and give --truncate to cut what is too long"
            raise InputError(f"{key} cannot be set per request", field=key, remedy=remedy, code="unsupported")
        if key not in known | _IGNORED | {"truncate_prompt_tokens"}:
            raise InputError(f"unknown parameter {key!r}", field=key, remedy="leave it out", code="unsupported")


def _required(body: dict[str, Any], *names: str) -> Any:
    """The value of the first of these names that is there."""
    name = next((n for n in names if n in body), names[0])
    if body.get(name) is None:
        what = "null" if name in body else "missing"
        raise InputError(f"{name} is {what}", field=name, remedy="give it", code="missing_field")
    return body[name]


def _embeddings(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    _check_keys(body, {"input", "dimensions", "encoding_format"})
    format = body.get("encoding_format") or "float"
    if format not in ("float", "base64"):
        remedy = 'use "float" or "base64"'
        raise InputError(f"encoding_format is {format!r}", field="encoding_format", remedy=remedy, code="wrong_type")
    item = {"text": _required(body, "input"), "dimensions": body.get("dimensions")}
    return [item], {"kind": "embeddings", "format": format}


def _rerank(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    names = {"query", "documents", "top_n", "return_documents", "instruction"}
    _check_keys(body, names)
    item = {name: body[name] for name in names & set(body)}
    item |= {"query": _required(body, "query"), "documents": _required(body, "documents")}
    item["return_documents"] = bool(body.get("return_documents"))
    if isinstance(item["query"], list):
        raise InputError("query is a list", field="query", remedy="give one text", code="wrong_type")
    return [item], {"kind": "rerank"}


def _score(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """One text against one or many, or as many against as many."""
    _check_keys(body, {"text_1", "text_2", "queries", "documents", "instruction"})
    first, second = _required(body, "text_1", "queries"), _required(body, "text_2", "documents")
    first = first if isinstance(first, list) else [first]
    second = second if isinstance(second, list) else [second]
    fixed = {"instruction": body.get("instruction")}
    if len(first) == 1:
        return [{"query": first[0], "documents": second, **fixed}], {"kind": "score"}
    if len(first) != len(second):
        message = f"text_1 holds {len(first)} texts, text_2 {len(second)}"
        raise InputError(message, field="text_1", remedy="give one text, or as many as in text_2", code="wrong_type")
    return [{"query": a, "document": b, **fixed} for a, b in zip(first, second, strict=True)], {"kind": "score"}


_READERS = {"/v1/embeddings": _embeddings, "/v1/score": _score, "/score": _score}


# ------------------------------------------------------------------------------------------ responses


def _embeddings_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    result = results[0]
    vectors = result["embeddings"] if "embeddings" in result else [result["embedding"]]
    if meta["format"] == "base64":
        vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data}


def _rerank_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    result = results[0]
    entries: list[dict[str, Any]] = [{"index": i, "relevance_score": result["scores"][i]} for i in result["order"]]
    for entry, document in zip(entries, result.get("documents", []), strict=False):
        entry["document"] = {"text": document}
    return {"results": entries}


def _score_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    scores = [score for result in results for score in result.get("scores", [result.get("score")])]
    return {"object": "list", "data": [{"object": "score", "index": i, "score": s} for i, s in enumerate(scores)]}


_BODIES: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], dict[str, Any]]] = {
    "embeddings": _embeddings_body,
    "rerank": _rerank_body,
    "score": _score_body,
}
# kind -> what the response's id begins with, and what makes the response
_COMPLETIONS = {"chat": ("chatcmpl", chat_body), "completion": ("cmpl", completion_body)}
