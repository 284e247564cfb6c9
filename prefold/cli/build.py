"""Out of a command's options: the model's files, the tasks, the adapter, the job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import CheckpointError, JobError

__all__ = ["LazyTasks", "fingerprint", "load_llm", "make_adapter", "open_model", "render_chat", "task_settings"]

Options = dict[str, Any]


def open_model(o: Options) -> tuple[Any, Any]:
    """(checkpoint, tokenizer or None) of --model. Reads no weights."""
    from ..checkpoint import resolve
    from ..model import config_from
    from ..text import load_tokenizer

    checkpoint = resolve(o["model"], load_format=o["load_format"], notify=lambda line: click.echo(line, err=True))
    config_from(checkpoint.config)  # an unsupported model is refused before anything is read
    try:
        return checkpoint, load_tokenizer(checkpoint)
    except CheckpointError:
        if checkpoint.format == "dummy":
            return checkpoint, None  # token ids only
        raise


def load_llm(o: Options, checkpoint: Any) -> Any:
    """The LLM of the options. Imports torch."""
    from ..llm import LLM

    names = ("dtype", "device", "threads", "sharing", "max_batch_rows", "load_format")
    return LLM(o["model"], **{name: o[name] for name in names})


# ---------------------------------------------------------------------------------------------- tasks


class LazyTasks(Mapping[str, Any]):
    """The tasks of a batch, each made when the first record asks for it."""

    def __init__(self, names: tuple[str, ...], o: Options, checkpoint: Any, tokenizer: Any):
        self._names, self._options = names, o
        self._checkpoint, self._tokenizer = checkpoint, tokenizer
        self._tasks: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._tasks:
            from ..tasks import make_task

            settings = task_settings(name, self._options)
            self._tasks[name] = make_task(name, self._checkpoint, self._tokenizer, **settings)
        return self._tasks[name]

    def replace(self, name: str, task: Any) -> None:
        self._tasks[name] = task

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def task_settings(task: str, o: Options) -> dict[str, Any]:
    """The keyword arguments for make_task: those that were given."""
    from ..job.fields import read_argument

    names = {
        "embed": ("pooling", "normalize", "dimensions", "prompt_name", "instruction"),
        "rerank": ("instruction", "raw_scores", "template"),
        "classify": ("instructions", "normalization", "calibrate", "template"),
        "score": (),
    }
    settings = {name: o[name] for name in names[task] if o.get(name) not in (None, False) or name == "normalize"}
    if settings.get("normalize", 0) is None:
        del settings["normalize"]
    for name in {"instruction", "instructions", "template"} & set(settings):
        settings[name] = read_argument(settings[name])
    if task == "rerank" and o.get("words"):
        settings["words"] = tuple(word.strip() for word in o["words"].split(","))
    if task == "classify":
        settings |= _labels(o)
        if o.get("examples"):
            settings["examples"] = _examples(o["examples"])
    return settings | {name: o[name] for name in ("max_length", "truncate") if o.get(name)}


def _labels(o: Options) -> dict[str, Any]:
    if o.get("labels") and o.get("labels_file"):
        raise click.UsageError("--labels and --labels-file exclude each other")
    if o.get("labels"):
        return {"labels": [label.strip() for label in o["labels"].split(",") if label.strip()]}
    if not o.get("labels_file"):
        return {}
    text = _read(o["labels_file"])
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return {"labels": json.loads(text)}
        except ValueError as error:
            raise JobError(f"{o['labels_file']} is not valid JSON: {error}") from None
    return {"labels": [line.strip() for line in text.splitlines() if line.strip()]}


def _examples(name: str) -> list[tuple[str, str]]:
    from ..errors import InputError
    from ..job.fields import as_text, lookup
    from ..job.source import open_source

    out = []
    for row in open_source(name).rows():
        try:
            if row.error is not None:
                raise row.error
            data = row.data or {}
            out.append((as_text(lookup(data, "text"), "text"), as_text(lookup(data, "label"), "label")))
        except InputError as error:
            raise JobError(f"example {row.number} of {name}: {error}") from None
    return out


def _read(name: str) -> str:
    try:
        return _read_bytes(name).decode("utf-8")
    except UnicodeDecodeError:
        raise JobError(f"{name} is not valid UTF-8") from None


def _read_bytes(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise JobError(f"cannot read {name}: {error.strerror}") from None


# ------------------------------------------------------------------------------------------- adapters

_COLUMN_OPTIONS = ("prompt", "messages", "query", "document", "continuation", "id_column", "keep")


def make_adapter(task: str | None, o: Options, source: Any, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """(adapter, the tasks it may ask for). task None: told from the input, which must be batch lines."""
    from ..job.openai import LANES, OpenAIBatch, is_batch_line

    first = source.peek() if source.format == "jsonl" else None
    if first is not None and is_batch_line(first) and task is None:
        given = [f"--{n.removesuffix('_column')}" for n in _COLUMN_OPTIONS if o.get(n)]
        if given:
            raise JobError(f"{given[0]} is for tables; {source.name} holds OpenAI batch lines")
        seed = json.dumps(source.identity, sort_keys=True)
        return OpenAIBatch(o["model"], seed=seed), tuple(dict.fromkeys(LANES.values()))
    if task is None:
        raise JobError(
            f"{source.name} does not begin with an OpenAI batch line; for a table say what to do with it: "
            "--task embed, rerank, classify or score"
        )
    return _table_adapter(task, o, source, first, tokenizer), (task,)


def _table_adapter(task: str, o: Options, source: Any, first: dict[str, Any] | None, tokenizer: Any) -> Any:
    from ..job.fields import Template, read_argument
    from ..job.tables import Columns, TableAdapter, default_columns

    if o.get("prompt") and o.get("messages"):
        raise click.UsageError("--prompt and --messages exclude each other")
    columns: dict[str, Any] = {
        name: Template(read_argument(o[name]), f"--{name}")
        for name in ("prompt", "query", "document", "continuation")
        if o.get(name)
    }
    if o.get("messages"):
        if tokenizer is None:
            raise JobError("--messages needs a chat template, and the model has no tokenizer; give --prompt")
        columns["messages"] = o["messages"]
    have = source.columns if source.columns is not None else first and list(first)
    columns |= default_columns(task, have, columns)
    keep = dict(_kept(part.strip()) for part in o["keep"].split(",")) if o.get("keep") else {}
    adapter = TableAdapter(task, Columns(**columns, id=o.get("id_column"), keep=keep), render_chat(task, tokenizer))
    adapter.check(source.columns)
    return adapter


def _kept(part: str) -> tuple[str, str]:
    """(name in the output, column) of COLUMN or NAME=COLUMN."""
    name, equals, column = part.partition("=")
    return (name.strip(), column.strip()) if equals else (part, part)


def render_chat(task: str, tokenizer: Any) -> Any:
    """Chat messages to token ids. A text to be continued ends with what introduces the assistant's turn."""

    def render(messages: list[Any]) -> Any:
        text = tokenizer.render_chat(messages, add_generation_prompt=task != "embed")
        return tokenizer.encode(text, special=False)

    return render


# ---------------------------------------------------------------------------------------- fingerprint


def fingerprint(task: str | None, o: Options, source: Any, checkpoint: Any) -> dict[str, Any]:
    """What makes a job this one: its input, its model, its task, and the options that change a result."""
    from ..job.fields import read_argument

    options: dict[str, Any] = {}
    for name in (*_COLUMN_OPTIONS, *_RESULT_OPTIONS):
        value = o.get(name)
        if value is None or (value is False and name != "normalize"):
            continue
        if name in ("examples", "labels_file"):
            value = hashlib.blake2b(_read_bytes(value), digest_size=8).hexdigest()
        options[name] = read_argument(value) if isinstance(value, str) else value
    return {
        "input": source.identity,
        "task": task or "openai batch",
        "model": model_identity(checkpoint),
        "dtype": o["dtype"],
        "options": options,
    }


_RESULT_OPTIONS = (
    "pooling", "normalize", "dimensions", "prompt_name", "instruction", "words", "raw_scores", "template",
    "labels", "labels_file", "instructions", "examples", "normalization", "calibrate", "max_length", "truncate",
)  # fmt: skip


def model_identity(checkpoint: Any) -> dict[str, Any]:
    """Name, format, and a digest of the config and of the weights' file names and sizes."""
    files = []
    if checkpoint.path is not None:
        paths = sorted(checkpoint.path.glob("*.safetensors")) if checkpoint.path.is_dir() else [checkpoint.path]
        files = [(path.name, path.stat().st_size) for path in paths]
    content = json.dumps([checkpoint.config, files], sort_keys=True, default=str)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return {"name": checkpoint.name, "format": checkpoint.format, "digest": digest}
