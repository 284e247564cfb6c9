"""True answers of a table's decisions, and the doubtful answers that a person should look at.

`Gold` reads the true answers. `Review` keeps of each record what the end of the job needs: the probabilities beside the
true answers, and the row of a doubtful record. The output keeps it in the journal, in the same entry that commits the
record's line, so that a job which was killed and resumed has it once for each record. At the end `Review` compares the
probabilities with the true answers, and writes the files of --review and --save-calibration.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, JobError
from ..spec.fields import SpecError, near
from ..spec.job import JobSpec
from ..spec.task import DecideOptions
from ..tasks.calibration import LEAST_ROWS, Figures, Judgement, judge
from ..tasks.decide import DecideTask
from ..tasks.questions import Question, read_questions
from ..tasks.results import Answer, Decision
from .columns import TableForm
from .fields import is_empty, lookup, parse_cell
from .output import finish_for
from .record import Record, dumps
from .source import open_source
from .tables import decision_columns

GOLD = "_gold"  # the end of the name of a column of true answers in a file of --review


class Gold:
    """A Gold reads the true answers of records, from columns of the input or from a table beside it.

    paths   the columns of the input that hold them
    unused  how many rows of the table beside it belong to no record that was read; 0 without such a table
    """

    def __init__(self, columns: Sequence[str], file: str | None, id_column: str | None, questions: Sequence[Question]):
        """Read the table beside the input, if there is one.

        columns    the values of --gold
        file       the table of --gold-file; None: the input has the columns
        id_column  the column of --id

        Raise SpecError for a question that is not asked, and JobError for a table that cannot be read.
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
        if self._file is not None:
            return ()
        return (self._column,) if self._column is not None else tuple(self._columns.values())

    @property
    def unused(self) -> int:
        return len(self._unused) if self._was_read else 0

    def of(self, data: dict[str, Any], number: int, id: object) -> list[int | None]:
        """Return the place of the true option of each question; None where it is not known.

        id: the record's, with --id. Raise InputError for a value that is no option.
        """
        row: Mapping[str, object] = data
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
        """Return {question: true answer} of the value of a column for all questions."""
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
        message = f"{field!r} is {value!r:.80}, which does not say of which question it is the answer"
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


def _checked(row: Record, name: str) -> dict[str, Any]:
    if row.error is not None or row.data is None:
        raise JobError(f"row {row.number} of --gold-file {name}: {row.error}")
    return row.data


def _key_of(value: object, kind: str) -> object:
    """Return a record's number, or its id as text; None for neither."""
    if kind == "id":
        return None if is_empty(value) else str(value)
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if number >= 1 and number == number // 1 else None


def _value(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column; None if a record lacks it, as some records of JSON lines are not labelled."""
    try:
        return lookup({**row}, column)
    except InputError:
        return None


def _columns_of(texts: Sequence[str], names: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return (the column of all questions or None, {question: its column}) of the values of --gold."""
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


def review_path(spec: JobSpec) -> Path | None:
    """Return the file of doubtful records; None: it is not written."""
    output = spec.output
    if output.review is not None:
        return Path(output.review)
    if output.file is None or "review_below" not in spec.given or spec.task != "decide":
        return None
    name = output.file.name.removesuffix(".gz")
    return output.file.with_name(f"{Path(name).stem}.review{Path(name).suffix}")


@dataclass
class Conclusion:
    """What the end of a job says of its answers.

    judgements   of each question with true answers
    unanswered   names of the questions without true answers, of a job that has --gold
    doubtful     records with a doubtful answer; None: there is no threshold
    notes        what was written, or why it was not
    """

    judgements: list[Judgement] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    doubtful: int | None = None
    notes: list[str] = field(default_factory=list)
    precision: float = 0.95

    def lines(self) -> list[str]:
        """Return the lines of the summary."""
        lines = [line for judgement in self.judgements for line in _lines_of(judgement, self.precision)]
        lines += [f"  gold      {name}: no record has a true answer" for name in self.unanswered]
        if self.doubtful is not None:
            lines.append(f"  review    {self.doubtful:,} record{'s' * (self.doubtful != 1)} with a doubtful answer")
        return lines + [f"            {note}" for note in self.notes]

    def data(self) -> list[dict[str, object]]:
        """Return the judgements, with their lines, as the report has them."""
        return [
            judgement.to_dict() | {"lines": [line.strip() for line in _lines_of(judgement, self.precision)[1:]]}
            for judgement in self.judgements
        ]


def _said(figures: Figures) -> str:
    parts = f"accuracy {figures.accuracy:.3f}, log loss {figures.log_loss:.3f}, ECE {figures.calibration_error:.3f}"
    return parts if figures.mean_error is None else f"{parts}, mean error {figures.mean_error:.3f} levels"


def _lines_of(judgement: Judgement, precision: float) -> list[str]:
    whole, fit, check = judgement.whole, judgement.fit, judgement.check
    lines = [f"  gold      {judgement.name}: {whole.rows:,} record{'s' * (whole.rows != 1)}, {_said(whole)}"]
    if fit is None or check is None:
        return [*lines, f"            too few for a temperature: each half needs {LEAST_ROWS} records"]
    bound = " (a bound: are all right, or all wrong?)" if judgement.at_bound else ""
    before, after = check.before, check.after
    lines.append(
        f"            temperature {judgement.temperature:.3g}{bound}, fitted to {fit.before.rows:,}; on the other"
        f" {before.rows:,}: log loss {before.log_loss:.3f} -> {after.log_loss:.3f},"
        f" ECE {before.calibration_error:.3f} -> {after.calibration_error:.3f}"
    )
    if judgement.threshold is None:
        return [*lines, f"            no threshold makes {precision:.4g} of the answers right"]
    right = f"{check.right / check.decided:.1%} of them right" if check.decided else "none of them"
    lines.append(
        f"            threshold {judgement.threshold:.4g} for precision {precision:.4g}: decides"
        f" {check.decided / before.rows:.1%} of the other {before.rows:,}, {right}"
    )
    return lines


class Review:
    """A Review keeps what the end of a job of decisions needs, and ends it.

    gold  the true answers; None: there are none
    """

    def __init__(self, spec: JobSpec, task: DecideTask, gold: Gold | None, checkpoint: Any):
        self.gold = gold
        self._spec, self._task, self._checkpoint = spec, task, checkpoint
        self._path = review_path(spec)

    def check(self, *, ended: bool) -> None:
        """Raise JobError if the file of doubtful records exists, as labels may be in it. ended: the job has ended
        before"""
        path = self._path
        if path is not None and path.exists() and not ended and not self._spec.output.overwrite:
            raise JobError(
                f"{path} exists, and may hold labels; move it away, write elsewhere (--review FILE), or give"
                " --overwrite"
            )
        if path is not None:
            finish_for(path, True)  # refuse an unknown ending before the work

    def extra(self, number: int, meta: Mapping[str, Any], answers: Sequence[Answer]) -> list[Any] | None:
        """Return what is to be kept of a record, as JSON: its number; for each question [place of the true option, the
        probability of each option] or null; the row for a person or null. Return None if there is nothing to keep."""
        (decision,) = answers
        assert isinstance(decision, Decision)
        gold = meta.get("gold") or [None] * len(self._task.questions)
        judged: list[list[Any] | None] = []
        for question, place in zip(self._task.questions, gold, strict=True):
            answer = decision.answers.get(question.name)
            judged.append(None if place is None or answer is None else [place, *answer.probabilities.values()])
        is_doubtful = any(answer.review for answer in decision.answers.values())
        row = self._row(number, meta, decision, gold) if is_doubtful else None
        return None if row is None and not any(judged) else [number, judged, row]

    def _row(
        self, number: int, meta: Mapping[str, Any], decision: Decision, gold: Sequence[int | None]
    ) -> dict[str, Any]:
        """Return the row of a doubtful record: its state, its answers, and a column for each true answer."""
        head = {"record": number} | ({"id": meta["id"]} if "id" in meta else {})
        own = decision_columns(decision)
        own |= {f"{name}_p": max(one.probabilities.values()) for name, one in decision.answers.items()}
        for question, place in zip(self._task.questions, gold, strict=True):
            own[question.name + GOLD] = None if place is None else question.options[place]
        return own | meta.get("keep", {}) | meta.get("row", {}) | head

    def conclude(self, extras: Iterable[list[Any]]) -> Conclusion:
        """Compare the answers with the true ones, and write the files. extras: what `extra` returned for all records"""
        conclusion = Conclusion(precision=self._spec.output.precision, doubtful=0 if self._task.marks else None)
        questions = self._task.questions
        found = [(array("q"), array("q"), array("d")) for _ in questions]  # numbers, places, probabilities
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "rows").open("wb") as rows:
            for number, judged, row in extras:
                for parts, (numbers, places, probabilities) in zip(judged, found, strict=True):
                    if parts is not None:
                        numbers.append(number)
                        places.append(parts[0])
                        probabilities.extend(parts[1:])
                if row is not None and conclusion.doubtful is not None:
                    conclusion.doubtful += 1
                    rows.write(b"%d\t" % number + (dumps(row) + "\n").encode())
            if self._path is not None:
                rows.flush()
                conclusion.notes.append(self._write_rows(Path(rows.name), self._path))
        if self.gold is not None:
            for question, (numbers, places, probabilities) in zip(questions, found, strict=True):
                if not numbers:
                    conclusion.unanswered.append(question.name)
                    continue
                p = np.array(probabilities).reshape(-1, len(question.options))
                judgement = judge(question, np.array(numbers), p, np.array(places), conclusion.precision)
                conclusion.judgements.append(judgement)
            if self.gold.unused and self._spec.input.limit is None:
                name = self._spec.input.gold_file
                conclusion.notes.append(f"{self.gold.unused:,} rows of {name} belong to no record that was read")
        if self._spec.output.save_calibration is not None:
            conclusion.notes.append(self._save(conclusion.judgements, Path(self._spec.output.save_calibration)))
        return conclusion

    def _write_rows(self, rows: Path, path: Path) -> str:
        if path.exists() and not self._spec.output.overwrite:
            return f"{path} stays what it is, as labels may be in it"
        empty = self._row(0, {}, Decision({}), [None] * len(self._task.questions))
        finish = finish_for(path, True, TableForm(("record",), (), {}, empty))
        assert finish is not None
        finish(rows, path)
        return f"written to {path}; fill in the columns ...{GOLD}, and give it to --gold-file"

    def _save(self, judgements: Sequence[Judgement], path: Path) -> str:
        calibration = self._task.fitted(judgements, self._spec.output.precision, self._checkpoint)
        if not calibration.questions:
            return f"no calibration written to {path}: no question has enough true answers"
        calibration.save(path)
        left_out = [question.name for question in self._task.questions if question.name not in calibration.questions]
        rest = f", without {', '.join(left_out)}, which have too few true answers" if left_out else ""
        return f"calibration written to {path}{rest}"


def gold_of(spec: JobSpec) -> Gold | None:
    """Return the true answers of a job; None: it has none."""
    given, options = spec.input, spec.tasks.get("decide")
    if spec.task != "decide" or not (given.gold or given.gold_file) or not isinstance(options, DecideOptions):
        return None
    if options.questions is None:
        raise SpecError("--gold needs --questions", field="questions")
    questions, errors = read_questions(options.questions)
    for error in errors.values():
        raise error
    return Gold(given.gold, given.gold_file, given.id_column, questions)
