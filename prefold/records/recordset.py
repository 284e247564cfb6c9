"""Holds sets of record numbers in one bit a record, and sets of texts in eight bytes a text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

_MOST_NEW = 1 << 16


class RecordSet:
    """Holds a set of record numbers, which are 0 or more, in one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Adds a number. Returns False when it was there already."""
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 64)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self._count += 1
        return True


class TextSet:
    """Holds a set of texts, as 64-bit digests.

    Two different texts share a digest with a probability of about n^2 / 2^65 (1e-9 for 200,000).
    """

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.uint64)
        self._new: set[int] = set()  # digests that are to be put among those, many at once

    def add(self, text: str) -> bool:
        """Adds a text. Returns False when it was there already."""
        digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
        place = int(np.searchsorted(self._sorted, np.uint64(digest)))
        if digest in self._new or (place < len(self._sorted) and int(self._sorted[place]) == digest):
            return False
        self._new.add(digest)
        if len(self._new) == _MOST_NEW:
            new = np.sort(np.fromiter(self._new, np.uint64))
            self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, new), new)
            self._new = set()
        return True


def format_ranges(numbers: Iterable[int]) -> str:
    """Returns distinct numbers as a text of ranges such as "1-5,7,9-12"."""
    ordered = np.sort(np.fromiter(numbers, np.int64))
    ranges = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ",".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges if len(each))


def parse_ranges(text: str) -> Iterator[int]:
    """Yields the numbers of a text that `format_ranges` wrote. Raises ValueError for any other text."""
    for part in filter(None, text.split(",")):
        start, _, stop = part.partition("-")
        yield from range(int(start), int(stop or start) + 1)
