"""The number of threads that the kernels run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..spec.container import usable_cores

# Variables by which a user chooses the threads of numeric libraries, the strongest first.
VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
CPUS = Path("/sys/devices/system/cpu")


class Threads:
    """The number of threads of this process's calls.

    chosen: the number that `set` was given last; None: no number was set
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._default: int | None = None

    def get(self) -> int:
        """Return the number of threads: as set, or else `default_threads`, which is looked up once."""
        if self.chosen is not None:
            return self.chosen
        if self._default is None:
            self._default = default_threads()
        return self._default

    def set(self, count: int) -> None:
        """Run calls on `count` threads from now on. Raise ValueError if that is less than 1."""
        if count < 1:
            raise ValueError(f"{count} threads; use at least 1")
        self.chosen = count


process = Threads()  # of this process


def threads() -> int:
    """Return the number of threads that the kernels run on."""
    return process.get()


def set_threads(count: int) -> None:
    """Let the kernels run on `count` threads. Raise ValueError if that is less than 1."""
    process.set(count)


def default_threads() -> int:
    """Return the number of threads if none is set: as VARIABLES say, or the cores that this process can keep busy.

    Two hardware threads of one core count once, because they share what the kernels wait for.
    """
    for name in VARIABLES:
        first = os.environ.get(name, "").split(",")[0].strip()  # OpenMP accepts a number for each nesting level
        if first.isdecimal() and int(first):
            return int(first)
    return min(usable_cores(), len(set(_cores())) or usable_cores())


def _cores() -> Iterator[str]:
    """Yield for each hardware thread that this process may use the hardware threads of its core; only on Linux."""
    for number in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        try:
            yield (CPUS / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
        except OSError:  # a system that does not say so
            yield str(number)
