"""Convert a parsed command to a JobSpec. No other file reads the command-line options of jobs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from ..errors import InputError, JobError
from ..spec.calibration import Calibration
from ..spec.fields import SpecError, kind_of, parameter_of
from ..spec.files import as_utf8, read_argument, read_text
from ..spec.job import FleetSpec, InputSpec, JobSpec, OutputSpec
from ..spec.model import GROUPS, CacheOptions, ModelSpec, model_fields, model_keywords, model_options
from ..spec.server import ServerSpec
from ..spec.task import OPTIONS, ConversationOptions, TaskSpec, cli_names, options_of

T = TypeVar("T")
Values = Mapping[str, Any]  # {command-line parameter: value}; other files get only specs
# Parameters for the form of generated text; at most one may be given.
FORMATS = ("json_schema", "json_object", "regex", "choice", "grammar")
_TEMPLATES = ("prompt", "state", "query", "document", "continuation")


def takes_job(task: str | None = None, *, own: Collection[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that calls a function with a JobSpec instead of the options of a command.

    Args:
        task: The task of the command; None: --task names it, if the command has that option.
        own: Parameters to pass to the function unchanged, in addition to the parameters in its signature.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        named = {*inspect.signature(function).parameters, *own}

        @wraps(function)
        def command(**values: Any) -> Any:
            source = click.get_current_context().get_parameter_source
            asked = {name: value for name, value in values.items() if name not in named}
            given = {name for name in asked if source(name) is not ParameterSource.DEFAULT}
            try:
                spec = job_spec(asked, given, task)
                return function(spec, **{name: values[name] for name in values if name in named})
            except SpecError as error:
                raise click.UsageError(str(error)) from None

        return command

    return decorate


def job_spec(values: Values, given: Collection[str] | None = None, task: str | None = None) -> JobSpec:
    """Return the spec of a job. Read the files that options name.

    Args:
        values: {command-line parameter: value}; a missing parameter has its default.
        given: The parameters that the user gave (default: all in `values`).
        task: The task; None: `values["task"]`.
    """
    read = _Reader()
    named = values.get("task")
    texts = {name: read(name, values[name]) for name in _TEMPLATES if values.get(name) is not None}
    tools = values.get("tools")
    column = None if tools is not None and tools.startswith("@") else tools
    model = model_spec(values, read, texts_alone=named is not None)
    task, conversations = task or named, _conversations(values, read)
    adapter = _only_adapter(model, values)
    tasks = {name: _task_spec(name, values, read, adapter) for name in ([task] if task else OPTIONS)}
    if values.get("gold_file") is not None:
        read.note("gold_file", values["gold_file"])
    return _part(
        JobSpec, values,
        model=model,
        task=task,
        tasks=tasks,
        conversations=conversations,
        input=_part(InputSpec, values, names=tuple(values.get("input") or ()), tools=column, **texts),
        output=_part(OutputSpec, values),
        fleet=_part(FleetSpec, values),
        given=frozenset(values if given is None else given),
        side_files=tuple(read.files),
    )  # fmt: skip


def server_spec(values: Values) -> ServerSpec:
    """Return the spec of a server, from the options of `prefold serve`."""
    names = [name for name in ServerSpec.__dataclass_fields__ if name in values]
    return ServerSpec(**{name: values[name] for name in names})


def _part(kind: type[T], values: Values, **own: Any) -> T:
    """Return a dataclass with the values of its parameters; `own` overrides them."""
    declared = [entry for entry in fields(cast(Any, kind)) if entry.metadata]
    taken = {entry.name: values.get(parameter_of(entry)) for entry in declared}
    return kind(**{name: value for name, value in taken.items() if value is not None} | own)


class _Reader:
    """A reader of the files that options name.

    Attributes:
        files: (flag, path) of each file.
    """

    def __init__(self) -> None:
        self.files: list[tuple[str, str]] = []
        self._texts: dict[str, str] = {}  # {value of an option: its text}, because a pipe can be read only once

    def __call__(self, name: str, text: str) -> str:
        """Return the value of a text option. @FILE means the text of the file, without its last newline."""
        if text not in self._texts:
            self._texts[text] = read_argument(text)
            if text.startswith("@"):
                self.note(name, text[1:])
        return self._texts[text]

    def note(self, name: str, path: str) -> str:
        """Add the file `path`, which the option `name` names, to `files`. Return the path."""
        self.files.append((f"--{name.replace('_', '-')}", path))
        return path


# ---------------------------------------------------------------------------------------------- the model


def model_spec(values: Values, read: _Reader | None = None, *, texts_alone: bool = False) -> ModelSpec:
    """Return the spec of a model. `texts_alone`: load no vision tower unless an option names a column with images."""
    read = read or _Reader()
    keywords: dict[str, Any] = {}
    for name, option in model_fields(ModelSpec, *GROUPS.values()).items():
        value = values.get(name)
        if value is not None and value is not False and value != ():
            keywords[option.name] = value
    if values.get("adapter"):
        keywords["adapters"] = adapter_folders(values["adapter"])
    if texts_alone and not (values.get("image") or values.get("messages")):
        keywords["tower"] = False
    options = {option.name: values[name] for name, option in model_fields(CacheOptions).items() if name in values}
    settings = {name: value for name, value in options.items() if value is not None}
    # A sorted job never returns to a finished prefix, but a stream may.
    policy: Any = values.get("cache") or ("lru" if settings or values.get("stream") else "off")
    if "shifted" in settings:
        read.note("cache_reuse_shifted", settings["shifted"])
        if policy == "off":
            raise SpecError("--cache-reuse-shifted needs a cache; leave out --cache off", field="cache")
    keywords["cache"] = CacheOptions(policy=policy, **settings) if policy != "off" and settings else policy
    return model_options(model_keywords(keywords))


def adapter_folders(texts: Sequence[str]) -> dict[str, str]:
    """Return {name: folder} of --adapter."""
    out = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise SpecError(f"--adapter {text!r}: write NAME=FOLDER", field="adapter")
        if not Path(folder).is_dir():
            raise JobError(f"--adapter {name}: there is no folder {folder}")
        out[name] = folder
    return out


def _only_adapter(model: ModelSpec, values: Values) -> str | None:
    names = [*(model.adapters or {})]
    return names[0] if len(names) == 1 and not values.get("adapter_column") else None


# ---------------------------------------------------------------------------------------------- tasks


def _task_spec(task: str, values: Values, read: _Reader, adapter: str | None) -> TaskSpec:
    """Return the options of a task from the command-line parameters."""
    settings: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
    for option in fields(OPTIONS[task]):
        parameters = cli_names(task)[option.name]
        if convert := _CONVERTED.get(option.name):
            settings |= convert({name: values[name] for name in parameters if values.get(name) is not None}, read)
        elif option.name != "adapter" and parameters:
            settings |= _plain([option], values, read)
    return options_of(task, settings)


def _conversations(values: Values, read: _Reader) -> ConversationOptions:
    own = [option for option in fields(ConversationOptions) if option.name not in _CONVERTED]
    variables = _CONVERTED["chat_template_kwargs"](values, read)
    return ConversationOptions(**_plain(own, values, read) | variables)


def _plain(options: Sequence[Any], values: Values, read: _Reader) -> dict[str, Any]:
    """Return {option: value} of options that need no conversion except @FILE.

    Empty texts of conversation options are left out.
    """
    found = {}
    for option in options:
        value = values.get(option.name)
        if value is not None and not (value == "" and hasattr(ConversationOptions, option.name)):
            found[option.name] = read(option.name, value) if kind_of(option) is str else value
    return found


def _max_tokens(given: Values, read: _Reader) -> dict[str, Any]:
    return {"max_tokens": given["max_tokens"] or None} if given else {}


def _truncate(given: Values, read: _Reader) -> dict[str, Any]:
    kind = given.get("truncate_side") or given.get("truncate")
    return {"truncate": kind} if kind else {}


def _tools(given: Values, read: _Reader) -> dict[str, Any]:
    tools = given.get("tools", "")
    return {"tools": _json_option(read("tools", tools), "--tools", list)} if tools.startswith("@") else {}


def _words(given: Values, read: _Reader) -> dict[str, Any]:
    return {"words": tuple(word.strip() for word in given["words"].split(","))} if given.get("words") else {}


def _template_variables(given: Values, read: _Reader) -> dict[str, Any]:
    text = given.get("chat_template_kwargs")
    return {"chat_template_kwargs": _json_option(text, "--chat-template-kwargs", dict)} if text else {}


def _stop(given: Values, read: _Reader) -> dict[str, Any]:
    return {"stop": tuple(map(as_utf8, given["stop"]))} if given.get("stop") else {}


def _stop_ids(given: Values, read: _Reader) -> dict[str, Any]:
    return {"stop_ids": given["stop_id"]} if given.get("stop_id") else {}


def _logit_bias(given: Values, read: _Reader) -> dict[str, Any]:
    return {"logit_bias": [_bias(text) for text in given["logit_bias"]]} if given.get("logit_bias") else {}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        message = f"--logit-bias {text!r} is not TOKEN_ID=NUMBER, such as 42=-5"
        raise SpecError(message, field="logit_bias") from None


def _labels(given: Values, read: _Reader) -> dict[str, Any]:
    if given.get("labels") and given.get("labels_file"):
        raise SpecError("--labels and --labels-file exclude each other", field="labels")
    if given.get("labels"):
        return {"labels": [label.strip() for label in as_utf8(given["labels"]).split(",") if label.strip()]}
    if not given.get("labels_file"):
        return {}
    name = read.note("labels_file", given["labels_file"])
    text = read_text(name)
    if text.lstrip()[:1] in ("[", "{"):
        return {"labels": _json_option(text, name)}
    labels = [line.strip() for line in text.split("\n") if line.strip()]
    if not labels:
        raise JobError(f"{name} contains no labels; write one per line")
    return {"labels": labels}


def _examples(given: Values, read: _Reader) -> dict[str, Any]:
    from ..jobs.source import open_source
    from ..text.fields import as_text, lookup

    if not given.get("examples"):
        return {}
    out, name = [], read.note("examples", given["examples"])
    for row in open_source(name).records():
        try:
            if row.error is not None:
                raise row.error
            data = row.data or {}
            out.append((as_text(lookup(data, "text"), "text"), as_text(lookup(data, "label"), "label")))
        except InputError as error:
            raise JobError(f"example {row.number} of {name}: {error}") from None
    if not out:
        raise JobError(
            f"{name} contains no examples; write rows with the columns text and label, or leave --examples out"
        )
    return {"examples": out}


def _questions(given: Values, read: _Reader) -> dict[str, Any]:
    if not (text := given.get("questions")):
        return {}
    name = "--questions"
    if text.lstrip()[:1] not in ("{", "["):  # a file; the @ is optional
        name = read.note("questions", text.removeprefix("@"))
        text = read_text(name)
    import yaml

    try:  # JSON is YAML
        questions = json.loads(text) if text.lstrip()[:1] in ("{", "[") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise JobError(f"{name} is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    return {"questions": questions}


def _calibration(given: Values, read: _Reader) -> dict[str, Any]:
    if not (name := given.get("calibration")):
        return {}
    # As JSON, because the journal compares its fields.
    return {"calibration": Calibration.load(read.note("calibration", name.removeprefix("@"))).to_dict()}


def _grammar(given: Values, read: _Reader) -> dict[str, Any]:
    formats = [name for name in FORMATS if given.get(name)]
    if not formats:
        return {}
    if len(formats) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in formats[:2])
        raise SpecError(f"{first} and {second} exclude each other", field=formats[1])
    kind, value = formats[0], given[formats[0]]
    if kind == "json_schema":
        inline = value.lstrip()[:1] == "{"
        schema = value if inline else read_text(read.note(kind, value.removeprefix("@")))
        return {"grammar": {"json_schema": _json_option(schema, "--json-schema", dict)}}
    if kind == "json_object":
        return {"grammar": {"json": True}}
    if kind == "choice":
        return {"grammar": {"choice": tuple(map(as_utf8, value))}}
    return {"grammar": {"regex" if kind == "regex" else "lark": read(kind, value)}}


# {option with its own syntax: function from its given parameters to {option: value}}.
_CONVERTED: dict[str, Callable[[Values, _Reader], dict[str, Any]]] = {
    "max_tokens": _max_tokens, "truncate": _truncate, "tools": _tools, "words": _words, "labels": _labels,
    "examples": _examples, "questions": _questions, "stop": _stop, "stop_ids": _stop_ids, "logit_bias": _logit_bias,
    "grammar": _grammar, "calibration": _calibration, "chat_template_kwargs": _template_variables,
}  # fmt: skip


def _json_option(text: str, option: str, kind: type | None = None) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise JobError(f"{option} is not valid JSON: {error}") from None
    if kind is not None and not isinstance(value, kind):
        raise JobError(f"{option} is not a JSON {'object' if kind is dict else 'list'}")
    return value
