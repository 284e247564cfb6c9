"""/v1/chat/completions and /v1/completions: requests become items of the task "generate", answers become responses.

The parameters are OpenAI's and vLLM's. An unsupported parameter is an error, unless its value changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Annotated, Any, ClassVar
from uuid import uuid4

import msgspec

from ..errors import InputError
from ..spec.fields import checked
from ..spec.task import http_names
from ..tasks.results import Choice, Generation
from ..tasks.sampling import format_grammar, seed_at
from .answers import ChoiceText, Events, calls_in, read_tools, split_reasoning
from .body import (
    IDS,
    OBJECTS,
    TEXT_OR_TEXTS,
    Batchable,
    Body,
    Ignored,
    ServedModel,
    TaskOrder,
    Word,
    doc,
    doc_of_option,
)
from .numbers import Prompts

# OpenAI's defaults that differ from Sampling's. max_tokens None: until the model's context is full.
CHAT_DEFAULTS = {"temperature": 1.0, "max_tokens": None}
COMPLETION_DEFAULTS = {"temperature": 1.0, "max_tokens": 16}
# {parameter: field of Sampling}
_SAMPLING = http_names()
# {generation option that is not a number: its schema}
_SCHEMAS: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1}, "stop": TEXT_OR_TEXTS, "stop_ids": IDS, "route": IDS,
    "logit_bias": {"type": "object"},
}  # fmt: skip
# {parameter for a grammar: its key in `grammar_from`}
_GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "lark"}
_STRUCTURED = {"json": "json_schema", "json_object": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}
# values of reasoning_effort in OpenAI's API and in vLLM
Effort = Word("Effort", {name: name for name in ("none", "minimal", "low", "medium", "high", "xhigh", "max")})
Tools = Annotated[Any, doc("Functions that the model may call.", **OBJECTS)]
ToolChoice = Annotated[Any, doc("auto, none, required, or a function to call.", "string")]
_LOGPROB = itemgetter("logprob")
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
Result = dict[str, Any]


def openai_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Result]:
    """Return (status, body) of an error in OpenAI's form."""
    kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code or None}}


# ------------------------------------------------------------------------------------------- requests


class StreamOptions(Body):
    """Which chunks have the usage: one last chunk (`include_usage`), also all others (`continuous_usage_stats`)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Ignored = None


class Streamable(Batchable, kw_only=True):
    """The body of a request whose response may be streamed."""

    stream: Annotated[bool, doc("Stream the answer as server-sent events.")] = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[Any, doc("Requests share a prefix only if their salts are equal.", "string")] = None
    priority: Annotated[Any, doc("A larger number keeps the K/V longer (--cache priority).", "integer")] = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    store: Ignored = None

    task = "generate"
    fields: ClassVar = {"stop_ids": "stop_token_ids", "salt": "cache_salt", "with_ids": "return_token_ids"}
    batch: ClassVar = Batchable.batch | {
        "stream": ((False,), "leave it out, since a batch answers with whole responses")
    }

    @classmethod
    def usage(cls, answers: Sequence[Generation]) -> Result:
        return usage_of(answers)

    def check_stream_options(self) -> None:
        """Raise InputError for options of a stream without "stream": true."""
        if self.stream_options is not None and not self.stream:
            message, remedy = "'stream_options' is given without 'stream'", 'give "stream": true'
            raise InputError(message, field="stream_options", remedy=remedy)


def sampled(parameters: Iterable[str]) -> Any:
    """Return a base class of bodies with these sampling parameters, declared like the options."""
    fields = [
        (name, Annotated[Any, doc_of_option(_SAMPLING[name], **_SCHEMAS.get(_SAMPLING[name], {}))], None)
        for name in parameters
    ]
    return msgspec.defstruct("Sampled", fields, bases=(Streamable,), kw_only=True)


class Generating(sampled(_SAMPLING), kw_only=True):  # type: ignore[misc]
    """The body of a request for generated text."""

    prompt_logprobs: Annotated[
        Any, doc("Number of most likely tokens to list for each prompt token.", "integer", minimum=0)
    ] = None
    response_format: Annotated[Any, doc("OpenAI's: text, json_object or json_schema.", "object")] = None
    structured_outputs: Annotated[Any, doc("One of json, json_object, regex, choice, grammar.", "object")] = None
    guided_json: Annotated[Any, doc("A JSON schema for the answer.", "object")] = None
    guided_regex: Annotated[Any, doc("A regular expression for the answer.", "string")] = None
    guided_choice: Annotated[Any, doc("The allowed answers.", "array", items={"type": "string"})] = None
    guided_grammar: Annotated[Any, doc("A grammar for the answer, in Lark's syntax.", "string")] = None
    return_token_ids: Annotated[bool, doc("Return the token ids of the prompt and of the answer.")] = False
    metadata: Ignored = None
    guided_decoding_backend: Ignored = None

    unsupported: ClassVar = {
        "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,), "prediction": (),
        "early_stopping": (False,), "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,), "allowed_token_ids": (), "bad_words": ([],), "audio": (),
        "return_tokens_as_token_ids": (False,), "logits_processors": (), "modalities": (["text"],),
        "function_call": ("none",), "functions": (), "guided_whitespace_pattern": (),
    }  # fmt: skip
    batch: ClassVar = Streamable.batch | {
        "prompt_logprobs": ((), "use the task score, or ask for them outside of a batch"),
        "echo": ((False,), "use the task score, or ask for it outside of a batch"),
    }
    remedies: ClassVar = Streamable.remedies | {
        "best_of": "use n, and choose among the choices",
        "function_call": "use tools",
        "functions": "use tools",
    }
    missing = ("{} is missing", "give it")
    may_be_empty = True

    def order(self, served: ServedModel) -> TaskOrder:
        echo = read_echo(self, most=served.max_logprobs)
        self.check_stream_options()
        items, meta = self.read({})
        meta["system_fingerprint"] = served.fingerprint
        if echo is not None and echo.num_listed is not None:
            meta["prompt_logprobs"] = echo.num_listed
        if echo is not None and echo.text:
            meta |= {"echo": [item["prompt"] for item in items], "echo_logprobs": echo.logprobs, "llm": served.llm}
        events = None
        if self.stream:
            samples = items[0]["sampling"].get("n") or 1
            options = self.stream_options or StreamOptions()
            events = Chunks(type(self), meta, options, model=served.model, id=served.id, samples=samples)
        is_scored = echo is not None and echo.top is not None
        return self.ordered(served, items, meta, echo=echo if is_scored else None, events=events)

    def sampling(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling options. The name of the parameter with the grammar goes into `meta`."""
        sampling = {field: value for name, field in _SAMPLING.items() if (value := getattr(self, name)) is not None}
        forms = {
            "response_format": _response_format(self.response_format),
            "structured_outputs": _structured_outputs(self.structured_outputs),
            **{name: None if (form := getattr(self, name)) is None else {kind: form} for name, kind in _GUIDED.items()},
        }
        grammars = [(name, grammar) for name, grammar in forms.items() if grammar is not None]
        # Clients that support several versions of vLLM send one grammar under two names.
        for name, grammar in grammars[1:]:
            if grammar != grammars[0][1]:
                message = f"{grammars[0][0]} and {name} are different grammars"
                raise InputError(message, field=name, remedy="give one of them")
        for meta["format"], sampling["grammar"] in grammars[:1]:
            pass
        return sampling

    @property
    def item_fields(self) -> dict[str, Any]:
        """Return the fields of an item besides its prompt and its sampling."""
        values = {"salt": self.cache_salt, "priority": self.priority, "with_ids": self.return_token_ids or None}
        return {name: value for name, value in values.items() if value is not None}


class Chat(Generating):
    """Continue a conversation."""

    messages: Annotated[Any, doc("The conversation: role and content of each message.", **OBJECTS)]
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool, doc("false: return at most one function call.")] = True
    logprobs: Annotated[Any, doc("Return the log-probability of each token.", "boolean")] = None
    top_logprobs: Annotated[Any, doc("Number of most likely tokens to list for each token.", "integer", minimum=0)] = (
        None
    )
    documents: Annotated[Any, doc("Documents for the chat template.", **OBJECTS)] = None
    chat_template: Annotated[Any, doc("The name of a chat template, or its text.", "string")] = None
    chat_template_kwargs: Annotated[Any, doc("Variables of the chat template.", "object")] = None
    add_generation_prompt: Annotated[
        Any, doc("End the prompt with the header of the assistant's message.", "boolean")
    ] = None
    continue_final_message: Annotated[Any, doc("Continue the last message.", "boolean")] = None
    reasoning_effort: Effort | None = None
    include_reasoning: Annotated[bool, doc("false: drop the reasoning of a model that thinks.")] = True
    verbosity: Ignored = None

    prefix = "chatcmpl-"
    fields: ClassVar = Generating.fields | {"logprobs": "top_logprobs"}
    unsupported: ClassVar = Generating.unsupported | {"add_special_tokens": (False,), "echo": (False,)}

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        tools, calls, grammar = read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        item: dict[str, Any] = {"messages": self.messages, "tools": tools}
        names = (
            "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
        )  # fmt: skip
        item |= {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.reasoning_effort is not None:
            # The task raises if it is not an object.
            variables, effort = item.get("chat_template_kwargs", {}), self.reasoning_effort.value
            if isinstance(variables, Mapping):
                item["chat_template_kwargs"] = {"reasoning_effort": effort, **variables}
        meta: dict[str, Any] = {} if self.include_reasoning else {"hides_reasoning": True}
        sampling = {**CHAT_DEFAULTS, **defaults, **self.sampling(meta)}
        if calls is not None:
            meta["calls"] = calls
        # A response_format applies to the message's text. An answer that must be a call has no text.
        if grammar is not None:
            if meta.get("format", "response_format") != "response_format":
                message = f"{meta['format']} and tool_choice exclude each other"
                raise InputError(message, field="tool_choice", remedy="give one of them")
            sampling["grammar"], meta["format"] = grammar, "tools"
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InputError("top_logprobs needs logprobs", field="top_logprobs", remedy='give "logprobs": true')
        # An answer with a grammar has no reasoning: it follows the grammar from its first token.
        item["with_reasoning"] = "grammar" not in sampling
        return [item | {"sampling": sampling} | self.item_fields], meta

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Generation]) -> Result:
        return chat_body(meta, answers)


class Completion(Generating, kw_only=True):
    """Continue prompts."""

    prompt: Prompts
    max_tokens: Annotated[
        Any, doc("Maximum number of tokens to generate; 0 only with echo or prompt_logprobs.", "integer", minimum=0)
    ] = None
    logprobs: Annotated[Any, doc("Number of most likely tokens to list for each token.", "integer", minimum=0)] = None
    echo: Annotated[bool, doc("Put the prompt before each choice, also in the log-probabilities.")] = False

    prefix = "cmpl-"
    unsupported: ClassVar = Generating.unsupported | {"add_special_tokens": (True,)}

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        prompt, meta = self.prompt, dict[str, Any]()
        if prompt == []:
            raise InputError("prompt is an empty list", field="prompt", remedy="give a text", code="missing_field")
        prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
        sampling = {**COMPLETION_DEFAULTS, **defaults, **self.sampling(meta)}
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        seed = sampling.get("seed")
        has_seed = isinstance(seed, int)  # the task refuses a seed of another type
        return [
            {
                "prompt": text,
                "sampling": sampling | {"seed": seed_at(seed, place)} if has_seed and place else sampling,
                **self.item_fields,
            }
            for place, text in enumerate(prompts)
        ], meta

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Generation]) -> Result:
        """Return the response to one or more prompts. The samples of a prompt follow each other."""
        choices: list[Result] = []
        for place, answer in enumerate(answers):
            for choice in answer.choices:
                text, entries = choice.text, choice.logprobs
                if "echo" in meta:
                    prompt = meta["echo"][place]
                    if not isinstance(prompt, str):
                        prompt = meta["llm"].tokenizer.decode(prompt, skip_special=False)
                    text = prompt + (text or "")
                    if entries is not None:
                        count = meta["echo_logprobs"]
                        entries = [*(token | {"top": token["top"][:count]} for token in answer.prompt or ()), *entries]
                logprobs = None if entries is None else completion_logprobs(entries)
                head = {"index": len(choices), "text": text, "logprobs": logprobs}
                if "prompt_logprobs" in meta:
                    head["prompt_logprobs"] = prompt_logprobs(answer.prompt or (), meta["prompt_logprobs"])
                if answer.prompt_ids is not None:
                    head |= {"token_ids": choice.tokens, "prompt_token_ids": answer.prompt_ids}
                choices.append(head | _ending(choice))
        return {"object": "text_completion", "choices": choices} | _fingerprint(meta)


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    forms = {k: v for k, v in value.items() if v not in (None, False)} if isinstance(value, dict) else {}
    if len(forms) != 1 or not forms.keys() <= _STRUCTURED.keys():
        message = f"structured_outputs has {', '.join(forms) or 'nothing'}"
        remedy = f"give one of {', '.join(_STRUCTURED)}"
        raise InputError(message, field="structured_outputs", remedy=remedy)
    ((kind, inner),) = forms.items()
    return {_STRUCTURED[kind]: inner}


def _response_format(value: Any) -> dict[str, Any] | None:
    """Return the grammar of a response_format: OpenAI's, or huggingface_hub's, a json_object with a value."""
    if isinstance(value, dict) and value.get("type") == "json_object" and value.get("value") is not None:
        return {"json_schema": value["value"]}
    return format_grammar(value)


# ------------------------------------------------------------------------------------------ responses


def chat_body(meta: Mapping[str, Any], answers: Sequence[Generation]) -> Result:
    """Return the response to a chat request, without its id, time, model and usage."""
    choices, (answer,) = [], answers
    for index, choice in enumerate(answer.choices):
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
        content, thought, ending = choice.text, "", _ending(choice)
        if answer.thinks is not None and content:
            thought, content = split_reasoning(content, answer.thinks)
        message = {"role": "assistant", "content": content or None if thought else content, "refusal": None}
        if thought and "hides_reasoning" not in meta:
            message |= reasoning_of(thought)
        text, calls = calls_in(content or "", meta["calls"]) if "calls" in meta else ("", [])
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            tool_calls = [
                {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function} for function in functions
            ]
            message |= {"content": text or None, "tool_calls": tool_calls}
            ending["finish_reason"] = "tool_calls"
        choices.append({"index": index, "message": message, "logprobs": logprobs} | ending)
    body = _fingerprint(meta)
    if "prompt_logprobs" in meta:
        body["prompt_logprobs"] = prompt_logprobs(answer.prompt or (), meta["prompt_logprobs"])
    if answer.prompt_ids is not None:
        body["prompt_token_ids"] = answer.prompt_ids
        for made, choice in zip(choices, answer.choices, strict=True):
            made["token_ids"] = choice.tokens
    return {"object": "chat.completion", "choices": choices} | body


def reasoning_of(thought: str) -> dict[str, str]:
    """Return the reasoning fields of a message or delta, under DeepSeek's name and under vLLM's."""
    return {"reasoning_content": thought, "reasoning": thought}


def _fingerprint(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta[name] for name in ("system_fingerprint",) if name in meta}


def usage_of(answers: Sequence[Generation]) -> Result:
    """Return the usage of a response."""
    prompt = sum([answer.num_tokens for answer in answers])
    generated_tokens = sum([answer.num_generated for answer in answers])
    details = {"cached_tokens": sum([answer.cached_tokens for answer in answers])}
    if approximate := sum([answer.approximate_tokens or 0 for answer in answers]):
        details["approximate_tokens"] = approximate
    thinking = [choice for answer in answers if answer.thinks is not None for choice in answer.choices]
    thought = sum([choice.reasoning_tokens or 0 for choice in thinking])
    reasoning = {"completion_tokens_details": {"reasoning_tokens": thought}} if thinking else {}
    return reasoning | {
        "prompt_tokens": prompt,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt + generated_tokens,
        "prompt_tokens_details": details,
    }


def _ending(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop}


def _chat_token(entry: dict[str, Any]) -> dict[str, Any]:
    token = entry.get("token", "")
    return {"token": token, "logprob": entry["logprob"], "bytes": entry.get("bytes") or list(token.encode())}


def chat_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the log-probabilities of tokens in the form of a chat response."""
    content = [_chat_token(e) | {"top_logprobs": [_chat_token(t) for t in e["top"]]} for e in entries]
    return {"content": content, "refusal": None}


def _token_name(entry: Mapping[str, Any]) -> str:
    """Return a token's text. For a token that is a part of a character, return its bytes as OpenAI writes them."""
    data = bytes(entry.get("bytes", ()))
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)
    return entry.get("token", "")


def completion_logprobs(entries: list[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    """Return the log-probabilities of tokens in the form of a completion.

    Args:
        start: text offset of the first token
    """
    lengths = (len(entry.get("token", "")) for entry in entries)
    # OpenAI always lists the chosen token among the most likely ones. If tokens have equal texts, the likeliest counts.
    every = ([*entry["top"], entry] for entry in entries)
    top = [
        None if listed[-1]["logprob"] is None else {_token_name(t): t["logprob"] for t in sorted(listed, key=_LOGPROB)}
        for listed in every
    ]
    return {
        "tokens": [_token_name(entry) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": top,
        "text_offset": [*accumulate(lengths, initial=start)][:-1],
    }


@dataclass(frozen=True)
class Echo:
    """The parts of its prompts that a request wants in the response.

    Attributes:
        text: each choice starts with the prompt
        logprobs: number of most likely tokens in a choice's log-probabilities, for each prompt token; None: no
            log-probabilities of the prompt
        num_listed: number of most likely tokens in `prompt_logprobs`, for each prompt token; None: no `prompt_logprobs`
        is_all: nothing is generated
    """

    text: bool
    logprobs: int | None
    num_listed: int | None
    is_all: bool

    @property
    def top(self) -> int | None:
        """Return how many of the most likely tokens to compute for each token; None: the prompts are not scored."""
        counts = [count for count in (self.logprobs, self.num_listed) if count is not None]
        return max([1, *counts]) if counts or self.is_all else None


def read_echo(body: Any, *, most: int) -> Echo | None:
    """Return the Echo of a Chat or a Completion, or None if the response has nothing of its prompts.

    If nothing is to be generated, set max_tokens to 1; the response drops that token. Raise InputError.

    Args:
        most: maximum number of most likely tokens that may be listed
    """
    text = getattr(body, "echo", False)
    counts = {"prompt_logprobs": body.prompt_logprobs, "logprobs": body.logprobs if text else None}
    num_listed, logprobs = (
        None if count is None else checked(int, count, name, least=0, most=most) for name, count in counts.items()
    )
    if not text and num_listed is None:
        return None
    is_all = hasattr(body, "echo") and body.max_tokens == 0 and body.max_tokens is not False
    if is_all:
        body.max_tokens = 1
        if body.n not in (None, 1):
            message = "'n' is given, but nothing is generated"
            raise InputError(message, field="n", remedy="leave it out, or give max_tokens above 0")
    for name in ("stream", "truncate_prompt_tokens"):
        if getattr(body, name):
            name_of = "echo" if text else "prompt_logprobs"
            message, remedy = f"{name_of} and {name} exclude each other", f"leave {name} out"
            raise InputError(message, field=name_of, remedy=remedy, code="unsupported")
    return Echo(text, logprobs, num_listed, is_all)


def prompt_logprobs(entries: Sequence[Mapping[str, Any]], count: int) -> list[Result | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's form.

    Each entry maps token ids to values, for the token itself and the most likely tokens. The first entry is null.
    """

    def likely(entry: Mapping[str, Any]) -> Result:
        ranked = [*enumerate(entry["top"][:count], 1), (entry["rank"], entry)]
        return {
            str(token["id"]): {"logprob": token["logprob"], "rank": rank, "decoded_token": token.get("token")}
            for rank, token in ranked
        }

    return [None if entry["logprob"] is None else likely(entry) for entry in entries]


# ------------------------------------------------------------------------------------------------ in pieces


class _Choice:
    """The state of a streamed choice: what was sent so far.

    Args:
        prompt: the note of its prompt
        calls: the rules for finding calls
    """

    def __init__(self, prompt: Result, calls: Mapping[str, Any] | None):
        self.prompt, self.text = prompt, ChoiceText(prompt.get("thinks"), calls)
        self.ids: list[int] = []  # token ids so far
        self.num_ids: int | None = None  # number of ids that were sent
        self.num_logprobs = self.num_letters = 0  # tokens whose log-probabilities were sent, and their characters


class Chunks(Events):
    """The chunks of a streamed response.

    Args:
        kind: Chat or Completion
        options: the request's stream options, which select the chunks with the usage
        samples: choices of each prompt
    """

    is_named, mark = False, b"data: [DONE]\n\n"

    def __init__(
        self, kind: type[Generating], meta: Result, options: StreamOptions, *, model: str, id: str, samples: int
    ):
        self._kind, self._meta, self._options = kind, meta, options
        self._samples, self._chat = samples, issubclass(kind, Chat)
        name = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = {"id": f"{kind.prefix}{id}", "object": name, "created": int(time.time()), "model": model}
        self._head |= _fingerprint(meta)
        self._choices: list[_Choice] = []
        self._answers: dict[int, Generation] = {}
        self._input_tokens = 0
        self._counts: dict[int, dict[int, int]] = {}  # {item: {sample: tokens}}

    def begin(self, prompts: list[Result]) -> Iterator[Result]:
        self._input_tokens = sum(prompt["tokens"] for prompt in prompts)
        calls = self._meta.get("calls")
        self._choices = [_Choice(prompt, calls) for prompt in prompts for _ in range(self._samples)]
        for index, choice in enumerate(self._choices if self._chat else ()):
            ids = {"prompt_token_ids": choice.prompt["ids"]} if "ids" in choice.prompt else {}
            yield self._chunk(index, {"role": "assistant", "content": ""}) | ids

    def piece(self, item: int, sample: int, text: str, tokens: list[Result], count: int) -> Iterator[Result]:
        self._counts.setdefault(item, {})[sample] = count
        index = item * self._samples + sample
        choice = self._choices[index]
        if "ids" in choice.prompt:
            choice.ids += [token["id"] for token in tokens]
        thought, text = choice.text.add(text)
        if thought and "hides_reasoning" not in self._meta:
            yield self._with_ids(self._chunk(index, reasoning_of(thought)), choice)
        if text:
            chunk = self._chunk(index, {"content": text} if self._chat else text)
            # If text was held back, its tokens are unknown.
            if tokens and "logprob" in tokens[0] and "calls" not in self._meta and "thinks" not in choice.prompt:
                chunk["choices"][0]["logprobs"] = self._logprobs(choice, tokens)
            yield self._with_ids(chunk, choice)

    def end(self, item: int, answer: Generation) -> Iterator[Result]:
        self._answers[item] = answer
        self._counts[item] = {0: answer.num_generated}
        # The log-probabilities of earlier tokens were sent with their text.
        bare = answer
        if answer.choices[0].logprobs is not None:
            bare = replace(answer, choices=tuple([replace(choice, logprobs=None) for choice in answer.choices]))
        for sample, whole in enumerate(self._kind.body(self._meta, [bare])["choices"]):
            index = item * self._samples + sample
            choice, message = self._choices[index], whole["message"] if self._chat else {"content": whole["text"]}
            thought, rest = choice.text.rest(message)
            choice.ids = whole.get("token_ids", [])
            delta: Any = ({"content": rest} if rest else {}) if self._chat else rest
            chunk = self._with_ids(self._chunk(index, delta), choice)
            (entry,) = chunk["choices"]
            if thought:
                entry["delta"] |= reasoning_of(thought)
            if tokens := (answer.choices[sample].logprobs or [])[choice.num_logprobs :]:
                entry["logprobs"] = self._logprobs(choice, tokens)
            if "tool_calls" in message:
                # OpenAI's clients need the finish_reason in a later chunk to see that a call's arguments are complete.
                entry["delta"]["tool_calls"] = [{"index": i} | call for i, call in enumerate(message["tool_calls"])]
                yield chunk
                chunk = self._with_ids(self._chunk(index, {}), choice)
            chunk["choices"][0] |= {name: whole[name] for name in ("finish_reason", "stop_reason")}
            yield chunk

    def last(self) -> Iterator[Result]:
        if self._options.include_usage:
            usage = usage_of([self._answers[item] for item in sorted(self._answers)])
            yield self._head | {"choices": [], "usage": usage}

    def failed(self, status: int, message: str, code: str, param: str | None) -> Result:
        return openai_error(status, message, code, param)[1]

    def _with_ids(self, chunk: Result, choice: _Choice) -> Result:
        """Add the token ids of a choice that were not sent yet, if the request wants ids.

        A chat sends the prompt's ids in its very first chunk. A completion sends them in the first chunk of each
        choice.
        """
        if "ids" in choice.prompt:
            if not self._chat and choice.num_ids is None:
                chunk["choices"][0]["prompt_token_ids"] = choice.prompt["ids"]
            chunk["choices"][0]["token_ids"] = choice.ids[choice.num_ids or 0 :]
            choice.num_ids = len(choice.ids)
        return chunk

    def _logprobs(self, choice: _Choice, tokens: list[Result]) -> Result:
        """Return the log-probabilities of tokens that follow the tokens sent so far."""
        letters = choice.num_letters
        choice.num_logprobs += len(tokens)
        choice.num_letters += sum(len(token.get("token", "")) for token in tokens)
        return chat_logprobs(tokens) if self._chat else completion_logprobs(tokens, letters)

    def _chunk(self, index: int, content: Any) -> Result:
        choice = {"index": index, "delta" if self._chat else "text": content, "logprobs": None, "finish_reason": None}
        chunk = self._head | {"choices": [choice]}
        if self._options.include_usage and self._options.continuous_usage_stats:
            num_generated = sum(count for samples in self._counts.values() for count in samples.values())
            counts = {"prompt_tokens": self._input_tokens, "completion_tokens": num_generated}
            return chunk | {"usage": counts | {"total_tokens": self._input_tokens + num_generated}}
        return chunk | ({"usage": None} if self._options.include_usage else {})
