"""The exchanges of a recording: requests to servers, each server with a model and options of its own.

Every path that takes JSON is asked with a body that it takes, and then in every way that a request is commonly wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .jobs import BATCH, SCHEMA, TEXTS, picture

__all__ = ["SERVERS", "Exchange", "Server"]


@dataclass(frozen=True)
class Exchange:
    """An Exchange is a request to a server, and what is recorded of the answer.

    body   bytes, or what is sent as JSON; <NAME> in it, and in the path, is what an earlier exchange kept as NAME
    keep   {NAME: field of the answer}
    until  a pattern: the request is sent again until the answer has it
    rough  whether the answer is lines of a batch, whose order and last digits follow the clock, as its steps do
    """

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keep: Mapping[str, str] = field(default_factory=dict)
    until: str | None = None
    rough: bool = False


@dataclass(frozen=True)
class Server:
    """A Server is the arguments of `prefold serve`, the requests to it, and files that it finds in its folder."""

    arguments: Sequence[str]
    exchanges: Sequence[Exchange]
    files: Mapping[str, str] = field(default_factory=dict)


def post(name: str, path: str, body: Any, headers: Mapping[str, str] | None = None, **more: Any) -> Exchange:
    """Returns an Exchange that sends a body."""
    return Exchange(name, "POST", path, body, headers or {}, **more)


def get(name: str, path: str, **more: Any) -> Exchange:
    """Returns an Exchange that sends none."""
    return Exchange(name, "GET", path, **more)


def many(path: str, body: Mapping[str, Any], **changes: Mapping[str, Any]) -> list[Exchange]:
    """Returns an Exchange for each change of a body. None in a change takes a field out."""
    name = title(path)
    found = []
    for change, fields in changes.items():
        changed = {key: value for key, value in {**body, **fields}.items() if value is not None}
        found.append(post(f"{name}-{change}", path, changed))
    return found


def title(path: str) -> str:
    """Returns a path as a part of a name."""
    return path.strip("/").replace("/", "-") or "root"


def upload(name: str, content: str, purpose: str = "batch", **more: Any) -> Exchange:
    """Returns an Exchange that uploads a file."""
    parts = f'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
    parts += (
        f'--x\r\ncontent-disposition: form-data; name="file"; filename="{name}.jsonl"\r\n\r\n{content}\r\n--x--\r\n'
    )
    return post(name, "/v1/files", parts.encode(), {"content-type": "multipart/form-data; boundary=x"}, **more)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 8, "temperature": 0}
COMPLETION: dict[str, Any] = {"prompt": TEXTS[1], "max_tokens": 8, "temperature": 0}
RESPONSE: dict[str, Any] = {"input": "the yes", "max_output_tokens": 16, "temperature": 0}
MESSAGE: dict[str, Any] = CHAT
RERANK: dict[str, Any] = {"query": "the query", "documents": TEXTS[:3]}
SCORE: dict[str, Any] = {"text_1": "the query", "text_2": TEXTS[:3]}
EMBED: dict[str, Any] = {"inputs": TEXTS[:2]}
COHERE: dict[str, Any] = {"texts": TEXTS[:2], "input_type": "search_query", "embedding_types": ["float"]}
PARAMETERS = {"type": "object", "properties": {"kind": {"enum": ["yes", "no"]}}, "required": ["kind"]}
TOOL = {"type": "function", "function": {"name": "say", "description": "says it", "parameters": PARAMETERS}}
CALLED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
# {path: a body that it takes}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": {"input": "the yes"},
    "/v1/embeddings": {"input": TEXTS[:2]},
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/score": SCORE,
    "/v1/score": SCORE,
    "/pooling": {"input": TEXTS[:2]},
    "/v1/embed": COHERE,
    "/v2/embed": COHERE,
    "/embed": EMBED,
    "/embed_all": {"inputs": "the yes"},
    "/similarity": {"inputs": {"source_sentence": "the yes", "sentences": TEXTS[:2]}},
    "/tokenize": {"prompt": "the yes"},
    "/detokenize": {"tokens": [40, 50, 60]},
    "/decode": {"ids": [40, 50, 60]},
    "/": EMBED,
    "/cache/pin": {"prompt": "the prompt that stays, yes"},
    "/cache/unpin": {"prompt": "the prompt that stays, yes"},
}
GETS = (
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/warm",
    "/v1/models/nothing",
    "/health",
    "/ping",
    "/version",
    "/info",
    "/openapi.json",
    "/docs",
    "/",
    "/nothing",
    "/v1/nothing",
    "/v2/nothing",
    "/v1/messages/nothing",
)


def wrong(path: str, body: Mapping[str, Any]) -> list[Exchange]:
    """Returns requests to a path that are wrong, each in one way."""
    name, first = title(path), next(iter(body))
    return [
        post(f"{name}-wrong-json", path, b'{"input": '),
        post(f"{name}-wrong-list", path, []),
        post(f"{name}-wrong-empty", path, {}),
        post(f"{name}-wrong-type", path, {**body, first: 5}),
        post(f"{name}-wrong-field", path, {**body, "colour": 1}),
        post(f"{name}-wrong-model", path, {**body, "model": "nothing"}),
        Exchange(f"{name}-wrong-method", "PUT", path, dict(body)),
    ]


def generating() -> list[Exchange]:
    """Returns requests that generate text, whole and streamed, in each dialect."""
    more: dict[str, Mapping[str, Any]] = {
        "streamed": {"stream": True},
        "usage": {"stream": True, "stream_options": {"include_usage": True}},
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "logprobs-streamed": {"logprobs": True, "top_logprobs": 2, "stream": True},
        "samples": {"temperature": 1, "seed": 4, "n": 3},
        "samples-streamed": {"temperature": 1, "seed": 4, "n": 2, "stream": True},
        "sampling": {
            "temperature": 0.8,
            "seed": 4,
            "top_p": 0.9,
            "top_k": 30,
            "min_p": 0.01,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.1,
            "repetition_penalty": 1.1,
            "logit_bias": {"40": 2},
            "min_tokens": 5,
        },
        "stop": {"stop": ["a", "e"], "max_tokens": 40},
        "adapter": {"model": "warm"},
        "cached": {},
        "uncached": {"cache_prompt": False},
        "salted": {"cache_salt": "a"},
        "schema": {"response_format": FORMAT, "max_tokens": 60},
        "object": {"response_format": {"type": "json_object"}, "max_tokens": 12, "logit_bias": {"96": 50}},
        "regex": {"guided_regex": "(yes|no)[ab]{2}"},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
        "tools": {**CALLED},
        "tools-streamed": {**CALLED, "stream": True},
        "tools-auto": {"tools": [TOOL]},
        "tools-named": {**CALLED, "tool_choice": {"type": "function", "function": {"name": "say"}}},
        "system": {"messages": [{"role": "system", "content": "be brief"}, *CHAT["messages"]]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "the yes"}]}]},
        "continued": {
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "I"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "truncated": {"messages": [{"role": "user", "content": "no " * 600}], "truncate_prompt_tokens": -1},
        "prompt-logprobs": {"prompt_logprobs": 1, "messages": [{"role": "user", "content": "yes"}]},
        "ignored": {"user": "me", "metadata": {}, "store": False},
        "too-long": {"messages": [{"role": "user", "content": "no " * 600}]},
        "too-many-tokens": {"max_tokens": 600},
        "cold": {"temperature": -1},
        "many-samples": {"n": 1000},
        "no-schema": {"response_format": {"type": "json_schema"}},
        "wrong-regex": {"guided_regex": "("},
        "two-formats": {"guided_regex": "a", "guided_choice": ["a"]},
        "wrong-role": {"messages": [{"role": 5, "content": "x"}]},
        "template": {"chat_template": "{{ messages }}"},
        "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    }
    completions: dict[str, Mapping[str, Any]] = {
        "streamed": {"stream": True},
        "usage": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "many": {"prompt": TEXTS[:3], "n": 2, "temperature": 1, "seed": 3},
        "many-streamed": {"prompt": TEXTS[:2], "stream": True},
        "ids": {"prompt": [[40, 50], [60, 70]]},
        "logprobs": {"logprobs": 2},
        "logprobs-streamed": {"logprobs": 2, "stream": True},
        "echo": {"echo": True, "logprobs": 1, "prompt": "yes no"},
        "echo-only": {"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": "yes no"},
        "prompt-logprobs": {"prompt_logprobs": 2, "prompt": "yes no"},
        "stop-ids": {"stop_token_ids": [40, 41, 42], "ignore_eos": True, "max_tokens": 60},
        "grammar": {"guided_grammar": 'start: "yes" | "no"'},
        "empty": {"prompt": ""},
        "empty-list": {"prompt": []},
        "wrong-id": {"prompt": [5, 100000]},
        "too-long": {"prompt": "no " * 600},
        "suffix": {"suffix": "x"},
        "best-of": {"best_of": 3},
        "stream-options": {"stream_options": {"include_usage": True}},
        "exits": {"exit_threshold": 0.5},
    }
    responses: dict[str, Mapping[str, Any]] = {
        "streamed": {"stream": True},
        "items": {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "the yes"}]}],
            "instructions": "be brief",
        },
        "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        "schema": {
            "text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}},
            "max_output_tokens": 60,
        },
        "tools": {
            "tools": [{"type": "function", "name": "say", "parameters": PARAMETERS}],
            "tool_choice": "required",
            "max_output_tokens": 40,
        },
        "tools-streamed": {
            "tools": [{"type": "function", "name": "say", "parameters": PARAMETERS}],
            "stream": True,
            "tool_choice": "required",
            "max_output_tokens": 40,
        },
        "unkept": {"store": False},
        "background": {"background": True},
        "reasoning": {"reasoning": {"effort": "low"}},
        "previous-unknown": {"previous_response_id": "resp_nothing"},
    }
    say = {"name": "say", "description": "says it", "input_schema": PARAMETERS}
    messages: dict[str, Mapping[str, Any]] = {
        "streamed": {"stream": True},
        "system": {"system": [{"type": "text", "text": "be brief"}], "stop_sequences": ["a"], "top_k": 5},
        "tools": {"tools": [say], "tool_choice": {"type": "any"}, "max_tokens": 40},
        "tools-streamed": {
            "tools": [say],
            "tool_choice": {"type": "tool", "name": "say"},
            "max_tokens": 40,
            "stream": True,
        },
        "tool-result": {
            "messages": [
                *CHAT["messages"],
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "say", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "yes"}]},
            ]
        },
        "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 60},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "no-max": {"max_tokens": None},
        "too-long": {"messages": [{"role": "user", "content": "no " * 600}]},
    }
    return [
        *many("/v1/chat/completions", CHAT, **more),
        *many("/v1/completions", COMPLETION, **completions),
        *many("/v1/responses", RESPONSE, **responses),
        *many("/v1/messages", MESSAGE, **messages),
    ]


def numbers() -> list[Exchange]:
    """Returns requests whose answers are numbers, or tokens."""
    long = "no " * 600
    return [
        *many(
            "/v1/embeddings",
            {"input": "the yes"},
            base64={"encoding_format": "base64"},
            dimensions={"dimensions": 4},
            ids={"input": [[40, 50], [60]]},
            adapter={"model": "warm"},
            blank={"input": " "},
            none={"input": []},
            toolong={"input": long},
            truncated={"input": long, "truncate_prompt_tokens": -1},
            format={"encoding_format": "hex"},
            toomany={"dimensions": 1000},
        ),
        *many(
            "/v1/rerank",
            RERANK,
            top={"top_n": 1},
            bare={"return_documents": False},
            cut={"max_tokens_per_doc": 3},
            instruction={"instruction": "find it"},
            parts={"documents": [{"text": "the yes"}]},
            toolong={"documents": [long]},
            blank={"query": ""},
        ),
        *many(
            "/rerank",
            {"query": "the query", "texts": TEXTS[:3]},
            tei={},
            teiraw={"raw_scores": True, "return_text": True},
            teilong={"texts": [long]},
            teicut={"texts": [long], "truncate": True},
            teiempty={"texts": []},
        ),
        *many(
            "/score",
            SCORE,
            queries={"text_1": None, "text_2": None, "queries": ["a", "b"], "documents": ["yes", "no"]},
            items={"text_1": None, "text_2": None, "data_1": "x", "data_2": ["y"]},
            odd={"text_1": ["a", "b", "c", "d"]},
        ),
        *many(
            "/pooling",
            {"input": "the yes"},
            plain={"use_activation": False},
            base64={"encoding_format": "base64"},
            task={"task": "classify"},
        ),
        *many(
            "/v2/embed",
            COHERE,
            types={"embedding_types": ["float", "base64", "binary", "ubinary"]},
            int8={"embedding_types": ["int8"]},
            document={"input_type": "search_document"},
            cut={"texts": [long]},
            uncut={"texts": [long], "truncate": "NONE"},
            bare={"embedding_types": None},
        ),
        *many("/v1/embed", COHERE, bare={"embedding_types": None}),
        *many(
            "/embed",
            EMBED,
            one={"inputs": "the yes"},
            plain={"normalize": False},
            prompt={"prompt_name": "query"},
            noprompt={"prompt_name": "nothing"},
            toolong={"inputs": long},
            cut={"inputs": long, "truncate": True},
            left={"inputs": long, "truncate": True, "truncation_direction": "Left"},
            empty={"inputs": []},
        ),
        *many("/", EMBED, similarity=BODIES["/similarity"], parameters={"parameters": {"normalize": True}}),
        *many(
            "/tokenize",
            {"prompt": "the yes <|im_end|>"},
            names={"return_token_strs": True},
            special={"add_special_tokens": False},
            chat={"prompt": None, "messages": CHAT["messages"]},
            tei={"prompt": None, "inputs": ["the yes", "no"]},
            last={"truncate_prompt_tokens": 2},
        ),
        *many("/detokenize", BODIES["/detokenize"], wrongid={"tokens": [100000]}),
        *many(
            "/decode", BODIES["/decode"], special={"ids": [2, 40], "skip_special_tokens": False}, wrongid={"ids": [-1]}
        ),
        post("classify-without-labels", "/classify", {"input": "the yes"}),
        post("predict-without-labels", "/predict", {"inputs": "the yes"}),
    ]


def lines(*wanted: str, model: str = "tiny") -> str:
    """Returns lines of a batch: those of the batch of jobs that ask for one of these paths."""
    rows = [
        {"custom_id": f"b{i}", "method": "POST", "url": url, "body": {"model": model, **body}}
        for i, (url, body) in enumerate(BATCH)
        if url in wanted
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def batches() -> list[Exchange]:
    """Returns requests about files, batches and responses that are kept."""
    found = [get("files-none", "/v1/files"), get("batches-none", "/v1/batches")]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/rerank", "/v1/responses"):
        name = "batch-" + title(path)
        more = {} if path == "/v1/responses" else {"errors": "error_file_id"}
        has_errors = path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
        found += [
            upload(f"{name}-file", lines(path), keep={"file": "id"}),
            post(
                f"{name}-create",
                "/v1/batches",
                {"input_file_id": "<file>", "endpoint": path, "completion_window": "24h", "metadata": {"of": "me"}},
                keep={"batch": "id"},
            ),
            get(
                f"{name}-ended",
                "/v1/batches/<batch>",
                until='"status":"(completed|failed)"',
                keep={"output": "output_file_id"} | (more if has_errors else {}),
            ),
            get(f"{name}-output", "/v1/files/<output>/content", rough=True),
        ]
        if has_errors:
            found.append(get(f"{name}-errors", "/v1/files/<errors>/content"))
    create = {"input_file_id": "<file>", "endpoint": "/v1/completions", "completion_window": "24h"}
    return [
        *found,
        post("batch-cancel-ended", "/v1/batches/<batch>/cancel", None),
        get("batch-unknown", "/v1/batches/batch_nothing"),
        get("batches-page", "/v1/batches?limit=2"),
        get("batches-after", "/v1/batches?limit=2&after=<batch>"),
        get("batches-limit", "/v1/batches?limit=x"),
        upload("batch-none-file", "\n", keep={"file": "id"}),
        post("batch-none-create", "/v1/batches", create, keep={"batch": "id"}),
        get("batch-none-ended", "/v1/batches/<batch>", until='"status":"(completed|failed)"'),
        *many(
            "/v1/batches",
            create,
            endpoint={"endpoint": "/v1/nothing"},
            window={"completion_window": "x"},
            file={"input_file_id": "file-nothing"},
            field={"colour": 1},
            metadata={"metadata": {"a": 5}},
        ),
        get("file", "/v1/files/<file>"),
        get("file-content", "/v1/files/<file>/content"),
        get("files-page", "/v1/files?limit=3&purpose=batch&order=asc"),
        Exchange("file-delete", "DELETE", "/v1/files/<file>"),
        get("file-deleted", "/v1/files/<file>"),
        get("file-unknown", "/v1/files/file-nothing/content"),
        upload("file-purpose", "x", "fine-tune"),
        post("file-no-form", "/v1/files", {"purpose": "batch"}),
        post("response-kept", "/v1/responses", RESPONSE, keep={"response": "id"}),
        post(
            "response-goes-on",
            "/v1/responses",
            {**RESPONSE, "input": "and then", "previous_response_id": "<response>"},
            keep={"later": "id"},
        ),
        get("response", "/v1/responses/<response>"),
        get("response-items", "/v1/responses/<later>/input_items"),
        get("response-items-page", "/v1/responses/<later>/input_items?limit=1&order=asc"),
        Exchange("response-delete", "DELETE", "/v1/responses/<later>"),
        get("response-deleted", "/v1/responses/<later>"),
    ]


def every_way() -> list[Exchange]:
    """Returns what each path is asked in the same ways."""
    found = [post(f"{title(path)}-taken", path, body) for path, body in BODIES.items()]
    found += [get(f"get-{title(path)}", path) for path in GETS]
    for path, body in BODIES.items():
        found += wrong(path, body)
    return found


TEXT = [
    *every_way(),
    *generating(),
    *numbers(),
    get("metrics", "/metrics"),
    get("cache-state", "/cache"),
    get("page-data", "/page/data"),
    post("cache-clear", "/cache/clear", {}),
    get("cache-cleared", "/cache"),
    post("tenant-unknown", "/cache/pin", {"prompt": "x", "tenant": "nothing"}),
    post("host-foreign", "/v1/completions", COMPLETION, {"host": "example.org"}),
    post("origin-foreign", "/v1/completions", COMPLETION, {"origin": "https://example.org"}),
    post("body-too-large", "/v1/completions", b"x", {"content-length": "99999999"}),
    post("body-no-utf8", "/v1/completions", b'{"prompt": "\xff"}'),
    post("body-surrogate", "/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 2}'),
    post("body-twice", "/v1/completions", b'{"prompt": "a", "prompt": "b", "max_tokens": 2, "temperature": 0}'),
    post("body-nan", "/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
    post("body-no-type", "/v1/completions", json.dumps(COMPLETION).encode()),
    get("header-too-large", "/v1/models", headers={"x": "y" * 100000}),
    Exchange("head", "HEAD", "/health"),
    Exchange("options", "OPTIONS", "/v1/completions"),
    post("trailing-slash", "/v1/completions/", COMPLETION),
]
KEYS = """[[key]]
key = "sk-admin"
tenant = "search"
admin = true
[[key]]
key = "sk-other"
tenant = "other"
class = "batch"
max_waiting_tokens = 50
"""
BEARER, OTHER = {"authorization": "Bearer sk-admin"}, {"x-api-key": "sk-other"}
KEYED = [
    *(post(f"missing-{title(path)}", path, body) for path, body in BODIES.items()),
    *(
        get(f"missing-get-{title(path)}", path)
        for path in ("/v1/models", "/health", "/metrics", "/info", "/", "/nothing")
    ),
    post("wrong-key", "/v1/completions", COMPLETION, {"authorization": "Bearer sk-wrong"}),
    post("wrong-scheme", "/v1/completions", COMPLETION, {"authorization": "Basic sk-admin"}),
    post("bearer", "/v1/completions", COMPLETION, BEARER),
    post("x-api-key", "/v1/messages", MESSAGE, OTHER),
    post("too-much-waits", "/v1/completions", {**COMPLETION, "prompt": TEXTS[:5]}, OTHER),
    get("metrics-of-admin", "/metrics", headers=BEARER),
    get("metrics-of-other", "/metrics", headers=OTHER),
    get("cache-of-admin", "/cache", headers=BEARER),
    post("pin-for-other", "/cache/pin", {"prompt": "the prompt stays", "tenant": "other"}, BEARER),
    get("cache-after-pin", "/cache", headers=BEARER),
    post("pin-by-other", "/cache/pin", {"prompt": "the prompt stays"}, OTHER),
    get("page-data-of-other", "/page/data", headers=OTHER),
    get("files-not-kept", "/v1/files", headers=BEARER),
    post("stored-not-kept", "/v1/responses", {**RESPONSE, "store": True}, BEARER),
]
LABELS = [
    *many(
        "/classify",
        {"input": TEXTS[:2]},
        taken={},
        logits={"use_activation": False},
        ids={"input": [40, 50]},
        blank={"input": ""},
    ),
    *many("/pooling", {"input": TEXTS[:2]}, labels={}, dimensions={"dimensions": 3}),
    *many(
        "/predict",
        {"inputs": "the yes"},
        taken={},
        raw={"raw_scores": True},
        pair={"inputs": ["a", "b"]},
        batch={"inputs": [["a"], ["b", "c"]]},
        top={"parameters": {"top_k": 1, "function_to_apply": "sigmoid"}},
        wrongtype={"inputs": 5},
        wrongtop={"parameters": {"top_k": 0}},
        toolong={"inputs": "no " * 600},
        cut={"inputs": "no " * 600, "truncate": True},
    ),
    *wrong("/classify", {"input": "the yes"}),
    *wrong("/predict", {"inputs": "the yes"}),
    post("root-labels", "/", {"inputs": "the yes"}),
    post("embed-of-labels", "/embed", EMBED),
    post("rerank-of-labels", "/rerank", {"query": "a", "texts": ["b"]}),
    post("completion-of-labels", "/v1/completions", COMPLETION),
    post("embeddings-of-labels", "/v1/embeddings", {"input": "a"}),
    get("info-of-labels", "/info"),
]
RANKER = [
    post("rerank", "/rerank", RERANK),
    post("rerank-tei", "/rerank", {"query": "the query", "texts": TEXTS[:3], "raw_scores": True}),
    post("score", "/score", SCORE),
    post("similarity", "/similarity", BODIES["/similarity"]),
    post("root-rerank", "/", {"query": "the query", "texts": TEXTS[:2]}),
    get("info-of-ranker", "/info"),
]
URL = f"data:image/png;base64,{picture(0)}"
SHOWN = [{"type": "text", "text": "what is "}, {"type": "image_url", "image_url": {"url": URL}}]
IMAGES = [
    *many(
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": SHOWN}]},
        shown={},
        again={},
        streamed={"stream": True},
        two={"messages": [{"role": "user", "content": [*SHOWN, *SHOWN]}]},
        file={
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        far={
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}
            ]
        },
        broken={"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL[:200]}}]}]},
    ),
    post(
        "responses-shown",
        "/v1/responses",
        {
            **RESPONSE,
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "what is "}, {"type": "input_image", "image_url": URL}],
                }
            ],
        },
    ),
    post(
        "messages-shown",
        "/v1/messages",
        {
            **MESSAGE,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture(1)}}
                    ],
                }
            ],
        },
    ),
    post("tokenize-shown", "/tokenize", {"messages": [{"role": "user", "content": SHOWN}]}),
    post(
        "count-shown",
        "/v1/messages/count_tokens",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture(1)}}
                    ],
                }
            ]
        },
    ),
]
GATED = [
    *many(
        "/v1/completions",
        COMPLETION,
        plain={},
        exits={"exit_threshold": 0.5, "min_visits": 2},
        route={"route": [0, 1, 0]},
        change={"exit_change": 0.9, "exit_prompts": True},
        most={"max_visits": 2, "stream": True},
        wrongroute={"route": [7]},
        wrongthreshold={"exit_threshold": 2},
        wrongvisits={"min_visits": 9},
    ),
    post("embeddings", "/v1/embeddings", {"input": TEXTS[:2]}),
    post("rerank", "/rerank", RERANK),
]

ONE = ("--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB")
TINY = ("-m", "{text}", *ONE, "--cache", "lru", "--cache-reuse", "4", "--served-model-name", "tiny")
SERVERS = {
    "text": Server([*TINY, "--served-model-name", "other", "--adapter", "warm={warm}", "--max-texts", "64"], TEXT),
    "kept": Server([*TINY, "--data-dir", "data", "--max-batch-rows", "64"], batches()),
    "keys": Server([*TINY, "--api-keys", "keys.toml"], KEYED, {"keys.toml": KEYS}),
    "labels": Server(["-m", "{labels}", *ONE, "--served-model-name", "tiny"], LABELS),
    "ranker": Server(["-m", "{ranker}", *ONE, "--cache", "lru"], RANKER),
    "images": Server(["-m", "{images}", *ONE, "--cache", "lru"], IMAGES),
    "gated": Server(["-m", "{gated}", *ONE, "--exits", "save"], GATED),
}
