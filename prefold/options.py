"""Defines the options of each task as a dataclass, read by the methods of LLM, the command line, the journal and the
docs.

The metadata of a field say what it means (`doc`) and of which parameters of the command line it is made (`cli`; empty
for an option that only Python has). Neither torch nor NumPy is imported here.
"""

# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from .errors import InputError

if TYPE_CHECKING:
    from .types import Grammar

__all__ = [
    "OPTIONS",
    "ClassifyOptions",
    "EmbedOptions",
    "GenerationOptions",
    "RerankOptions",
    "ScoreOptions",
    "TaskOptions",
    "check_options",
    "cli_names",
    "doc_of",
    "journal_names",
    "options_of",
]

Truncate = bool | Literal["left", "right"]
Pooling = Literal["last", "mean", "first"]
Normalization = Literal["tokens", "bytes"]
JsonSpace = Literal["compact", "free"]


def _option(
    default: Any,
    doc: str,
    *cli: str | None,
    one_of: tuple[Any, ...] = (),
    kind: type | None = None,
    journal: bool = True,
) -> Any:
    """Returns a field of a dataclass of options.

    cli      the parameters of the command line that it is made of: by default one of the field's own name; None: none
    one_of   the values that are allowed, where not all are
    kind     bool, str or int, where only that (or the default) is allowed
    journal  whether a job with another value is another job
    """
    metadata = {"doc": doc, "cli": cli, "one_of": one_of, "kind": kind, "journal": journal}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Holds the options of all tasks. Raises InputError for a value that no checkpoint could take."""

    task: ClassVar[str] = ""

    max_length: int | None = _option(
        None, "The most tokens a prompt may have; by default what the model takes.", kind=int
    )
    truncate: Truncate = _option(
        False,
        "Cut what is too long instead of raising an error: True cuts the longest column of a template, the longest"
        ' content of a conversation, of rerank the document, and keeps what is around it; "left" and "right" cut the'
        " prompt as a whole at that end (of rerank the document, of classify the text).",
        "truncate", "truncate_side",
        one_of=(False, True, "left", "right"),
    )  # fmt: skip

    adapter: str | Sequence[str | None] | None = _option(
        None, "The LoRA adapter to run with; in Python also a list of one a prompt. By default the model itself."
    )

    exit_threshold: float | None = _option(
        None,
        "Of a looped model with a gate: read a row after the first visit at which its probability of having left is at"
        " least this; 1: after its last visit. By default what the checkpoint says.",
    )
    min_visits: int = _option(1, "Of a looped model with a gate: read no row after fewer visits.", kind=int)
    max_visits: int | None = _option(
        None, "Of a looped model with a gate: read no row after more visits; by default all it makes.", kind=int
    )
    exit_change: float | None = _option(
        None,
        "Of a looped model whose rows leave: a row leaves after the first visit that changes its state by at most this"
        " part of it.",
    )
    exit_prompts: bool = _option(
        False, "Of a looped model whose rows leave: rows of prompts leave too, by the same rules.", kind=bool
    )
    route: Sequence[int] | None = _option(
        None,
        "Of a looped model whose rows leave or take routes: the numbers of the blocks that rows visit, from 0; by"
        " default as the checkpoint says.",
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value, allowed, kind = getattr(self, one.name), one.metadata["one_of"], one.metadata["kind"]
            if allowed and not any(type(value) is type(each) and value == each for each in allowed):
                remedy = f"use one of {', '.join(repr(each) for each in allowed)}"
                raise InputError(f"{one.name} is {value!r:.80}", field=one.name, remedy=remedy)
            if kind is not None and not _is_a(kind, value) and not (value is None and one.default is None):
                remedy = {bool: "give True or False", str: "give a text", int: "give a whole number"}[kind]
                raise InputError(f"{one.name} is {value!r:.80}", field=one.name, remedy=remedy, code="wrong_type")
        if self.adapter is not None and not isinstance(self.adapter, (str, list, tuple)):
            message = f"adapter is {self.adapter!r:.80}, not a name"
            raise InputError(message, field="adapter", remedy="give the name of an adapter", code="wrong_type")
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length is {self.max_length}", field="max_length", remedy="give 1 or more")


def _is_a(kind: type, value: object) -> bool:
    """Returns whether a value is a `kind`; a NumPy integer is a whole number, and True is none."""
    return hasattr(value, "__index__") and not isinstance(value, bool) if kind is int else isinstance(value, kind)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(TaskOptions):
    """Holds the options of `embed`.

    None means what the checkpoint says (sentence-transformers' files, or a GGUF file's pooling type). A checkpoint that
    says nothing is read at the last token, and its vectors have length 1.
    """

    task = "embed"

    pooling: Pooling | None = _option(
        None, "Where the embedding is read; by default what the checkpoint says, else last.",
        one_of=(None, "last", "mean", "first"),
    )  # fmt: skip
    normalize: bool | None = _option(
        None,
        "Whether to scale the embedding to length 1; by default what the checkpoint says, else yes.",
        one_of=(None, False, True),
    )
    dimensions: int | None = _option(None, "Keep only so many values, the first (before they are scaled).", kind=int)
    prompt: str | None = _option(None, "A text to put before every text.", None, kind=str)
    prompt_name: str | None = _option(
        None, "The name of one of the checkpoint's own prompts, which is put before every text.", kind=str
    )
    instruction: str | None = _option(
        None, "What queries are for; written before each text as Qwen3-Embedding wants it.", kind=str
    )


@dataclass(frozen=True, kw_only=True)
class RerankOptions(TaskOptions):
    """Holds the options of `rerank`."""

    task = "rerank"

    instruction: str | None = _option(
        None, "What is wanted of a document; by default that it answers a web search.", kind=str
    )
    template: str | None = _option(
        None,
        "The prompt, with {query}, {document} and, if wanted, {instruction}; by default Qwen3-Reranker's, or the bare"
        " pair for a cross-encoder that was trained on it.",
    )
    words: tuple[str, str] = _option(("yes", "no"), "The two words whose logits are compared, one token each.")
    raw_scores: bool = _option(False, "Give the difference of the logits, without the sigmoid.", kind=bool)


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(TaskOptions):
    """Holds the options of `classify`. With a checkpoint's classification head only max_length and truncate are
    allowed."""

    task = "classify"

    labels: Sequence[str] | Mapping[str, str] | None = _option(
        None, "The labels, or {label: how it is written in the prompt}; by default those of the classification head.",
        "labels", "labels_file",
    )  # fmt: skip
    instructions: str = _option("", "What comes before the examples and the text.", kind=str)
    examples: Sequence[object] = _option((), 'Pairs (text, label), or {"text": ..., "label": ...}.')
    template: str | None = _option(
        None,
        "How an example is written, with {text} and then {label}; by default two lines, Text: and Label:.",
        kind=str,
    )
    separator: str = _option("\n\n", "What stands between examples; by default an empty line.", None, kind=str)
    normalization: Normalization | None = _option(
        None,
        "Divide a label's log-likelihood by the label's length in tokens or bytes.",
        one_of=(None, "tokens", "bytes"),
    )
    calibrate: bool = _option(
        False,
        "Whether to calibrate the labels with texts without content (contextual calibration, Zhao et al. 2021).",
        kind=bool,
    )


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(TaskOptions):
    """Holds the options of `score`."""

    task = "score"

    prefix_token: int | None = _option(
        None,
        "The token id that stands for an empty prompt; by default BOS, or EOS where there is none.",
        None,
        kind=int,
    )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(TaskOptions):
    """Holds the options of `generate`, `chat` and `stream`: the fields of Sampling as users write them, and what
    makes the prompt."""

    task = "generate"

    max_tokens: int | Literal["auto"] | None = _option(
        "auto",
        "The most tokens of an answer; by default 256, or fewer where the context ends. None (on the command line 0):"
        " until the model's context is full.",
    )  # fmt: skip
    min_tokens: int = _option(0, "The answer does not end before so many tokens.")
    temperature: float = _option(
        0.0, "What logits are divided by before a token is drawn; 0: always the most likely token."
    )
    top_k: int = _option(0, "Draw only from so many of the most likely tokens; 0: from all.")
    top_p: float = _option(1.0, "Draw only from the most likely tokens that together have this probability.")
    min_p: float = _option(0.0, "Draw only from tokens this likely, relative to the most likely one.")
    repetition_penalty: float = _option(
        1.0,
        "Divides the logits of tokens that the prompt or the answer holds already, where they are positive, and"
        " multiplies them where they are negative: above 1 repetitions become rarer, below 1 more frequent; 1: off.",
    )
    presence_penalty: float = _option(0.0, "Taken off the logits of tokens in the answer, once; 0: off.")
    frequency_penalty: float = _option(
        0.0, "Taken off the logits of tokens in the answer, once for each time they occur; 0: off."
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _option(
        (), "{token id: what is added to its logit}."
    )
    seed: int | None = _option(None, "The seed of sampling; by default drawn anew for each call.", None)
    n: int = _option(1, "How many answers each prompt gets.")
    stop: str | Sequence[str] = _option((), "Texts that end the answer, which is cut off before them.")
    stop_ids: int | Sequence[int] = _option((), "Token ids that end the answer.", "stop_id")
    ignore_eos: bool = _option(False, "Go on after the model's end of text.")
    logprobs: int | None = _option(
        None, "Give each token's log-probability, and those of so many of the most likely tokens."
    )
    max_n: int = _option(128, "The most answers that a prompt's own options may ask for, unless n is larger.", kind=int)
    max_logprobs: int = _option(
        20, "The most log-probabilities that a prompt's own options may ask for, unless logprobs is larger.", kind=int
    )
    exit_visits: Sequence[int] = _option(
        (),
        "Of a looped model whose rows leave: after how many visits the row of each token of the answer leaves, in place"
        " of other rules as far as the list goes.",
        None,
    )
    grammar: Grammar | Mapping[str, object] | None = _option(
        None, 'What the text must look like: {"json_schema": ...}, {"json": True}, {"regex": ...}, {"choice": [...]} or'
        ' {"lark": ...}.',
        "json_schema", "json_object", "regex", "choice", "grammar",
    )  # fmt: skip
    json_space: JsonSpace = _option(
        "compact",
        "White space in JSON answers: compact (the default), one blank after a comma or colon at most; free, up to 64"
        " blanks and line ends in a row.",
        one_of=("compact", "free"),
    )
    response_format: type | Mapping[str, object] | None = _option(
        None, "In place of grammar: a pydantic class, or OpenAI's object.", None
    )
    system: str | None = _option(None, "A system message for conversations without one.", kind=str)
    tools: Sequence[object] | None = _option(
        None,
        "What the chat template is told of tools: JSON schemas as OpenAI writes them, or in Python functions with types"
        " and a docstring.",
    )
    chat_template: str | None = _option(
        None, "The name of one of the checkpoint's chat templates, or the text of a template.", kind=str
    )
    chat_template_kwargs: Mapping[str, object] | None = _option(None, "Further variables for the chat template.")
    template_seconds: float | None = _option(
        None,
        "Processor seconds that a chat template which a record brings may take; by default 10.",
        journal=False,
    )
    escape_special: bool = _option(
        False,
        "Special tokens that are written in what a conversation holds (messages, tools, documents) stay text; only the"
        " chat template's own are special.",
        kind=bool,
    )
    salt: str = _option(
        "",
        "A name for those who may share: prompts share keys and values, in a batch and in the cache, only where their"
        " salts are equal. With a salt for each customer nobody can find out by timing what others asked.",
        None,
        kind=str,
    )
    priority: int = _option(
        0,
        'How long keys and values of the prompt are kept by a cache with cache="priority": those of smaller numbers are'
        " forgotten first. It does not change the order in which prompts are computed.",
        None,
    )


OPTIONS: dict[str, type[TaskOptions]] = {
    kind.task: kind for kind in (EmbedOptions, RerankOptions, ClassifyOptions, ScoreOptions, GenerationOptions)
}


def options_of(task: str, given: Mapping[str, Any]) -> TaskOptions:
    """Returns the options of a task. Raises InputError for an unknown task or option, and for bad values."""
    if task not in OPTIONS:
        raise InputError(f"there is no task {task!r}", field="task", remedy=f"the tasks are {', '.join(OPTIONS)}")
    check_options(task, given, [*cli_names(task)])
    return OPTIONS[task](**given)


def check_options(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises InputError for an option that is not known, naming the one whose name is nearest. owner: what has them."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            remedy = f"{hint}it has: {', '.join(known)}"
            raise InputError(f"{owner} has no option {name!r}", field=name, remedy=remedy, code="unknown_option")


def doc_of(task: str, name: str) -> str:
    """Returns what an option means, in a sentence or two."""
    return cast(str, next(one.metadata["doc"] for one in fields(OPTIONS[task]) if one.name == name))


def cli_names(task: str) -> dict[str, tuple[str, ...]]:
    """Returns {option of a task: the parameters of the command line that it is made of}; options of all tasks come
    last."""
    common = {one.name for one in fields(TaskOptions)}
    found = {}
    for one in sorted(fields(OPTIONS[task]), key=lambda one: one.name in common):
        names = one.metadata["cli"]
        found[one.name] = () if names == (None,) else names or (one.name,)
    return found


def journal_names() -> tuple[str, ...]:
    """Returns the parameters of the command line, but for adapters, with which a job of a task is another job when
    they differ."""
    names = [
        name
        for task, kind in OPTIONS.items()
        for one in fields(kind)
        if one.metadata["journal"] and one.name != "adapter"
        for name in cli_names(task)[one.name]
    ]
    return tuple(dict.fromkeys(names))
