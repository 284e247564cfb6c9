"""Remembers the last steps of an engine, for the page."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..report.page import merged

STEPS, SHOWN_SECONDS, BINS = 4096, 300.0, 240


class StepWatch:
    """The last steps of an engine: (start, seconds, 1, rows, path rows, sequences running) of each."""

    def __init__(self, engine: Any):
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._end = ExitStack()
        self._end.enter_context(engine.meter.heard_by(self._note))

    def _note(self, step: Any) -> None:
        self._steps.append((step.started, step.seconds, 1, step.rows, step.path_rows, step.running))

    def bins(self) -> list[list[float]]:
        """Returns the steps of the last minutes, neighbours added up; their start is in seconds before now."""
        now = time.perf_counter()
        found = np.array([step for step in list(self._steps) if step[0] > now - SHOWN_SECONDS]).reshape(-1, 6)
        found[:, 0] -= now
        return [[float(f"{value:.6g}") for value in entry] for entry in merged(found, BINS).tolist()]

    def close(self) -> None:
        """Ends the watching."""
        self._end.close()
