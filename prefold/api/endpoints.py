"""Says which URL is answered by which task, and how bodies of requests are read and those of responses made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .answers import ChoiceText, Events
from .body import Body as RequestBody
from .completions import (
    Chat,
    Completion,
    chat_body,
    chat_logprobs,
    completion_body,
    completion_logprobs,
    read_chat,
    read_completion,
    reasoning_of,
    usage_of,
)
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

    def names(self, meta: Meta) -> Mapping[str, str]:
        """Returns what the request calls the fields of the task's items. meta: what the response needs."""
        return self.fields | ({"grammar": meta["format"]} if "format" in meta else {})


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


class _Choice:
    """What was sent of one choice. prompt: what the task notes of its prompt; how: how calls are found."""

    def __init__(self, prompt: Body, how: Mapping[str, Any] | None):
        self.prompt, self.text = prompt, ChoiceText(prompt.get("thinks"), how)
        self.ids: list[int] = []  # of its tokens so far
        self.num_ids: int | None = None  # those that were sent
        self.num_logprobs = self.num_letters = 0  # tokens whose log-probabilities were sent, and their letters


class Chunks(Events):
    """Makes the chunks of one response.

    kind     "chat" or "completion"
    usage    whether a last chunk says how many tokens there were, and whether every chunk how many there are so far
    samples  choices of each prompt
    """

    is_named, mark = False, b"data: [DONE]\n\n"

    def __init__(self, kind: str, meta: Body, *, model: str, id: str, usage: tuple[bool, bool], samples: int):
        self._kind, self._meta, self._model, self._id = kind, meta, model, id
        self._usage, self._counts = usage
        self._samples, self._chat = samples, kind == "chat"
        name = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = {"id": f"{KINDS[kind].id}{id}", "object": name, "created": int(time.time()), "model": model}
        self._head |= {name: meta[name] for name in ("system_fingerprint",) if name in meta}
        self._choices: list[_Choice] = []
        self._results: dict[int, Body] = {}
        self._input_tokens = 0
        self._made: dict[int, dict[int, int]] = {}  # {item: {sample: tokens}}

    def begin(self, prompts: list[Body]) -> Iterator[Body]:
        self._input_tokens = sum(prompt["tokens"] for prompt in prompts)
        how = self._meta.get("calls")
        self._choices = [_Choice(prompt, how) for prompt in prompts for _ in range(self._samples)]
        for index, choice in enumerate(self._choices if self._chat else ()):
            ids = {"prompt_token_ids": choice.prompt["ids"]} if "ids" in choice.prompt else {}
            yield self._chunk(index, {"role": "assistant", "content": ""}) | ids

    def piece(self, item: int, sample: int, text: str, tokens: list[Body], count: int) -> Iterator[Body]:
        self._made.setdefault(item, {})[sample] = count
        index = item * self._samples + sample
        choice = self._choices[index]
        if "ids" in choice.prompt:
            choice.ids += [token["id"] for token in tokens]
        thought, text = choice.text.add(text)
        if thought and "hides_reasoning" not in self._meta:
            yield self._with_ids(self._chunk(index, reasoning_of(thought)), choice)
        if text:
            chunk = self._chunk(index, {"content": text} if self._chat else text)
            # Where text was kept back, it is not known which tokens are in it.
            if tokens and "logprob" in tokens[0] and "calls" not in self._meta and "thinks" not in choice.prompt:
                chunk["choices"][0]["logprobs"] = self._logprobs(choice, tokens)
            yield self._with_ids(chunk, choice)

    def end(self, item: int, result: Body) -> Iterator[Body]:
        self._results[item] = result
        self._made[item] = {0: result["num_generated"]}
        # Log-probabilities have been told with their tokens, but for the last.
        whole = response_body(self._kind, self._meta, [_bare(result)], model=self._model, id=self._id)
        for sample, made in enumerate(whole["choices"]):
            index = item * self._samples + sample
            choice, message = self._choices[index], made["message"] if self._chat else {"content": made["text"]}
            thought, rest = choice.text.rest(message)
            choice.ids = made.get("token_ids", [])
            delta: Any = ({"content": rest} if rest else {}) if self._chat else rest
            chunk = self._with_ids(self._chunk(index, delta), choice)
            (ended,) = chunk["choices"]
            if thought:
                ended["delta"] |= reasoning_of(thought)
            if "tool_calls" in message:
                ended["delta"]["tool_calls"] = [{"index": i} | call for i, call in enumerate(message["tool_calls"])]
            ended |= {name: made[name] for name in ("finish_reason", "stop_reason")}
            if tokens := (result.get("choices") or [result])[sample].get("logprobs", ())[choice.num_logprobs :]:
                ended["logprobs"] = self._logprobs(choice, list(tokens))
            yield chunk

    def last(self) -> Iterator[Body]:
        if self._usage:
            usage = usage_of([self._results[item] for item in sorted(self._results)])
            yield self._head | {"choices": [], "usage": usage}

    def failed(self, status: int, message: str, code: str, param: str | None) -> Body:
        return openai_error(status, message, code, param)[1]

    def _with_ids(self, chunk: Body, choice: _Choice) -> Body:
        """Returns a chunk, with the ids of a choice's tokens that have not been sent, where they are asked for. A
        chat's prompt stands in the chunk that begins it, that of a text in its first."""
        if "ids" in choice.prompt:
            if not self._chat and choice.num_ids is None:
                chunk["choices"][0]["prompt_token_ids"] = choice.prompt["ids"]
            chunk["choices"][0]["token_ids"] = choice.ids[choice.num_ids or 0 :]
            choice.num_ids = len(choice.ids)
        return chunk

    def _logprobs(self, choice: _Choice, tokens: list[Body]) -> Body:
        """Returns the log-probabilities of tokens that follow those that were sent."""
        letters = choice.num_letters
        choice.num_logprobs += len(tokens)
        choice.num_letters += sum(len(one.get("token", "")) for one in tokens)
        return chat_logprobs(tokens) if self._chat else completion_logprobs(tokens, letters)

    def _chunk(self, index: int, content: Any) -> Body:
        choice = {"index": index, "delta" if self._chat else "text": content, "logprobs": None, "finish_reason": None}
        usage = None
        if self._counts:
            made = sum(count for samples in self._made.values() for count in samples.values())
            usage = {"prompt_tokens": self._input_tokens, "completion_tokens": made}
            usage["total_tokens"] = self._input_tokens + made
        return self._head | {"choices": [choice]} | ({"usage": usage} if self._usage or self._counts else {})


def _bare(result: Body) -> Body:
    """Returns a result without the log-probabilities of its tokens."""
    bare = {name: value for name, value in result.items() if name != "logprobs"}
    return bare | {"choices": [_bare(one) for one in bare["choices"]]} if "choices" in bare else bare
