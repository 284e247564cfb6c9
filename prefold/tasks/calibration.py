"""How well the probabilities of decisions fit true answers, and the temperature and threshold that improve them.

The rows are split in two halves by their numbers. The *fit* half chooses the temperature and the threshold of a
question; the *check* half was not looked at and shows what they are worth.
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

BINS = 15  # of the calibration error, as Guo et al. 2017 have it
LEAST_ROWS = 10  # of a half, from which on a temperature and a threshold are fitted
BOUNDS = (0.05, 20.0)  # of a temperature. Without them it is 0 if all rows are right
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Figures:
    """How well the probabilities of some rows fit their true answers.

    Attributes:
        rows: how many rows
        accuracy: share of rows whose most likely option is the true one
        log_loss: mean of -log p of the true option, in nats
        calibration_error: expected calibration error, see `calibration_error`
        mean_error: of a score the mean distance of the answer, the mean level, from the true level
    """

    rows: int
    accuracy: float
    log_loss: float
    calibration_error: float
    mean_error: float | None = None


@dataclass(frozen=True)
class Bin:
    """The rows whose confidence, the probability of the most likely option, lies in one of the equal parts of 0 to 1.

    Attributes:
        rows: how many rows
        confidence: their mean confidence
        accuracy: share of rows whose most likely option is the true one
    """

    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Half:
    """The figures of a half of the rows, before and after the temperature.

    Attributes:
        before: of the probabilities as they were answered
        after: of the same rows, with the temperature
        decided: rows whose confidence reaches the threshold, with the temperature
        right: decided records whose answer is true
        bins: before and after, each a list of `BINS` Bin
    """

    before: Figures
    after: Figures
    decided: int
    right: int
    bins: tuple[list[Bin], list[Bin]]


@dataclass(frozen=True)
class Judgement:
    """The probabilities of a question compared with true answers.

    Attributes:
        name: of the question
        whole: figures of all rows, as they were answered
        bins: of all rows, as they were answered
        temperature: fitted on the fit half; None: there are too few rows
        threshold: the least confidence from which on the share of right answers in the fit half is at least the
            precision; None: it is not reached anywhere
        fit: the half that chose them
        check: the half that was not looked at
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
        """Return whether the temperature is at a bound, as of rows that are all right."""
        return self.temperature is not None and not BOUNDS[0] * 1.01 < self.temperature < BOUNDS[1] / 1.01

    def to_dict(self) -> dict[str, object]:
        """Return the judgement as a JSON object."""
        return asdict(self)

    def calibration(self, question: Question, applied: QuestionCalibration | None) -> QuestionCalibration:
        """Return the calibration of the question. applied: the calibration that the probabilities already have"""
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
    """Return what true answers say about the probabilities of a question, with a temperature and a threshold.

    Args:
        question: The question.
        numbers: The number of each row, which says in which half it is.
        probabilities: As they were answered, [rows, options].
        gold: The place of the true option of each row.
        precision: The share of decided rows that has to be right.
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
    """Return whether each row is in the fit half: by a bit of the digest of its number, so that the order and the
    number of the other rows do not matter."""
    digests = (hashlib.blake2b(b"%d" % number, digest_size=1).digest() for number in numbers)
    return np.fromiter((digest[0] & 1 for digest in digests), np.bool_, len(numbers))


def log_of(probabilities: Floats) -> Floats:
    """Return the logarithm of probabilities. 0 counts as the least number above 0."""
    return np.log(np.maximum(probabilities, np.finfo(np.float64).smallest_subnormal))


def fit_temperature(logs: Floats, gold: Ints) -> float:
    """Return the temperature T within BOUNDS that makes the true answers most likely: the minimum of the mean log loss
    of softmax(logs / T) (temperature scaling, Guo et al. 2017).

    The log loss is convex in 1/T, so its derivative by 1/T has one zero, which is found by bisection.

    Args:
        logs: Log-probabilities or logits, [rows, options].
        gold: The place of the true option of each row.
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
    """Return the Figures of some rows, at least one. probabilities: [rows, options]; gold: the place of the true
    option"""
    confidence, right = _top(probabilities, gold)
    loss = -log_of(probabilities[np.arange(len(gold)), gold])
    levels = np.arange(probabilities.shape[1])
    distance = float(np.abs(probabilities @ levels - gold).mean()) if is_score else None
    return Figures(len(gold), float(right.mean()), float(loss.mean()), calibration_error(confidence, right), distance)


def reliability(confidence: Floats, right: Bools, bins: int = BINS) -> list[Bin]:
    """Return the rows in bins of equal width by their confidence: bin m of M holds those in ((m-1)/M, m/M]."""
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights, bins) / np.maximum(counts, 1) for weights in (confidence, right)]
    return [Bin(int(n), float(p), float(a)) for n, p, a in zip(counts, *sums, strict=True)]


def calibration_error(confidence: Floats, right: Bools, bins: int = BINS) -> float:
    """Return the expected calibration error, sum over bins B of |B|/n * |accuracy(B) - mean confidence(B)| (Naeini et
    al. 2015; with 15 bins of the most likely option, as here, Guo et al. 2017)."""
    parts = reliability(confidence, right, bins)
    return sum(part.rows * abs(part.accuracy - part.confidence) for part in parts) / len(right)


def threshold_for(confidence: Floats, right: Bools, precision: float) -> float | None:
    """Return the least confidence from which on the share of right rows is at least the precision; 0 if that holds for
    all rows, and None if it holds nowhere.

    It lies in the middle between the last row that is decided and the first one that is not, so that rounding of
    probabilities in another batch moves as few rows as possible across it.
    """
    order = np.argsort(-confidence, kind="stable")
    sorted_confidence, share = confidence[order], np.cumsum(right[order]) / np.arange(1, len(right) + 1)
    is_last = np.append(sorted_confidence[1:] < sorted_confidence[:-1], True)  # of rows of equal confidence
    places = np.flatnonzero(is_last & (share >= precision))
    if not places.size:
        return None
    last = int(places[-1])
    return 0.0 if last == len(right) - 1 else float(sorted_confidence[last : last + 2].mean())


def _top(probabilities: Floats, gold: Ints) -> tuple[Floats, Bools]:
    """Return (the probability of the most likely option, whether it is the true one) of each row."""
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == gold
