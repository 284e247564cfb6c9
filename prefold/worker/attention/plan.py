"""What plans of attention over rows and over slots have in common. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Plan:
    """A plan of attention keeps what has been made of it for a device, so that each plane of a step finds it there."""

    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what `make` gives, made once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def window_positions(window: int | None, positions: np.ndarray | None, count: int) -> np.ndarray | None:
    """Returns positions as contiguous int64 [count] where there is a sliding window, else None.

    Raises ValueError for a window below 1, and where positions are missing or not `count`.
    """
    if window is None:
        return None
    if window < 1 or positions is None or len(positions) != count:
        raise ValueError(
            f"a sliding window of {window} with {0 if positions is None else len(positions)} positions of {count} rows"
            "; pass a window of at least 1, and the position of each row"
        )
    return np.ascontiguousarray(positions, dtype=np.int64)
