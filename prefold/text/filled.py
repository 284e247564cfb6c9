"""Filled is a text that knows which parts of it were filled into a template, so that these parts alone are cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import InputError

_FIELD = re.compile(r"\{(\w+)\}")


class Filled(str):
    """A Filled is a text made of a template: a str like any other, of which truncate=True cuts the longest column.

    parts   (text, whether it is a column) pairs that make up the whole
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> Filled:
        parts = tuple(parts)
        made = super().__new__(cls, "".join(text for text, _ in parts))
        made.parts = parts
        return made

    @classmethod
    def of(cls, template: str, **columns: str) -> Filled:
        """Returns the template with each {column} replaced by its value. Raises InputError for a column of the
        template without a value, and for a value without a column."""
        pieces = _FIELD.split(template)
        names = pieces[1::2]
        for name in {*names} ^ {*columns}:
            what = "is missing" if name in names else "is not in the template"
            raise InputError(f"the column {name!r} {what}", field=name, remedy=f"the template has {', '.join(names)}")
        return cls((columns[text], True) if i % 2 else (text, False) for i, text in enumerate(pieces))

    @property
    def columns(self) -> list[str]:
        """Returns the texts of the columns, in order."""
        return [text for text, is_column in self.parts if is_column]

    def refilled(self, columns: Sequence[str]) -> str:
        """Returns the text with other columns: as many as `columns` has, in order."""
        left = iter(columns)
        return "".join(next(left) if is_column else text for text, is_column in self.parts)

    def __reduce__(self) -> tuple[type[Filled], tuple[tuple[tuple[str, bool], ...]]]:
        return Filled, (self.parts,)
