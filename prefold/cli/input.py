"""Opens a command's input, and makes the adapter of its records, by the options."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..errors import InputError, JobError
from .model import (
    LazyTasks,
    Options,
    adapter_folders,
    check_tokenizer,
    conversation_settings,
    load_llm,
    open_model,
    sampling_settings,
    uses_chat,
)
from .options import refuse_conversation_options, refuse_other_tasks_options

COLUMN_OPTIONS = (
    "prompt", "messages", "query", "document", "continuation", "tools", "adapter_column", "image", "id_column",
    "keep", "empty",
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """An Input holds a command's records, their adapter, and the model and tasks for them. names: the input's files,
    patterns and folders, as the user wrote them"""

    names: Sequence[str]
    source: Any
    adapter: Any
    tasks: LazyTasks
    checkpoint: Any
    tokenizer: Any

    def load(self, o: Options) -> Any:
        """Returns the LLM of these options, with the image table of the tasks."""
        return load_llm(o, self.checkpoint, self.tokenizer, media=self.tasks.media)


def open_input(
    task: str | None, names: Sequence[str], o: Options, *, stdin: Iterable[bytes] | None = None, weights: bool = True
) -> Input:
    """Opens the files, patterns and folders `names` as one input, and returns it.

    task     the task of a table; None: the input must be OpenAI batch lines, which name their tasks
    stdin    the lines of standard input, where they have been read already
    weights  whether the model's weights are downloaded, as the command is going to read them
    """
    from ..records import TableOptions, open_sources

    _check_json_columns(task, o)
    if task is not None:
        refuse_other_tasks_options((task,), task)
    limits = {name: o[name] for name in ("delimiter", "max_cell_lines") if o.get(name) is not None}
    source = open_sources(names, o["input_format"], TableOptions(**limits), stdin=stdin)
    checkpoint, tokenizer = open_model(o, weights=weights)
    adapter, tasks = make_adapter(task, o, source, checkpoint, tokenizer)
    lazy_tasks = LazyTasks(tasks, o, checkpoint, tokenizer)
    if task is not None:
        lazy_tasks[task]  # options that are wrong are refused before any record is read
    return Input(names, source, adapter, lazy_tasks, checkpoint, tokenizer)


@dataclass(frozen=True)
class Sample:
    """Holds what was drawn of an input, by task: items, and the Work of each. left_out: records, or items of them, that
    were drawn and are unusable."""

    items: dict[str, list[Any]]
    works: dict[str, list[Any]]
    left_out: int


def draw(input: Input, rows: Iterable[Any], count: int, seed: int = 0) -> Sample:
    """Returns about `count` records drawn from all over `rows`.

    Raises JobError where none of the records is usable.
    """
    from ..job.verify import sample_items

    drawn_rows, left_out = sample_items(rows, input.adapter, count, seed=seed)
    by_task: dict[str, list[Any]] = {}
    for task, item in drawn_rows:
        by_task.setdefault(task, []).append(item)
    sample, wrong = Sample({}, {}, left_out), []
    for task, items in by_task.items():
        pairs = list(zip(items, input.tasks[task].prepare(items), strict=True))
        usable = [(item, work) for item, work in pairs if not isinstance(work, InputError)]
        wrong += [work for _, work in pairs if isinstance(work, InputError)]
        if usable:
            sample.items[task], sample.works[task] = (list(column) for column in zip(*usable, strict=True))
    if not sample.works:
        reason = f"; the first: {wrong[0]}" if wrong else ""
        raise JobError(f"none of the records that were drawn from {input.source.name} is usable{reason}")
    return replace(sample, left_out=left_out + len(wrong))


def _check_json_columns(task: str | None, o: Options) -> None:
    """Refuses --json-columns where answers are no JSON objects, or where a record has several."""
    if not o.get("json_columns"):
        return
    if task != "generate":
        raise click.UsageError("--json-columns is for tables that are answered; give a table and --task generate")
    if not o.get("json_schema") and not o.get("json_object"):
        raise click.UsageError("--json-columns needs answers that are JSON objects: add --json-schema or --json-object")
    if (o.get("n") or 1) > 1:
        raise click.UsageError("--json-columns and --n exclude each other: a record has one answer's columns")


def make_adapter(
    task: str | None, o: Options, source: Any, checkpoint: Any, tokenizer: Any
) -> tuple[Any, tuple[str, ...]]:
    """Returns (adapter, the tasks it may ask for). task None: the input must be OpenAI batch lines."""
    from ..api import TASKS
    from ..records.batch import OpenAIBatch, is_batch_line

    first = source.peek() if source.format == "jsonl" else None
    if first is not None and is_batch_line(first) and task is None:
        columns = [f"--{n.removesuffix('_column')}" for n in COLUMN_OPTIONS if o.get(n)]
        if columns:
            raise JobError(f"{columns[0]} is for tables; {source.name} holds OpenAI batch lines")
        refuse_other_tasks_options(TASKS, f"OpenAI batch lines, which {source.name} holds")
        seed = json.dumps(source.identity, sort_keys=True)
        sampling = sampling_settings(o, checkpoint, tokenizer)
        batch = OpenAIBatch(o["model"], seed=seed, sampling=sampling, adapters=tuple(adapter_folders(o)))
        return batch, TASKS
    if task is None:
        is_empty = source.format == "jsonl" and first is None
        wrong = "has no line with a JSON object" if is_empty else "does not begin with an OpenAI batch line"
        raise JobError(
            f"{source.name} {wrong}; for a table say what to do with it: "
            "--task embed, rerank, classify, score or generate"
        )
    check_tokenizer(checkpoint, tokenizer, f"the texts of {source.name}")
    return _table_adapter(task, o, source, first, tokenizer), (task,)


def _table_adapter(task: str, o: Options, source: Any, first: dict[str, Any] | None, tokenizer: Any) -> Any:
    from ..records.fields import Template, read_argument
    from ..records.tables import Columns, default_columns

    if o.get("prompt") and o.get("messages"):
        raise click.UsageError("--prompt and --messages exclude each other")
    if task != "generate" and not o.get("messages"):
        refuse_conversation_options(o, "add --messages COLUMN")
    columns: dict[str, Any] = {
        name: Template(read_argument(o[name]), f"--{name}")
        for name in ("prompt", "query", "document", "continuation")
        if o.get(name)
    }
    if o.get("messages"):
        columns["messages"] = o["messages"]
    have = source.columns if source.columns is not None else first and list(first)
    chat = task == "generate" and uses_chat(o, tokenizer)
    if not columns and chat and "messages" in (have or []):
        columns["messages"] = "messages"
    if task == "generate" and o.get("tools") and not o["tools"].startswith("@"):
        columns["tools"] = o["tools"]
    if o.get("image"):
        if task == "rerank":
            raise click.UsageError("--image is for embed, classify, score and generate")
        columns["image"] = o["image"]
    if o.get("adapter_column"):
        columns["adapter"] = o["adapter_column"]
    elif len(o.get("adapter") or ()) > 1:
        raise JobError("which records use which --adapter? add --adapter-column COLUMN")
    columns |= default_columns(task, have, columns)
    if task == "score" and o.get("image") and "continuation" not in columns:
        raise click.UsageError(
            "--image of score needs continuations, which are what is scored: add --continuation COLUMN"
        )
    kind, own_options = _adapter_kind(task, o)
    reserved = kind.reserved_for(task, has_id=o.get("id_column") is not None)
    used_columns = Columns(**columns, id=o.get("id_column"), **_kept(reserved, o, source.columns))
    empty = o.get("empty") == "keep"
    filled = source.format == "parquet"
    adapter = kind(
        task, used_columns, render_chat(task, o, tokenizer), chat=chat, keep_empty=empty, filled=filled,
        **own_options,
    )  # fmt: skip
    adapter.check(source.columns)
    return adapter


def _adapter_kind(task: str, o: Options) -> tuple[Any, dict[str, bool]]:
    """Return (the class of the adapter, the options that it has of its own)."""
    from ..records.tables import AnswerColumns, LabelColumns, TableAdapter

    if o.get("json_columns"):
        return AnswerColumns, {}
    suffixes = [suffix for suffix in Path(o.get("output") or "").suffixes if suffix != ".gz"]
    suffix, scores = suffixes[-1].lower() if suffixes else "", o.get("scores")
    if task != "classify" or (scores is None and suffix not in (".csv", ".tsv", ".parquet")):
        return TableAdapter, {}
    # The cells of CSV cannot hold objects, and the columns of Parquet can.
    return LabelColumns, {"every": scores == "all", "keeps": scores is None and suffix == ".parquet"}


def _kept(reserved: Collection[str], o: Options, have: list[str] | None) -> dict[str, Any]:
    """Returns `keep` and `keep_all` of Columns, as --keep says. reserved: the names that lines have of their own; have:
    the input's columns, None where not known."""
    from ..records.tables import kept_name

    keep: dict[str, str] = {}
    parts = [part.strip() for text in o.get("keep") or () for part in text.split(",")]
    for part in parts:
        name, equals, column = part.partition("=")
        if part == "*":
            # A column "id" that is the id is in each line already.
            columns = [column for column in have or () if not column == "id" == o.get("id_column")]
            keep |= {kept_name(reserved, column): column for column in columns}
        elif part and not part == "id" == o.get("id_column"):  # which is in each line already
            keep[name.strip()] = (column if equals else part).strip()
    return {"keep": keep, "keep_all": "*" in parts and have is None}


def render_chat(task: str, o: Options, tokenizer: Any) -> Any:
    """Returns the function that turns chat messages into token ids, for a task that does not continue them.

    A conversation whose continuation is scored ends with the beginning of the assistant's turn.
    """
    from ..tasks.base import Inputs
    from ..tasks.conversations import Conversations

    conversations, inputs = Conversations(**conversation_settings(o)), Inputs(tokenizer)
    return partial(conversations.ids, inputs=inputs, add_generation_prompt=task != "embed")
