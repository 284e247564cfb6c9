"""A job as a whole: how its input is read, where its results go, what computes it, and which options each task has."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from .fields import SpecError, flags_of, option, parameter_of
from .model import ModelSpec
from .task import OPTIONS, ConversationOptions, TaskSpec, cli_names

# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)


Format = Literal["jsonl", "csv", "tsv", "parquet"]
FORMATS: tuple[Format, ...] = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The input of a job: its files, its columns, and how much is read.

    names: files, patterns and folders, or on the command line the texts themselves
    """

    names: tuple[str, ...] = ()
    prompt: str | None = option(None, 'The text: a column, or "...{column}...".', metavar="TEMPLATE")
    state: str | None = option(
        None, 'The state of decisions: a column (JSON stays JSON), or "...{column}...".', metavar="TEMPLATE"
    )
    query: str | None = option(None, "The query: a column, or a template.  [default: query]", metavar="TEMPLATE")
    document: str | None = option(
        None, "The document: a column (a list is ranked as one), or a template.", metavar="TEMPLATE"
    )
    continuation: str | None = option(
        None,
        "What is scored: a column (a list is scored one by one), or a template. Without it, the prompt as a whole.",
        metavar="TEMPLATE",
    )
    tools: str | None = option(
        None, "Tools that the chat template is told of: a column, or @FILE (JSON) for all records.", metavar="COLUMN"
    )
    messages: str | None = option(None, "Chat messages, written by the model's chat template.", metavar="COLUMN")
    adapter_column: str | None = option(None, "The name of each record's adapter.", metavar="COLUMN")
    image: str | None = option(
        None,
        "The record's image, or a list of them: base64, a data URL, bytes, with --media-folder a path. Without a job:"
        " the path of an image.",
        metavar="COLUMN",
    )
    media_folder: str | None = option(
        None, "Images may be given as paths in this folder; nothing outside of it is read.", metavar="FOLDER"
    )
    gold: tuple[str, ...] = option(
        (),
        "True answers, which the probabilities are compared with: a column (of several questions an object {question:"
        " answer}), or QUESTION=COLUMN,... May be repeated.",
        metavar="COLUMN",
    )
    gold_file: str | None = option(
        None,
        "Read the columns of --gold from this table. Its column record (with --id: id) names the record."
        "  [default for --gold: QUESTION_gold, as in a file of --review]",
        metavar="FILE",
    )
    id_column: str | None = option(None, "A column that the output repeats as id.", metavar="COLUMN", flags="--id")
    keep: tuple[str, ...] = option(
        (),
        "Further columns that the output repeats, under another name as NAME=COLUMN; '*': all. May be repeated.",
        metavar="A,B,...",
    )
    empty: Literal["error", "keep"] | None = option(
        None,
        "What an empty cell, null or NaN in a prompt is: an error of that record, or an empty text.  [default: error]",
        one_of=(None, "error", "keep"),
    )
    format: Format | None = option(
        None, "Format of the input.  [default: as its name says; standard input: jsonl]", "input_format",
        one_of=(None, *FORMATS), flags="--format", journal=False,
    )  # fmt: skip
    delimiter: str | None = option(
        None, "What parts the cells of CSV or TSV, such as ';' or tab.  [default: a comma; of TSV a tab]",
        metavar="CHAR",
    )  # fmt: skip
    max_cell_lines: int | None = option(
        None,
        "Lines that a quoted cell of CSV or TSV may have; a longer one is a broken quote. 0: any number."
        "  [default: 1000]",
        least=0,
    )
    media_bytes: int | None = option(None, "Size of an image's file.  [default: 20MB]")
    media_pixels: int | None = option(None, "Height times width of an image.  [default: 64000000]", least=1)
    limit: int | None = option(None, "Only the first N records.", least=1, journal=False)
    window: int = option(
        1 << 20, "Tokens held in memory at once; with --stream those that wait.", least=1, journal=False
    )
    stream: bool = option(
        False,
        "Run records as they come, the most alike first, instead of sorting the whole input: for input without end."
        " Shares less.",
        journal=False,
    )


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """The output of a job. path: None, or "-": standard output"""

    path: str | None = option(
        None,
        ".jsonl, .csv, .tsv or .parquet; .gz may follow. Without it: JSON lines to standard output.",
        "output", flags="-o --output", metavar="FILE", journal=False,
    )  # fmt: skip
    keep_order: bool = option(False, "Results in input order, instead of as they come.", journal=False)
    overwrite: bool = option(False, "Start again, replacing the output.", journal=False)
    resume: bool = option(
        False,
        "Continue an interrupted job, and fail if there is none. (Without this option a job with a journal is"
        " resumed too.)",
        journal=False,
    )
    grown: bool = option(
        False, "The input may have become longer since: go on with the records behind those that are done.",
        journal=False,
    )  # fmt: skip
    report: str | None = option(
        None, "Write an HTML page about the job: its trie, its batches.", metavar="FILE", journal=False
    )
    quiet: bool = option(False, "No progress and no summary.", journal=False)
    scores: Literal["label", "all"] | None = option(
        None,
        "Which probabilities have a column of their own. label: the label's, p; all: every label's too, p_LABEL."
        "  [default: label for CSV and Parquet; else the objects of JSON lines]",
        one_of=(None, "label", "all"),
    )
    review: str | None = option(
        None,
        "Write the records with a doubtful answer to this table, in which the true answers can be filled in.  [default"
        " with --review-below and -o: NAME.review beside the output]",
        metavar="FILE", journal=False,
    )  # fmt: skip
    precision: float = option(
        0.95, "With --gold: look for the threshold from which on this share of the answers is right.",
        least=0, most=1, above=True, journal=False,
    )  # fmt: skip
    save_calibration: str | None = option(
        None, "With --gold: write the temperatures and thresholds that fit to a file for --calibration.",
        metavar="FILE", journal=False,
    )  # fmt: skip
    json_columns: bool = option(
        False,
        "Each property of a JSON answer becomes a column of its own, beside text. Needs --json-schema or"
        " --json-object.",
    )

    @property
    def file(self) -> Path | None:
        """Return the file of the output, which has a journal beside it; None: standard output."""
        return None if self.path is None or self.path == "-" else Path(self.path)

    def check(self) -> None:
        """Raise SpecError for options that exclude each other."""
        if self.file is None and (self.resume or self.overwrite or self.grown):
            raise SpecError("--resume, --overwrite and --grown need an output file: add -o FILE", field="output")
        if self.resume and self.overwrite:
            raise SpecError("--resume and --overwrite exclude each other", field="overwrite")


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """The backend of a job, and its replicas."""

    ray: str | None = option(
        None,
        "Run replicas of the model on a Ray cluster. Without ADDRESS: on the cluster of RAY_ADDRESS, else on this"
        " machine. Write it behind INPUT, or as --ray=ADDRESS.",
        metavar="[ADDRESS]", journal=False,
    )  # fmt: skip
    urls: tuple[str, ...] = option(
        (),
        "A server that runs the model: one with OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI. May be"
        " repeated. PREFOLD_API_KEY in the environment is its key.",
        "url", metavar="URL", journal=False,
    )  # fmt: skip
    tokenizer: str | None = option(
        None,
        "With --url: a folder, hub id or built-in name with the tokenizer, so that token ids are sent.  [default: that"
        " of --model, if it is a folder; else texts are sent]",
        metavar="NAME",
    )
    backend: str | None = option(
        None,
        "What computes, here or on the replicas of --ray: prefold, vllm, or what a package or --plugin adds. vLLM"
        " generates text only, and runs models that prefold does not know.  [default: prefold]",
        metavar="NAME",
    )
    backend_option: tuple[str, ...] = option(
        (),
        "With --backend vllm: a field of its AsyncEngineArgs, such as block_size=32. May be repeated.",
        metavar="NAME=VALUE",
    )
    replicas: int | None = option(
        None,
        "How many, each with --threads or, on GPUs, --tensor-parallel GPUs of its own.  [default: as many as there is"
        " room for]",
        least=1, journal=False,
    )  # fmt: skip
    patience: float = option(
        300.0, "A replica that has work and makes no progress for so long is killed.",
        least=0, above=True, metavar="SECONDS", journal=False,
    )  # fmt: skip

    @property
    def backend_name(self) -> str:
        """Return the name of the backend in the table of backends."""
        return "url" if self.urls else self.backend or "prefold"

    @property
    def backend_options(self) -> dict[str, object]:
        """Return the values of --backend-option by name. Raise SpecError for a text that is not NAME=VALUE."""
        options: dict[str, object] = {}
        for text in self.backend_option:
            name, _, value = text.partition("=")
            if not name or not value:
                message = f"--backend-option {text!r} is not NAME=VALUE, such as block_size=32"
                raise SpecError(message, field="backend_option")
            try:
                options[name] = json.loads(value)
            except ValueError:
                options[name] = value
        return options


# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)


DEFAULT_MODEL = "smollm2-135m"
NUMERIC_TASKS = ("embed", "rerank", "classify", "decide", "score")  # the tasks whose results are numbers
TASKS = (*NUMERIC_TASKS, "generate")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """All options of a job. The command line makes one for every command that runs a model.

    task           the task of a table; None: the input is OpenAI batch lines, and each line names its task
    tasks          the options of each task that the input may ask for
    conversations  how a conversation becomes a prompt, for every task
    given          the parameters that were given, even if the value is the default
    side_files     (flag, path) of each file that was read for an option
    """

    model_name: str = option(
        DEFAULT_MODEL, "Built-in name, local folder, .gguf file, or hub id.", "model",
        flags="-m --model", metavar="NAME", journal=False,
    )  # fmt: skip
    model: ModelSpec = ModelSpec()
    task: str | None = None
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict)
    conversations: ConversationOptions = ConversationOptions()
    input: InputSpec = InputSpec()
    output: OutputSpec = OutputSpec()
    fleet: FleetSpec = FleetSpec()
    chat: bool | None = option(
        None, "Put prompts into the model's chat template, or not.  [default: if it has one]", flags="--chat/--raw"
    )
    recommended: bool = option(
        False, "Where an option is not given, sample as the checkpoint's generation_config.json says."
    )
    seed: int | None = option(
        None, "Of sampling; each record's own is made of it.  [default: drawn, and kept in the journal]",
        least=0, most=2**53 - 1, journal=False,
    )  # fmt: skip
    given: frozenset[str] = frozenset()
    side_files: tuple[tuple[str, str], ...] = ()

    def settings(self, task: str, *kinds: type) -> dict[str, Any]:
        """Return {option: value} of a task's options that were given and that these dataclasses declare."""
        options, parameters = self.tasks[task], cli_names(task)
        names = [entry.name for kind in kinds for entry in fields(kind)]
        return {name: getattr(options, name) for name in names if not self.given.isdisjoint(parameters[name])}

    def identity(self) -> dict[str, Any]:
        """Return {name: value} of the options that distinguish this job from others, for the journal. Adapters and the
        seed are stored beside them."""
        values = {
            parameter_of(entry): value
            for entry, value in self._own_options()
            if entry.metadata["journal"] and not (value is False and entry.default is False)
        }
        for task, options in self.tasks.items():
            own = self.settings(task, type(options))
            for entry in [entry for entry in fields(options) if entry.name in own and entry.metadata["journal"]]:
                value = own[entry.name]
                if entry.name != "adapter" and not (value is None and entry.default is None):
                    # None that is given is max_tokens, which the command line writes as 0
                    values[_journal_name(task, entry.name)] = 0 if value is None else value
        for entry in fields(self.conversations):
            if entry.name in self.given and entry.metadata["journal"]:
                values.setdefault(entry.name, getattr(self.conversations, entry.name))
        for entry, value in self._model_options():
            if entry.metadata["journal"] and value is not False:
                values[parameter_of(entry)] = value
        return {name: value for name, value in values.items() if value is not None}

    def shown(self) -> dict[str, str]:
        """Return {name: value} of the options that have a value, for the report."""
        values = {
            parameter_of(entry): value
            for entry, value in (*self._own_options(), *self._model_options())
            if value is not False and parameter_of(entry) not in ("report", "quiet")
        }
        for task, options in self.tasks.items():
            values |= {_journal_name(task, name): value for name, value in self.settings(task, type(options)).items()}
        texts = {name: str(getattr(value, "policy", value)) for name, value in values.items() if value is not None}
        return {name.replace("_", "-"): text for name, text in texts.items()}

    def _own_options(self) -> Iterator[tuple[Field[Any], Any]]:
        """Yield (declaration, value) of the options that a job has beside its model and its tasks, if they have a
        value."""
        for part in (self, self.input, self.output, self.fleet):
            for entry in fields(part):
                if entry.metadata and (value := getattr(part, entry.name)) not in (None, ()):
                    yield entry, value

    def _model_options(self) -> Iterator[tuple[Field[Any], Any]]:
        """Yield (declaration, value) of the options of the model that the command line has, if they have a value."""
        for part in (self.model, self.model.cache, self.model.looped, self.model.images):
            for entry in fields(part) if part is not None else ():
                if entry.metadata["on"] is not None and (value := getattr(part, entry.name)) not in (None, ()):
                    yield entry, value

    def check(self) -> None:
        """Raise SpecError for options that exclude each other, whatever the input holds."""
        self.output.check()
        self._check_json_columns()
        self._check_gold()
        if self.task is None:
            return
        self.check_tasks((self.task,), self.task)
        if self.input.prompt and self.input.messages:
            raise SpecError("--prompt and --messages exclude each other", field="messages")
        if self.task == "decide" and self.input.state and self.input.messages:
            raise SpecError("--state and --messages exclude each other", field="messages")
        if self.task != "generate" and not self.input.messages:
            self.check_conversations("add --messages COLUMN")
        if self.task == "rerank" and self.input.image:
            raise SpecError("--image is for embed, classify, decide, score and generate", field="image")

    def check_tasks(self, tasks: Collection[str], subject: str) -> None:
        """Raise SpecError if an option was given that is for other tasks than these. subject: the tasks in words"""
        for name in sorted(self.given):
            of = [task for task in TASKS if name in task_parameters(task)]
            if of and not {*of} & {*tasks}:
                flags = "/".join(flags_of(task_parameters(of[0])[name], name))
                of_tasks = " and ".join(filter(None, (", ".join(of[:-1]), of[-1])))
                raise SpecError(f"{flags} is for {of_tasks}, and not for {subject}", field=name)

    def check_conversations(self, remedy: str) -> None:
        """Raise SpecError if an option of rendering conversations is given. remedy: how to have conversations"""
        for entry in fields(ConversationOptions):
            if entry.name != "tools" and getattr(self.conversations, entry.name) != entry.default:  # these are a column
                (flag,) = flags_of(entry, entry.name)
                raise SpecError(f"{flag} is for conversations", field=entry.name, remedy=remedy)

    def _check_gold(self) -> None:
        """Raise SpecError if what needs true answers, or doubtful ones, has none."""
        if not self.input.gold and self.input.gold_file is None:
            for name in ("precision", "save_calibration"):
                if name in self.given:
                    flag = f"--{name.replace('_', '-')}"
                    raise SpecError(f"{flag} needs true answers", field=name, remedy="add --gold COLUMN")
        if self.output.save_calibration is not None and self.input.adapter_column is not None:
            message = "--save-calibration and --adapter-column exclude each other: a calibration is of one adapter"
            raise SpecError(message, field="save_calibration")
        if self.output.review is not None and self.task is None:
            raise SpecError("--review is for tables; give a table and --task decide", field="review")
        if self.output.review is not None and self.given.isdisjoint(("review_below", "calibration")):
            remedy = "add --review-below P or --calibration FILE"
            raise SpecError("--review: nothing says which answers are doubtful", field="review", remedy=remedy)

    def _check_json_columns(self) -> None:
        """Raise SpecError for --json-columns if answers are not JSON objects, or if a record has several answers."""
        if not self.output.json_columns:
            return
        if self.task != "generate":
            message = "--json-columns is for tables that are answered; give a table and --task generate"
            raise SpecError(message, field="json_columns")
        if self.given.isdisjoint(("json_schema", "json_object")):
            message = "--json-columns needs answers that are JSON objects: add --json-schema or --json-object"
            raise SpecError(message, field="json_columns")
        if self.settings("generate", OPTIONS["generate"]).get("n", 1) > 1:
            message = "--json-columns and --n exclude each other: a record has one answer's columns"
            raise SpecError(message, field="json_columns")


def _journal_name(task: str, name: str) -> str:
    """Return the name of a task's option in the journal: its parameter if it is made of one, else its own name."""
    parameters = cli_names(task)[name]
    return parameters[0] if len(parameters) == 1 else name


# ------------------------------------------------------------------------- parameters of the command line

_TEXTS = {
    "embed": ("prompt",),
    "classify": ("prompt",),
    "decide": ("state", "gold", "gold_file"),
    "rerank": ("query", "document"),
    "score": ("prompt", "continuation"),
    "generate": ("prompt", "tools"),
}
_OF_ALL_COLUMNS = (
    "adapter_column", "image", "media_folder", "id_column", "keep", "empty", "input_format", "delimiter",
    "max_cell_lines",
)  # fmt: skip
# Parameters of a task's command that are no options of the task itself.
BESIDE = {
    "classify": ("scores",),
    "decide": ("scores", "review", "precision", "save_calibration"),
    "generate": ("chat", "recommended", "seed", "json_columns"),
}
# Parameters that name a column, or say what is read from columns.
COLUMNS = (
    "prompt", "state", "messages", "query", "document", "continuation", "tools", "adapter_column", "image", "id_column",
    "keep", "empty", "gold", "gold_file",
)  # fmt: skip


def column_parameters(*tasks: str) -> list[str]:
    """Return the parameters that say how the table of these tasks is read."""
    names = list(dict.fromkeys(name for task in tasks for name in _TEXTS[task]))
    return [*names, *(["messages"] if {*tasks} != {"rerank"} else []), *_OF_ALL_COLUMNS]


def declarations(tasks: Collection[str]) -> dict[str, dict[str, Field[Any]]]:
    """Return {parameter: {task: declaration}} of the options of tasks. Options of all tasks come last."""
    common = {entry.name for entry in fields(TaskSpec)}
    found: dict[str, dict[str, Field[Any]]] = {}
    for task, kind in [(task, kind) for task, kind in OPTIONS.items() if task in tasks]:
        own = {entry.name: entry for entry in fields(kind)}
        if task not in ("rerank", "decide", "generate"):  # those that read conversations, too
            own |= {entry.name: entry for entry in fields(ConversationOptions)}
        for entry in sorted(own.values(), key=lambda entry: entry.name in common):
            names = entry.metadata["cli"] or (entry.name,)
            for parameter in [name for name in names if name is not None and name != "tools"]:  # which are a column
                found.setdefault(parameter, {})[task] = entry
    return dict(sorted(found.items(), key=lambda pair: next(iter(pair[1].values())).name in common))


@cache
def job_parameters() -> dict[str, Field[Any]]:
    """Return {parameter: declaration} of a job's options for input, output and fleet."""
    every = (entry for kind in (InputSpec, OutputSpec, FleetSpec, JobSpec) for entry in fields(kind))
    return {parameter_of(entry): entry for entry in every if entry.metadata}


@cache
def task_parameters(task: str) -> dict[str, Field[Any]]:
    """Return {parameter: declaration} of a task's options, and of those that say how its table is read."""
    beside = [*column_parameters(task), *BESIDE.get(task, ())]
    own = {name: entry[task] for name, entry in declarations([task]).items()}
    return {name: job_parameters()[name] for name in beside} | own
