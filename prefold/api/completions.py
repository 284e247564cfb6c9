"""/v1/chat/completions and /v1/completions: requests become items of the task "generate", results become responses.

The parameters are OpenAI's, and those that vLLM adds. A parameter that cannot be honoured is an error, unless its
value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any
from uuid import uuid4

from ..errors import InputError
from ..options import http_names
from ..tasks.sampling import format_grammar
from .asked import flag
from .echo import prompt_logprobs
from .reasoning import parted
from .tools import calls_in, read_tools

__all__ = [
    "CHAT_NAMES",
    "COMPLETION_NAMES",
    "chat_body",
    "chat_logprobs",
    "completion_body",
    "completion_logprobs",
    "read_chat",
    "read_completion",
    "reasoning_of",
    "usage_of",
]

# OpenAI's defaults where they differ from those of Sampling. max_tokens None: until the model's context is full.
CHAT_DEFAULTS = {"temperature": 1.0, "max_tokens": None}
COMPLETION_DEFAULTS = {"temperature": 1.0, "max_tokens": 16}
# {parameter: field of Sampling that takes its value}
_SAMPLING = http_names()
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# {vLLM's name: the name that `grammar_from` knows}
_STRUCTURED = {"json": "json_schema", "json_object": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}
_COMMON = {*_SAMPLING, *_GUIDED, "logprobs", "response_format", "structured_outputs", "cache_salt", "return_token_ids"}
_CHAT = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "documents", "chat_template",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "reasoning_effort", "include_reasoning",
}  # fmt: skip
CHAT_NAMES, COMPLETION_NAMES = _COMMON | _CHAT, _COMMON | {"prompt"}
# Parameters that change no result here: bookkeeping, and hints for other servers.
_IGNORED = {
    "model", "user", "priority", "request_id", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "stream_options", "guided_decoding_backend",
}  # fmt: skip
# Parameters that are not supported, with the values that ask for nothing, which are allowed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "echo": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,),
    "length_penalty": (1,), "early_stopping": (False,), "skip_special_tokens": (True,), "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (),
    "allowed_token_ids": (), "bad_words": ([],), "return_tokens_as_token_ids": (False,),
    "logits_processors": (), "modalities": (["text"],), "audio": (), "prediction": (),
    "function_call": ("none",), "functions": (), "guided_whitespace_pattern": (), "add_special_tokens": (),
}  # fmt: skip
# How much a model that thinks is to think, in OpenAI's words and vLLM's.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_REMEDIES = {
    "stream": "leave it out, since a batch answers with whole responses",
    "best_of": "use n, and choose among the choices",
    "truncate_prompt_tokens": "leave it out, and give --truncate to cut what is too long",
    "echo": "use the task score, or ask for it outside of a batch",
    "prompt_logprobs": "use the task score, or ask for them outside of a batch",
    "function_call": "use tools",
    "functions": "use tools",
}


_LOGPROB = itemgetter("logprob")


# ------------------------------------------------------------------------------------------- requests


def read_chat(body: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns one item of the task, and what the response needs.

    defaults: {field of Sampling: value}, in place of OpenAI's own. Raises InputError.
    """
    _check(body, CHAT_NAMES, neutral={"add_special_tokens": (False,)})
    if body.get("messages") is None:
        raise InputError("messages is missing", field="messages", remedy="give it", code="missing_field")
    tools, calls, grammar = read_tools(body)
    item: dict[str, Any] = {"messages": body["messages"], "tools": tools}
    names = ("documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    item |= {name: body[name] for name in names if body.get(name) is not None}
    if (effort := body.get("reasoning_effort")) is not None:
        if effort not in _EFFORTS:
            message, remedy = f"'reasoning_effort' is {effort!r:.100}", f"give one of {', '.join(_EFFORTS)}"
            raise InputError(message, field="reasoning_effort", remedy=remedy, code="wrong_type")
        # What is wrong with the object itself, the task says.
        own = item.get("chat_template_kwargs", {})
        item["chat_template_kwargs"] = {"reasoning_effort": effort, **own} if isinstance(own, Mapping) else own
    meta: dict[str, Any] = {} if flag(body, "include_reasoning", True) else {"hides_reasoning": True}
    sampling = {**CHAT_DEFAULTS, **defaults, **_sampling(body, meta)}
    if calls is not None:
        meta["calls"] = calls
    if grammar is not None:  # a response_format is of the message's text, and an answer that must be a call has none
        if meta.get("format", "response_format") != "response_format":
            message = f"{meta['format']} and tool_choice exclude each other"
            raise InputError(message, field="tool_choice", remedy="give one of them")
        sampling["grammar"], meta["format"] = grammar, "tools"
    if body.get("logprobs"):
        sampling["logprobs"] = body.get("top_logprobs") or 0
    elif body.get("top_logprobs"):
        raise InputError("top_logprobs needs logprobs", field="top_logprobs", remedy='give "logprobs": true')
    # An answer that a grammar makes is of that form from its beginning on.
    item["with_reasoning"] = "grammar" not in sampling
    return [item | {"sampling": sampling} | _beside(body)], meta


def read_completion(body: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns an item of the task for each prompt, and what the response needs.

    defaults: {field of Sampling: value}, in place of OpenAI's own. Raises InputError.
    """
    _check(body, COMPLETION_NAMES, neutral={"add_special_tokens": (True,)})
    prompt = body.get("prompt")
    if prompt is None or prompt == []:
        what = "is missing" if prompt is None else "is an empty list"
        raise InputError(f"prompt {what}", field="prompt", remedy="give it", code="missing_field")
    many = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
    meta: dict[str, Any] = {}
    sampling = {**COMPLETION_DEFAULTS, **defaults, **_sampling(body, meta)}
    if body.get("logprobs") is not None:
        sampling["logprobs"] = body["logprobs"]
    return [{"prompt": p, "sampling": sampling, **_beside(body)} for p in (prompt if many else [prompt])], meta


def _check(body: dict[str, Any], known: set[str], neutral: dict[str, tuple[Any, ...]]) -> None:
    allowed = _NEUTRAL | neutral
    for name, value in body.items():
        if value is None or name in known | _IGNORED or (name in allowed and value in allowed[name]):
            continue
        what = f"{name} is not supported" if name in allowed else f"unknown parameter {name!r}"
        raise InputError(what, field=name, remedy=_REMEDIES.get(name, "leave it out"), code="unsupported")


def _beside(body: dict[str, Any]) -> dict[str, Any]:
    names = {"cache_salt": "salt", "priority": "priority"}
    found = {field: body[name] for name, field in names.items() if body.get(name) is not None}
    return found | ({"with_ids": True} if flag(body, "return_token_ids") else {})


def _sampling(body: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling options of a request, and notes in `meta` which parameter asks for a format."""
    found = {field: body[name] for name, field in _SAMPLING.items() if body.get(name) is not None}
    asked = [(name, grammar) for name in _FORMATS if (grammar := _FORMATS[name](body.get(name))) is not None]
    if len(asked) > 1:
        message = f"{asked[0][0]} and {asked[1][0]} exclude each other"
        raise InputError(message, field=asked[1][0], remedy="give one of them")
    for name, grammar in asked:
        found["grammar"], meta["format"] = grammar, name
    return found


# --------------------------------------------------------------------------------------------- formats


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    given = {k: v for k, v in value.items() if v not in (None, False)} if isinstance(value, dict) else {}
    if len(given) != 1 or not given.keys() <= _STRUCTURED.keys():
        remedy = f"give one of {', '.join(_STRUCTURED)}"
        raise InputError(
            f"structured_outputs has {', '.join(given) or 'nothing'}", field="structured_outputs", remedy=remedy
        )
    ((kind, inner),) = given.items()
    return {_STRUCTURED[kind]: inner}


def _guided(kind: str) -> Callable[[Any], dict[str, Any] | None]:
    return lambda value: None if value is None else {_STRUCTURED[kind]: value}


def _response_format(value: Any) -> dict[str, Any] | None:
    """Returns the grammar of a response_format: OpenAI's, or huggingface_hub's, which is a json_object with a value."""
    if isinstance(value, dict) and value.get("type") == "json_object" and value.get("value") is not None:
        return {"json_schema": value["value"]}
    return format_grammar(value)


_FORMATS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{name: _guided(kind) for name, kind in _GUIDED.items()},
}


# ------------------------------------------------------------------------------------------ responses


def chat_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response to a chat request, without its id, time, model and usage."""
    choices, (result,) = [], results
    for index, choice in enumerate(_choices(result)):
        logprobs = chat_logprobs(choice["logprobs"]) if "logprobs" in choice else None
        content, thought, ending = choice.get("text"), "", _ending(choice)
        if "thinks" in result and content:
            thought, content = parted(content, result["thinks"])
        message = {"role": "assistant", "content": content or None if thought else content, "refusal": None}
        if thought and "hides_reasoning" not in meta:
            message |= reasoning_of(thought)
        text, calls = calls_in(content or "", meta["calls"]) if "calls" in meta else ("", [])
        if calls:
            message |= {"content": text or None, "tool_calls": [_tool_call(*call) for call in calls]}
            ending["finish_reason"] = "tool_calls"
        choices.append({"index": index, "message": message, "logprobs": logprobs} | ending)
    told = _fingerprint(meta)
    if "prompt_logprobs" in meta:
        told["prompt_logprobs"] = prompt_logprobs(result["prompt"], meta["prompt_logprobs"])
    if "prompt_ids" in result:
        told["prompt_token_ids"] = result["prompt_ids"]
        for made, choice in zip(choices, _choices(result), strict=True):
            made["token_ids"] = choice["tokens"]
    return {"object": "chat.completion", "choices": choices} | told


def completion_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response to a request with one prompt or several, without its id, time, model and usage.

    The samples of each prompt follow each other.
    """
    choices: list[dict[str, Any]] = []
    for place, result in enumerate(results):
        for choice in _choices(result):
            text, entries = choice.get("text"), choice.get("logprobs")
            if "echo" in meta:
                text = meta["echo"][place] + (text or "")
                if entries is not None:
                    count = meta["echo_logprobs"]
                    entries = [*(one | {"top": one["top"][:count]} for one in result["prompt"]), *entries]
            logprobs = None if entries is None else completion_logprobs(entries)
            head = {"index": len(choices), "text": text, "logprobs": logprobs}
            if "prompt_logprobs" in meta:
                head["prompt_logprobs"] = prompt_logprobs(result["prompt"], meta["prompt_logprobs"])
            if "prompt_ids" in result:
                head |= {"token_ids": choice["tokens"], "prompt_token_ids": result["prompt_ids"]}
            choices.append(head | _ending(choice))
    return {"object": "text_completion", "choices": choices} | _fingerprint(meta)


def reasoning_of(thought: str) -> dict[str, str]:
    """Returns the fields of a message, or of a piece of it, that hold reasoning: DeepSeek's name for it, and vLLM's."""
    return {"reasoning_content": thought, "reasoning": thought}


def _fingerprint(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta[name] for name in ("system_fingerprint",) if name in meta}


def usage_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many tokens the prompts have, and how many were generated."""
    prompt, generated, cached = (
        sum(result[name] for result in results) for name in ("num_tokens", "num_generated", "cached_tokens")
    )
    details = {"cached_tokens": cached}
    if approximate := sum(result.get("approximate_tokens", 0) for result in results):
        details["approximate_tokens"] = approximate
    choices = [choice for result in results if "thinks" in result for choice in _choices(result)]
    thought = sum(choice["reasoning_tokens"] for choice in choices)
    made = {"completion_tokens_details": {"reasoning_tokens": thought}} if choices else {}
    return made | {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": details,
    }


def _choices(result: dict[str, Any]) -> list[dict[str, Any]]:
    return result.get("choices") or [result]


def _ending(choice: dict[str, Any]) -> dict[str, Any]:
    return {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop")}


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_token(entry: dict[str, Any]) -> dict[str, Any]:
    token = entry.get("token", "")
    # A token that is only a part of a letter is decoded to U+FFFD, from which its bytes cannot be known.
    whole = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": entry["logprob"], "bytes": whole}


def chat_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the log-probabilities of tokens as a chat response has them."""
    content = [_chat_token(e) | {"top_logprobs": [_chat_token(t) for t in e["top"]]} for e in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: list[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    """Returns the log-probabilities of tokens as a completion has them. start: where the first token begins."""
    tokens = [entry.get("token", "") for entry in entries]
    offsets = [start]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    # OpenAI lists the chosen token among the most likely ones, even where it is none of them. Of tokens that have the
    # same text the most likely one counts.
    every = ([*entry["top"], entry] for entry in entries)
    top = [
        None if some[-1]["logprob"] is None else {t.get("token", ""): t["logprob"] for t in sorted(some, key=_LOGPROB)}
        for some in every
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets[: len(tokens)],
    }
