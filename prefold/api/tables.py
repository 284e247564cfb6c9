"""Run a method of LLM on a table, and add its answers as columns. The result is a table of the same kind.

Tables are pandas and Polars DataFrames, PyArrow Tables, RecordBatches and RecordBatchReaders, and DuckDB relations.
Values keep their types. Data frames are read through narwhals. Importing this module imports no table library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import numpy as np

from ..errors import InputError, JobError, MissingExtraError
from ..tasks import Task, Work
from ..tasks.base import attempt
from ..tasks.results import PREFIX, Answer, Relevance
from ..tasks.rows import Columns, RowReader, kept_name, usual_columns
from ..tasks.run import finish_items
from ..text.fields import Template
from .arguments import first_error
from .running import CallForm, TaskRunner, read_call

if TYPE_CHECKING:
    import narwhals as nw
    import pyarrow as pa
    from duckdb import DuckDBPyRelation

    Frame = nw.DataFrame[Any]

Scores = Literal["label", "all"]
T = TypeVar("T")
PIECE_ROWS = 8192  # rows of a RecordBatchReader to compute at once


class _HasColumns(Protocol):
    @property
    def columns(self) -> object: ...


class _HasSchema(Protocol):
    @property
    def schema(self) -> object: ...


Table = TypeVar("Table", bound="_HasColumns | _HasSchema")
_KINDS = {
    ("pandas", "DataFrame"), ("polars", "DataFrame"), ("modin", "DataFrame"), ("cudf", "DataFrame"),
    ("pyarrow", "Table"), ("pyarrow", "RecordBatch"), ("pyarrow", "RecordBatchReader"),
    ("duckdb", "DuckDBPyRelation"), ("_duckdb", "DuckDBPyRelation"),
}  # fmt: skip


def kind_of(value: object) -> str | None:
    """Return the class name of a table that LLM's methods accept, or None for any other value."""
    for kind in type(value).__mro__:
        if (kind.__module__.partition(".")[0], kind.__name__) in _KINDS:
            return kind.__name__
    return None


@dataclass(frozen=True)
class TableCall:
    """A call of a method of LLM on a table."""

    task: str
    argument: str  # name of the argument with the table, for errors
    columns: Mapping[str, tuple[str, str | None]]  # columns to read: {command-line option: (keyword, its value)}
    errors: Literal["raise", "return"]  # "return": the result has a column `error`
    options: Mapping[str, object]  # options of the task, with `adapter` and `progress`
    scores: Scores = "label"  # "all": a column for the probability of each label or option
    fixed: Mapping[str, object] = field(default_factory=dict)  # fields that all items have
    chat: bool = False  # whether a prompt is a user's message


class TableTasks(TaskRunner):
    """A TaskRunner that also runs tasks on tables."""

    def _on_table(self, table: Table, call: TableCall) -> Table:
        """Return a table of the same kind with the answers as additional columns, and the rows in their order.

        A RecordBatchReader is returned for a RecordBatchReader; it computes PIECE_ROWS rows at a time. Raise InputError
        as the methods do.
        """
        if call.scores not in ("label", "all"):
            raise InputError(f"scores is {call.scores!r}", field="scores", remedy='use "label" or "all"')
        nw, arrow = _need("narwhals"), _need("pyarrow")
        kind, value = kind_of(table), cast(Any, table)
        compute = _Compute(call, self.task, self._run_works, self.config.hidden)

        def of_arrow(rows: pa.Table) -> pa.Table:
            return compute(nw.from_native(rows, eager_only=True)).to_native()

        found: Any
        if kind == "RecordBatchReader":
            if isinstance(call.options.get("adapter"), (list, tuple)):
                message = "adapter is a list, but the number of rows of a RecordBatchReader is unknown"
                raise InputError(message, field="adapter", remedy="give one name")
            compute.is_whole = False
            found = _streamed(value, of_arrow)
        elif kind == "RecordBatch":
            rows = of_arrow(arrow.Table.from_batches([value])).combine_chunks()
            found = next(iter(rows.to_batches()), None) or arrow.RecordBatch.from_pylist([], schema=rows.schema)
        elif kind == "DuckDBPyRelation":
            found = _as_relation(value, of_arrow(arrow.table(value)))
        else:
            try:
                frame = nw.from_native(value, eager_only=True)
            except nw.exceptions.DuplicateError as error:
                message = f"{call.argument} is a table with equal column names: {' '.join(str(error).split())}"
                raise InputError(message, field=call.argument, remedy="rename columns") from None
            found = compute(frame).to_native()
        return cast(Table, found)


def _need(package: Literal["narwhals", "pyarrow"]) -> ModuleType:
    try:
        return __import__(package)
    except ImportError:
        raise MissingExtraError(package, "tables", "a table") from None


def _as_relation(relation: DuckDBPyRelation, prefold_answers_of_this_call: pa.Table) -> DuckDBPyRelation:
    """Return an Arrow table as a relation on the connection of `relation`, so that the two can be joined."""
    # DuckDB finds the table by the name of this function's parameter.
    found = relation.query("prefold_rows", "SELECT * FROM prefold_answers_of_this_call")
    # DuckDB 1 leaves this view behind.
    relation.query("prefold_rows", "DROP VIEW IF EXISTS prefold_rows")
    return cast("DuckDBPyRelation", found)


def _streamed(reader: pa.RecordBatchReader, compute: Callable[[pa.Table], pa.Table]) -> pa.RecordBatchReader:
    """Return a reader of the rows of `reader` with their answers."""
    import pyarrow as pa

    # Wrong columns or options are found before a row is read.
    schema = compute(reader.schema.empty_table()).schema

    def batches() -> Iterator[pa.RecordBatch]:
        for piece in _pieces(reader):
            yield from compute(pa.Table.from_batches(piece)).cast(schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield the rows of batches in pieces of PIECE_ROWS rows; the last piece may have fewer."""
    piece: list[pa.RecordBatch] = []
    free = PIECE_ROWS
    for batch in batches:
        while batch.num_rows:
            part, batch = batch.slice(0, free), batch.slice(free)
            piece.append(part)
            free -= part.num_rows
            if not free:
                yield piece
                piece, free = [], PIECE_ROWS
    if piece:
        yield piece


class _Compute:
    """A function that adds the answers to the rows of a narwhals data frame, as columns."""

    def __init__(
        self, call: TableCall, make: Callable[..., Task], run: Callable[..., list[list[object] | None]], hidden: int
    ):
        """`make` and `run` are methods of TaskRunner. `hidden` is the size of the model's vectors."""
        self._call, self._make, self._run, self._hidden = call, make, run, hidden
        self.is_whole = True  # True if a frame is the whole table

    def __call__(self, frame: Frame) -> Frame:
        import narwhals as nw

        reader = self._reader(frame)
        items = self._items(reader, frame)
        call, items, options = read_call(self._call.argument, items, False, self._call.errors, {**self._call.options})
        task = self._make(self._call.task, **options)
        if task.is_listwise and not self.is_whole:
            message = f"{call.argument} is a RecordBatchReader, but the checkpoint ranks all rows as one list"
            raise InputError(message, field=call.argument, remedy="give a Table: reader.read_all()")
        good = iter(task.prepare([item for item in items if not isinstance(item, InputError)]))
        works = [item if isinstance(item, InputError) else _renamed(reader, next(good)) for item in items]
        if not call.back:
            first_error(works, call.argument)
            first_error([_of_part(work) for work in works], call.argument)
        if task.is_listwise:
            answers = self._of_list(task, items, works, call)
        else:
            answers = finish_items(task, works, self._run(task, works, call))
        answers = [_renamed(reader, answer) for answer in answers]
        if not call.back:
            first_error(answers, call.argument)
        size = options.get("dimensions") or self._hidden
        added = self._columns(task, answers, [str(name) for name in frame.columns], size)
        names = {name: kept_name(added.keys(), str(name)) for name in frame.columns}
        renamed = frame.rename({name: new for name, new in names.items() if new != str(name)})
        columns = nw.from_arrow(_need("pyarrow").table(added), backend=frame.implementation)
        return renamed.with_columns(*(columns[name] for name in added))

    def _of_list(
        self, task: Task, items: Sequence[Any], works: Sequence[Work | InputError], call: CallForm
    ) -> list[Answer | InputError]:
        """Rank the documents of all items as one list; return each item's Relevance or InputError."""
        answers: list[Any] = list(works)
        good = [i for i, work in enumerate(works) if not isinstance(work, InputError)]
        if good:
            rest = {name: value for name, value in items[good[0]].items() if name != "document"}
            one = task.prepare([{**rest, "documents": [items[i]["document"] for i in good]}])
            (ranking,) = finish_items(task, one, self._run(task, one, call))
            for place, i in enumerate(good):
                answers[i] = ranking if isinstance(ranking, InputError) else Relevance(float(ranking.scores[place]))
        return answers

    def _reader(self, frame: Frame) -> RowReader:
        call, have = self._call, [str(name) for name in frame.columns]
        given = {option: value for option, (_, value) in call.columns.items()}
        if call.chat and not any(given.values()) and "messages" in have:
            given["messages"] = "messages"
        templates: dict[str, Any] = {}
        for option, name in usual_columns(call.task, have, {**given, **call.fixed}).items():
            keyword = call.columns[option][0]
            if name is None:
                message = (
                    f"which column of {call.argument} is the {keyword}? It has the columns {', '.join(have)[:300]}"
                )
                remedy = f'give {keyword}="COLUMN", or a template such as {keyword}="... {{COLUMN}} ..."'
                raise InputError(message, field=keyword, remedy=remedy, code="missing_option")
            given[option] = name
        for option, text in given.items():
            keyword = call.columns[option][0]
            if text is None:
                continue
            if not isinstance(text, str):
                remedy = 'give the name of a column, or a template such as "... {COLUMN} ..."'
                message = f"{keyword} is of type {type(text).__name__}"
                raise InputError(message, field=keyword, remedy=remedy, code="wrong_type")
            try:
                templates[option] = text if option == "messages" else Template(text, keyword)
            except JobError as error:
                raise InputError(str(error), field=keyword) from None
        # All structs of an Arrow column have the same fields, so missing ones are null. Objects in pandas differ.
        filled = not frame.implementation.is_pandas_like()
        reader = RowReader(call.task, Columns(**templates), chat=call.chat, filled=filled, lists=False)
        try:
            reader.check(have)
        except JobError as error:
            raise InputError(str(error), field=call.argument, code="missing_field") from None
        return reader

    def _items(self, reader: RowReader, frame: Frame) -> list[dict[str, object] | InputError]:
        """Return the item of each row, or its InputError."""
        used = reader.used
        values = {str(name): _values(frame.get_column(name)) for name in frame.columns if str(name) in used}

        def item(row: tuple[object, ...]) -> dict[str, object]:
            try:
                _, (item,) = reader.items(dict(zip(values, row, strict=True)))
            except InputError as error:
                if error.code in ("empty", "null"):
                    raise error.renamed(error.field, "give it a text, or drop the row") from None
                raise
            return {**self._call.fixed, **item}

        return [attempt(item, row) for row in zip(*values.values(), strict=True)]

    def _columns(
        self, task: Task, answers: Sequence[Answer | InputError], have: Sequence[str], size: int
    ) -> dict[str, pa.Array]:
        """Return {name: Arrow array} of the answers' columns.

        `have` has the names of the table's columns. `size` is the size of vectors if no answer has a vector.
        """
        import pyarrow as pa

        every = self._call.scores == "all"
        example = task.example.columns(every)
        rows = [{} if isinstance(answer, InputError) else answer.columns(every) for answer in answers]
        vectors = (row.get("embedding") for row in rows)
        found = next((vector.size for vector in vectors if isinstance(vector, np.ndarray)), None)
        size = found or size
        added = {name: _array([row.get(name) for row in rows], value, size) for name, value in example.items()}
        if self._call.task == "decide":  # names of questions may equal names of the table's columns
            added = {PREFIX + name if name in have or name == "error" else name: part for name, part in added.items()}
        if self._call.errors == "return":
            added["error"] = pa.array([_message(answer) for answer in answers], pa.string())
        return added


def _renamed(reader: RowReader, value: T | InputError) -> T | InputError:
    return reader.renamed(value) if isinstance(value, InputError) else value


def _of_part(work: Work | InputError) -> InputError | None:
    """Return the first error of a part of an item, such as one question of a state, or None."""
    errors = {} if isinstance(work, InputError) else (work.note or {}).get("errors", {})
    return next((InputError(**error) for error in errors.values()), None)


def _message(answer: Answer | InputError) -> str | None:
    """Return the errors of a row, or of parts of it such as questions; None without errors."""
    if isinstance(answer, InputError):
        return f"{answer.code}: {answer}"
    errors: Mapping[object, InputError] = getattr(answer, "errors", {})
    return "; ".join(f"{error.code}: {error}" for error in errors.values()) or None


def _values(column: nw.Series[Any]) -> list[object]:
    """Return the values of a column as Python objects; missing values become None."""
    values: list[object] = column.to_list()
    if column.implementation.is_pandas_like():
        missing = column.is_null().to_list()
        return [None if is_null else _plain(value) for value, is_null in zip(values, missing, strict=True)]
    return values


def _plain(value: object) -> object:
    """Convert NumPy arrays and numbers in a pandas cell to Python objects; cells from Arrow files contain them."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _array(values: list[Any], example: object, size: int) -> pa.Array:
    """Return values as an Arrow array; None becomes null.

    Args:
        values: The values.
        example: A value of the column, for its type.
        size: Size of a vector.
    """
    import pyarrow as pa

    if isinstance(example, np.ndarray):
        missing = np.array([value is None for value in values], bool)
        flat = np.zeros((len(values), size), np.float32)
        for i in np.flatnonzero(~missing):
            flat[i] = values[i]
        mask = pa.array(missing) if missing.any() else None
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), size, mask=mask)
    types = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    type_ = types.get(type(example))
    if type_ == pa.string():  # the options of a choice may be texts and booleans
        values = [str(value).lower() if isinstance(value, bool) else value for value in values]
    return pa.array(values, type_)
