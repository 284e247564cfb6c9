"""The options of each task.

These dataclasses define the keywords of LLM's methods, the command line and HTTP bodies with their schema. Requests to
other servers, the sampler's arrays, the journal and the reference pages are made from them too.
"""

# ruff: noqa: RUF009  (`option` returns a dataclass field)

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
    """The form that generated text must have.

    Attributes:
        kind: "json_schema" (the text is the schema, as JSON), "json" (any JSON object), "regex", "choice" (the text is
            a JSON list of strings) or "lark" (the text is a grammar in Lark's syntax).
        text: The schema, expression, list or grammar; empty for "json".
        compact: For JSON. True: no white space except one blank after a comma or a colon. False: the model may write up
            to 64 blanks and line ends in a row. A schema's own "x-guidance" overrides this.

    Example:
        >>> llm.generate("A colour:", grammar=Grammar("choice", '["red", "green"]'))
    """

    kind: Literal["json_schema", "json", "regex", "choice", "lark"]
    text: str = ""
    compact: bool = True


@dataclass(frozen=True, kw_only=True)
class LoopedOptions:
    """The options of looped models, for all tasks."""

    exit_threshold: float | None = option(
        None, "Looped models: exit when the exit probability reaches this (default: the checkpoint's).",
        details="For models with an exit gate: a row is read after the first visit at which its exit probability is at"
        " least this. 1: after its last visit.",
        group="Looped models", least=0, most=1, above=True,
    )  # fmt: skip
    min_visits: int = option(
        1, "Looped models: minimum number of visits before a row is read.",
        details="For models with an exit gate, or with exits save or project.", group="Looped models", least=1,
    )  # fmt: skip
    max_visits: int | None = option(
        None, "Looped models: maximum number of visits before a row is read (default: all).",
        details="For models with an exit gate, or with exits save or project.", group="Looped models", least=1,
    )  # fmt: skip
    exit_change: float | None = option(
        None, "Looped models: exit when a visit changes the state by at most this share.",
        details="For models with exits that save or project. The share is the norm of the change divided by the norm of"
        " the state before the visit.",
        group="Looped models", least=0, above=True,
    )  # fmt: skip
    exit_prompts: bool = option(
        False, "Looped models with exits: apply the exit rules to prompt rows too.", group="Looped models"
    )
    route: Sequence[int] | None = option(
        None, "Looped models: blocks to visit, numbered from 0 (default: the checkpoint's or router's).",
        group="Looped models",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """The options that choose the tokens of an answer and end it, in the form that users write."""

    max_tokens: int | Literal["auto"] | None = option(
        "auto", "Maximum number of tokens to generate (default: 256, less if the context is full).",
        details="None, or 0 on the command line: generate until the context is full.",
        group="Sampling", common=True, least=1, http="max_tokens max_completion_tokens", sent="own",
    )  # fmt: skip
    min_tokens: int = option(
        0, "Minimum number of tokens before the answer may end.", group="Sampling", least=0, sent="set"
    )
    temperature: float = option(
        0.0, "Divide logits by this before sampling (0: take the most likely token).",
        group="Sampling", common=True, least=0, sent="openai", draws="filter",
    )  # fmt: skip
    top_k: int = option(
        0, "Sample from the K most likely tokens (0: all).",
        details="-1 also means all.", group="Sampling", common=True, least=-1, sent="vllm", draws="filter",
    )  # fmt: skip
    # Holtzman et al. 2020
    top_p: float = option(
        1.0, "Sample from the most likely tokens whose total probability reaches this.",
        group="Sampling", common=True, least=0, most=1, sent="openai", draws="filter",
    )  # fmt: skip
    # Nguyen et al. 2024
    min_p: float = option(
        0.0, "Drop tokens with less than this share of the top token's probability.",
        group="Sampling", least=0, most=1, sent="vllm", draws="filter",
    )  # fmt: skip
    # Tang et al. 2024: the same tokens are left at any temperature.
    top_n_sigma: float = option(
        0.0, "Drop tokens this many standard deviations below the top logit (0: off).",
        details="The standard deviation is taken over all logits.",
        group="Sampling", least=0, draws="filter",
    )  # fmt: skip
    # Keskar et al. 2019. The bounds keep the value from becoming 0 or infinite in float32.
    repetition_penalty: float = option(
        1.0, "Penalty factor for repeated tokens (1: off; above 1: fewer repeats).",
        details="It applies to every token of the prompt and the answer. Positive logits are divided by it, negative"
        " logits multiplied.",
        group="Sampling", least=1e-30, most=1e30, sent="vllm", draws="penalty",
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, "Subtract this from the logit of every token already generated (0: off).",
        group="Sampling", least=-2, most=2, sent="openai", draws="penalty",
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "Subtract this from a token's logit for each time it was generated (0: off).",
        group="Sampling", least=-2, most=2, sent="openai", draws="penalty",
    )  # fmt: skip
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = option(
        (), "Values added to logits: {token id: value}.", group="Sampling", sent="own"
    )
    seed: int | None = option(
        None, "Seed for sampling (default: drawn for each call).", None,
        details="Each prompt of a list has its own seed, made from this seed and the prompt's index.",
        group="Sampling", least=-(2**63), most=2**64 - 1, sent="set",
    )  # fmt: skip
    n: int = option(
        1, "Number of answers for each prompt.", group="Sampling", common=True, least=1, sent="set"
    )  # fmt: skip
    stop: str | Sequence[str] = option(
        (), "Texts that end the answer; the answer does not include them.", group="Sampling", common=True, sent="own"
    )
    stop_ids: int | Sequence[int] = option(
        (), "Token ids that end the answer.", "stop_id", group="Sampling", http="stop_token_ids", sent="own"
    )
    ignore_eos: bool = option(False, "Continue after the end-of-text token.", group="Sampling", sent="set")
    skip_special_tokens: bool = option(
        True, "Leave special tokens out of the text.",
        details="A choice that contains special tokens keeps them.", group="Sampling", sent="set",
    )  # fmt: skip
    logprobs: int | None = option(
        None, "Return log-probabilities: of each token, and of this many most likely tokens.",
        group="Sampling", least=0, most=2**31 - 1, http=None, sent="own",
    )  # fmt: skip
    exit_visits: Sequence[int] = option(
        (), "Looped models with exits: number of visits after which each generated token exits.", None,
        details="The other exit rules apply to tokens past the end of the list.",
        group="Looped models", http=None,
    )  # fmt: skip
    grammar: Grammar | Mapping[str, object] | None = option(
        None, "Form that the text must have: a JSON schema, any JSON object, a regex, a choice or a grammar.",
        "json_schema", "json_object", "regex", "choice", "grammar",
        details='Write it as {"json_schema": ...}, {"json": True}, {"regex": ...}, {"choice": [...]} or {"lark": ...}.',
        group="Sampling", common=True, http=None, sent="own",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """The options that turn a conversation into the text of a prompt."""

    system: str | None = option(
        None, "System message for conversations without one.", group="Prompt", common=True
    )  # fmt: skip
    tools: Sequence[object] | None = option(
        None, "Tools for the chat template: JSON schemas in OpenAI's form.",
        details="In Python also functions with type hints and a docstring.",
        group="Prompt",
    )  # fmt: skip
    chat_template: str | None = option(
        None, "Name of one of the checkpoint's chat templates, or the text of a template.", group="Prompt"
    )
    chat_template_kwargs: Mapping[str, object] | None = option(
        None, "Additional variables for the chat template.", group="Prompt"
    )
    template_seconds: float | None = option(
        None, "CPU seconds allowed for a chat template that a record brings (default: 10).",
        group="Advanced", least=0, above=True, journal=False,
    )  # fmt: skip
    escape_special: bool = option(
        False, "Treat special tokens inside messages, tools and documents as plain text.",
        details="Only the special tokens of the chat template itself remain special.",
        group="Prompt",
    )  # fmt: skip


_SAMPLER = {entry.name for entry in fields(SamplerOptions)}


@dataclass(frozen=True, kw_only=True)
class TaskSpec(LoopedOptions):
    """The options of all tasks. Raise InputError for a value that no checkpoint could accept."""

    task: ClassVar[str] = ""

    max_length: int | None = option(
        None, "Maximum length of a prompt in tokens (default: the model's limit).", group="Prompt", least=1
    )
    truncate: Truncate = option(
        False, "Cut a prompt that is too long instead of raising an error.",
        "truncate", "truncate_side",
        details="True cuts the longest column of a template, the longest content of a conversation, or the document of"
        ' a rerank pair. The text around it stays. "left" and "right" cut that end of the whole prompt (rerank: of'
        " the document; classify: of the text).",
        group="Prompt", common=True, one_of=(False, True, "left", "right"),
    )  # fmt: skip

    adapter: str | Sequence[str | None] | None = option(
        None, "LoRA adapter to run with (default: none).",
        details="In Python also a list with one name or None for each prompt.",
        group="Model", common=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        # The task checks the remaining options, because only the task knows the model.
        own = [entry for entry in fields(self) if entry.name not in _SAMPLER]
        check_values(self, [entry for entry in own if kind_of(entry) is not float])
        if self.adapter is not None and not isinstance(self.adapter, (str, list, tuple)):
            message = f"adapter is {self.adapter!r:.80}, not a name"
            raise InputError(message, field="adapter", remedy="give the name of an adapter", code="wrong_type")


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(TaskSpec):
    """The options of `embed`.

    None: use the setting in the checkpoint's sentence-transformers files, or the pooling type of a GGUF file. If the
    checkpoint has no such setting, the last token is read and the vector is scaled to length 1.
    """

    task = "embed"

    pooling: Pooling | None = option(
        None, "Rows that form the embedding (default: from the checkpoint, else last).",
        group="Task", common=True, one_of=(None, "last", "mean", "first"),
    )  # fmt: skip
    normalize: bool | None = option(
        None, "Scale embeddings to length 1 (default: from the checkpoint, else yes).",
        group="Task", common=True, one_of=(None, False, True),
    )  # fmt: skip
    dimensions: int | None = option(
        None, "Keep only the first N values, before scaling (default: all).", group="Task", common=True, least=1
    )
    prompt: str | None = option(None, "Text to put before every text.", None, group="Prompt")
    prompt_name: str | None = option(
        None, "Name of one of the checkpoint's prompts to put before every text.", group="Prompt", common=True
    )
    instruction: str | None = option(
        None, "Purpose of the queries, put before each text in Qwen3-Embedding's form.", group="Prompt", common=True
    )


@dataclass(frozen=True, kw_only=True)
class RerankOptions(TaskSpec):
    """The options of `rerank`."""

    task = "rerank"

    instruction: str | None = option(
        None, "Criterion for good documents (default: the checkpoint's, else: answers a web search).",
        group="Prompt", common=True,
    )  # fmt: skip
    template: str | None = option(
        None, "Prompt with {query} and {document} (default: the checkpoint's, else Qwen3-Reranker's).",
        details="The placeholders may be in either order, and {instruction} is optional. The text before the second"
        " placeholder is shared.",
        group="Prompt", common=True,
    )  # fmt: skip
    add_special_tokens: bool | None = option(
        None, "Add the tokenizer's special tokens (default: unless the template starts with BOS).",
        group="Prompt", one_of=(None, False, True),
    )  # fmt: skip
    words: tuple[str, str] = option(
        ("yes", "no"), "Words whose logits are compared (default: from the checkpoint, else yes,no).",
        details="Each of the two words must be one token.",
        group="Task",
    )  # fmt: skip
    raw_scores: bool = option(False, "Return the logit difference without the sigmoid.", group="Task")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(TaskSpec):
    """The options of `classify`. A checkpoint with a classification head allows only `max_length` and `truncate`."""

    task = "classify"

    labels: Sequence[str] | Mapping[str, str | Mapping[str, str]] | None = option(
        None, "Labels to choose from (default: the labels of the classification head).",
        "labels", "labels_file",
        details="A list, or {label: how the prompt writes it}, or"
        ' {label: {"description": its meaning, "text": how the prompt writes it}}.',
        group="Task", common=True,
    )  # fmt: skip
    instructions: str = option("", "Text before the examples and the text to classify.", group="Prompt", common=True)
    examples: Sequence[object] = option(
        (), 'Examples for the prompt: pairs (text, label), or {"text": ..., "label": ...}.', group="Prompt", common=True
    )
    template: str | None = option(
        None, 'Form of an example, with {text} and then {label} (default: lines "Text:" and "Label:").',
        group="Prompt",
    )  # fmt: skip
    separator: str = option("\n\n", "Text between examples (default: an empty line).", None, group="Prompt")
    normalization: Normalization | None = option(
        None, "Divide a label's log-likelihood by its length in tokens or bytes.",
        group="Task", one_of=(None, "tokens", "bytes"),
    )  # fmt: skip
    calibrate: bool = option(
        False, "Correct the labels' bias by texts without content (Zhao et al. 2021).", group="Task"
    )


@dataclass(frozen=True, kw_only=True)
class DecideOptions(TaskSpec):
    """The options of `decide`."""

    task = "decide"

    questions: Mapping[str, Mapping[str, object]] | Sequence[Mapping[str, object]] | None = option(
        None, "Questions to answer about each state; on the command line a YAML or JSON file.",
        details='{name: {"type": "noul", "choice" or "score", "instructions": ..., "criteria": ...}}, or a list of'
        " questions in OpenAI's form.",
        group="Task", common=True, metavar="FILE",
    )  # fmt: skip
    prompt_style: Literal["transformers", "vllm"] | None = option(
        None, "Prompt format (default: the template beside the weights, else transformers).",
        group="Prompt", one_of=(None, "transformers", "vllm"),
    )  # fmt: skip
    template: str | None = option(
        None, "Jinja template of the whole prompt, with `state` and `question` (or `questions`).", group="Prompt"
    )
    first: Literal["state", "question"] | None = option(
        None, "First part of the default prompt; question shares long questions (default: state).",
        details="question is faster if long questions are asked about many short states.",
        group="Prompt", one_of=(None, "state", "question"),
    )  # fmt: skip
    temperature: Mapping[str, float] | None = option(
        None, "{type of question: divisor of its logits} (default: from decision.json, else 1).", None,
        group="Calibration",
    )  # fmt: skip
    calibration: Calibration | Mapping[str, object] | None = option(
        None, "Temperature and threshold of each question; on the command line a JSON file.",
        details="`prefold decide --save-calibration` and `llm.calibrate` make it.",
        group="Calibration", metavar="FILE",
    )  # fmt: skip
    review_below: float | None = option(
        None, "Mark answers with a lower probability as doubtful (default: by the calibration).",
        group="Calibration", least=0, most=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(TaskSpec):
    """The options of `score`."""

    task = "score"

    prefix_token: int | None = option(
        None, "Token id that replaces an empty prompt (default: BOS, else EOS).", None, group="Prompt"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(TaskSpec, ConversationOptions, SamplerOptions):
    """The options of `generate`, `chat` and `stream`."""

    task = "generate"

    max_n: int = option(128, "Maximum n in a prompt's own options, unless n is larger.", group="Limits", least=1)
    max_logprobs: int = option(
        20, "Maximum logprobs in a prompt's own options, unless logprobs is larger.",
        group="Limits", least=0,
    )  # fmt: skip
    json_space: JsonSpace = option(
        "compact", "White space in JSON: one blank after a comma or colon, or free.",
        details="compact: no other white space. free: up to 64 blanks and line ends in a row.",
        group="Sampling", one_of=("compact", "free"),
    )  # fmt: skip
    response_format: type | Mapping[str, object] | None = option(
        None, "Alternative to `grammar`: a pydantic class, or OpenAI's object.", None, group="Sampling"
    )
    salt: str = option(
        "", "Prompts share computed rows and cached K/V only if their salts are equal.", None,
        details="With one salt per customer, no customer can detect another customer's prompts by timing.",
        group="Advanced",
    )  # fmt: skip
    priority: int = option(
        0, 'Priority of the prompt\'s K/V in a cache with cache="priority"; lower values are evicted first.', None,
        details="It does not change the order in which prompts are computed.",
        group="Advanced",
    )  # fmt: skip


OPTIONS: dict[str, type[TaskSpec]] = {
    kind.task: kind
    for kind in (EmbedOptions, RerankOptions, ClassifyOptions, DecideOptions, ScoreOptions, GenerationOptions)
}


def options_of(task: str, values: Mapping[str, Any]) -> TaskSpec:
    """Return the options of a task. Raise InputError for an unknown task or option, or for a bad value."""
    if task not in OPTIONS:
        raise InputError(f"there is no task {task!r}", field="task", remedy=f"the tasks are {', '.join(OPTIONS)}")
    parameters = cli_names(task)
    wholes = {name: option_of(task, option) for option, names in parameters.items() for name in names}
    check_options(task, values, [*parameters], wholes)
    return OPTIONS[task](**values)


def option_of(task: str, name: str) -> Field[Any]:
    """Return the declaration of an option of a task."""
    return next(entry for entry in fields(OPTIONS[task]) if entry.name == name)


def cli_names(task: str) -> dict[str, tuple[str, ...]]:
    """Return {option of a task: its command-line parameters}. Options that all tasks have come last."""
    common = {entry.name for entry in fields(TaskSpec)}
    parameters = {}
    for entry in sorted(fields(OPTIONS[task]), key=lambda entry: entry.name in common):
        names = entry.metadata["cli"]
        parameters[entry.name] = () if names == (None,) else names or (entry.name,)
    return parameters


def http_names(*kinds: type) -> dict[str, str]:
    """Return {parameter of a completion request: the option that it sets}.

    Args:
        kinds: The dataclasses that declare the options (default: SamplerOptions and LoopedOptions).
    """
    every = (entry for kind in kinds or (SamplerOptions, LoopedOptions) for entry in fields(kind))
    names = {entry.name: entry.metadata["http"] for entry in every if entry.metadata["http"] is not None}
    return {parameter: name for name, own in names.items() for parameter in (own or name).split()}


def sent_names(*modes: str | None) -> tuple[str, ...]:
    """Return the generation options that are sent to other servers in one of these ways; see `sent` of `option`."""
    every = (*fields(SamplerOptions), *fields(LoopedOptions))
    return tuple(entry.name for entry in every if entry.metadata["sent"] in modes)


def not_sent(options: SamplerOptions) -> list[str]:
    """Return the options that differ from their defaults and cannot be sent to another server."""
    defaults = {entry.name: entry.default for entry in fields(options)}
    return [name for name in sent_names(None) if getattr(options, name) != defaults[name]]


def _drawn(mode: str) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(SamplerOptions) if entry.metadata["draws"] == mode)


# The columns of the sampler's arrays, in order, and the functions that read a row's values from Sampling or
# SamplerOptions. The temperature is the first filter.
FILTERS, PENALTIES = _drawn("filter"), _drawn("penalty")
filters_of, penalties_of = attrgetter(*FILTERS), attrgetter(*PENALTIES)
