"""Reads rows of CSV and TSV, and limits what a broken quote can spoil.

A quoted cell may go over several lines, so a quote that is never closed takes in all lines up to the next quote in the
file. Such a cell is recognised by its length, by a quote that closes in the middle of a cell, or by its lines, where
they look like rows of the table. One error then stands for the line in which the quote opens, and the lines behind it
are read again as rows of their own, or counted as lost where they do not look like rows.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import InputError

__all__ = ["MAX_CELL_LINES", "TableLine", "read_rows"]

MAX_CELL_LINES = 1000
MAX_CELL_BYTES = 64 << 20  # of a row that goes over several lines
_MAX_FIELD = 1 << 30
# A cell whose quote is closed is taken for rows only where at least so many of its lines look like rows. A few lines
# suffice where a column has a form that they share (ids, numbers, dates); more are needed where only the number of
# cells can be compared.
_LINES_ALIKE, _LINES_COUNTED = 3, 20


@dataclass(frozen=True, slots=True)
class TableLine:
    """A TableLine holds the cells of one row of a table, or what is wrong with it.

    line   number of the row's first line, from 1
    cells  its cells; None where there is an error
    error  what is wrong with the row, else None
    size   how many characters it has
    lost   how many further lines a broken quote took in that are not read as rows of their own
    """

    line: int
    cells: list[str] | None = None
    error: InputError | None = None
    size: int = 0
    lost: int = 0


def read_rows(
    lines: Iterable[bytes], delimiter: str, *, width: int | None = None, max_cell_lines: int = MAX_CELL_LINES
) -> Iterator[TableLine]:
    """Returns the rows of a table, the header's included. Empty lines between rows are left out.

    width            how many cells a row has; a row with another number is an error. None: any number
    max_cell_lines   how many lines a quoted cell may have. 0: any number, and cells are never taken for rows that a
                     broken quote took in
    """
    csv.field_size_limit(_MAX_FIELD)
    return iter(_Rows(lines, delimiter, width, max_cell_lines))


class _TooLong(Exception):
    """Says that a row goes over more lines, or bytes, than it may."""


class _Lines:
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

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self.taken and self._most and (len(self.taken) > self._most or self.size > MAX_CELL_BYTES):
            raise _TooLong
        # Undecodable bytes become lone surrogates: the field that has them is reported when it is used.
        line = self._again.popleft() if self._again else next(self._source).decode("utf-8", "surrogateescape")
        self.taken.append(line)
        self.size += len(line)
        return line


class _Rows:
    """Iterates over the rows of a table; see `read_rows`."""

    def __init__(self, lines: Iterable[bytes], delimiter: str, width: int | None, most: int):
        self._delimiter = delimiter
        self._width = width
        self._most = most
        self._lines = _Lines(lines, most)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        self._good: deque[list[str]] = deque(maxlen=16)  # the last rows that were right

    def __iter__(self) -> Iterator[TableLine]:
        lines = self._lines
        while True:
            lines.begin()
            try:
                cells = next(self._reader)
            except StopIteration:
                return
            except (csv.Error, _TooLong) as error:
                yield self._error(error)
                continue
            if not cells:
                continue
            if len(lines.taken) > 1 and self._most and self._took_rows(cells):
                yield self._error(None)
            elif self._width is not None and len(cells) != self._width:
                message = f"line {lines.first} has {len(cells)} cells, the header {self._width}"
                remedy = "give it as many cells as the header has, and quote cells that hold a delimiter"
                error = InputError(message, remedy=remedy, code="wrong_number_of_fields")
                yield TableLine(lines.first, error=error, size=lines.size)
            else:
                if lines.first > 1:  # line 1 is the header, whose names look like no cells
                    self._good.append(cells)
                yield TableLine(lines.first, cells, size=lines.size)

    def _error(self, error: Exception | None) -> TableLine:
        """Returns the error of a broken row. The lines that its quote took in are put back where they are rows."""
        lines = self._lines
        opened = _opened(lines.taken, self._delimiter)
        behind = len(lines.taken) - 1 - opened
        ended = isinstance(error, csv.Error) and "unexpected end" in str(error)
        if not behind and not ended:
            what = f"line {lines.first + opened} is not a valid row: {error}"
            return self._row(what, "double the quotes inside a quoted cell, and quote cells that hold a quote", 0)
        what, remedy = f"the quote that opens in line {lines.first + opened}", "close the quote, or double it"
        if isinstance(error, _TooLong):
            what += f" is not closed within {behind + 1:,} lines"
            remedy += ", or allow longer cells with --max-cell-lines N"
        elif ended:
            what += " is never closed"
        elif error is not None:
            what += f" is closed in the middle of line {lines.first + len(lines.taken) - 1}, where no cell ends"
        else:
            what += f" takes in {behind:,} lines that look like rows"
            remedy += ", or allow such cells with --max-cell-lines 0"
        certain = error is None or ended or isinstance(error, _TooLong) or self._width == 1
        if certain or 2 * sum(self._look_like_rows(lines.taken[-behind:])) >= behind:
            lines.give_back(behind)
            if behind and error is not None:
                one = "the line behind it is read as a row of its own"
                what += f"; the {behind:,} lines behind it are read as rows of their own" if behind > 1 else f"; {one}"
            return self._row(what, remedy, 0)
        return self._row(f"{what}; {behind:,} lines went with it", remedy, behind)

    def _row(self, message: str, remedy: str, lost: int) -> TableLine:
        error = InputError(message, remedy=remedy, code="invalid_csv")
        return TableLine(self._lines.first, error=error, size=self._lines.size, lost=lost)

    def _took_rows(self, cells: list[str]) -> bool:
        """Returns whether a row of several lines, whose quotes are all closed, is really a broken quote before rows."""
        if self._width is None or self._width == 1:
            return False
        taken = self._lines.taken
        behind = taken[_opened(taken, self._delimiter) + 1 :]
        if not behind or not all(self._look_like_rows(behind)):
            return False
        return len(cells) != self._width or len(behind) >= (_LINES_ALIKE if any(self._forms()) else _LINES_COUNTED)

    def _look_like_rows(self, lines: list[str]) -> Iterator[bool]:
        """Yields for each line whether, read by itself, it has as many cells as the header and its columns' forms."""
        forms = self._forms()
        for line in lines:
            try:
                cells = next(csv.reader([line], delimiter=self._delimiter), [])
            except csv.Error:  # a carriage return within the line
                cells = []
            alike = (form is None or form == _form(cell) for form, cell in zip(forms, cells, strict=False))
            yield len(cells) == self._width and all(alike)

    def _forms(self) -> list[str | None]:
        """Returns the form that the cells of each column have; None where the last good rows do not agree."""
        forms = [set(map(_form, column)) for column in zip(*self._good, strict=False)]
        return [next(iter(found)) if len(found) == 1 else None for found in forms]


def _form(cell: str) -> str | None:
    """Returns the form of a short cell: "a0" for "r100", "0-0-0" for "2024-05-01"; None for a long cell."""
    if len(cell) > 40 or " " in cell:
        return None
    return re.sub("[^\\W\\d_]+", "a", re.sub("[0-9]+", "0", cell))


def _opened(lines: list[str], delimiter: str) -> int:
    """Returns the index of the line in which the last quoted cell of a row opens; 0 when no cell is quoted."""
    opened, inside = 0, False
    for index, line in enumerate(lines):
        at = 0
        while at < len(line):
            if not inside and line[at] == '"':
                inside, opened, at = True, index, at + 1
            if inside:
                quote = line.find('"', at)
                if quote < 0:
                    break
                doubled = line[quote + 1 : quote + 2] == '"'
                inside, at = doubled, quote + 1 + doubled
            if not inside:
                cut = line.find(delimiter, at)
                if cut < 0:
                    break
                at = cut + 1
    return opened
