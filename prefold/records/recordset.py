"""Holds sets of record numbers in one bit a record, and sets of texts in eight bytes a text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator


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
    """Holds a set of texts, as 64-bit digests in one flat table.

    Two different texts share a digest with a probability of about n^2 / 2^65 (1e-9 for 200,000).
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._count = 0

    def add(self, text: str) -> bool:
        """Adds a text. Returns False when it was there already."""
        # Zero marks a free place of the table, so a digest of zero is replaced by one.
        digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) or 1
        if 2 * self._count >= len(self._table):
            self._grow()
        added = _insert(self._table, digest)
        self._count += added
        return added

    def _grow(self) -> None:
        old, self._table = self._table, array("Q", bytes(16 * len(self._table)))
        for digest in old:
            if digest:
                _insert(self._table, digest)


def _insert(table: array, digest: int) -> bool:
    mask = len(table) - 1
    place = digest & mask
    while table[place]:
        if table[place] == digest:
            return False
        place = (place + 1) & mask
    table[place] = digest
    return True


def format_ranges(numbers: Iterable[int]) -> str:
    """Returns distinct numbers as a text of ranges such as "1-5,7,9-12"."""
    parts: list[str] = []
    start = last = None
    for number in sorted(numbers):
        if last is not None and number == last + 1:
            last = number
            continue
        if start is not None:
            parts.append(f"{start}-{last}" if last != start else str(start))
        start = last = number
    if start is not None:
        parts.append(f"{start}-{last}" if last != start else str(start))
    return ",".join(parts)


def parse_ranges(text: str) -> Iterator[int]:
    """Yields the numbers of a text that `format_ranges` wrote. Raises ValueError for any other text."""
    for part in filter(None, text.split(",")):
        start, _, stop = part.partition("-")
        yield from range(int(start), int(stop or start) + 1)
