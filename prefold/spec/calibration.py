"""The calibration of decisions: a temperature and a threshold for each question, in a JSON file.

`prefold.tasks.calibration` fits them. The file also has digests of the model, the prompt format and the questions. A
calibration is refused if they do not match the job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from ..errors import InputError, JobError
from .files import read_text, replacing, writing

T = TypeVar("T")
_VERSION = 1
_REMEDY = "give a file that --save-calibration or Calibration.save wrote"


@dataclass(frozen=True, kw_only=True)
class QuestionCalibration:
    """The temperature and the threshold of one question.

    Attributes:
        digest: Digest of the question: its type, instructions, options and their descriptions.
        type: "noul", "choice" or "score".
        options: The options, in the order of the prompt.
        temperature: Divisor of the options' log-probabilities. They are normalised again after the division.
        threshold: An answer is doubtful if the calibrated probability of its most likely option is below this. None:
            no threshold reached the precision, so every answer is doubtful.
        figures: Measurements of the fit. prefold only prints them; see `prefold.tasks.calibration.Judgement`.
    """

    digest: str
    type: str
    options: tuple[str | bool, ...]
    temperature: float = 1.0
    threshold: float | None = None
    figures: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The calibration of the questions of a `decide` job or call.

    `llm.calibrate` and `prefold decide --save-calibration` make it. `llm.decide(..., calibration=...)` and
    --calibration apply it: p' = softmax(log p / temperature) over the options of a question (temperature scaling,
    Guo et al. 2017). The most likely option stays the same.

    Attributes:
        questions: {name of a question: its QuestionCalibration}.
        model: The model's name. It is only printed; `model_digest` identifies the model.
        model_digest: Digest of the model's files.
        prompt: Digest of the prompt format, and of the temperature that the job sets for each type of question.
        adapter: Name of the LoRA adapter that answered; None: the base model.
        precision: The share of correct answers, among answers that are not doubtful, for which thresholds were fitted.

    Example:
        >>> Calibration.load("calibration.json").questions["refund"].threshold
    """

    questions: Mapping[str, QuestionCalibration]
    model: str
    model_digest: str
    prompt: str
    adapter: str | None = None
    precision: float = 0.95

    def __hash__(self) -> int:
        return hash(self._text())

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Read a calibration from a file.

        Args:
            path: JSON file that `save` or --save-calibration wrote.

        Returns:
            The calibration.

        Raises:
            JobError: The file cannot be read.
            InputError: The file does not contain a calibration. The message names the field.

        Example:
            >>> calibration = Calibration.load("calibration.json")
        """
        text = read_text(path)
        try:
            value = json.loads(text)
        except ValueError as error:
            raise JobError(f"{path} is not valid JSON: {error}; {_REMEDY}") from None
        return cls.of(value)

    @classmethod
    def of(cls, value: object) -> Calibration:
        """Convert the JSON object that `to_dict` returns to a Calibration.

        Args:
            value: A mapping from `to_dict`, or a Calibration, which is returned unchanged.

        Returns:
            The calibration.

        Raises:
            InputError: The value is neither, or a field is missing, unknown or wrong. The message names the field.
        """
        if isinstance(value, cls):
            return value
        version = value.get("prefold_calibration") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or version != _VERSION:
            found = f"has the version {version!r:.40}" if version is not None else "is not a calibration of decisions"
            raise InputError(f"calibration {found}", field="calibration", remedy=_REMEDY, code="wrong_type")
        own = _taken(cls, {name: one for name, one in value.items() if name != "prefold_calibration"}, "")
        questions = _of_kind(own["questions"], dict, "questions")
        named = {str(name): _question(one, f"questions[{name!r}]") for name, one in questions.items()}
        for name in ("model", "model_digest", "prompt"):
            _of_kind(own[name], str, name)
        if own.get("adapter") is not None:
            _of_kind(own["adapter"], str, "adapter")
        _number(own.get("precision", 0.5), "precision", most=1.0)
        return cls(**{**own, "questions": named})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Return the calibration as a JSON object, in the form of the file. `of` converts it back."""
        value: dict[str, object] = json.loads(self._text())
        return value

    def save(self, path: Path | str) -> None:
        """Write the calibration to a JSON file, atomically.

        Args:
            path: The file. An existing file is replaced.

        Raises:
            JobError: The file cannot be written.

        Example:
            >>> llm.calibrate(states, questions, gold).save("calibration.json")
        """
        with writing(f"the calibration {path}"), replacing(Path(path)) as temporary:
            temporary.write_text(self._text() + "\n", encoding="utf-8")

    def check_source(self, model: str, model_digest: str, prompt: str, adapter: str | None) -> None:
        """Raise InputError unless the calibration was made with this model, adapter and prompt."""
        if self.model_digest != model_digest:
            raise _mismatch(f"was made with another model ({self.model}; this model is {model}, with other files)")
        if self.adapter != adapter:
            used = [f"the adapter {name!r}" if name else "no adapter" for name in (self.adapter, adapter)]
            raise _mismatch(f"was made with {used[0]}, but this job uses {used[1]}")
        if self.prompt != prompt:
            parts = "template, --prompt-style, --first, labels and temperatures"
            raise _mismatch("was made with another prompt", remedy=f"give the same {parts}, or fit it again")

    def check_names(self, asked: Iterable[str]) -> None:
        """Raise InputError if the calibration has a question that this job does not ask."""
        names = [*asked]
        for name in self.questions:
            if name not in names:
                raise _mismatch(f"contains the question {name!r}, but the questions are {', '.join(map(repr, names))}")

    def of_question(self, name: str, digest: str, options: tuple[str | bool, ...]) -> QuestionCalibration | None:
        """Return the calibration of a question, or None if there is none for this name.

        Raise InputError if the question had other instructions, options or descriptions when it was calibrated.
        """
        own = self.questions.get(name)
        if own is not None and own.digest != digest:
            what = "other instructions or descriptions"
            if own.options != options:
                what = f"the options {', '.join(map(str, own.options))}"
            raise _mismatch(f"of the question {name!r} was made with {what}")
        return own

    def _text(self) -> str:
        return json.dumps({"prefold_calibration": _VERSION, **asdict(self)}, indent=1, ensure_ascii=False)


def _mismatch(what: str, remedy: str = "fit it again (--gold, --save-calibration), or leave it out") -> InputError:
    return InputError(f"the calibration {what}", field="calibration", remedy=remedy, code="calibration_mismatch")


def _question(value: object, where: str) -> QuestionCalibration:
    own = _taken(QuestionCalibration, _of_kind(value, dict, where), where)
    for name in ("digest", "type"):
        _of_kind(own[name], str, f"{where}.{name}")
    options = own["options"]
    if not isinstance(options, (list, tuple)) or not all(isinstance(option, (str, bool)) for option in options):
        raise _wrong(f"{where}.options", "is not a list of texts and booleans")
    temperature = _number(own.get("temperature", 1.0), f"{where}.temperature")
    threshold = own.get("threshold")
    if threshold is not None and threshold != 0:
        _number(threshold, f"{where}.threshold", most=1.0)
    figures = _of_kind(own.get("figures", {}), dict, f"{where}.figures")
    return QuestionCalibration(**{**own, "options": tuple(options), "temperature": temperature, "figures": figures})  # type: ignore[arg-type]


def _taken(kind: type, value: Mapping[str, object], where: str) -> dict[str, object]:
    """Check the keys of a JSON object against the fields of a dataclass, and return the object as a dict.

    Raise InputError if a key is unknown, or if a required key is missing.

    Args:
        kind: `Calibration` or `QuestionCalibration`.
        where: The place of the object in the file, for errors; "": the file itself.
    """
    declared = {one.name: one for one in fields(kind)}
    required = {"digest", "type", "options", "questions", "model", "model_digest", "prompt"}
    for name in value:
        if name not in declared:
            raise _wrong(f"{where}.{name}".lstrip("."), "is unknown")
    for name in declared.keys() & required:
        if name not in value:
            raise _wrong(f"{where}.{name}".lstrip("."), "is missing")
    return dict(value)


def _of_kind(value: object, kind: type[T], where: str) -> T:
    if not isinstance(value, kind):
        raise _wrong(where, f"is of type {type(value).__name__}")
    return value


def _number(value: object, where: str, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most or value == math.inf:
        raise _wrong(where, f"is {value!r:.40}")
    return float(value)


def _wrong(where: str, what: str) -> InputError:
    return InputError(f"the calibration's {where} {what}", field="calibration", remedy=_REMEDY, code="wrong_type")
