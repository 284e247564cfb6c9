"""Tables as jobs: JSONL, CSV, TSV or Parquet records whose columns make the prompts of one task."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, JobError, record_error
from ..tasks.results import PREFIX, Answer, Classification, Decision, names_in_lines
from ..tasks.rows import Columns, RowReader, bare, kept_name
from ..text.fields import lookup
from ..text.valid import valid_text
from ..wire.decisions import state_of
from .record import ParsedRecord, Record, error_object, plain

if TYPE_CHECKING:
    from .gold import Gold

# fields of output lines that do not come from the answer
_OF_LINES = {"record", "id", "error", "results"}


def reserved_names(task: str, *, has_id: bool = True) -> frozenset[str]:
    """Return the names of the fields of a task's output line. Repeated columns need other names.

    Args:
        has_id: Whether lines have the field `id` (--id).
    """
    names = _OF_LINES | names_in_lines(task)
    return frozenset(names if has_id else names - {"id"})


class TableAdapter:
    """The RecordAdapter of a table's rows.

    If the last column of prompts holds a list, the record's line has the results of the whole list.
    """

    def __init__(
        self,
        task: str,
        columns: Columns,
        render_chat: Callable[[list[Any]], Any] | None = None,
        *,
        gold: Gold | None = None,
        shows: bool = False,
        **options: bool,
    ):
        """Raise JobError if a column is to be repeated under the name of a field of the line.

        Args:
            task: The name of the task.
            columns: The columns that make prompts, and the columns to repeat.
            render_chat: As in RowReader.
            gold: The true answers of decisions.
            shows: Keep the columns of a decision's state, for rows that a person reviews.
            options: Further options of RowReader.
        """
        self.reserved = self.reserved_for(task, has_id=columns.id is not None)
        for name in columns.keep:
            if name in self.reserved:
                raise JobError(f"--keep {name}: lines already have a field {name!r}; write --keep my_{name}={name}")
        self.task = task
        self.columns_used = columns
        # A conversation becomes the state of a decision in the same way as over HTTP.
        self._rows = RowReader(task, columns, state_of if task == "decide" else render_chat, **options)
        self.columns = None if columns.keep_all else self._rows.used
        self.gold, self._shows = gold, shows
        self.labels: Counter[str] = Counter()  # {label: number of lines in this run}

    def check(self, have: list[str] | None) -> None:
        """Raise JobError if the table lacks a used column.

        Args:
            have: The columns of the table; None if unknown.
        """
        if have is not None:
            self._rows.check(have)

    def read(self, record: Record) -> ParsedRecord:
        parsed = ParsedRecord(task=self.task, error=record.error)
        if record.error is not None or record.data is None:
            return parsed
        try:
            parsed.meta = self._meta(record.data, record.number)
            if self.gold is not None:
                parsed.meta["gold"] = self.gold.of(record.data, record.number, parsed.meta.get("id"))
            is_list, parsed.items = self._rows.items(record.data)
            if is_list:
                parsed.meta["many"] = True
        except Exception as error:
            parsed.error = record_error(error)
        return parsed

    @classmethod
    def reserved_for(cls, task: str, *, has_id: bool) -> frozenset[str]:
        """Return the names of the line's own fields."""
        return reserved_names(task, has_id=has_id)

    def kept_name(self, column: str) -> str:
        """Return the name under which a line repeats a column, if all columns are repeated."""
        return kept_name(self.reserved, column)

    def _meta(self, data: dict[str, Any], number: int) -> dict[str, Any]:
        columns, meta = self.columns_used, {}
        if columns.id is not None:
            value = number if columns.id == "record" and "record" not in data else lookup(data, columns.id)
            if not isinstance(value, (str, int)) or isinstance(value, bool):
                remedy = "give it a text or a whole number"
                message = f"the id in column {columns.id!r} is {value!r:.100}"
                raise InputError(message, field=columns.id, remedy=remedy, code="wrong_type")
            meta["id"] = valid_text(value, columns.id) if isinstance(value, str) else value
        if columns.keep or columns.keep_all:
            every = data if columns.keep_all else ()
            repeated = {self.kept_name(name): plain(data[name]) for name in every if not name == "id" == columns.id}
            meta["keep"] = repeated | {name: plain(lookup(data, path)) for name, path in columns.keep.items()}
        if self._shows:
            meta["row"] = {name: plain(data.get(name)) for name in columns.state_columns(data)}
        return meta

    def line(self, number: int, meta: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
        for answer in answers:
            if isinstance(answer, Classification) and answer.label:  # an example has an empty label
                self.labels[answer.label] += 1
        head = self._head(number, meta)
        if meta.get("many"):
            return head | {"results": [self._fields_of(answer, is_part=True) for answer in answers]}
        return head | self._fields_of(answers[0])

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        """Return the fields of an answer in the output line of its record.

        Args:
            is_part: Return the fields of an entry of `results` instead. The record has a list of prompts.
        """
        return answer.line()

    def error_line(self, number: int, meta: dict[str, Any] | None, error: InputError) -> dict[str, Any]:
        return self._head(number, meta or {}) | {"error": error_object(self._rows.renamed(error))}

    def _head(self, number: int, meta: dict[str, Any]) -> dict[str, Any]:
        head: dict[str, Any] = {"record": number}
        if "id" in meta:
            head["id"] = meta["id"]
        return head | meta.get("keep", {})


class LabelColumns(TableAdapter):
    """The TableAdapter of "classify" for tables that people read: the label, and its probability in the column `p`."""

    prefix = "p_"

    def __init__(self, *arguments: Any, every: bool = False, keeps: bool = False, **options: Any):
        """Choose a prefix that no kept column starts with.

        Args:
            arguments: As of TableAdapter.
            every: Add a column p_LABEL for the probability of each label.
            keeps: Keep the objects of probabilities, log-likelihoods and logits, as nested columns.
            options: As of TableAdapter.
        """
        super().__init__(*arguments, **options)
        self._every, self._keeps = every, keeps
        while any(name.startswith(self.prefix) for name in self.columns_used.keep):
            self.prefix += LabelColumns.prefix

    @classmethod
    def reserved_for(cls, task: str, *, has_id: bool) -> frozenset[str]:
        return super().reserved_for(task, has_id=has_id) | {"p"}

    def kept_name(self, column: str) -> str:
        name = super().kept_name(column)
        # A label's column needs the same name in all lines, but the columns of later records are unknown.
        clashes = self._every and name == column and bare(name, "input_").startswith(self.prefix)
        return f"input_{name}" if clashes else name

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        assert isinstance(answer, Classification)
        own = answer.columns(self._every, self.prefix)
        objects = () if self._keeps else answer.numbers
        return own | {name: value for name, value in answer.line().items() if name not in objects}


class DecisionColumns(TableAdapter):
    """The TableAdapter of "decide" for tables that people read: a column NAME with the value of each question.

    `Decision.columns` lists the other columns. A question that failed has a column NAME_error instead.

    Args:
        every: As in `Decision.columns`.
        keeps: Keep the object of all answers, as a nested column.
    """

    def __init__(self, *arguments: Any, every: bool = False, keeps: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self._every, self._keeps = every, keeps

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        assert isinstance(answer, Decision)
        own = answer.columns(self._every) | {f"{name}_error": str(error) for name, error in answer.errors.items()}
        line = {name: value for name, value in answer.line().items() if self._keeps or name != "answers"}
        # The line's own fields keep their names: a question called "record" becomes answer_record.
        return {(PREFIX + name if name in self.reserved or name in self.columns_used.keep else name): value
                for name, value in own.items()} | line  # fmt: skip


class AnswerColumns(TableAdapter):
    """The TableAdapter of "generate" that makes a column of each property of a JSON answer.

    For a list of prompts the properties are in each of its `results`. The name of a property's column must not depend
    on the record. If a line repeats all columns of its record, and they are unknown in advance, every property is
    called answer_NAME. Then a repeated column with such a name is called input_answer_NAME.
    """

    def kept_name(self, column: str) -> str:
        name = super().kept_name(column)
        return f"input_{name}" if name == column and bare(name, "input_").startswith(PREFIX) else name

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        repeated = set() if is_part else set(self.columns_used.keep)
        return with_columns(answer.line(), repeated, every=self.columns_used.keep_all and not is_part)


def with_columns(result: dict[str, Any], repeated: Collection[str], *, every: bool = False) -> dict[str, Any]:
    """Return a result of "generate" with the properties of the JSON object in its `text` as further fields.

    A result whose text is not a JSON object, for example because max_tokens cut it off, is returned unchanged. A
    property is called answer_NAME in these cases, so that all names stay distinct:

    - the line has its own field NAME
    - NAME is in `repeated`
    - the property itself is called answer_..., and the rest is one of these names

    If names in `repeated` start with answer_, another answer_ is put before it.

    Args:
        every: Rename all properties.
    """
    try:
        answer = json.loads(result.get("text", ""))
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return result
    if not isinstance(answer, dict):
        return result
    reserved = {*repeated, *reserved_names("generate")}
    prefix, bases = PREFIX, {bare(name, PREFIX) for name in reserved}
    while any(name.startswith(prefix) for name in reserved):
        prefix += PREFIX
    names = (prefix + name if every or bare(name, PREFIX) in bases else name for name in answer)
    return result | dict(zip(names, map(plain, answer.values()), strict=True))
