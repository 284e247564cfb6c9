"""Filled: a text that knows which parts of it were filled into a template, so that cutting it keeps the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import InputError

__all__ = ["Filled"]

_FIELD = re.compile(r"\{(\w+)\}")


class Filled(str):
    """A text made of a template. It is a str like any other, and truncate=True cuts its longest column.

    parts   (text, whether it is a column) pairs that make the text up
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> Filled:
        parts = tuple(parts)
        made = super().__new__(cls, "".join(text for text, _ in parts))
        made.parts = parts
        return made

    @classmethod
    def of(cls, template: str, **columns: str) -> Filled:
        """The template with each {column} replaced. Raises InputError for a column that is missing, or not there."""
        pieces = _FIELD.split(template)
        names = pieces[1::2]
        for name in {*names} ^ {*columns}:
            what = "is missing" if name in names else "is not in the template"
            raise InputError(f"the column {name!r} {what}", field=name, remedy=f"the template has {', '.join(names)}")
        return cls((columns[text], True) if i % 2 else (text, False) for i, text in enumerate(pieces))

    @property
    def columns(self) -> list[str]:
        """What was filled in, in order."""
        return [text for text, is_column in self.parts if is_column]

    def refilled(self, columns: Sequence[str]) -> str:
        """The text with other columns."""
        left = iter(columns)
        return "".join(next(left) if is_column else text for text, is_column in self.parts)

    def __reduce__(self) -> tuple[type[Filled], tuple[tuple[tuple[str, bool], ...]]]:
        return Filled, (self.parts,)
