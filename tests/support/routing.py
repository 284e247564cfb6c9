"""Which experts a row goes through, in NumPy and float64, by the formulas of the papers."""

from __future__ import annotations

import numpy as np


def route(
    logits: np.ndarray,
    chosen: int,
    *,
    normalised: bool,
    sigmoid: bool = False,
    scale: float = 1.0,
    correction: np.ndarray | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    group_best: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The experts of one row, best first, and the weights of all of them. logits: [experts]"""
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits - logits.max())
    scores = scores if sigmoid else scores / scores.sum()
    keys = scores if correction is None else scores + correction
    of_groups = np.sort(keys.reshape(groups, -1), 1)[:, ::-1]
    values = of_groups[:, :group_best].sum(1)
    left = np.ones((groups, 1), bool)
    left[np.argsort(-values, kind="stable")[:chosen_groups]] = False
    keys = np.where(left, -np.inf, keys.reshape(groups, -1)).reshape(-1)
    best = np.argsort(-keys, kind="stable")[:chosen]
    return best, scale * scores / (scores[best].sum() if normalised else 1)
