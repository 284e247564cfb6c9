"""All options of a job: its input, its output, its backend and replicas, and the options of each task."""

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

# ruff: noqa: RUF009  (`option` returns a dataclass field)


Format = Literal["jsonl", "csv", "tsv", "parquet"]
FORMATS: tuple[Format, ...] = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The input of a job: its files, its columns, and how much is read."""

    names: tuple[str, ...] = ()  # files, patterns and folders; on the command line also the texts themselves
    prompt: str | None = option(
        None, 'Text to process: a column, or a template "...{column}...".',
        group="Input", common=True, metavar="TEMPLATE",
    )  # fmt: skip
    state: str | None = option(
        None, "State of a decision: a column, or a template.",
        details="A column with JSON stays JSON.", group="Input", common=True, metavar="TEMPLATE",
    )  # fmt: skip
    query: str | None = option(
        None, "Query: a column, or a template (default: query).", group="Input", common=True, metavar="TEMPLATE"
    )
    document: str | None = option(
        None, "Document: a column, or a template.",
        details="A column of lists is ranked list by list.", group="Input", common=True, metavar="TEMPLATE",
    )  # fmt: skip
    continuation: str | None = option(
        None, "Text to score after the prompt: a column, or a template (default: score the prompt).",
        details="Each element of a list is scored separately.", group="Input", common=True, metavar="TEMPLATE",
    )  # fmt: skip
    tools: str | None = option(
        None, "Tools for the chat template: a column, or @FILE (JSON) for all records.", group="Prompt",
        metavar="COLUMN",
    )  # fmt: skip
    messages: str | None = option(
        None, "Column with chat messages; the model's chat template formats them.",
        group="Input", common=True, metavar="COLUMN",
    )  # fmt: skip
    adapter_column: str | None = option(
        None, "Column with the name of each record's adapter.", group="Model", metavar="COLUMN"
    )
    image: str | None = option(
        None, "Column with an image or a list of images; for texts: path of an image.",
        details="An image is base64 text, a data URL, bytes, or with --media-folder a path.",
        group="Images", common=True, metavar="COLUMN",
    )  # fmt: skip
    media_folder: str | None = option(
        None, "Folder whose images records may name by path; other folders are never read.",
        group="Images", metavar="FOLDER",
    )  # fmt: skip
    gold: tuple[str, ...] = option(
        (), "Column with the true answers, or QUESTION=COLUMN pairs separated by commas.",
        details="For several questions the column holds objects {question: answer}.",
        group="Calibration", metavar="COLUMN",
    )  # fmt: skip
    gold_file: str | None = option(
        None, "Table with the columns of --gold (default columns: QUESTION_gold, as --review writes).",
        details="Its column record, or with --id its column id, names the record.",
        group="Calibration", metavar="FILE",
    )  # fmt: skip
    id_column: str | None = option(
        None, "Column to copy to the output as id.", group="Input", common=True, metavar="COLUMN", flags="--id"
    )
    keep: tuple[str, ...] = option(
        (), "Columns to copy to the output; NAME=COLUMN renames, '*' copies all.",
        group="Output", common=True, metavar="A,B,...",
    )  # fmt: skip
    empty: Literal["error", "keep"] | None = option(
        None, "An empty cell, null or NaN in a prompt is an error or an empty text (default: error).",
        group="Input", one_of=(None, "error", "keep"),
    )  # fmt: skip
    format: Format | None = option(
        None, "Format of the input (default: by the file's name; standard input: jsonl).", "input_format",
        group="Input", one_of=(None, *FORMATS), flags="--format", journal=False,
    )  # fmt: skip
    delimiter: str | None = option(
        None, "Separator of cells in CSV or TSV, such as ';' (default: comma; TSV: tab).",
        group="Input", metavar="CHAR",
    )  # fmt: skip
    max_cell_lines: int | None = option(
        None, "Maximum lines in a quoted CSV or TSV cell (0: no limit; default: 1000).",
        details="A longer cell is taken for a broken quote.", group="Input", least=0,
    )  # fmt: skip
    media_bytes: int | None = option(None, "Maximum size of an image file (default: 20MB).", group="Images")
    media_pixels: int | None = option(
        None, "Maximum height times width of an image (default: 64000000).", group="Images", least=1
    )
    limit: int | None = option(
        None, "Read only the first N records.", group="Input", common=True, least=1, journal=False
    )
    window: int = option(
        1 << 20, "Tokens held in memory at once; with --stream: tokens that wait.",
        group="Performance", least=1, journal=False,
    )  # fmt: skip
    stream: bool = option(
        False, "Process records as they arrive, for endless input, instead of sorting all.",
        details="The most similar waiting records run first. Less is shared than in a sorted job.",
        group="Input", journal=False,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """The output of a job."""

    path: str | None = option(
        None, "Output: .jsonl, .csv, .tsv or .parquet, also with .gz (default: JSON lines on stdout).",
        "output", group="Output", common=True, flags="-o --output", metavar="FILE", journal=False,
    )  # fmt: skip
    keep_order: bool = option(
        False, "Write results in input order instead of as they come.", group="Output", common=True, journal=False
    )
    overwrite: bool = option(
        False, "Start again and replace the output.", group="Output", common=True, journal=False
    )  # fmt: skip
    resume: bool = option(
        False, "Continue an interrupted job; fail if there is none.",
        details="Without this option, a job that has a journal is resumed too.",
        group="Output", common=True, journal=False,
    )  # fmt: skip
    grown: bool = option(
        False, "The input has grown since the last run: process the new records at its end.",
        group="Output", journal=False,
    )  # fmt: skip
    report: str | None = option(
        None, "Write an HTML report of the job, with its trie and its batches.",
        group="Output", common=True, metavar="FILE", journal=False,
    )  # fmt: skip
    quiet: bool = option(
        False, "Print no progress and no summary.", group="Output", common=True, journal=False
    )  # fmt: skip
    scores: Literal["label", "all"] | None = option(
        None, "Columns with probabilities: the label's, or all (default: label, in CSV and Parquet).",
        details="all: also p_LABEL for every label. By default JSON lines have one object with all probabilities.",
        group="Output", one_of=(None, "label", "all"),
    )  # fmt: skip
    review: str | None = option(
        None, "Write records with doubtful answers to this table (default: OUTPUT.review).",
        details="The true answers can be filled in there. The default needs --review-below and -o.",
        group="Calibration", metavar="FILE", journal=False,
    )  # fmt: skip
    precision: float = option(
        0.95, "With --gold: share of right answers that the threshold must reach.",
        group="Calibration", least=0, most=1, above=True, journal=False,
    )  # fmt: skip
    save_calibration: str | None = option(
        None, "With --gold: write fitted temperatures and thresholds, for --calibration.",
        group="Calibration", metavar="FILE", journal=False,
    )  # fmt: skip
    json_columns: bool = option(
        False, "Write each property of a JSON answer to a column, beside the column text.",
        details="Needs --json-schema or --json-object.", group="Output",
    )  # fmt: skip

    @property
    def file(self) -> Path | None:
        """Return the output file, or None for standard output. A file has a journal beside it."""
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
        None, "Run replicas on a Ray cluster (default ADDRESS: RAY_ADDRESS, else this machine).",
        details="Write it after INPUT, or as --ray=ADDRESS.",
        group="Replicas", common=True, metavar="[ADDRESS]", journal=False,
    )  # fmt: skip
    urls: tuple[str, ...] = option(
        (), "Server that runs the model, with OpenAI's API or TEI's.", "url",
        details="Such servers are vLLM, SGLang and prefold serve. The key is read from PREFOLD_API_KEY.",
        group="Replicas", common=True, metavar="URL", journal=False,
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "With --url: folder, hub id or built-in name of the tokenizer, to send token ids.",
        details="By default the tokenizer of --model if that is a folder; else texts are sent.",
        group="Replicas", metavar="NAME",
    )  # fmt: skip
    backend: str | None = option(
        None, "Engine: prefold, vllm, or an engine that a package or --plugin adds (default: prefold).",
        details="It runs here, or on the replicas of --ray. vLLM only generates text, and also runs models that prefold"
        " does not support.",
        group="Replicas", metavar="NAME",
    )  # fmt: skip
    backend_option: tuple[str, ...] = option(
        (), "With --backend vllm: a field of AsyncEngineArgs, such as block_size=32.",
        group="Replicas", metavar="NAME=VALUE",
    )  # fmt: skip
    replicas: int | None = option(
        None, "Number of replicas (default: as many as fit).",
        details="Each has --threads CPU threads, or on GPUs --tensor-parallel GPUs, of its own.",
        group="Replicas", common=True, least=1, journal=False,
    )  # fmt: skip
    patience: float = option(
        300.0, "Kill a replica that has work but makes no progress for this long.",
        group="Replicas", least=0, above=True, metavar="SECONDS", journal=False,
    )  # fmt: skip

    @property
    def backend_name(self) -> str:
        """Return the backend's key in the table of backends; "url" if servers compute."""
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


DEFAULT_MODEL = "smollm2-135m"
NUMERIC_TASKS = ("embed", "rerank", "classify", "decide", "score")  # tasks that generate no text
TASKS = (*NUMERIC_TASKS, "generate")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """All options of a job. Every command that runs a model makes one."""

    model_name: str = option(
        DEFAULT_MODEL, "Model: a built-in name, local folder, .gguf file or hub id.", "model",
        group="Model", common=True, flags="-m --model", metavar="NAME", journal=False,
    )  # fmt: skip
    model: ModelSpec = ModelSpec()
    task: str | None = None  # task of a table; None: OpenAI batch lines, each of which names its task
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict)  # options of each task that the input may ask for
    conversations: ConversationOptions = ConversationOptions()  # for all tasks
    input: InputSpec = InputSpec()
    output: OutputSpec = OutputSpec()
    fleet: FleetSpec = FleetSpec()
    chat: bool | None = option(
        None, "Apply the model's chat template to prompts, or not (default: if it has one).",
        group="Prompt", common=True, flags="--chat/--raw",
    )  # fmt: skip
    recommended: bool = option(
        False, "Take missing sampling options from the checkpoint's generation_config.json.", group="Sampling"
    )
    seed: int | None = option(
        None, "Seed for sampling (default: random, kept in the journal).",
        details="Each record's own seed is made from it.",
        group="Sampling", common=True, least=0, most=2**53 - 1, journal=False,
    )  # fmt: skip
    given: frozenset[str] = frozenset()  # parameters that the user gave, even if the value is the default
    side_files: tuple[tuple[str, str], ...] = ()  # (flag, path) of each file that was read for an option

    def settings(self, task: str, *kinds: type) -> dict[str, Any]:
        """Return {option: value} of the options of a task that the user gave and that `kinds` declare."""
        options, parameters = self.tasks[task], cli_names(task)
        names = [entry.name for kind in kinds for entry in fields(kind)]
        return {name: getattr(options, name) for name in names if not self.given.isdisjoint(parameters[name])}

    def identity(self) -> dict[str, Any]:
        """Return {name: value} of the options that distinguish this job from others, for the journal.

        The journal stores adapters and the seed separately.
        """
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
                    # only max_tokens can be None and given; the command line writes it as 0
                    values[_journal_name(task, entry.name)] = 0 if value is None else value
        for entry in fields(self.conversations):
            if entry.name in self.given and entry.metadata["journal"]:
                values.setdefault(entry.name, getattr(self.conversations, entry.name))
        for entry, value in self._model_options():
            if entry.metadata["journal"] and value is not False:
                values[parameter_of(entry)] = value
        return {name: value for name, value in values.items() if value is not None}

    def shown(self) -> dict[str, str]:
        """Return {option: text} of all options that have a value, for the report."""
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
        """Yield (declaration, value) of each option of the job, its input, output and fleet that has a value."""
        for part in (self, self.input, self.output, self.fleet):
            for entry in fields(part):
                if entry.metadata and (value := getattr(part, entry.name)) not in (None, ()):
                    yield entry, value

    def _model_options(self) -> Iterator[tuple[Field[Any], Any]]:
        """Yield (declaration, value) of each model option of the command line that has a value."""
        for part in (self.model, self.model.cache, self.model.looped, self.model.images):
            for entry in fields(part) if part is not None else ():
                if entry.metadata["on"] is not None and (value := getattr(part, entry.name)) not in (None, ()):
                    yield entry, value

    def check(self) -> None:
        """Raise SpecError for options that exclude each other with any input."""
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
        """Raise SpecError if a given option belongs only to other tasks. `subject` names `tasks` in the message."""
        for name in sorted(self.given):
            of = [task for task in TASKS if name in task_parameters(task)]
            if of and not {*of} & {*tasks}:
                flags = "/".join(flags_of(task_parameters(of[0])[name], name))
                of_tasks = " and ".join(filter(None, (", ".join(of[:-1]), of[-1])))
                raise SpecError(f"{flags} is for {of_tasks}, and not for {subject}", field=name)

    def check_conversations(self, remedy: str) -> None:
        """Raise SpecError if an option of conversations is given, because the input has none."""
        for entry in fields(ConversationOptions):
            if (
                entry.name != "tools" and getattr(self.conversations, entry.name) != entry.default
            ):  # tools may be a column
                (flag,) = flags_of(entry, entry.name)
                raise SpecError(f"{flag} is for conversations", field=entry.name, remedy=remedy)

    def _check_gold(self) -> None:
        """Raise SpecError for an option that needs true answers, or a rule for doubtful answers, without these."""
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
            raise SpecError("--review needs a rule for doubtful answers", field="review", remedy=remedy)

    def _check_json_columns(self) -> None:
        """Raise SpecError for --json-columns unless each record has one answer that is a JSON object."""
        if not self.output.json_columns:
            return
        if self.task != "generate":
            message = "--json-columns is for tables with --task generate; give both"
            raise SpecError(message, field="json_columns")
        if self.given.isdisjoint(("json_schema", "json_object")):
            message = "--json-columns needs answers that are JSON objects: add --json-schema or --json-object"
            raise SpecError(message, field="json_columns")
        if self.settings("generate", OPTIONS["generate"]).get("n", 1) > 1:
            message = "--json-columns and --n exclude each other: the columns hold one answer per record"
            raise SpecError(message, field="json_columns")


def _journal_name(task: str, name: str) -> str:
    """Return the name of a task's option in the journal: its parameter if it has exactly one, else its own name."""
    parameters = cli_names(task)[name]
    return parameters[0] if len(parameters) == 1 else name


# ------------------------------------------------------------------------- command-line parameters

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
# Parameters of a task's command that are options of the job, not of the task.
BESIDE = {
    "classify": ("scores",),
    "decide": ("scores", "review", "precision", "save_calibration"),
    "generate": ("chat", "recommended", "seed", "json_columns"),
}
# Parameters that name a column, or how columns are read.
COLUMNS = (
    "prompt", "state", "messages", "query", "document", "continuation", "tools", "adapter_column", "image", "id_column",
    "keep", "empty", "gold", "gold_file",
)  # fmt: skip


def column_parameters(*tasks: str) -> list[str]:
    """Return the parameters for reading the table of these tasks."""
    names = list(dict.fromkeys(name for task in tasks for name in _TEXTS[task]))
    return [*names, *(["messages"] if {*tasks} != {"rerank"} else []), *_OF_ALL_COLUMNS]


def declarations(tasks: Collection[str]) -> dict[str, dict[str, Field[Any]]]:
    """Return {parameter: {task: declaration}} of the options of tasks. Options that all tasks have come last."""
    common = {entry.name for entry in fields(TaskSpec)}
    found: dict[str, dict[str, Field[Any]]] = {}
    for task, kind in [(task, kind) for task, kind in OPTIONS.items() if task in tasks]:
        own = {entry.name: entry for entry in fields(kind)}
        if task not in ("rerank", "decide", "generate"):  # for conversations in a column
            own |= {entry.name: entry for entry in fields(ConversationOptions)}
        for entry in sorted(own.values(), key=lambda entry: entry.name in common):
            names = entry.metadata["cli"] or (entry.name,)
            for parameter in [name for name in names if name is not None and name != "tools"]:  # InputSpec has --tools
                found.setdefault(parameter, {})[task] = entry
    return dict(sorted(found.items(), key=lambda pair: next(iter(pair[1].values())).name in common))


@cache
def job_parameters() -> dict[str, Field[Any]]:
    """Return {parameter: declaration} of the job's own options and of its input, output and fleet."""
    every = (entry for kind in (InputSpec, OutputSpec, FleetSpec, JobSpec) for entry in fields(kind))
    return {parameter_of(entry): entry for entry in every if entry.metadata}


@cache
def task_parameters(task: str) -> dict[str, Field[Any]]:
    """Return {parameter: declaration} of a task's options, with the options for reading its table."""
    beside = [*column_parameters(task), *BESIDE.get(task, ())]
    own = {name: entry[task] for name, entry in declarations([task]).items()}
    return {name: job_parameters()[name] for name in beside} | own
