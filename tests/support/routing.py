"""Which experts a row goes through, in NumPy and float64, by the formulas of the papers."""

from __future__ import annotations

import numpy as np


def route(
    logits: np.ndarray,
    chosen: int,
    *,
    normalised: bool,
    score: str = "softmax",
    scale: float = 1.0,
    correction: np.ndarray | None = None,
    corrects_logits: bool = False,
    least_sum: float = 0.0,
    tolerance: float = 0.0,
    groups: int = 1,
    chosen_groups: int = 1,
    group_best: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The experts of one row, best first, and the weights of all of them. logits: [experts]"""
    if score == "sparsemixer":
        return mix_sparsely(logits, chosen, tolerance, scale)
    sigmoid = score == "sigmoid"
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits - logits.max())
    scores = scores if sigmoid else scores / scores.sum()
    keys = scores if correction is None else (logits if corrects_logits else scores) + correction
    of_groups = np.sort(keys.reshape(groups, -1), 1)[:, ::-1]
    values = of_groups[:, :group_best].sum(1)
    left = np.ones((groups, 1), bool)
    left[np.argsort(-values, kind="stable")[:chosen_groups]] = False
    keys = np.where(left, -np.inf, keys.reshape(groups, -1)).reshape(-1)
    best = np.argsort(-keys, kind="stable")[:chosen]
    return best, scale * scores / (max(scores[best].sum(), least_sum) if normalised else 1)


def mix_sparsely(logits: np.ndarray, chosen: int, tolerance: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """SparseMixer (arXiv 2409.12136) at inference."""
    left, best, weights = logits.copy(), list[int](), np.zeros_like(logits)
    for _ in range(chosen):
        number = int(left.argmax())
        top = logits[number]
        near = (left > -np.inf) & ((top - logits) / np.maximum(np.abs(logits), top) <= tolerance)
        weights[number] = scale / np.exp(logits[near] - top).sum()
        best.append(number)
        left[number] = -np.inf
    return np.array(best), weights
