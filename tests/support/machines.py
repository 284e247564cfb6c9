"""Machines of other kinds: without compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefold import kernels
from prefold.kernels.loader import LoadedKernels, process


@contextmanager
def kernels_in_use(some: kernels.Kernels | None) -> Iterator[None]:
    """A context in which this process has these kernels; None: as with PREFOLD_KERNELS=0."""
    before = process.load()
    process.loaded = LoadedKernels(some, "of a test")
    try:
        yield
    finally:
        process.loaded = before


@contextmanager
def threads_in_use(count: int) -> Iterator[None]:
    """A context in which the kernels, and PyTorch, run on so many threads."""
    from prefold.worker.torch.device import settle_threads

    before = kernels.threads()
    settle_threads(count)
    try:
        yield
    finally:
        settle_threads(before)
