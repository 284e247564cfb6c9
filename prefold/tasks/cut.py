"""Cutting a prompt that is too long: its longest column goes, and what is around it stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..text import Tokenizer
from ..text.filled import Filled

__all__ = ["columns_of", "cut_columns"]

T = TypeVar("T")
TRIES = 16


def columns_of(text: str) -> tuple[list[str], Callable[[Sequence[str]], str]]:
    """(the columns of a text, what makes the text of other ones). A text of no template is one column."""
    if isinstance(text, Filled) and any(text.columns):
        return text.columns, text.refilled
    return [text], lambda columns: columns[0]


def cut_columns(
    tokenizer: Tokenizer,
    columns: Sequence[str],
    make: Callable[[Sequence[str]], T],
    size: Callable[[T], int],
    room: int,
    *,
    left: bool = False,
) -> T | None:
    """make(columns), the longest of them cut so that size(...) is at most `room`, and one token more would be too much.

    Columns that are longer than the others are cut to one length. Each keeps its beginning, or with `left` its end.
    None where nothing would be left of them. What is made is encoded as a whole, so its size need not be the sum of
    its parts' sizes: the number of tokens that are kept is searched for, beginning with what the sizes say.
    """
    spans = [tokenizer.spans(column) for column in columns]
    total = sum(len(each) for each in spans)

    def cut(keep: int) -> T:
        counts = _level([len(each) for each in spans], keep)
        return make([_part(*one, left) for one in zip(columns, spans, counts, strict=True)])

    best: T | None = None
    low, high = 0, total  # it is known that `low` tokens fit, or that there are none, and that `high` do not
    keep = total - (size(make(columns)) - room)
    for _ in range(TRIES):
        keep = min(max(keep, low + 1), high - 1)
        if keep <= low:
            break
        made = cut(keep)
        over = size(made) - room
        if over <= 0:
            best, low = made, keep
            if not over:
                break
        else:
            high = keep
        keep -= over
    return best


def _level(sizes: Sequence[int], keep: int) -> list[int]:
    """How much of each is kept so that `keep` are in all, and the largest are cut to one size."""
    low, high = 0, max(sizes)
    while low < high:  # the largest cap under which at most `keep` are left
        cap = (low + high + 1) // 2
        low, high = (cap, high) if sum(min(size, cap) for size in sizes) <= keep else (low, cap - 1)
    counts = [min(size, low) for size in sizes]
    spare = keep - sum(counts)
    for i, size in enumerate(sizes):
        if spare > 0 and counts[i] < size:
            counts[i], spare = counts[i] + 1, spare - 1
    return counts


def _part(text: str, spans: Sequence[tuple[int, int]], count: int, left: bool) -> str:
    """The first `count` tokens of a text, or with `left` the last ones. spans: where each begins and ends in it."""
    if count >= len(spans):
        return text
    if not count:
        return ""
    return text[spans[-count][0] :] if left else text[: spans[count - 1][1]]
