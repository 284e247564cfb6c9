"""Describes requests in JSON Schema, for OpenAPI. Which parameters a kind has comes from the tables of its reader."""

from __future__ import annotations

from typing import Any

from ..options import http_names, kind_of, option_of
from .anthropic import MESSAGE_NAMES
from .cohere import COHERE_EMBED_NAMES
from .endpoints import KINDS
from .pooling import CLASSIFY_NAMES, POOLING_NAMES
from .tei import TEI_NAMES
from .tokens import DETOKENIZE_NAMES, TOKENIZE_NAMES

__all__ = ["BODIES", "STREAMED", "SUMMARIES", "body_schema"]

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
# {body of an API that is answered over HTTP only: its fields}
_OTHERS = {f"tei_{kind}": names for kind, names in TEI_NAMES.items()} | {
    "message": MESSAGE_NAMES, "message_tokens": MESSAGE_NAMES, "cohere_embed": COHERE_EMBED_NAMES,
    "tokenize_prompt": (*KINDS["completion"].names, *TOKENIZE_NAMES),
    "tokenize_chat": (*KINDS["chat"].names, *TOKENIZE_NAMES), "detokenize": DETOKENIZE_NAMES,
    "classify": CLASSIFY_NAMES, "pooling": POOLING_NAMES,
}  # fmt: skip
BODIES = (*KINDS, *_OTHERS)
_LIKE_KINDS = {"tokenize_prompt", "tokenize_chat", "classify", "pooling"}  # they have the settings of requests
_REQUIRED = {
    "message": ["messages", "max_tokens"], "message_tokens": ["messages"], "cohere_embed": ["texts"],
    "tokenize_prompt": ["prompt"], "tokenize_chat": ["messages"], "detokenize": ["tokens"],
    "tei_rerank": ["query", "texts"], "tei_decode": ["ids"],
    **{f"tei_{kind}": ["inputs"] for kind in ("embed", "embed_all", "predict", "similarity", "tokenize")},
    "embeddings": ["input"], "rerank": ["query", "documents"], "chat": ["messages"], "completion": ["prompt"],
    "response": ["input"], "classify": ["input"], "pooling": ["input"],
}  # fmt: skip


def _of(kind: str | list[str], description: str = "", **more: Any) -> Schema:
    return {"type": kind} | ({"description": description} if description else {}) | more


def _of_option(name: str) -> Schema:
    """Returns the schema of an option of generation, if it is a number or a flag."""
    option = option_of("generate", name)
    kind = {int: "integer", float: "number", bool: "boolean"}.get(kind_of(option))
    least, most = option.metadata["least"], option.metadata["most"]
    bounds = {"exclusiveMinimum" if option.metadata["above"] else "minimum": least, "maximum": most}
    return _of(kind, option.metadata["doc"], **{k: v for k, v in bounds.items() if v is not None}) if kind else {}


_TEXTS = {"type": "array", "items": {"type": "string"}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, _TEXTS]}
_TEXT_OR_OBJECTS = {"anyOf": [{"type": "string"}, _OBJECTS]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
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
    "stream_options": _of(
        "object",
        '{"include_usage": true}: a last chunk says how many tokens there were; "continuous_usage_stats": every chunk.',
    ),
}
_PROMPT_LOGPROBS = {
    "prompt_logprobs": _of("integer", "vLLM's: so many most likely tokens at each token of the prompt.", minimum=0)
}
_ECHO = {"echo": _of("boolean", "Whether choices, and their log-probabilities, begin with the prompt.")}
_SETTINGS = {
    "truncate_prompt_tokens": _of("integer", "-1 cuts a prompt to what the model takes, k to k tokens.", minimum=-1),
    "cache_prompt": _of("boolean", "false: the prompt shares nothing with earlier or later requests."),
}
# {parameter: its schema}; those that mean different things in two kinds are under (kind, parameter).
_PARAMETERS: dict[Any, Schema] = {
    "messages": _OBJECTS | {"description": "The conversation: role and content of each message."},
    "prompt": _PROMPT,
    ("embeddings", "input"): _PROMPT,
    ("classify", "input"): _PROMPT,
    ("pooling", "input"): _PROMPT,
    "use_activation": _of("boolean", "false: logits, or vectors that are not scaled."),
    "task": _of("string", "What the model does: embed, or classify where it has a classification head."),
    ("response", "input"): {"anyOf": [{"type": "string"}, _OBJECTS], "description": "A text, or items."},
    "instructions": _of("string", "What stands before the input, as a system message."),
    **{name: _of_option(option) for name, option in http_names().items()},
    "logit_bias": _of("object", "{token id: what is added to its logit}."),
    "max_tokens": _of("integer", minimum=1),
    ("completion", "max_tokens"): _of("integer", "0 with echo or prompt_logprobs only.", minimum=0),
    "max_completion_tokens": _of("integer", minimum=1),
    "max_output_tokens": _of("integer", minimum=1),
    "stop": _TEXT_OR_TEXTS | {"description": "Texts that end a sample; they are left out of it."},
    "stop_token_ids": {"type": "array", "items": {"type": "integer"}},
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
    "parallel_tool_calls": _of("boolean", "false: at most one call of a function is answered.", default=True),
    ("chat", "documents"): _OBJECTS | {"description": "What the chat template is told of documents."},
    "documents": {"type": "array", "items": {"type": ["string", "object"]}},
    "chat_template": _of("string"),
    "chat_template_kwargs": _of("object", "Variables of the chat template."),
    "add_generation_prompt": _of("boolean"),
    "continue_final_message": _of("boolean"),
    "route": _of("array", "A looped model's: the blocks that rows visit.", items=_of("integer")),
    "cache_salt": _of("string", "Requests share a prefix only where this is equal."),
    "priority": _of("integer", "What a request of larger priority computed is kept longer (--cache priority)."),
    "include": _TEXTS,
    "return_token_ids": _of("boolean", "vLLM's: whether the ids of the prompt's and the answer's tokens are told."),
    "reasoning_effort": _of("string", "A variable of the chat template: low, medium, high, ..."),
    "include_reasoning": _of("boolean", "false: the reasoning of a model that thinks is left out.", default=True),
    "reasoning": _of("object", '{"effort": ...}: a variable of the chat template.'),
    "metadata": _of("object", "Is repeated in the response."),
    "dimensions": _of("integer", "The vectors' first so many numbers, scaled to length 1.", minimum=1),
    "encoding_format": _of("string", enum=["float", "base64"]),
    "query": _of("string"),
    "queries": _TEXT_OR_TEXTS,
    "text_1": _TEXT_OR_TEXTS,
    "text_2": _TEXT_OR_TEXTS,
    "data_1": _TEXT_OR_TEXTS,
    "data_2": _TEXT_OR_TEXTS,
    "items": _TEXT_OR_TEXTS,
    "top_n": _of("integer", "How many of the best documents are answered.", minimum=1),
    "return_documents": _of("boolean", "Whether each result holds its document.", default=True),
    "max_tokens_per_doc": _of("integer", "How many tokens are read of each document, its first.", minimum=1),
    "instruction": _of("string", "What the reranker is told to look for."),
    "inputs": _TEXT_OR_TEXTS,
    ("tei_predict", "inputs"): {
        "anyOf": [{"type": "string"}, _TEXTS | {"maxItems": 2}, {"type": "array", "items": _TEXTS | {"maxItems": 2}}],
        "description": "A text, a pair of texts, or a list of lists of one text or two.",
    },
    ("tei_similarity", "inputs"): {
        "type": "object", "additionalProperties": False, "required": ["source_sentence", "sentences"],
        "properties": {"source_sentence": {"type": "string"}, "sentences": _TEXTS},
    },
    "normalize": _of("boolean", "Whether vectors are scaled to length 1.", default=True),
    "prompt_name": _of("string", "The checkpoint's prompt that is put before the texts."),
    "truncate": _of("boolean", "Cut what is too long; else it is an error.", default=False),
    "truncation_direction": _of("string", enum=["Left", "Right"], default="Right"),
    "raw_scores": _of("boolean", "Scores before they are made probabilities.", default=False),
    "return_text": _of("boolean", default=False),
    ("tei_predict", "parameters"): _of("object", "huggingface_hub's: top_k, function_to_apply."),
    ("tei_similarity", "parameters"): _of("object", "prompt_name, truncate and truncation_direction."),
    ("tei_rerank", "texts"): _TEXTS,
    "ids": {
        "anyOf": [_IDS, {"type": "array", "items": _IDS}], "description": "Token ids, or lists of them.",
    },
    "skip_special_tokens": _of("boolean", default=True),
    "add_special_tokens": _of("boolean", "Whether what stands around every text is added.", default=True),
    "return_token_strs": _of("boolean", "Whether the text of each token is answered too.", default=False),
    ("detokenize", "tokens"): _IDS,
    ("cohere_embed", "texts"): _TEXTS,
    "input_type": _of("string", enum=["search_query", "search_document", "classification", "clustering"]),
    "embedding_types": {"type": "array", "items": {"enum": ["float", "base64", "ubinary", "binary"]}},
    "output_dimension": _of("integer", "The vectors' first so many numbers, scaled to length 1.", minimum=1),
    ("cohere_embed", "truncate"): _of("string", enum=["NONE", "START", "END"], default="END"),
    "system": _TEXT_OR_OBJECTS | {"description": "The system's message: a text, or blocks of text."},
    "stop_sequences": _TEXTS | {"description": "Texts that end the answer; they are left out of it."},
    ("message", "tool_choice"): _of("object", '{"type": auto, any, none or tool}; "disable_parallel_tool_use".'),
    "service_tier": _of("string", "Changes nothing."),
    "output_config": _of("object", '{"format": {"type": "json_schema", "schema": {...}}}: the form of the answer.'),
    "thinking": _of("object", '{"type": "disabled"} only.'),
    "cache_control": _of("object", "Changes nothing: what is computed is kept anyway."),
}  # fmt: skip


def body_schema(kind: str) -> Schema:
    """Returns the schema of the bodies of one kind of request."""
    names: Any = KINDS[kind].names if kind in KINDS else _OTHERS[kind]
    names = sorted(names, key=lambda name: (name not in _REQUIRED.get(kind, []), name))
    properties = {name: _of_field(kind, name) for name in names}
    if kind in KINDS or kind in _LIKE_KINDS:
        properties |= _SHARED | _SETTINGS | (_STREAM if kind in STREAMED else {})
    if kind in ("chat", "completion"):
        properties |= _PROMPT_LOGPROBS | (_ECHO if kind == "completion" else {})
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": _REQUIRED[kind]} if kind in _REQUIRED else {})


def _of_field(kind: str, name: str) -> Schema:
    """Returns the schema of a field, which may be one of its kind only."""
    own = "message" if kind == "message_tokens" else kind
    every = _PARAMETERS | _SHARED | _STREAM
    return every.get((own, name)) or every[name]
