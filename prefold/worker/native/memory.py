"""Memory of the native executor: cache-aligned arrays, zero pages, and a workspace that buffers share."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from ...model.program import Buffer, Operation

LINE = 64  # bytes of a cache line


def empty_bytes(size: int) -> np.ndarray:
    """Return uninitialised memory, uint8 [size], aligned to a cache line."""
    memory = np.empty(size + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return memory[first : first + size]


class Workspace:
    """Memory that the programs of one model use in turn. `memory` is uint8, aligned to a cache line."""

    def __init__(self) -> None:
        self.memory = empty_bytes(0)

    def reserve(self, size: int) -> np.ndarray:
        """Return at least `size` bytes. Growing replaces the memory and discards its content."""
        if len(self.memory) < size:
            self.memory = empty_bytes(size)
        return self.memory


def zero_pages(size: int) -> np.ndarray:
    """Return zeros, uint8 [size], aligned to a page. A page uses physical memory only after the first write to it.

    Huge pages are off for this memory. A KV store touches a few rows in each of many regions (one for every plane,
    head, and K or V), and with huge pages each region would use 2 MB for its first row.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no huge pages here
        return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)[:size]
    pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:size]


def place_buffers(
    layers: Iterable[Sequence[Operation]], sizes: Mapping[Buffer, int], apart: Iterable[Buffer]
) -> tuple[dict[Buffer, int], int]:
    """Return the offset of each buffer in one piece of memory, and the total size.

    Two buffers share memory if no layer needs both at once. A layer needs a buffer from its first to its last operation
    that names the buffer.

    Args:
        layers: The operations of each layer.
        sizes: The size of each buffer, in whole cache lines.
        apart: Buffers that pass data from layer to layer. They share nothing.
    """
    places: dict[Buffer, int] = {}
    end = 0
    for buffer in apart:
        places[buffer], end = end, end + sizes[buffer]
    start, spans = end, list[dict[Buffer, tuple[int, int]]]()
    for operations in layers:
        span: dict[Buffer, tuple[int, int]] = {}
        for number, operation in enumerate(operations):
            for buffer in operation.buffers:
                span[buffer] = span.get(buffer, (number, number))[0], number
        spans.append(span)
    for buffer in sorted(sizes.keys() - places.keys(), key=lambda name: (-sizes[name], name)):
        taken = sorted(
            (places[other], places[other] + sizes[other])
            for other in places.keys() & {name for span in spans if buffer in span for name in _beside(span, buffer)}
            if places[other] >= start
        )
        at = start
        for first, stop in taken:
            if first - at >= sizes[buffer]:
                break
            at = max(at, stop)
        places[buffer] = at
        end = max(end, at + sizes[buffer])
    return places, end


def _beside(span: Mapping[Buffer, tuple[int, int]], buffer: Buffer) -> list[Buffer]:
    """Return the buffers that a layer needs at the same time as `buffer`."""
    first, last = span[buffer]
    return [name for name, (begin, stop) in span.items() if begin <= last and first <= stop]
