"""The number of threads that the kernels run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..spec.container import usable_cores

# Variables that set the number of threads of numeric libraries. The first one that is set wins.
VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
CPUS = Path("/sys/devices/system/cpu")


class Threads:
    """The number of threads of the kernels' calls.

    Attributes:
        chosen: the number of the last call of `set`, or None.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._default: int | None = None

    def get(self) -> int:
        """Return the number that was set, else the result of `default_threads`, which is computed once."""
        if self.chosen is not None:
            return self.chosen
        if self._default is None:
            self._default = default_threads()
        return self._default

    def set(self, count: int) -> None:
        """Run calls on `count` threads from now on. Raise ValueError if `count` is less than 1."""
        if count < 1:
            raise ValueError(f"{count} threads; use at least 1")
        self.chosen = count


process = Threads()  # for this process


def threads() -> int:
    """Return the number of threads that the kernels run on."""
    return process.get()


def set_threads(count: int) -> None:
    """Run the kernels on `count` threads. Raise ValueError if `count` is less than 1."""
    process.set(count)


def default_threads() -> int:
    """Return the number of threads if none is set: from VARIABLES, or the number of cores that this process may use.

    Two hardware threads of one core count once, because they share the units that limit the kernels.
    """
    for name in VARIABLES:
        first = os.environ.get(name, "").split(",")[0].strip()  # OpenMP accepts a number for each nesting level
        if first.isdecimal() and int(first):
            return int(first)
    return min(usable_cores(), len(set(_cores())) or usable_cores())


def _cores() -> Iterator[str]:
    """Yield the list of its core's hardware threads for each hardware thread of this process. Empty except on Linux."""
    for number in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        try:
            yield (CPUS / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
        except OSError:  # the system does not report it
            yield str(number)
