"""Calibration of decisions: how well probabilities fit true answers, and a temperature and threshold that improve them.

The rows are split into two halves by their numbers. The *fit* half chooses the temperature and the threshold of a
question. The *check* half is not used for that choice, so it shows how well both work on new rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ..spec.calibration import QuestionCalibration
from .classify import softmax
from .questions import Question

BINS = 15  # bins of the calibration error, as in Guo et al. 2017
LEAST_ROWS = 10  # rows that each half needs before a temperature and a threshold are fitted
BOUNDS = (0.05, 20.0)  # bounds of the temperature; without them it would be 0 if all rows are right
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Figures:
    """How well the probabilities of some rows fit their true answers.

    Attributes:
        rows: number of rows
        accuracy: share of rows whose most likely option is the true one
        log_loss: mean of -log p of the true option, in nats
        calibration_error: expected calibration error, see the function `calibration_error`
        mean_error: for a score, the mean distance between the answer (the mean level) and the true level
    """

    rows: int
    accuracy: float
    log_loss: float
    calibration_error: float
    mean_error: float | None = None


@dataclass(frozen=True)
class Bin:
    """The rows whose confidence lies in one bin. Bins split the range 0 to 1 equally.

    Attributes:
        rows: number of rows
        confidence: mean probability of the most likely option
        accuracy: share of rows whose most likely option is the true one
    """

    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Half:
    """The figures of one half of the rows, without and with the temperature.

    Attributes:
        before: figures of the probabilities as answered
        after: figures of the same rows with the temperature
        decided: number of rows whose confidence with the temperature reaches the threshold
        right: number of decided rows whose answer is true
        bins: bins without and with the temperature, `BINS` each
    """

    before: Figures
    after: Figures
    decided: int
    right: int
    bins: tuple[list[Bin], list[Bin]]


@dataclass(frozen=True)
class Judgement:
    """The probabilities of a question, compared with true answers.

    Attributes:
        name: name of the question
        whole: figures of all rows, as answered
        bins: bins of all rows, as answered
        temperature: fitted on the fit half; None: too few rows
        threshold: the least confidence above which the share of right answers in the fit half reaches the precision;
            None: no confidence reaches it
        fit: the half that chose the temperature and the threshold
        check: the other half
    """

    name: str
    whole: Figures
    bins: list[Bin]
    temperature: float | None = None
    threshold: float | None = None
    fit: Half | None = None
    check: Half | None = None

    @property
    def at_bound(self) -> bool:
        """Return whether the temperature is at a bound. This happens, for example, if all rows are right."""
        return self.temperature is not None and not BOUNDS[0] * 1.01 < self.temperature < BOUNDS[1] / 1.01

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def calibration(self, question: Question, applied: QuestionCalibration | None) -> QuestionCalibration:
        """Return the calibration of the question.

        Args:
            applied: the calibration that the probabilities already include
        """
        assert self.fit is not None and self.check is not None and self.temperature is not None
        halves = {"fit": self.fit, "check": self.check}
        shown = {
            name: {
                "before": asdict(half.before), "after": asdict(half.after), "decided": half.decided, "right": half.right
            }
            for name, half in halves.items()
        }  # fmt: skip
        return QuestionCalibration(
            digest=question.digest,
            type=question.kind,
            options=question.options,
            temperature=self.temperature * (1.0 if applied is None else applied.temperature),
            threshold=self.threshold,
            figures=shown,
        )


def judge(
    question: Question, numbers: Sequence[int] | Ints, probabilities: Floats, gold: Ints, precision: float
) -> Judgement:
    """Compare the probabilities of a question with true answers, and fit a temperature and a threshold.

    Args:
        question: The question.
        numbers: The record number of each row. It decides the half of the row.
        probabilities: The answered probabilities, [rows, options].
        gold: The index of the true option of each row.
        precision: The share of decided rows that must be right.
    """
    is_score = question.kind == "score"
    whole, bins = figures(probabilities, gold, is_score=is_score), reliability(*_top(probabilities, gold))
    chosen = in_fit_half(numbers)
    if min(chosen.sum(), (~chosen).sum()) < LEAST_ROWS:
        return Judgement(question.name, whole, bins)
    logs = log_of(probabilities)
    temperature = fit_temperature(logs[chosen], gold[chosen])
    after = softmax(logs / temperature)
    threshold = threshold_for(*_top(after[chosen], gold[chosen]), precision)

    def half(rows: Bools) -> Half:
        confidence, right = _top(after[rows], gold[rows])
        decided = np.zeros(len(right), np.bool_) if threshold is None else confidence >= threshold
        return Half(
            figures(probabilities[rows], gold[rows], is_score=is_score),
            figures(after[rows], gold[rows], is_score=is_score),
            int(decided.sum()),
            int((decided & right).sum()),
            (reliability(*_top(probabilities[rows], gold[rows])), reliability(confidence, right)),
        )

    return Judgement(question.name, whole, bins, temperature, threshold, half(chosen), half(~chosen))


def in_fit_half(numbers: Sequence[int] | Ints) -> Bools:
    """Return for each row whether it is in the fit half.

    A bit of the digest of the row's number decides, so the order and the number of other rows do not matter.
    """
    digests = (hashlib.blake2b(b"%d" % number, digest_size=1).digest() for number in numbers)
    return np.fromiter((digest[0] & 1 for digest in digests), np.bool_, len(numbers))


def log_of(probabilities: Floats) -> Floats:
    """Return the logarithm of probabilities. 0 is replaced by the smallest positive float64."""
    return np.log(np.maximum(probabilities, np.finfo(np.float64).smallest_subnormal))


def fit_temperature(logs: Floats, gold: Ints) -> float:
    """Return the temperature T within BOUNDS that minimises the mean log loss of softmax(logs / T) (Guo et al. 2017).

    The log loss is convex in 1/T, so its derivative by 1/T has one zero. Bisection finds it.

    Args:
        logs: Log-probabilities or logits, [rows, options].
        gold: The index of the true option of each row.
    """
    rows = np.arange(len(gold))
    below = logs - logs.max(axis=1, keepdims=True)  # 0 at the most likely option: an exponent cannot overflow

    def slope(log_inverse: float) -> float:
        mean = (softmax(below * np.exp(log_inverse)) * below).sum(axis=1)
        return float((mean - below[rows, gold]).mean())

    low, high = (float(-np.log(bound)) for bound in BOUNDS[::-1])
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return float(np.exp(-(low + high) / 2))


def figures(probabilities: Floats, gold: Ints, *, is_score: bool = False) -> Figures:
    """Return the Figures of at least one row.

    Args:
        probabilities: [rows, options]
        gold: index of each true option
    """
    confidence, right = _top(probabilities, gold)
    loss = -log_of(probabilities[np.arange(len(gold)), gold])
    levels = np.arange(probabilities.shape[1])
    distance = float(np.abs(probabilities @ levels - gold).mean()) if is_score else None
    return Figures(len(gold), float(right.mean()), float(loss.mean()), calibration_error(confidence, right), distance)


def reliability(confidence: Floats, right: Bools, bins: int = BINS) -> list[Bin]:
    """Return the rows in bins of equal width. Bin m of M holds the confidences in ((m-1)/M, m/M]."""
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights, bins) / np.maximum(counts, 1) for weights in (confidence, right)]
    return [Bin(int(n), float(p), float(a)) for n, p, a in zip(counts, *sums, strict=True)]


def calibration_error(confidence: Floats, right: Bools, bins: int = BINS) -> float:
    """Return the expected calibration error: the sum over bins B of |B|/n * |accuracy(B) - mean confidence(B)|.

    The formula is from Naeini et al. 2015. The 15 bins by the most likely option are from Guo et al. 2017.
    """
    parts = reliability(confidence, right, bins)
    return sum(part.rows * abs(part.accuracy - part.confidence) for part in parts) / len(right)


def threshold_for(confidence: Floats, right: Bools, precision: float) -> float | None:
    """Return the least confidence above which the share of right rows is at least the precision.

    Return 0 if that holds for all rows, and None if it holds for no confidence. The threshold lies in the middle
    between the last decided row and the first undecided one. So rounding in another batch moves as few rows as possible
    across it.
    """
    order = np.argsort(-confidence, kind="stable")
    sorted_confidence, share = confidence[order], np.cumsum(right[order]) / np.arange(1, len(right) + 1)
    is_last = np.append(sorted_confidence[1:] < sorted_confidence[:-1], True)  # last among equal confidences
    places = np.flatnonzero(is_last & (share >= precision))
    if not places.size:
        return None
    last = int(places[-1])
    return 0.0 if last == len(right) - 1 else float(sorted_confidence[last : last + 2].mean())


def _top(probabilities: Floats, gold: Ints) -> tuple[Floats, Bools]:
    """Return (the probability of the most likely option, whether it is the true one) of each row."""
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == gold
