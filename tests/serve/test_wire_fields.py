"""Each field of the wire formats has an effect, is refused by its name, or is documented as one that changes nothing.

The fields are those of the references: TEI's OpenAPI file, Cohere's v1 and v2, OpenAI's, Anthropic's and vLLM's.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from serving import dress, serving
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.errors import InputError
from prefold.tasks.results import Classification, Ranking
from prefold.wire import ENDPOINTS, KINDS
from prefold.wire.anthropic import Message
from prefold.wire.body import ServedModel
from prefold.wire.numbers import Classify, CohereEmbed, Pooling
from prefold.wire.tei import TeiEmbed, TeiPredict, TeiRerank, TeiSimilarity

CHAT = [{"role": "user", "content": "is it the one? yes or no"}]
SCHEMA = {"type": "object"}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

SHORT = {"max_tokens": 3, "temperature": 0}

# OpenAI's fields, then vLLM's, of both kinds of generation: {field: a value that is not its default}.
GENERATION = {
    "model": "none", "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "n": 2, "presence_penalty": 0.5, "seed": 5,
    "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.5,
    "user": "somebody", "max_tokens": 7,
    "top_k": 5, "min_p": 0.1, "top_n_sigma": 0.1,
    "repetition_penalty": 1.1, "length_penalty": 1.5, "stop_token_ids": [5],
    "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "truncate_prompt_tokens": 5, "truncation_side": "left",
    "prompt_logprobs": 1,
    "allowed_token_ids": [5], "bad_words": ["no"], "use_beam_search": True, "echo": True,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": SCHEMA,
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: \"a\"", "guided_decoding_backend": "auto",
    "priority": 3, "request_id": "x", "logits_processors": ["a"], "return_tokens_as_token_ids": True,
    "return_token_ids": True, "cache_salt": "x", "kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1},
    "logprob_token_ids": [5], "thinking_token_budget": 5, "repetition_detection": {"a": 1}, "cache_prompt": False,
}  # fmt: skip
POOLED = {
    "model": "none", "user": "somebody", "truncate_prompt_tokens": 5, "truncation_side": "left", "request_id": "x",
    "padding": "max_length", "priority": 3, "mm_processor_kwargs": {"a": 1}, "cache_salt": "x", "cache_prompt": False,
}  # fmt: skip
CONVERSATION = {
    "add_generation_prompt": True, "continue_final_message": True, "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"tone": "a"}, "media_io_kwargs": {"a": 1},
}  # fmt: skip
TRUNCATION = {"truncate": True, "truncation_direction": "Left"}
TEMPLATE = "{document} {query}"
RERANK = {
    "top_n": 1,
    "return_documents": False,
    "instruction": "Judge.",
    "template": TEMPLATE,
    "use_activation": False,
} | POOLED
# {route: (a body, its further fields)}
FIELDS = {
    "/v1/chat/completions": ({"messages": CHAT} | SHORT, GENERATION | CONVERSATION | {
        "audio": {"voice": "a", "format": "wav"}, "function_call": "auto", "functions": [TOOL], "logprobs": True,
        "max_completion_tokens": 7, "metadata": {"a": "b"}, "modalities": ["audio"], "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "a"}, "prompt_cache_key": "x", "prompt_cache_retention": "24h",
        "reasoning_effort": "low", "response_format": FORMAT, "safety_identifier": "x", "service_tier": "flex",
        "store": True, "tool_choice": "required", "tools": TOOLS, "top_logprobs": 2, "verbosity": "low",
        "web_search_options": {"a": 1}, "documents": [{"text": "a"}], "add_special_tokens": True,
        "mm_processor_kwargs": {"a": 1}, "include_reasoning": False, "continue_final_message": True,
    }),
    "/v1/completions": ({"prompt": "is it"} | SHORT, GENERATION | {
        "best_of": 2, "logprobs": 2, "suffix": "a", "prompt_embeds": "a", "add_special_tokens": False,
    }),
    "/v1/embeddings": ({"input": "is it"}, POOLED | CONVERSATION | {
        "dimensions": 5, "encoding_format": "base64", "add_special_tokens": False, "use_activation": False,
        "normalize": False, "embed_dtype": "float16", "endianness": "big", "messages": CHAT,
    }),
    "/v1/responses": ({"input": "is it", "max_output_tokens": 3, "temperature": 0}, {
        "background": True, "context_management": [{"type": "compaction"}], "conversation": "x",
        "include": ["reasoning.encrypted_content"], "instructions": "Say.", "max_output_tokens": 7, "max_tool_calls": 1,
        "metadata": {"a": "b"}, "model": "none", "parallel_tool_calls": False, "previous_response_id": "resp_1",
        "prompt": {"id": "a"}, "prompt_cache_key": "x", "prompt_cache_retention": "24h", "reasoning": {"effort": "low"},
        "safety_identifier": "x", "service_tier": "flex", "store": True, "stream": True,
        "stream_options": {"include_obfuscation": False}, "temperature": 0.5,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "required", "tools": [{"type": "function"} | TOOL], "top_logprobs": 2, "top_p": 0.5,
        "truncation": "auto", "user": "somebody", "top_k": 5, "repetition_penalty": 1.1, "stop": ["x"], "seed": 5,
        "mm_processor_kwargs": {"a": 1}, "priority": 3, "request_id": "x", "cache_salt": "x", "logit_bias": {"5": 1},
        "enable_response_messages": True, "previous_input_messages": CHAT, "structured_outputs": {"regex": "a"},
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "vllm_xargs": {"a": 1}, "kv_transfer_params": {"a": 1},
    }),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 3, "temperature": 0}, {
        "model": "none", "cache_control": {"type": "ephemeral"}, "container": "x", "context_management": {"edits": []},
        "inference_geo": "us", "mcp_servers": [{"type": "url"}], "metadata": {"user_id": "a"},
        "output_config": {"effort": "low"}, "output_format": {"type": "json_schema", "schema": SCHEMA},
        "service_tier": "auto", "speed": "fast", "stop_sequences": ["x"], "stream": True, "system": "Say.",
        "temperature": 0.5, "thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "any"},
        "tools": [{"name": "look", "input_schema": SCHEMA}], "top_k": 5, "top_p": 0.5,
    }),
    "/v1/rerank": ({"query": "is it", "documents": ["no", "yes"]}, RERANK | {
        "rank_fields": ["text"], "max_chunks_per_doc": 2, "max_tokens_per_doc": 5,
    }),
    "/v2/rerank": ({"query": "is it", "documents": ["no", "yes"]}, RERANK | {
        "max_tokens_per_doc": 5, "relevant_spans": {"a": 1},
    }),
    "/score": ({"text_1": "is it", "text_2": ["no", "yes"]}, POOLED | {
        "use_activation": False, "instruction": "Judge.", "template": TEMPLATE,
    }),
    "/classify": ({"input": "is it"}, POOLED | CONVERSATION | {
        "use_activation": False, "add_special_tokens": False, "messages": CHAT,
    }),
    "/pooling": ({"input": "is it"}, POOLED | CONVERSATION | {
        "task": "token_embed", "dimensions": 5, "encoding_format": "base64", "use_activation": False, "messages": CHAT,
        "embed_dtype": "float16", "endianness": "big", "add_special_tokens": False,
    }),
    "/tokenize": ({"prompt": "is it the one"}, {
        "model": "none", "add_special_tokens": False, "return_token_strs": True, "truncate_prompt_tokens": 2,
    }),
    "/tokenize of messages": ({"messages": CHAT}, CONVERSATION | {
        "model": "none", "add_special_tokens": True, "return_token_strs": True, "truncate_prompt_tokens": 2,
        "mm_processor_kwargs": {"a": 1}, "tools": TOOLS, "add_generation_prompt": False,
    }),
    "/detokenize": ({"tokens": [5, 6]}, {"model": "none"}),
    "/v1/embed": ({"texts": ["is it"]}, {
        "images": ["a"], "model": "none", "input_type": "search_query", "embedding_types": ["base64"],
        "truncate": "START",
    }),
    "/v2/embed": ({"texts": ["is it"]}, {
        "images": ["a"], "inputs": [{"content": []}], "model": "none", "input_type": "search_query", "max_tokens": 5,
        "output_dimension": 5, "embedding_types": ["base64"], "truncate": "START", "priority": 3,
    }),
    "/embed": ({"inputs": "is it"}, {"prompt_name": "query", "normalize": False, "dimensions": 5} | TRUNCATION),
    "/embed_all": ({"inputs": "is it"}, {"prompt_name": "query"} | TRUNCATION),
    "/predict": ({"inputs": "is it"}, {"raw_scores": True, "parameters": {"top_k": 1}} | TRUNCATION),
    "/rerank of texts": ({"query": "is it", "texts": ["no", "yes"]}, {
        "raw_scores": True, "return_text": True, "top_n": 1,
    } | TRUNCATION),
    "/similarity": ({"inputs": {"source_sentence": "is it", "sentences": ["no"]}}, {
        "parameters": {"prompt_name": "query"} | TRUNCATION,
    }),
    "/tokenize of inputs": ({"inputs": "is it"}, {"add_special_tokens": False, "prompt_name": "query"}),
    "/decode": ({"ids": [0, 5]}, {"skip_special_tokens": False}),
}  # fmt: skip
# Without these a field asks for nothing.
WITH = {
    "stream_options": {"stream": True}, "truncation_direction": {"truncate": True}, "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": TOOLS}, "parallel_tool_calls": {"tools": TOOLS},
}  # fmt: skip

DOCS = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
# [(paths, the fields that change nothing there)]
IGNORED = re.findall(r"^\| (`/[^|]+) \| ([^|]+) \|$", DOCS.partition("change nothing")[2], re.M)
READERS = {
    "/v1/messages": (Message, {}), "/v1/embed": (CohereEmbed, {}), "/v2/embed": (CohereEmbed, {"default": ["float"]}),
    "/embed": (TeiEmbed, {}), "/embed_all": (TeiEmbed, {}), "/predict": (TeiPredict, {}),
    "/rerank of texts": (TeiRerank, {}), "/similarity": (TeiSimilarity, {}), "/classify": (Classify, {}),
    "/pooling": (Pooling, {}),
}  # fmt: skip
# A task's answer to an item. The answer of "embed" stands for one text and for several.
MADE = {
    "embed": SimpleNamespace(embedding=np.arange(3.0), embeddings=np.eye(3)[:1], vectors=np.eye(3)[:1], num_tokens=3),
    "rerank": Ranking(np.array([0.1, 0.9]), [1, 0], num_tokens=3),
    "classify": Classification("a", {"a": 0.6, "b": 0.4}, logits={"a": 3.0, "b": 1.0}, num_tokens=3),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Asks a server of a model with a prompt, special tokens and a template with a variable."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("fields"))
    dress(folder)
    with (
        serving(LLM(str(folder), dtype="float32"), served_names=("tiny",)) as server,
        httpx.Client(base_url=server.url) as made,
    ):
        yield made


def served_by(labels: int | None) -> ServedModel:
    """What answers, of a model with so many labels."""
    settings = SimpleNamespace(prompts=("query", "document"))
    task = SimpleNamespace(settings=settings)
    return ServedModel(SimpleNamespace(config=SimpleNamespace(num_labels=labels), task=lambda name: task))


def what_is_asked(route: str, body: dict) -> str:
    """What is read of a body, and what is made of an answer to it; nothing where the server alone reads it. Raises
    InputError."""
    if route in ENDPOINTS:
        asked = KINDS[ENDPOINTS[route]].of(body)
        streamed = ()
        if asked.task == "generate":
            asked.check_stream_options()
            streamed = (asked.stream, asked.stream_options)
        return repr((streamed, asked.options(asked.task), asked.cache_prompt, asked.read({})))
    if route not in READERS:
        return ""
    options: Any = None
    kind, more = READERS[route]
    asked = kind.of(body)
    if route in ("/classify", "/pooling"):
        options = asked.options("embed"), asked.cache_prompt
    asked = asked.order(served_by(2 if route in ("/predict", "/classify") else None), **more)
    if route == "/v1/messages":
        return repr(asked)
    made = re.sub("'created': [0-9]+", "", repr(asked.make([MADE[asked.task]] * len(asked.items))))
    return repr((options, asked.items, asked.options, made))


def answer(client: httpx.Client, route: str, body: dict) -> tuple[int, str]:
    found = client.post(route.partition(" ")[0], json=body)
    return found.status_code, re.sub(r'(_|-|")[0-9a-f]{24}"|"created(_at)?":[0-9]+', "", found.text)


def what_becomes(client: httpx.Client, route: str, field: str, body: dict, value: object) -> str:
    """Says whether a field is used, refused by its name, or neither."""
    with_it = body | {field: value}
    try:
        if what_is_asked(route, with_it) != what_is_asked(route, body):
            return "used"
    except InputError as error:
        return "refused" if field in f"{error} {error.field}" else str(error)
    answer(client, route, body)  # so that both of these read the same from the cache
    status, text = answer(client, route, with_it)
    if (status, text) != answer(client, route, body):
        return "used" if status == 200 else "refused" if field in text else text
    path = route.partition(" ")[0]
    documented = any(f"`{path}`" in paths and f"`{field}`" in names for paths, names in IGNORED)
    return "ignored" if documented else "it changes nothing, which docs/reference/http.md does not say"


@pytest.mark.parametrize("route", FIELDS)
def test_fields_are_used_or_refused_or_documented(client, route):
    body, fields = FIELDS[route]
    found = {}
    for field, value in fields.items():
        beside = {name: fields.get(name, one) for name, one in WITH.get(field, {}).items()}
        beside = {} if route == "/v1/responses" and field == "top_logprobs" else beside
        found[field] = what_becomes(client, route, field, body | beside, value)
    assert {field: what for field, what in found.items() if what not in ("used", "refused", "ignored")} == {}
    assert "used" in found.values() or route == "/detokenize"


NULLS = {
    "/v1/responses": {"text": {"foo": None, "bar": None}, "reasoning": {"foo": None, "effort": "low"}},
    "/v1/messages": {"output_config": {"foo": None}},
    "/v1/chat/completions": {"stream": True, "stream_options": {"foo": None, "include_usage": True}},
}


@pytest.mark.parametrize("route", NULLS)
def test_nulls_in_unknown_fields_say_nothing(route):
    body, nulls = FIELDS[route][0], NULLS[route]
    bare = {
        name: {part: each for part, each in value.items() if each is not None} if isinstance(value, dict) else value
        for name, value in nulls.items()
    }
    kept = re.sub("'text': {[^}]*}|'reasoning': {[^}]*}", "", what_is_asked(route, body | nulls))
    assert kept == re.sub("'text': {[^}]*}|'reasoning': {[^}]*}", "", what_is_asked(route, body | bare))
    for name in (name for name, value in nulls.items() if isinstance(value, dict)):
        with pytest.raises(InputError, match=f"'{name}.foo' is not supported|unknown field 'foo'"):
            what_is_asked(route, body | nulls | {name: {"foo": 1}})


WITHIN = re.findall(r"`([a-z_.]+)`", DOCS.partition("Within objects, these change nothing:")[2].partition("\n\n")[0])
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "is it"}]}
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "is it"}]}]
USED = {"tools": TOOLS, "response_format": FORMAT, "stream": True, "stream_options": {"include_usage": True}}
# (route, what its body has, where in it a field is put, {field: value})
NESTED = [
    ("/v1/chat/completions", USED, ("tools", 0, "function"), {"strict": True, "description": "Looks again."}),
    ("/v1/chat/completions", USED, ("response_format", "json_schema"), {"strict": True, "schema": {"type": "array"}}),
    ("/v1/chat/completions", USED, ("stream_options",), {"include_obfuscation": True, "include_usage": False, "x": 1}),
    ("/v1/responses", {"text": {}}, ("text",), {"verbosity": "low", "format": {"type": "json_object"}, "x": 1}),
    ("/v1/responses", {"reasoning": {}}, ("reasoning",), {"summary": "auto", "effort": "low", "x": 1}),
    ("/v1/responses", {"tools": [{"type": "function"} | TOOL]}, ("tools", 0), {"strict": True, "name": "other"}),
    ("/v1/responses", {"input": [ITEM]}, ("input", 0), {"id": "msg_1", "status": "completed", "role": "system"}),
    ("/v1/responses", {"input": [ITEM]}, ("input", 0, "content", 0), {"annotations": [], "text": "no"}),
    ("/v1/messages", {"messages": BLOCKS}, ("messages", 0, "content", 0), {
        "cache_control": {"type": "ephemeral"}, "citations": [], "text": "no",
    }),
    ("/v1/messages", {"tools": [{"name": "look", "input_schema": SCHEMA}]}, ("tools", 0), {
        "cache_control": {"type": "ephemeral"}, "strict": True, "description": "Looks.",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("route", "has", "place", "fields"), NESTED, ids=[f"{n[0]} {n[2]}" for n in NESTED])
def test_fields_within_objects_are_used_or_refused_or_documented(route, has, place, fields):
    """What a response or a template repeats counts as used."""
    became = {}
    for field, value in fields.items():
        body = FIELDS[route][0] | has
        changed = copy.deepcopy(body)
        inner: Any = changed
        for key in place:
            inner = inner[key]
        inner[field] = value
        try:
            used = what_is_asked(route, changed) != what_is_asked(route, body)
        except InputError as error:
            became[field] = "refused" if field in f"{error} {error.field}" else str(error)
            continue
        documented = any(field in name.split(".") for name in WITHIN)
        became[field] = "used" if used else "ignored" if documented else "not documented"
    assert set(became.values()) <= {"used", "refused", "ignored"}, became
    assert "used" in became.values(), became
