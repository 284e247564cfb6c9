"""The review at the end of a job of decisions: calibration against true answers, and doubtful answers.

For each record, `Review` collects the probabilities with the true answers, and the row of a doubtful record. The output
stores this data in the journal, in the entry that commits the record's line. So a job that was killed and resumed has
it exactly once for each record. At the end `Review` compares the probabilities with the true answers, and writes the
files of --review and --save-calibration.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import JobError
from ..spec.job import JobSpec
from ..tasks.calibration import LEAST_ROWS, Figures, Judgement, judge
from ..tasks.decide import DecideTask
from ..tasks.results import Answer, Decision
from .columns import TableForm
from .gold import GOLD, Gold
from .output import finish_for
from .record import Extra, dumps

Meta = Mapping[str, Any]  # a record's meta, as TableAdapter makes it
# (number, [index of the true option, its probabilities] or None for each question, row for manual review or None)
_Kept = tuple[int, list[list[Any] | None], dict[str, object] | None]


def review_path(spec: JobSpec) -> Path | None:
    """Return the file of doubtful records, or None if it is not written."""
    output = spec.output
    if output.review is not None:
        return Path(output.review)
    if output.file is None or "review_below" not in spec.given or spec.task != "decide":
        return None
    name = output.file.name.removesuffix(".gz")
    return output.file.with_name(f"{Path(name).stem}.review{Path(name).suffix}")


@dataclass
class Conclusion:
    """The result of comparing a job's answers with true answers."""

    judgements: list[Judgement] = field(default_factory=list)  # one for each question that has true answers
    unanswered: list[str] = field(default_factory=list)  # names of questions without true answers, in a job with --gold
    doubtful: int | None = None  # number of records with a doubtful answer; None: no threshold
    notes: list[str] = field(default_factory=list)  # files that were written, or why not; unused rows of `--gold`
    precision: float = 0.95

    def lines(self) -> list[str]:
        """Return the lines of the summary."""
        lines = [line for judgement in self.judgements for line in _lines_of(judgement, self.precision)]
        lines += [f"  gold      {name}: no record has a true answer" for name in self.unanswered]
        if self.doubtful is not None:
            lines.append(f"  review    {self.doubtful:,} record{'s' * (self.doubtful != 1)} with a doubtful answer")
        return lines + [f"            {note}" for note in self.notes]

    def data(self) -> list[dict[str, object]]:
        """Return the judgements with their lines, for the report."""
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
    decided = f"{check.decided / before.rows:.1%} of the other {before.rows:,}, "
    decided += f"{check.right / max(1, check.decided):.1%} of them right"
    lines.append(
        f"            threshold {judgement.threshold:.4g} for precision {precision:.4g}: decides "
        + (decided if check.decided else f"none of the other {before.rows:,}")
    )
    return lines


class Review:
    """Collects what the end of a job of decisions needs, and evaluates it.

    Args:
        gold: The true answers; None: there are none.
    """

    def __init__(self, spec: JobSpec, task: DecideTask, gold: Gold | None, checkpoint: Checkpoint):
        self.gold = gold
        self._spec, self._task, self._checkpoint = spec, task, checkpoint
        self._path = review_path(spec)

    def check(self, *, ended: bool) -> None:
        """Raise JobError if the file of doubtful records exists, because it may contain labels.

        Args:
            ended: Whether an earlier run has ended the job. The file is then from that run.
        """
        path = self._path
        if path is not None and path.exists() and not ended and not self._spec.output.overwrite:
            raise JobError(
                f"{path} exists, and may contain labels; move it, write elsewhere (--review FILE), or give --overwrite"
            )
        if path is not None:
            finish_for(path, True)  # refuse an unknown extension before the work

    def extra(self, number: int, meta: Meta, answers: Sequence[Answer]) -> Extra | None:
        """Return the JSON data to store about a record, or None if there is nothing to store.

        The list has the record's number, a list with an entry for each question, and the row of a doubtful record or
        null. An entry is [index of the true option, probability of each option], or null.
        """
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

    def _row(self, number: int, meta: Meta, decision: Decision, gold: Sequence[int | None]) -> dict[str, object]:
        """Return the row of a doubtful record: its state, its answers, and a column for each true answer."""
        head = {"record": number} | ({"id": meta["id"]} if "id" in meta else {})
        own = decision.columns() | {f"{name}_error": str(error) for name, error in decision.errors.items()}
        own |= {f"{name}_p": max(one.probabilities.values()) for name, one in decision.answers.items()}
        for question, place in zip(self._task.questions, gold, strict=True):
            own[question.name + GOLD] = None if place is None else question.options[place]
        return own | meta.get("keep", {}) | meta.get("row", {}) | head

    def conclude(self, extras: Iterable[Extra]) -> Conclusion:
        """Compare the answers with the true answers, and write the files.

        Args:
            extras: What `extra` returned for all records.
        """
        conclusion = Conclusion(precision=self._spec.output.precision, doubtful=0 if self._task.marks else None)
        questions = self._task.questions
        found = [(array("q"), array("q"), array("d")) for _ in questions]  # numbers, places, probabilities
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "rows").open("wb") as rows:
            for number, judged, row in cast(Iterable[_Kept], extras):
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
                count, name = self.gold.unused, self._spec.input.gold_file
                subject = f"1 row of {name} belongs" if count == 1 else f"{count:,} rows of {name} belong"
                conclusion.notes.append(f"{subject} to no record that was read")
        if self._spec.output.save_calibration is not None:
            conclusion.notes.append(self._save(conclusion.judgements, Path(self._spec.output.save_calibration)))
        return conclusion

    def _write_rows(self, rows: Path, path: Path) -> str:
        if path.exists() and not self._spec.output.overwrite:
            return f"{path} was not replaced, because it may contain labels"
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
