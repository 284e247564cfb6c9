"""Reads rows of CSV and TSV, and limits what a broken quote can spoil.

A quoted cell may go over several lines, so a quote that is never closed would take in all lines behind it. Where a
quote is broken one error stands for the line in which its row begins, and the lines behind that are read as rows of
their own.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import InputError

MAX_CELL_LINES = 1000
MAX_CELL_BYTES = 64 << 20  # of a row that goes over several lines
_MAX_FIELD = 1 << 30


@dataclass(frozen=True, slots=True)
class TableLine:
    """A TableLine holds the cells of one row of a table, or what is wrong with it.

    line   number of the row's first line, from 1
    cells  its cells; None where there is an error
    error  what is wrong with the row, else None
    size   how many characters it has
    """

    line: int
    cells: list[str] | None = None
    error: InputError | None = None
    size: int = 0


def read_rows(
    lines: Iterable[bytes], delimiter: str, *, width: int | None = None, max_cell_lines: int = MAX_CELL_LINES
) -> Iterator[TableLine]:
    """Yields the rows of a table, the header's included. Empty lines between rows are left out.

    width            how many cells a row has; a row with another number is an error. None: any number
    max_cell_lines   how many lines a quoted cell may have; 0: any number
    """
    csv.field_size_limit(_MAX_FIELD)
    row = _RowLines(lines, max_cell_lines)
    reader = csv.reader(row, delimiter=delimiter, strict=True)
    while True:
        row.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, _TooLong) as error:
            wrong, size = _broken(row, error), row.size
            row.give_back(len(row.taken) - 1)
            yield TableLine(row.first, error=wrong, size=size)
            continue
        if width is not None and cells and len(cells) != width:
            message = f"line {row.first} has {len(cells)} cells, the header {width}"
            remedy = "give it as many cells as the header has, and quote cells that hold a delimiter"
            wrong = InputError(message, remedy=remedy, code="wrong_number_of_fields")
            yield TableLine(row.first, error=wrong, size=row.size)
        elif cells:
            yield TableLine(row.first, cells, size=row.size)


class _TooLong(Exception):
    """Says that a row goes over more lines, or bytes, than it may."""


class _RowLines:
    """Iterates over decoded lines, keeps the lines of the row that is being read, and can take lines back."""

    def __init__(self, lines: Iterable[bytes], most: int):
        self._source = iter(lines)
        self._again: deque[str] = deque()
        self._most = most
        self.first = 1  # number of the row's first line
        self.taken: list[str] = []
        self.size = 0

    def begin(self) -> None:
        """Says that the next line begins a new row."""
        self.first += len(self.taken)
        self.taken = []
        self.size = 0

    def give_back(self, count: int) -> None:
        """Puts the last `count` lines back, to be read again."""
        self._again.extendleft(reversed(self.taken[len(self.taken) - count :]))
        del self.taken[len(self.taken) - count :]

    def __iter__(self) -> _RowLines:
        return self

    def __next__(self) -> str:
        if self.taken and self._most and (len(self.taken) >= self._most or self.size > MAX_CELL_BYTES):
            raise _TooLong
        # Undecodable bytes become lone surrogates: the field that has them is reported when it is used.
        line = self._again.popleft() if self._again else next(self._source).decode("utf-8", "surrogateescape")
        self.taken.append(line)
        self.size += len(line)
        return line


def _broken(row: _RowLines, error: Exception) -> InputError:
    """Returns the error of a row whose quotes are broken."""
    behind, what = len(row.taken) - 1, f"the row that begins in line {row.first} has a quote that"
    remedy = "close the quote, or double it"
    if isinstance(error, _TooLong):
        what += f" is not closed within {behind + 1:,} lines"
        remedy += ", or allow longer cells with --max-cell-lines N"
    elif "unexpected end" in str(error):
        what += " is never closed"
    elif behind:
        what += f" is closed in the middle of line {row.first + behind}, where no cell ends"
    else:
        what = f"line {row.first} is not a valid row: {error}"
        remedy = "double the quotes inside a quoted cell, and quote cells that hold a quote"
    if behind:
        what += f"; the {behind:,} lines behind it are read as rows of their own"
    return InputError(what, remedy=remedy, code="invalid_csv")
