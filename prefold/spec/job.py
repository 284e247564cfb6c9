"""A job as a whole, and which of its options belong to which task."""

# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any

from .fields import SpecError, flags_of, option, parameter_of
from .fleet import FleetSpec
from .input import InputSpec
from .model import ModelSpec
from .output import OutputSpec
from .task import OPTIONS, ConversationOptions, TaskSpec, cli_names

DEFAULT_MODEL = "smollm2-135m"
NUMERIC_TASKS = ("embed", "rerank", "classify", "score")  # the tasks whose results are numbers
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
        if self.task is None:
            return
        self.check_tasks((self.task,), self.task)
        if self.input.prompt and self.input.messages:
            raise SpecError("--prompt and --messages exclude each other", field="messages")
        if self.task != "generate" and not self.input.messages:
            self.check_conversations("add --messages COLUMN")
        if self.task == "rerank" and self.input.image:
            raise SpecError("--image is for embed, classify, score and generate", field="image")

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
    "rerank": ("query", "document"),
    "score": ("prompt", "continuation"),
    "generate": ("prompt", "tools"),
}
_OF_ALL_COLUMNS = (
    "adapter_column", "image", "media_folder", "id_column", "keep", "empty", "input_format", "delimiter",
    "max_cell_lines",
)  # fmt: skip
# Parameters of a task's command that are no options of the task itself.
BESIDE = {"classify": ("scores",), "generate": ("chat", "recommended", "seed", "json_columns")}
# Parameters that name a column, or say what is read from columns.
COLUMNS = (
    "prompt", "messages", "query", "document", "continuation", "tools", "adapter_column", "image", "id_column", "keep",
    "empty",
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
        if task not in ("rerank", "generate"):  # those that read conversations, too
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
