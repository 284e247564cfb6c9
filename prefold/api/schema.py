"""Describes requests in JSON Schema, for OpenAPI. Which parameters a kind has comes from the tables of its reader."""

from __future__ import annotations

from typing import Any

from .endpoints import KINDS

__all__ = ["STREAMED", "SUMMARIES", "body_schema"]

Schema = dict[str, Any]

# {kind of request: what answering it does}
SUMMARIES = {
    "embeddings": "Returns the vectors of texts.",
    "rerank": "Scores documents by how well they answer a query, the best first.",
    "score": "Scores pairs of texts.",
    "chat": "Continues a conversation.",
    "completion": "Continues prompts.",
    "response": "Continues a conversation of items.",
}
STREAMED = {"chat", "completion", "response"}
_REQUIRED = {
    "embeddings": ["input"], "rerank": ["query", "documents"], "chat": ["messages"], "completion": ["prompt"],
    "response": ["input"],
}  # fmt: skip


def _of(kind: str | list[str], description: str = "", **more: Any) -> Schema:
    return {"type": kind} | ({"description": description} if description else {}) | more


_TEXTS = {"type": "array", "items": {"type": "string"}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, _TEXTS]}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _TEXTS,
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
    "description": "A text, texts, token ids, or lists of token ids.",
}
_FORMAT = _of("object", "OpenAI's: text, json_object or json_schema.")
_SHARED = {
    "model": _of("string", "One of the served names, or an adapter's; the model where it is left out."),
    "user": _of("string", "Changes nothing."),
}
_STREAM = {
    "stream": _of("boolean", "Whether the answer is sent as server-sent events."),
    "stream_options": _of("object", '{"include_usage": true}: a last chunk says how many tokens there were.'),
}
_SETTINGS = {
    "truncate_prompt_tokens": _of("integer", "-1 cuts a prompt to what the model takes, k to k tokens.", minimum=-1),
    "cache_prompt": _of("boolean", "false: the prompt shares nothing with earlier or later requests."),
}
# {parameter: its schema}; those that mean different things in two kinds are under (kind, parameter).
_PARAMETERS: dict[Any, Schema] = {
    "messages": _OBJECTS | {"description": "The conversation: role and content of each message."},
    "prompt": _PROMPT,
    ("embeddings", "input"): _PROMPT,
    ("response", "input"): {"anyOf": [{"type": "string"}, _OBJECTS], "description": "A text, or items."},
    "instructions": _of("string", "What stands before the input, as a system message."),
    "temperature": _of("number", "0: always the most likely token.", minimum=0),
    "top_p": _of("number", minimum=0, maximum=1),
    "top_k": _of("integer", "0 or -1: all tokens.", minimum=-1),
    "min_p": _of("number", minimum=0, maximum=1),
    "n": _of("integer", "How many samples of each prompt are made.", minimum=1),
    "seed": _of("integer", "Makes samples come out the same again."),
    "presence_penalty": _of("number"),
    "frequency_penalty": _of("number"),
    "repetition_penalty": _of("number", exclusiveMinimum=0),
    "logit_bias": _of("object", "{token id: what is added to its logit}."),
    "min_tokens": _of("integer", minimum=0),
    "max_tokens": _of("integer", minimum=1),
    "max_completion_tokens": _of("integer", minimum=1),
    "max_output_tokens": _of("integer", minimum=1),
    "stop": _TEXT_OR_TEXTS | {"description": "Texts that end a sample; they are left out of it."},
    "stop_token_ids": {"type": "array", "items": {"type": "integer"}},
    "ignore_eos": _of("boolean", "Go on behind the end token."),
    "logprobs": _of(["boolean", "integer"], "Chat: whether; completion: how many most likely tokens are listed."),
    "top_logprobs": _of("integer", minimum=0),
    "response_format": _FORMAT,
    "text": _of("object", "{\"format\": text, json_object or json_schema}."),
    "structured_outputs": _of("object", "vLLM's: one of json, json_object, regex, choice, grammar."),
    "guided_json": _of(["object", "string"], "A JSON schema that the answer keeps."),
    "guided_regex": _of("string"),
    "guided_choice": _TEXTS,
    "guided_grammar": _of("string", "A grammar in Lark's syntax."),
    "tools": _OBJECTS | {"description": "Functions that the model may call."},
    "tool_choice": _of(["string", "object"], "auto, none, required, or a function."),
    ("chat", "documents"): _OBJECTS | {"description": "What the chat template is told of documents."},
    "documents": {"type": "array", "items": {"type": ["string", "object"]}},
    "chat_template": _of("string"),
    "chat_template_kwargs": _of("object", "Variables of the chat template."),
    "add_generation_prompt": _of("boolean"),
    "continue_final_message": _of("boolean"),
    "exit_threshold": _of("number", "A looped model's: after which visit a row is read."),
    "min_visits": _of("integer", "A looped model's.", minimum=1),
    "max_visits": _of("integer", "A looped model's.", minimum=1),
    "cache_salt": _of("string", "Requests share a prefix only where this is equal."),
    "priority": _of("integer", "What a request of larger priority computed is kept longer (--cache priority)."),
    "include": _TEXTS,
    "metadata": _of("object", "Is repeated in the response."),
    "previous_response_id": _of("string", "A kept response, from which this one goes on (--data-dir)."),
    "store": _of("boolean", "Whether the response is kept (--data-dir)."),
    "dimensions": _of("integer", "The vectors' first so many numbers, scaled to length 1.", minimum=1),
    "encoding_format": _of("string", enum=["float", "base64"]),
    "query": _of("string"),
    "queries": _TEXT_OR_TEXTS,
    "text_1": _TEXT_OR_TEXTS,
    "text_2": _TEXT_OR_TEXTS,
    "top_n": _of("integer", "How many of the best documents are answered.", minimum=1),
    "return_documents": _of("boolean"),
    "instruction": _of("string", "What the reranker is told to look for."),
}  # fmt: skip


def body_schema(kind: str) -> Schema:
    """Returns the schema of the bodies of one kind of request."""
    names = sorted(KINDS[kind].names, key=lambda name: (name not in _REQUIRED.get(kind, []), name))
    properties = {name: _PARAMETERS.get((kind, name)) or _PARAMETERS.get(name, {}) for name in names}
    properties |= _SHARED | _SETTINGS | (_STREAM if kind in STREAMED else {})
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": _REQUIRED[kind]} if kind in _REQUIRED else {})
