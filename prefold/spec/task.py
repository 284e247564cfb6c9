"""The options of each task.

These dataclasses are read by the methods of LLM and their keywords, the command line, the bodies of HTTP and their
schema, requests to other servers, the sampler's arrays, the journal and the docs.
"""

# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, Literal

from ..errors import InputError
from .calibration import Calibration
from .fields import check_options, check_values, kind_of, option

Truncate = bool | Literal["left", "right"]
Pooling = Literal["last", "mean", "first"]
Normalization = Literal["tokens", "bytes"]
JsonSpace = Literal["compact", "free"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A Grammar is the form that generated text must have.

    kind     "json_schema" (text: the schema as JSON), "json" (any JSON object), "regex", "choice" (text: a JSON
             list of strings), "lark" (text: a grammar in Lark's syntax)
    text     the schema, expression, list or grammar; empty for "json"
    compact  for JSON: no white space between its parts but one blank after a comma or colon. False: up to 64
             blanks and line ends, as the model likes. A schema's own "x-guidance" takes precedence
    """

    kind: Literal["json_schema", "json", "regex", "choice", "lark"]
    text: str = ""
    compact: bool = True


@dataclass(frozen=True, kw_only=True)
class LoopedOptions:
    """Holds the options of looped models, for all tasks."""

    exit_threshold: float | None = option(
        None,
        "Looped models with an exit gate: read a row after the first visit at which its exit probability reaches this;"
        " 1: after the last visit (default: from the checkpoint).",
        least=0, most=1, above=True,
    )  # fmt: skip
    min_visits: int = option(1, "Looped models with an exit gate: read no row after fewer visits.", least=1)
    max_visits: int | None = option(
        None, "Looped models with an exit gate: read no row after more visits (default: all that the model makes).",
        least=1,
    )  # fmt: skip
    exit_change: float | None = option(
        None,
        "Looped models with exits: a row leaves after the first visit that changes its state by at most this"
        " share.",
        least=0, above=True,
    )  # fmt: skip
    exit_prompts: bool = option(False, "Looped models with exits: rows of prompts leave too, by the same rules.")
    route: Sequence[int] | None = option(
        None,
        "Looped models: the numbers of the blocks that rows visit, from 0 (default: from the checkpoint, or chosen by"
        " its router).",
    )


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Holds the options that say how the tokens of an answer are chosen, and when it ends, as users write them."""

    max_tokens: int | Literal["auto"] | None = option(
        "auto",
        "The most tokens of an answer; by default 256, or fewer where the context ends. None (on the command line 0):"
        " until the model's context is full.",
        least=1, http="max_tokens max_completion_tokens", sent="own",
    )  # fmt: skip
    min_tokens: int = option(0, "The answer does not end before so many tokens.", least=0, sent="set")
    temperature: float = option(
        0.0, "What logits are divided by before a token is drawn; 0: always the most likely token.",
        least=0, sent="openai", draws="filter",
    )  # fmt: skip
    top_k: int = option(
        0, "Draw only from so many of the most likely tokens; 0 or -1: from all.", least=-1,
        sent="vllm", draws="filter",
    )  # fmt: skip
    # Holtzman et al. 2020
    top_p: float = option(
        1.0, "Draw only from the most likely tokens that together have this probability.",
        least=0, most=1, sent="openai", draws="filter",
    )  # fmt: skip
    # Nguyen et al. 2024
    min_p: float = option(
        0.0, "Draw only from tokens this likely, relative to the most likely one.",
        least=0, most=1, sent="vllm", draws="filter",
    )  # fmt: skip
    # Tang et al. 2024: the same tokens are left at any temperature.
    top_n_sigma: float = option(
        0.0, "Draw only from tokens whose logit is within so many standard deviations of all logits of the largest; 0:"
        " from all.",
        least=0, draws="filter",
    )  # fmt: skip
    # Keskar et al. 2019. Logits are divided or multiplied by it, in float32, which must neither take it for 0 nor
    # overflow.
    repetition_penalty: float = option(
        1.0,
        "Divides the logits of tokens that the prompt or the answer holds already, where they are positive, and"
        " multiplies them where they are negative: above 1 repetitions become rarer, below 1 more frequent; 1: off.",
        least=1e-30, most=1e30, sent="vllm", draws="penalty",
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, "Taken off the logits of tokens in the answer, once; 0: off.",
        least=-2, most=2, sent="openai", draws="penalty",
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "Taken off the logits of tokens in the answer, once for each time they occur; 0: off.",
        least=-2, most=2, sent="openai", draws="penalty",
    )  # fmt: skip
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = option(
        (), "{token id: what is added to its logit}.", sent="own"
    )
    seed: int | None = option(
        None,
        "The seed of sampling; each prompt of a list has its own, made of this one and the prompt's place. By default"
        " drawn anew for each call.",
        None,
        least=-(2**63), most=2**64 - 1, sent="set",
    )  # fmt: skip
    n: int = option(1, "How many answers each prompt gets.", least=1, sent="set")
    stop: str | Sequence[str] = option((), "Texts that end the answer, which is cut off before them.", sent="own")
    stop_ids: int | Sequence[int] = option(
        (), "Token ids that end the answer.", "stop_id", http="stop_token_ids", sent="own"
    )
    ignore_eos: bool = option(False, "Go on after the model's end of text.", sent="set")
    skip_special_tokens: bool = option(
        True,
        "Leave the special tokens of the vocabulary out of the text. A choice that holds special tokens keeps them.",
        sent="set",
    )
    logprobs: int | None = option(
        None, "Return each token's log-probability, and the log-probabilities of this many of the most likely tokens.",
        least=0, most=2**31 - 1, http=None, sent="own",
    )  # fmt: skip
    exit_visits: Sequence[int] = option(
        (),
        "Looped models with exits: after how many visits the row of each generated token leaves. Tokens behind"
        " the end of the list leave by the other rules.",
        None, http=None,
    )  # fmt: skip
    grammar: Grammar | Mapping[str, object] | None = option(
        None, 'What the text must look like: {"json_schema": ...}, {"json": True}, {"regex": ...}, {"choice": [...]} or'
        ' {"lark": ...}.',
        "json_schema", "json_object", "regex", "choice", "grammar", http=None, sent="own",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """Holds the options that say how a conversation becomes the text of a prompt."""

    system: str | None = option(None, "A system message for conversations without one.")
    tools: Sequence[object] | None = option(
        None,
        "What the chat template is told of tools: JSON schemas as OpenAI writes them, or in Python functions with types"
        " and a docstring.",
    )
    chat_template: str | None = option(
        None, "The name of one of the checkpoint's chat templates, or the text of a template."
    )
    chat_template_kwargs: Mapping[str, object] | None = option(None, "Further variables for the chat template.")
    template_seconds: float | None = option(
        None,
        "Processor seconds that a chat template which a record brings may take; by default 10.",
        least=0, above=True, journal=False,
    )  # fmt: skip
    escape_special: bool = option(
        False,
        "Special tokens that are written in what a conversation holds (messages, tools, documents) stay text; only the"
        " chat template's own are special.",
    )


_SAMPLER = {entry.name for entry in fields(SamplerOptions)}


@dataclass(frozen=True, kw_only=True)
class TaskSpec(LoopedOptions):
    """Holds the options of all tasks. Raises InputError for a value that no checkpoint could take."""

    task: ClassVar[str] = ""

    max_length: int | None = option(
        None, "The most tokens a prompt may have; by default what the model takes.", least=1
    )
    truncate: Truncate = option(
        False,
        "Cut what is too long instead of raising an error: True cuts the longest column of a template, the longest"
        ' content of a conversation, of rerank the document, and keeps what is around it; "left" and "right" cut the'
        " prompt as a whole at that end (of rerank the document, of classify the text).",
        "truncate", "truncate_side",
        one_of=(False, True, "left", "right"),
    )  # fmt: skip

    adapter: str | Sequence[str | None] | None = option(
        None, "The LoRA adapter to run with; in Python also a list of one a prompt. By default the model itself."
    )

    def __post_init__(self) -> None:
        # The task, which knows the model, checks and converts the others.
        own = [entry for entry in fields(self) if entry.name not in _SAMPLER]
        check_values(self, [entry for entry in own if kind_of(entry) is not float])
        if self.adapter is not None and not isinstance(self.adapter, (str, list, tuple)):
            message = f"adapter is {self.adapter!r:.80}, not a name"
            raise InputError(message, field="adapter", remedy="give the name of an adapter", code="wrong_type")


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(TaskSpec):
    """Holds the options of `embed`.

    None means what the checkpoint says (sentence-transformers' files, or a GGUF file's pooling type). A checkpoint that
    says nothing is read at the last token, and its vectors have length 1.
    """

    task = "embed"

    pooling: Pooling | None = option(
        None, "Where the embedding is read; by default what the checkpoint says, else last.",
        one_of=(None, "last", "mean", "first"),
    )  # fmt: skip
    normalize: bool | None = option(
        None,
        "Whether to scale the embedding to length 1; by default what the checkpoint says, else yes.",
        one_of=(None, False, True),
    )
    dimensions: int | None = option(None, "Keep only so many values, the first (before they are scaled).", least=1)
    prompt: str | None = option(None, "A text to put before every text.", None)
    prompt_name: str | None = option(
        None, "The name of one of the checkpoint's own prompts, which is put before every text."
    )
    instruction: str | None = option(
        None, "What queries are for; written before each text as Qwen3-Embedding wants it."
    )


@dataclass(frozen=True, kw_only=True)
class RerankOptions(TaskSpec):
    """Holds the options of `rerank`."""

    task = "rerank"

    instruction: str | None = option(
        None, "What is wanted of a document; by default as the checkpoint says, else that it answers a web search."
    )
    template: str | None = option(
        None,
        "The prompt, with {query} and {document} in any order and, if wanted, {instruction}. The text before the"
        " second placeholder is shared. By default the checkpoint's own, or Qwen3-Reranker's if it has none.",
    )
    add_special_tokens: bool | None = option(
        None,
        "Put the tokenizer's own special tokens (BOS) before a template; by default unless it begins with the BOS.",
        one_of=(None, False, True),
    )
    words: tuple[str, str] = option(
        ("yes", "no"), "The two words whose logits are compared, one token each; by default as the checkpoint says."
    )
    raw_scores: bool = option(False, "Give the difference of the logits, without the sigmoid.")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(TaskSpec):
    """Holds the options of `classify`. With a checkpoint's classification head only max_length and truncate are
    allowed."""

    task = "classify"

    labels: Sequence[str] | Mapping[str, str | Mapping[str, str]] | None = option(
        None,
        'The labels, or {label: how the prompt writes it}, or {label: {"description": what it means, "text": how the'
        " prompt writes it}}; by default the labels of the classification head.",
        "labels", "labels_file",
    )  # fmt: skip
    instructions: str = option("", "What comes before the examples and the text.")
    examples: Sequence[object] = option((), 'Pairs (text, label), or {"text": ..., "label": ...}.')
    template: str | None = option(
        None, "How an example is written, with {text} and then {label}; by default two lines, Text: and Label:."
    )
    separator: str = option("\n\n", "The text between examples (default: an empty line).", None)
    normalization: Normalization | None = option(
        None,
        "Divide a label's log-likelihood by the label's length in tokens or bytes.",
        one_of=(None, "tokens", "bytes"),
    )
    calibrate: bool = option(
        False, "Whether to calibrate the labels with texts without content (contextual calibration, Zhao et al. 2021)."
    )


@dataclass(frozen=True, kw_only=True)
class DecideOptions(TaskSpec):
    """Holds the options of `decide`."""

    task = "decide"

    questions: Mapping[str, Mapping[str, object]] | Sequence[Mapping[str, object]] | None = option(
        None,
        'The questions: {name: {"type": "noul", "choice" or "score", "instructions": ..., "criteria": ...}}, or a list'
        " of them as OpenAI writes it. On the command line a YAML or JSON file.",
        metavar="FILE",
    )
    prompt_style: Literal["transformers", "vllm"] | None = option(
        None,
        "Prompt format (default: the template beside the weights, else as transformers writes it).",
        one_of=(None, "transformers", "vllm"),
    )
    template: str | None = option(
        None, "A Jinja template of the whole prompt, with the variables state and question (or questions)."
    )
    first: Literal["state", "question"] | None = option(
        None,
        "What stands first in the default prompt: question shares long questions over short states (default: state).",
        one_of=(None, "state", "question"),
    )
    temperature: Mapping[str, float] | None = option(
        None, "{kind of question: what its logits are divided by} (default: from decision.json, else 1).", None
    )
    calibration: Calibration | Mapping[str, object] | None = option(
        None,
        "A temperature and a threshold for each question, from --save-calibration or llm.calibrate. On the command line"
        " a JSON file.",
        metavar="FILE",
    )
    review_below: float | None = option(
        None,
        "Mark an answer as doubtful if the probability of its most likely option is below this (default: the"
        " thresholds of the calibration, if there is one).",
        least=0, most=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(TaskSpec):
    """Holds the options of `score`."""

    task = "score"

    prefix_token: int | None = option(
        None, "The token id that stands for an empty prompt; by default BOS, or EOS where there is none.", None
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(TaskSpec, ConversationOptions, SamplerOptions):
    """Holds the options of `generate`, `chat` and `stream`."""

    task = "generate"

    max_n: int = option(128, "The most answers that a prompt's own options may ask for, unless n is larger.", least=1)
    max_logprobs: int = option(
        20, "The most log-probabilities that a prompt's own options may ask for, unless logprobs is larger.", least=0
    )
    json_space: JsonSpace = option(
        "compact",
        "White space in JSON answers: compact (the default), one blank after a comma or colon at most; free, up to 64"
        " blanks and line ends in a row.",
        one_of=("compact", "free"),
    )
    response_format: type | Mapping[str, object] | None = option(
        None, "In place of grammar: a pydantic class, or OpenAI's object.", None
    )
    salt: str = option(
        "",
        "A name for prompts that may share: they share keys and values, in a batch and in the cache, only where their"
        " salts are equal. With a salt for each customer no customer can find out others' prompts by timing.",
        None,
    )
    priority: int = option(
        0,
        'How long keys and values of the prompt are kept by a cache with cache="priority": those of smaller numbers are'
        " forgotten first. It does not change the order in which prompts are computed.",
        None,
    )


OPTIONS: dict[str, type[TaskSpec]] = {
    kind.task: kind
    for kind in (EmbedOptions, RerankOptions, ClassifyOptions, DecideOptions, ScoreOptions, GenerationOptions)
}


def options_of(task: str, values: Mapping[str, Any]) -> TaskSpec:
    """Returns the options of a task. Raises InputError for an unknown task or option, and for bad values."""
    if task not in OPTIONS:
        raise InputError(f"there is no task {task!r}", field="task", remedy=f"the tasks are {', '.join(OPTIONS)}")
    parameters = cli_names(task)
    wholes = {name: option_of(task, option) for option, names in parameters.items() for name in names}
    check_options(task, values, [*parameters], wholes)
    return OPTIONS[task](**values)


def option_of(task: str, name: str) -> Field[Any]:
    """Returns the declaration of an option of a task."""
    return next(entry for entry in fields(OPTIONS[task]) if entry.name == name)


def cli_names(task: str) -> dict[str, tuple[str, ...]]:
    """Returns {option of a task: the parameters of the command line that it is made of}; options of all tasks come
    last."""
    common = {entry.name for entry in fields(TaskSpec)}
    parameters = {}
    for entry in sorted(fields(OPTIONS[task]), key=lambda entry: entry.name in common):
        names = entry.metadata["cli"]
        parameters[entry.name] = () if names == (None,) else names or (entry.name,)
    return parameters


def http_names(*kinds: type) -> dict[str, str]:
    """Returns {parameter of a request for completions: the option that it sets}; of some dataclasses' options alone."""
    every = (entry for kind in kinds or (SamplerOptions, LoopedOptions) for entry in fields(kind))
    names = {entry.name: entry.metadata["http"] for entry in every if entry.metadata["http"] is not None}
    return {parameter: name for name, own in names.items() for parameter in (own or name).split()}


def sent_names(*modes: str | None) -> tuple[str, ...]:
    """Returns the options of generation that other servers' requests set in one of these ways (`sent` of `option`)."""
    every = (*fields(SamplerOptions), *fields(LoopedOptions))
    return tuple(entry.name for entry in every if entry.metadata["sent"] in modes)


def not_sent(options: SamplerOptions) -> list[str]:
    """Returns the options that differ from their defaults and that no request to another server can set."""
    defaults = {entry.name: entry.default for entry in fields(options)}
    return [name for name in sent_names(None) if getattr(options, name) != defaults[name]]


def _drawn(mode: str) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(SamplerOptions) if entry.metadata["draws"] == mode)


# The columns of the sampler's arrays, in order, and what takes the values of a row from Sampling or SamplerOptions. The
# temperature is the first of the filters.
FILTERS, PENALTIES = _drawn("filter"), _drawn("penalty")
filters_of, penalties_of = attrgetter(*FILTERS), attrgetter(*PENALTIES)
