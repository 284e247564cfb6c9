"""The common part of plans over rows and over slots. Imports only NumPy."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Plan:
    """A plan of attention, which caches its device copies so that all planes of a step share them."""

    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, called once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def window_positions(window: int | None, positions: np.ndarray | None, count: int) -> np.ndarray | None:
    """Return positions as contiguous int64 [count] if there is a sliding window, else None.

    Raise ValueError if the window is below 1, or if the number of positions is not `count`.
    """
    if window is None:
        return None
    if window < 1 or positions is None or len(positions) != count:
        raise ValueError(
            f"a sliding window of {window} with {0 if positions is None else len(positions)} positions of {count} rows"
            "; pass a window of at least 1, and the position of each row"
        )
    return np.ascontiguousarray(positions, dtype=np.int64)
