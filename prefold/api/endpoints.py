"""Says which URL is answered by which task, and how bodies of requests are read and those of responses made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .body import Body as RequestBody
from .body import renamed
from .completions import Chat, Completion, chat_body, completion_body, read_chat, read_completion, usage_of
from .numbers import (
    Embeddings,
    Rerank,
    Scoring,
    embeddings_body,
    read_embeddings,
    read_rerank,
    read_score,
    rerank_body,
    score_body,
)
from .responses import Responses, read_responses, responses_body

Body = dict[str, Any]
Meta = dict[str, Any]
Results = list[dict[str, Any]]


@dataclass(frozen=True)
class RequestKind:
    """A RequestKind says how requests of one kind are read and answered.

    task    the name of the task that answers it
    body    the fields of its body
    items   (body, {field of Sampling: default}) -> (items of the task, what the response needs, JSON-able).
            Raises InputError whose `field` is the request's
    make    (what the response needs, the task's result of each item) -> the response's own part of its body
    whole   whether `make` makes all of the body but the model; its "id" of what the response needs makes the ids
    fields  {name of a field of the task's items: what the request calls it}, where they differ
    id      what the response's id begins with; None: it has neither id nor time
    """

    task: str
    body: type[RequestBody]
    items: Callable[[Any, Mapping[str, Any]], tuple[list[Any], Meta]]
    make: Callable[[Meta, Results], Body]
    fields: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None
    whole: bool = False

    def read(self, body: Body, defaults: Mapping[str, Any]) -> tuple[list[Any], Meta]:
        """Returns what `items` does of the body of a batch's line. Raises InputError."""
        return self.items(self.body.of(body, in_batch=True), defaults)

    def name_of(self, field: str | None, meta: Meta) -> str | None:
        """Returns what the request calls a field of the task's items: "text[3]" is "input[3]" of an embeddings
        request."""
        name = (field or "").partition("[")[0]
        if name.partition(".")[0] == "grammar":
            return meta.get("format", name)
        return renamed(field, self.fields)


_SAMPLING = {"stop_ids": "stop_token_ids", "salt": "cache_salt", "with_ids": "return_token_ids"}
_CHAT = _SAMPLING | {"logprobs": "top_logprobs"}
_RESPONSE = _CHAT | {"messages": "input", "max_tokens": "max_output_tokens"}
_PAIR = {"query": "text_1", "document": "text_2", "documents": "text_2"}
KINDS = {
    "embeddings": RequestKind("embed", Embeddings, read_embeddings, embeddings_body, {"text": "input"}),
    "rerank": RequestKind("rerank", Rerank, read_rerank, rerank_body, id="rerank-"),
    "score": RequestKind("rerank", Scoring, read_score, score_body, _PAIR, "score-"),
    "chat": RequestKind("generate", Chat, read_chat, chat_body, _CHAT, "chatcmpl-"),
    "completion": RequestKind("generate", Completion, read_completion, completion_body, _SAMPLING, "cmpl-"),
    "response": RequestKind("generate", Responses, read_responses, responses_body, _RESPONSE, "resp_", whole=True),
}
# {URL: the kind of request that it takes}
ENDPOINTS = {
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
}
TASKS = tuple(dict.fromkeys(KINDS[kind].task for kind in ENDPOINTS.values()))

_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def response_body(kind: str, meta: Meta, results: Results, *, model: str, id: str) -> Body:
    """Returns the body of the response to a request of that kind.

    model   the model's name in it
    id      what is put behind the prefix of the response's id, for kinds that have one
    """
    found = KINDS[kind]
    if found.whole:
        return found.make(meta | {"id": id}, results) | {"model": model}
    head = {} if found.id is None else {"id": found.id + id, "created": int(time.time())}
    if found.task == "generate":
        usage = usage_of(results)
    else:
        tokens = sum(result["num_tokens"] for result in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return head | found.make(meta, results) | {"model": model, "usage": usage}


def openai_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Body]:
    """Returns (status, body) of an error in OpenAI's form."""
    kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code or None}}
