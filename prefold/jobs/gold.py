"""True answers for a table's decisions, from columns of the input or from a separate table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import InputError, JobError
from ..spec.fields import SpecError, near
from ..spec.job import JobSpec
from ..spec.task import DecideOptions
from ..tasks.questions import Question, read_questions
from ..text.fields import is_empty, lookup, parse_cell
from .record import Record
from .source import open_source

GOLD = "_gold"  # suffix of the columns of true answers in a file of --review


class Gold:
    """The true answers of records, from columns of the input or from a separate table."""

    def __init__(self, columns: Sequence[str], file: str | None, id_column: str | None, questions: Sequence[Question]):
        """Read the separate table, if there is one.

        Raise SpecError for a question that is not asked, and JobError for a table that cannot be read.

        Args:
            columns: The values of --gold.
            file: The table of --gold-file; None: the columns are in the input.
            id_column: The column of --id.
            questions: The questions of the job.
        """
        self._questions, self._file = questions, file
        self._column, self._columns = _columns_of(columns, [question.name for question in questions])
        self._rows: dict[object, Mapping[str, object]] = {}
        self._key = "record"
        if file is not None:
            self._read_file(file, has_id=id_column is not None)
        self._unused, self._was_read = set(self._rows), False

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the columns of the input that hold true answers."""
        if self._file is not None:
            return ()
        return (self._column,) if self._column is not None else tuple(self._columns.values())

    @property
    def unused(self) -> int:
        """Return how many rows of the separate table match no record that was read, or 0 without such a table."""
        return len(self._unused) if self._was_read else 0

    def of(self, data: Mapping[str, object], number: int, id: object) -> list[int | None]:
        """Return the index of the true option of each question, or None if it is unknown.

        Raise InputError for a value that is not an option.

        Args:
            id: The record's id, with --id.
        """
        row = data
        self._was_read = True
        if self._file is not None:
            key = number if self._key == "record" else str(id)
            self._unused.discard(key)
            row = self._rows.get(key, {})
        if self._column is not None:
            answers = self._of_column(_value(row, self._column), self._field(self._column))
            fields = dict.fromkeys(answers, self._field(self._column))
        else:
            answers = {name: _value(row, column) for name, column in self._columns.items()}
            fields = {name: self._field(column) for name, column in self._columns.items()}
        known = {name: value for name, value in answers.items() if not is_empty(value)}
        named = {question.name: question for question in self._questions}
        places = {name: named[name].place_of(value, fields[name]) for name, value in known.items()}
        return [places.get(question.name) for question in self._questions]

    def _field(self, column: str) -> str:
        return column if self._file is None else f"{column} of {self._file}"

    def _of_column(self, value: object, field: str) -> Mapping[str, object]:
        """Return {question: true answer} from the value of one column for all questions."""
        names = [question.name for question in self._questions]
        answers = parse_cell(value, field) if isinstance(value, str) and value.lstrip()[:1] == "{" else value
        if isinstance(answers, Mapping):
            for name in answers:
                if name not in names:
                    message = f"{field!r} has an answer to {name!r:.80}, which is not asked"
                    remedy = (
                        f"the questions are {', '.join(names)}; to use a part of the object, write QUESTION=COLUMN.KEY"
                    )
                    raise InputError(message, field=field, remedy=remedy, code="unknown_field")
            return answers
        if len(names) == 1 or is_empty(value):
            return {names[0]: value}
        message = f"{field!r} is {value!r:.80}, which does not name its question"
        remedy = "give it an object {question: answer}, or write --gold QUESTION=COLUMN"
        raise InputError(message, field=field, remedy=remedy, code="wrong_type")

    def _read_file(self, name: str, *, has_id: bool) -> None:
        rows = [_checked(row, name) for row in open_source(name).records()]
        have = list(dict.fromkeys(column for row in rows for column in row))
        self._key = "id" if has_id and "id" in have else "record"
        if self._key not in have:
            need = "record (the number of a record, from 1)" + (" or id" if has_id else "")
            raise JobError(f"--gold-file {name} has no column {need}; it has: {', '.join(have)}")
        if self._column is None and not self._columns:
            found = {question.name: question.name + GOLD for question in self._questions}
            self._columns = {question: column for question, column in found.items() if column in have}
            if not self._columns:
                message = f"--gold-file {name} has no column {' or '.join(found.values())}; it has: {', '.join(have)}"
                raise JobError(f"{message}; name the columns with --gold QUESTION=COLUMN")
        for column in (self._column, *self._columns.values()):
            if column is not None and column.split(".")[0] not in have and column not in have:
                raise JobError(
                    f"--gold-file {name} has no column {column!r}; {near(column, have)}it has: {', '.join(have)}"
                )
        for number, row in enumerate(rows, 1):
            key = _key_of(row.get(self._key), self._key)
            if key is None or key in self._rows:
                problem = f"has the {self._key} of an earlier row" if key in self._rows else f"has no valid {self._key}"
                raise JobError(f"row {number} of --gold-file {name} {problem}: {row.get(self._key)!r:.80}")
            self._rows[key] = row


def _checked(row: Record, name: str) -> Mapping[str, object]:
    if row.error is not None or row.data is None:
        raise JobError(f"row {row.number} of --gold-file {name}: {row.error}")
    return row.data


def _key_of(value: object, kind: str) -> object:
    """Return a record's number, or its id as text. Return None for an invalid value."""
    if kind == "id":
        return None if is_empty(value) else str(value)
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if number >= 1 and number == number // 1 else None


def _value(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, or None if the record lacks it: JSON lines without the column are not labelled."""
    try:
        return lookup({**row}, column)
    except InputError:
        return None


def _columns_of(texts: Sequence[str], names: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return (the column for all questions or None, {question: its column}) from the values of --gold."""
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    columns: dict[str, str] = {}
    bare = []
    for part in parts:
        name, equals, column = part.rpartition("=")
        if not equals:
            bare.append(part)
        elif name not in names or not column:
            message = f"--gold {part}: there is no question {name!r}; {near(name, names)}the questions are"
            raise SpecError(f"{message} {', '.join(names)}", field="gold")
        else:
            columns[name] = column
    if len(bare) + bool(columns) > 1:
        message = f"--gold {','.join(parts)}: write QUESTION=COLUMN for each, or one column"
        raise SpecError(message, field="gold")
    return (bare[0] if bare else None), columns


def gold_of(spec: JobSpec) -> Gold | None:
    """Return the true answers of a job, or None if the job has none."""
    given, options = spec.input, spec.tasks.get("decide")
    if spec.task != "decide" or not (given.gold or given.gold_file) or not isinstance(options, DecideOptions):
        return None
    if options.questions is None:
        raise SpecError("--gold needs --questions", field="questions")
    questions, errors = read_questions(options.questions)
    for error in errors.values():
        raise error
    return Gold(given.gold, given.gold_file, given.id_column, questions)
