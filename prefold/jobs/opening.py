"""Open a job by its spec: the input with its adapter, the output with its journal, and the engine."""

from __future__ import annotations

import errno
import fnmatch
import glob
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.identity import folder_digest, model_identity
from ..cluster.backends import Backend, backend_for
from ..errors import InputError, JobError
from ..spec.fields import SpecError
from ..spec.files import read_bytes, same_file
from ..spec.job import COLUMNS, JobSpec
from ..spec.job import TASKS as JOB_TASKS
from ..spec.model import ModelSpec
from ..tasks.kept import KeptAnswers, open_kept
from ..tasks.make import own_adapters
from .columns import TableForm
from .journal import journal_path, recorded_job
from .models import LazyTasks, Notify, batch_sampling, check_tokenizer, load_fleet, load_llm, open_model, uses_chat
from .output import OutputOptions, open_output, partial_path
from .reader import Job
from .source import check_grown

if TYPE_CHECKING:
    from .review import Review


@dataclass(frozen=True)
class Input:
    """The opened input of a job: its records, their adapter, and the model and tasks for them."""

    spec: JobSpec
    backend: Backend
    source: Any
    adapter: Any
    tasks: LazyTasks
    checkpoint: Any
    tokenizer: Any

    @property
    def is_fleet(self) -> bool:
        """Return whether replicas compute the job: on Ray, on servers, or in another engine."""
        return self.spec.fleet.ray is not None or bool(self.backend.where)

    def load(self, model: ModelSpec | None = None) -> Any:
        """Return the LLM of the job, or of another spec, with the image table of the tasks."""
        return load_llm(model or self.spec.model, self.checkpoint, self.tokenizer, media=self.tasks.media)


def open_input(spec: JobSpec, notify: Notify, *, stdin: Iterable[bytes] | None = None, weights: bool = True) -> Input:
    """Open the files, patterns and folders of a job as one input. Raise SpecError for options that conflict.

    Args:
        spec: The job.
        notify: Called with lines for the user, such as "downloading ...".
        stdin: The lines of standard input, if they were read already.
        weights: Download the model's weights, because the command needs them.
    """
    from . import TableOptions, open_sources

    spec.check()
    backend = backend_for(spec)
    limits: dict[str, Any] = {"delimiter": spec.input.delimiter, "max_cell_lines": spec.input.max_cell_lines}
    table = TableOptions(**{name: value for name, value in limits.items() if value is not None})
    source = open_sources(spec.input.names, spec.input.format, table, stdin=stdin)
    checkpoint, tokenizer = open_model(spec, backend, notify, weights=weights)
    adapter, names = make_adapter(spec, source, checkpoint, tokenizer)
    tasks = LazyTasks(names, spec, checkpoint, tokenizer)
    if spec.task is not None:
        tasks[spec.task]  # refuse wrong options before any record is read
    return Input(spec, backend, source, adapter, tasks, checkpoint, tokenizer)


@dataclass(frozen=True)
class Sample:
    """A sample of an input, by task."""

    items: dict[str, list[Any]]
    works: dict[str, list[Any]]  # the Work of each item
    left_out: int  # drawn records and items that are unusable


def draw(input: Input, rows: Iterable[Any], count: int, seed: int = 0) -> Sample:
    """Return about `count` records, drawn evenly from `rows`. Raise JobError if none of them is usable."""
    from .verify import sample_items

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


def make_adapter(spec: JobSpec, source: Any, checkpoint: Any, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """Return (adapter, names of the tasks that records may need).

    Without a task, the input must be OpenAI batch lines.
    """
    from ..wire import TASKS
    from .batch import OpenAIBatch, is_batch_line

    task = spec.task
    first = source.peek() if source.format == "jsonl" else None
    if first is not None and is_batch_line(first) and task is None:
        columns = [f"--{name.removesuffix('_column')}" for name in COLUMNS if name in spec.given]
        if columns:
            raise JobError(f"{columns[0]} is for tables; {source.name} holds OpenAI batch lines")
        spec.check_tasks(TASKS, f"OpenAI batch lines, which {source.name} holds")
        seed = json.dumps(source.identity, sort_keys=True)
        adapters = tuple(own_adapters(checkpoint, tokenizer, spec.model.adapters))
        sampling = batch_sampling(spec, checkpoint)
        return OpenAIBatch(spec.model_name, seed=seed, sampling=sampling, adapters=adapters), TASKS
    if task is None:
        is_empty = source.format == "jsonl" and first is None
        wrong = "has no line with a JSON object" if is_empty else "does not begin with an OpenAI batch line"
        raise JobError(
            f"{source.name} {wrong}; for a table say what to do with it: "
            f"--task {', '.join(JOB_TASKS[:-1])} or {JOB_TASKS[-1]}"
        )
    check_tokenizer(checkpoint, tokenizer, f"the texts of {source.name}")
    return _table_adapter(task, spec, source, first, tokenizer), (task,)


def _table_adapter(task: str, spec: JobSpec, source: Any, first: dict[str, Any] | None, tokenizer: Any) -> Any:
    from ..tasks.rows import Columns, default_columns
    from ..text.fields import Template

    table = spec.input
    texts = {"prompt": table.prompt, "query": table.query, "document": table.document}
    texts |= {"state": table.state, "continuation": table.continuation}
    columns: dict[str, Any] = {name: Template(text, f"--{name}") for name, text in texts.items() if text}
    if table.messages:
        columns["messages"] = table.messages
    have = source.columns if source.columns is not None else None if first is None else list(first)
    chat = task == "generate" and uses_chat(spec, tokenizer)
    if not columns and chat and "messages" in (have or []):
        columns["messages"] = "messages"
    if task == "generate" and table.tools:
        columns["tools"] = table.tools
    if table.image:
        columns["image"] = table.image
    if table.adapter_column:
        columns["adapter"] = table.adapter_column
    elif len(spec.model.adapters or ()) > 1:
        raise JobError("there are several --adapter: add --adapter-column COLUMN to name the adapter of each record")
    columns |= default_columns(task, have, columns)
    if task == "score" and table.image and "continuation" not in columns:
        message = "--image with the task score needs continuations to score: add --continuation COLUMN"
        raise SpecError(message, field="image")
    kind, own_options = _adapter_kind(task, spec)
    if task == "decide":
        from .gold import gold_of

        own_options |= {"gold": (gold := gold_of(spec)), "shows": _marks(spec)}
        columns["gold"] = () if gold is None else gold.paths
    reserved = kind.reserved_for(task, has_id=table.id_column is not None)
    used_columns = Columns(**columns, id=table.id_column, **_kept(reserved, spec, source.columns))
    adapter = kind(
        task, used_columns, render_chat(task, spec, tokenizer), chat=chat, keep_empty=table.empty == "keep",
        filled=source.format == "parquet", **own_options,
    )  # fmt: skip
    adapter.check(source.columns)
    return adapter


def _marks(spec: JobSpec) -> bool:
    """Return whether decisions say which answers are doubtful."""
    return not spec.given.isdisjoint(("review_below", "calibration"))


def _adapter_kind(task: str, spec: JobSpec) -> tuple[Any, dict[str, Any]]:
    """Return (the class of the adapter, the options that only this class has)."""
    from .tables import AnswerColumns, DecisionColumns, LabelColumns, TableAdapter

    if spec.output.json_columns:
        return AnswerColumns, {}
    suffixes = [suffix for suffix in Path(spec.output.path or "").suffixes if suffix != ".gz"]
    suffix, scores = suffixes[-1].lower() if suffixes else "", spec.output.scores
    kind = {"classify": LabelColumns, "decide": DecisionColumns}.get(task)
    if kind is None or (scores is None and suffix not in (".csv", ".tsv", ".parquet")):
        return TableAdapter, {}
    # CSV cells cannot hold objects, Parquet columns can.
    return kind, {"every": scores == "all", "keeps": scores is None and suffix == ".parquet"}


def _kept(reserved: Collection[str], spec: JobSpec, have: list[str] | None) -> dict[str, Any]:
    """Return `keep` and `keep_all` of Columns, from --keep.

    Args:
        reserved: Names of the line's own fields.
        have: The input's columns, None if unknown.
    """
    from ..tasks.rows import kept_name

    keep: dict[str, str] = {}
    own_id = spec.input.id_column
    parts = [part.strip() for text in spec.input.keep for part in text.split(",")]
    for part in parts:
        name, equals, column = part.partition("=")
        if part == "*":
            # If --id names the column "id", each line has it already.
            columns = [column for column in have or () if not column == "id" == own_id]
            keep |= {kept_name(reserved, column): column for column in columns}
        elif part and not part == "id" == own_id:  # also in each line already
            keep[name.strip()] = (column if equals else part).strip()
    return {"keep": keep, "keep_all": "*" in parts and have is None}


def render_chat(task: str, spec: JobSpec, tokenizer: Any) -> Any:
    """Return the function from chat messages to token ids, for a task that does not continue them.

    If a conversation is followed by a scored continuation, it ends with the header of the assistant's turn.
    """
    from ..tasks.base import Inputs
    from ..tasks.conversations import Conversations

    options = {entry.name: getattr(spec.conversations, entry.name) for entry in fields(spec.conversations)}
    conversations, inputs = Conversations(**options), Inputs(tokenizer)
    return partial(conversations.ids, inputs=inputs, add_generation_prompt=task != "embed")


def open_job(input: Input, notify: Notify) -> Job:
    """Return the job of an input.

    Args:
        notify: Called with lines about replicas.
    """
    from ..tasks.run import calibrated

    spec, tasks = input.spec, input.tasks
    path = spec.output.file
    _check_paths(path, input)
    seed = _seed(path, input) if "generate" in tasks else None

    def load() -> Any:
        if input.is_fleet:
            llm: Any = load_fleet(spec, input.backend, input.checkpoint, input.tokenizer, notify, tasks.media)
        else:
            llm = input.load(replace(spec.model, answers=None))  # the job keeps the answers, not the LLM
        if "classify" in tasks:
            tasks.replace("classify", calibrated(llm.engine, tasks["classify"]))
        return llm

    kept = None if spec.model.answers is None else _kept_answers(input, notify)
    output = open_output(
        OutputOptions(
            path,
            keep_order=spec.output.keep_order,
            overwrite=spec.output.overwrite,
            only_resume=spec.output.resume,
            limit=spec.input.limit,
            grown=partial(check_grown, input.source) if spec.output.grown else None,
            form=TableForm.of(input.adapter, input.source, tasks[spec.task].example if spec.task is not None else None),
        ),
        fingerprint(input, seed),
    )
    review = _review(input)
    if review is not None:
        try:
            review.check(ended=output.ended)
        except JobError:
            output.close()
            raise
    return Job(
        input.source, input.adapter, tasks, load, output, limit=spec.input.limit, window=spec.input.window,
        streaming=spec.input.stream, early=input.is_fleet, collect=bool(spec.output.report), seed=seed or 0,
        has_seed=spec.seed is not None, kept=kept, review=review,
    )  # fmt: skip


def _kept_answers(input: Input, notify: Notify) -> KeptAnswers | None:
    """Return the kept answers in the folder of --answers."""
    from ..model.machine import choose_device, choose_dtype

    model, config = input.spec.model.for_job(), input.checkpoint.config
    device = choose_device(model.device)
    model = replace(model, adapters=own_adapters(input.checkpoint, input.tokenizer, model.adapters) or None)
    return open_kept(model, input.checkpoint, choose_dtype(model.dtype, config, device), device, notify)


def _review(input: Input) -> Review | None:
    """Return the Review of a job of decisions with true answers or thresholds, or None for any other job."""
    gold = getattr(input.adapter, "gold", None)
    if input.spec.task != "decide" or (gold is None and not _marks(input.spec)):
        return None
    from .review import Review

    return Review(input.spec, input.tasks["decide"], gold, input.checkpoint)


def _seed(path: Path | None, input: Input) -> int:
    """Return the job's seed: from the options, else from the journal, else a new seed."""
    from ..tasks.run import draw_seed

    if input.spec.seed is not None:
        return input.spec.seed
    recorded = recorded_job(path).get("seed") if path is not None and not input.spec.output.overwrite else None
    return recorded if isinstance(recorded, int) else draw_seed()


def fingerprint(input: Input, seed: int | None) -> dict[str, Any]:
    """Return the fingerprint of a job: input, model, task, and the options that change a result.

    Args:
        seed: The seed of sampling; None: nothing is sampled.
    """
    spec = input.spec
    options = spec.identity()
    if "examples" in options:
        options["examples"] = _digest(json.dumps(options["examples"]).encode())
    if "cache_reuse_shifted" in options:
        options["cache_reuse_shifted"] = _digest(read_bytes(options["cache_reuse_shifted"]))
    adapters = own_adapters(input.checkpoint, input.tokenizer, spec.model.adapters)
    if adapters:
        options["adapter"] = {name: folder_digest(Path(folder)) for name, folder in adapters.items()}
    if "gold_file" in options:
        options["gold_file"] = _digest(read_bytes(options["gold_file"]))
    parts = {
        "input": input.source.identity,
        "format": input.source.format,
        "task": spec.task or "openai batch",
        "model": model_identity(input.checkpoint),
        "dtype": spec.model.dtype,
        "options": options,
        **({} if seed is None else {"seed": seed}),
    }
    return json.loads(json.dumps(parts))  # lists instead of tuples, so that it equals the journal's copy


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _check_paths(path: Path | None, input: Input) -> None:
    """Raise JobError if a file of the job would replace another file, or cannot be written."""
    spec, report = input.spec, input.spec.output.report
    for folder in (Path(os.path.realpath(name)) for name in spec.input.names if os.path.isdir(name)):
        if path is not None and Path(os.path.realpath(path)).is_relative_to(folder):
            raise JobError(f"the output {path} would become part of the input {folder.name}; write it elsewhere")
    for name in spec.input.names:
        if path is not None and glob.has_magic(name) and not os.path.exists(name) and _matches(path, name):
            raise JobError(f"the output {path} would become part of the input {name}; write it elsewhere")
    used: list[tuple[Path | str, str]] = [(path, "input") for path in input.source.paths]
    used += [(name, f"file of {flag}") for flag, name in spec.side_files]
    made: list[tuple[Path | str, str]] = []
    if path is not None:
        made = [(path, "output"), (partial_path(path), "partial output"), (journal_path(path), "journal")]
    made += [(report, "report")] if report else []
    made += [(name, role) for name, role in _written(spec) if name is not None]
    for place, (file, role) in enumerate(made):
        for other, other_role in (*used, *made[:place]):
            if same_file(file, other):
                raise JobError(f"the {role} {file} would replace the {other_role} {other}; give another name")
    for written in (path, report, *(name for name, _ in _written(spec))):
        if written is not None and written != "-":
            _check_place(Path(written))


def _written(spec: JobSpec) -> list[tuple[Path | str | None, str]]:
    """Return (path, role) of the files that the end of a job of decisions writes."""
    from .review import review_path

    return [(review_path(spec), "review file"), (spec.output.save_calibration, "calibration")]


def _matches(path: Path, pattern: str) -> bool:
    """Return whether a pattern would match this path."""

    def match(parts: Sequence[str], parts_of_pattern: Sequence[str]) -> bool:
        if not parts_of_pattern:
            return not parts
        if parts_of_pattern[0] == "**":
            return any(match(parts[at:], parts_of_pattern[1:]) for at in range(len(parts) + 1))
        return bool(parts) and fnmatch.fnmatch(parts[0], parts_of_pattern[0]) and match(parts[1:], parts_of_pattern[1:])

    return match(*(Path(os.path.abspath(name)).parts for name in (path, pattern)))


def _check_place(path: Path) -> None:
    """Raise JobError now if a file could not be written at the end of the job."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise JobError(f"there is no folder {path.parent} for {path}; create it first")
    if path.is_dir():
        raise JobError(f"{path} is a folder; name a file in it")
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise JobError(f"{path} is a loop of symbolic links; give another name") from None
    if not os.access(folder, os.W_OK):
        raise JobError(f"the folder {path.parent} is not writable; write {path.name} elsewhere")
