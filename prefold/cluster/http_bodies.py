"""Convert requests to bodies of OpenAI's API, and responses of servers to results.

`remote_model` makes the stand-in for the checkpoint of a server's model. Tasks need the model's name and a tokenizer,
but no weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..checkpoint import BUILT_IN, Checkpoint, resolve
from ..errors import CheckpointError, InputError
from ..spec.requests import Generated, Readout, Request, Result, Sampling, Stats
from ..spec.task import Grammar, not_sent, sent_names
from ..text import Tokenizer, tokenizer_or_none
from ..trie import MEDIA_BASE
from ..wire.body import Body
from ..wire.completions import Chat, Completion
from ..wire.numbers import Embeddings
from ..wire.tei import TeiEmbed
from .replicas import cannot_ask, generation_stats

# The start of a text that stands for a conversation. The rest of the text is JSON {"messages": ...}. The stand-in chat
# template of a model on a server writes such texts.
MESSAGES = "\x00messages\x00"
_NOT_KNOWN = -1  # the id of a generated token whose id the server does not send

# Fields of Sampling that bodies have under the same names. In order: fields for every server; fields that most servers
# have although OpenAI's API lacks them; fields that are sent if they are not the default.
_ALWAYS, NOT_OPENAIS, _WHERE_SET = sent_names("openai"), sent_names("vllm"), sent_names("set")
_DEFAULTS = {f.name: f.default for f in fields(Sampling)}


class RowError(InputError):
    """Raised if a server refuses a request or fails on it."""

    def __init__(self, server: str, status: int, words: str):
        message = f"{server} answered {status}: {words}" if status else f"{server}: {words}"
        super().__init__(message, remedy="see the server's message", code=f"http_{status}" if status else "no_answer")
        self.status = status

    @property
    def is_about_form(self) -> bool:
        """Return whether the server may have refused the form of the request: token ids, or a field."""
        return self.status in (400, 422)

    def __reduce__(self) -> Any:
        return InputError, (self.args[0],), self.__dict__


def generation_body(
    request: Request,
    model: str,
    text_of: Callable[[np.ndarray], str] | None,
    with_text: bool,
    *,
    context: int | None = None,
    knows_all: bool = True,
) -> tuple[str, Body]:
    """Return (path, body) of a request for text.

    Raise InputError for options that no server has, and for a prompt without max_tokens if the context's length is
    unknown.

    Args:
        text_of: converts token ids to text; None: ids are sent
        context: length of the model's context, in tokens like the request's; None: unknown, or the request's tokens are
            not the model's
        knows_all: whether the server has the options NOT_OPENAIS; if not, they are sent only if they are not the
            default
    """
    sampling = request.sampling or Sampling()
    _check([request], sampling, with_text)
    always = (*_ALWAYS, *NOT_OPENAIS) if knows_all else _ALWAYS
    values = {name: getattr(sampling, name) for name in (*_ALWAYS, *NOT_OPENAIS, *_WHERE_SET)}
    values = {name: value for name, value in values.items() if name in always or value != _DEFAULTS[name]}
    if values.get("top_k") == 0:
        values["top_k"] = -1  # all tokens; some servers refuse 0
    shared: dict[str, Any] = values | {
        "model": request.namespace.adapter or model,
        "max_tokens": sampling.max_tokens,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_ids) or None,
        "cache_salt": request.namespace.salt or None,
        "response_format": _response_format(sampling.grammar),
    }
    text = None if text_of is None else text_of(request.tokens)
    if text is not None and text.startswith(MESSAGES):
        # Without max_tokens, servers generate in a conversation until the context is full.
        return "/v1/chat/completions", Chat(**shared, **_conversation(text))
    if sampling.max_tokens is None:
        shared["max_tokens"] = _room(request, context)
    return "/v1/completions", Completion(prompt=request.tokens.tolist() if text is None else text, **shared)


def _response_format(grammar: Grammar | None) -> dict[str, Any] | None:
    if grammar is None or grammar.kind != "json_schema":
        return None if grammar is None else {"type": "json_object"}
    schema = {"name": "answer", "schema": json.loads(grammar.text), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _room(request: Request, context: int | None) -> int:
    """Return how many tokens fit after the prompt.

    Raise InputError if the prompt is too long or the context is unknown. Without a limit a server would generate 16
    tokens.
    """
    if context is None:
        message = "the length of the model's context is unknown, and without max_tokens a server stops after 16 tokens"
        remedy = "give max_tokens (--max-tokens), or a folder with the tokenizer and config.json (--tokenizer)"
        raise InputError(message, field="max_tokens", remedy=remedy, code="missing_option")
    if len(request.tokens) >= context:
        message = f"the prompt has {len(request.tokens)} tokens, the context of the server's model is {context}"
        raise InputError(message, field="prompt", remedy="shorten it", code="too_long")
    return context - len(request.tokens)


def _conversation(text: str) -> dict[str, Any]:
    """Return the fields of a text that stands for a conversation.

    Raise InputError for another text with the same start, because its content must not become fields of the body.
    """
    try:
        conversation = json.loads(text.removeprefix(MESSAGES))
    except (ValueError, RecursionError):
        conversation = None
    if not isinstance(conversation, dict) or not {"messages"} <= conversation.keys() <= {"messages", "tools"}:
        message = f"the prompt begins with {MESSAGES!r}, which is reserved for conversations that are sent to a server"
        raise InputError(message, field="prompt", remedy="remove it")
    return conversation


def _check(requests: Sequence[Request], asks: Sampling | Readout, with_text: bool = True) -> None:
    """Raise InputError for images, and for options of `asks` that no server has.

    Such options are exits, routes and bare tokens.
    """
    for request in requests:
        if len(request.tokens) and int(request.tokens.max()) >= MEDIA_BASE:
            raise _lacks("image")
    if isinstance(asks, Readout):
        lacks = [] if asks.exits is None else list(asks.exits.given)
    elif asks.logprobs is not None:
        lacks = ["logprobs"]
    elif asks.grammar is not None and asks.grammar.kind not in ("json_schema", "json"):
        lacks = [asks.grammar.kind]
    else:
        lacks = [*([] if with_text else ["tokens without text"]), *not_sent(asks)]
    for part in lacks:
        raise _lacks(part)


def _lacks(part: str) -> InputError:
    return cannot_ask("a server", part, "here (without --url)")


def generated_of(answer: Any) -> tuple[list[Generated], Stats]:
    """Return (the samples of a response in order, its `usage`)."""
    usage = answer.get("usage") or {}
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
    generated_tokens = usage.get("completion_tokens") or 0
    unnamed = [_NOT_KNOWN] * (generated_tokens // max(1, len(choices)))
    out = []
    for choice in choices:
        text = _text_of(choice["message"]) if "message" in choice else choice["text"]
        tokens = tuple(choice.get("token_ids") or unnamed)
        reason: Literal["stop", "length"] = "length" if choice.get("finish_reason") == "length" else "stop"
        stop = choice.get("stop_reason")
        out.append(Generated(tokens, text, reason, stop if isinstance(stop, (str, int)) else None, cached_tokens))
    return out, generation_stats(usage.get("prompt_tokens") or 0, generated_tokens, cached_tokens or 0)


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message.

    If the server has moved function calls out of the text, they are written into it in the form of Qwen's and Hermes'
    templates. Readers of the text then find calls from any server.
    """
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except ValueError:
            arguments = function["arguments"]
        call_text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{call_text}\n</tool_call>")
    return "\n".join(parts)


def embedding_bodies(
    requests: Sequence[Request], readout: Readout, model: str, text_of: Callable[[np.ndarray], str] | None
) -> list[tuple[str, Body]]:
    """Return (path, body) for the embeddings of prompts of one adapter.

    The first is OpenAI's API. For texts without an adapter, TEI's API follows as a fallback, because TEI has no
    adapters.
    """
    _check(requests, readout)
    adapter = requests[0].namespace.adapter
    assert all(request.namespace.adapter == adapter for request in requests)
    model = adapter or model
    if text_of is None:
        ids = [request.tokens.tolist() for request in requests]
        return [("/v1/embeddings", Embeddings(model=model, input=ids))]
    texts = [text_of(request.tokens) for request in requests]
    body = Embeddings(model=model, input=texts)
    return [("/v1/embeddings", body)] if adapter else [("/v1/embeddings", body), ("/embed", TeiEmbed(inputs=texts))]


def embeddings_of(answer: Any, count: int) -> list[Result]:
    """Return the embeddings of a response in order."""
    if isinstance(answer, dict):
        answer = [entry["embedding"] for entry in sorted(answer["data"], key=lambda entry: entry["index"])]
    if len(answer) != count:
        raise RowError("the server", 200, f"{len(answer)} vectors for {count} prompts")
    return [Result(np.array(vector, np.float32)) for vector in answer]


def logprob_bodies(request: Request, readout: Readout, model: str) -> list[tuple[str, Body]]:
    """Return (path, body) of completions in vLLM's form. Their prompt log-probabilities answer a request.

    For targets there is one completion, whose prompt ends with the last target. For logits there is one per id.
    """
    _check([request], readout)
    if readout.kind == "logits":
        ends: Sequence[int] = readout.ids
    else:
        targets = request.targets
        if (
            targets is None
            or request.tokens[len(request.tokens) - len(targets) + 1 :].tolist() != targets[:-1].tolist()
        ):
            raise InputError(
                "a server can score only targets that continue the prompt", field="targets", code="unsupported"
            )
        ends = [int(targets[-1])]
    shared: dict[str, Any] = {"model": request.namespace.adapter or model, "cache_salt": request.namespace.salt or None}
    shared |= {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    prompts = [[*request.tokens.tolist(), int(end)] for end in ends]
    return [("/v1/completions", Completion(prompt=prompt, **shared)) for prompt in prompts]


def logprobs_of(answers: Sequence[Any], request: Request, readout: Readout) -> Result:
    """Return the Result of a request from the answers to its `logprob_bodies`.

    In place of logits these are log-probabilities, which differ from the logits by a constant. Raise RowError if a
    server does not return log-probabilities of prompts.
    """
    ends = readout.ids if readout.kind == "logits" else None
    count = 1 if ends is not None or request.targets is None else len(request.targets)
    values, greedy = [], []
    for number, answer in enumerate(answers):
        logprobs = answer["choices"][0].get("prompt_logprobs")
        if logprobs is None:
            raise RowError("the server", 200, "no log-probabilities of the prompt (vLLM and prefold serve send them)")
        targets = [ends[number]] if ends is not None else request.targets.tolist()  # type: ignore[union-attr]
        for target, entry in zip(targets, logprobs[-count:], strict=True):
            values.append(entry[str(target)]["logprob"])
            greedy.append(entry[str(target)].get("rank") == 1)
    if readout.sums:  # the log-sum-exp of log-probabilities is 0
        values += [0.0, next((id for id, is_first in zip(readout.ids, greedy, strict=True) if is_first), -1)]
    is_logprobs = readout.kind == "logprobs"
    return Result(np.array(values, np.float32), np.array(greedy, bool) if is_logprobs else None)


def contexts_of(response: Any) -> dict[str, int | None]:
    """Return {name of a model: tokens of its context, or None} from a response of /v1/models.

    Return {} if the server lacks that path.
    """
    try:
        models = response.json()["data"] if response.status_code < 300 else []
        lengths = ((str(model["id"]), model.get("max_model_len")) for model in models)
        return {name: length if isinstance(length, int) and length > 0 else None for name, length in lengths}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


# A stand-in config for the tasks. The server decides whether a prompt is too long.
_ANY: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1 << 20, "num_hidden_layers": 1,
    "num_attention_heads": 1, "head_dim": 64, "intermediate_size": 1, "vocab_size": 1 << 24,
    "max_position_embeddings": (1 << 31) - 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
# Writes a conversation as JSON; the server applies its model's own template.
_TEMPLATE = MESSAGES + "{{ ({'messages': messages, 'tools': tools} if tools else {'messages': messages}) | tojson }}"


def remote_model(
    model: str, tokenizer: str | None, over: str = "over HTTP", notify: Callable[[str], None] = lambda line: None
) -> tuple[Checkpoint, Tokenizer]:
    """Return (checkpoint, tokenizer) for a model on a server or in vLLM.

    Without a tokenizer, prompts are texts and each byte counts as a token, so prompts are sorted by their bytes.

    Args:
        model: the model's name on the server, or a folder
        over: location of the model, for its description
        tokenizer: a folder, hub id or built-in name; None: the tokenizer of the folder `model`, else texts are sent
    """
    folder = tokenizer or (model if Path(model).is_dir() else None)
    if folder is None:
        return Checkpoint.dummy(_ANY, name=f"{model} {over}", path=None), _bytes()
    # A built-in model has its tokenizer in its only file. For other models no weights are read.
    checkpoint = resolve(folder, load_format="auto" if folder in BUILT_IN else "dummy", notify=notify)
    own_tokenizer = tokenizer_or_none(checkpoint)
    if own_tokenizer is None and tokenizer:
        raise CheckpointError(f"{tokenizer} has no tokenizer; remove --tokenizer to send texts")
    values = {name: checkpoint.config[name] for name in ("max_position_embeddings",) if checkpoint.config.get(name)}
    return Checkpoint.dummy(_ANY | values, name=f"{model} {over}", path=checkpoint.path), own_tokenizer or _bytes()


def context_of(checkpoint: Checkpoint) -> int | None:
    """Return the context length of a remote model's checkpoint in tokens, or None if it is unknown."""
    length: int = checkpoint.config["max_position_embeddings"]
    return None if length == _ANY["max_position_embeddings"] else length


def is_of_bytes(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer's ids are bytes instead of the model's tokens."""
    return tokenizer.chat_templates.templates.get("default") == _TEMPLATE


def _bytes() -> Tokenizer:
    """Return a tokenizer whose tokens are the bytes of a text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_templates={"default": _TEMPLATE})
