"""Cuts a prompt that is too long: its longest column is cut, and what stands around that column stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..text import Tokenizer
from ..text.prompts import Filled

T = TypeVar("T")
TRIES = 16


def columns_of(text: str) -> tuple[list[str], Callable[[Sequence[str]], str]]:
    """Returns the columns of a text, and a function that makes the text of other columns. A text that was not made
    of a template is one column."""
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
    """Returns make(columns) with the longest columns cut, so that its size is at most `room` and one token more is too
    much.

    make  makes a prompt of columns
    size  gives the tokens of what `make` returned
    room  tokens that the prompt may have
    left  whether each column keeps its end instead of its beginning

    All columns that are longer than some length are cut to that length. Returns None where nothing would be left of
    them. The prompt is encoded as a whole, so that its size need not be the sum of the sizes of its parts: the number
    of tokens to keep is searched for, beginning with the one that those sizes suggest.
    """
    spans = [tokenizer.spans(column) for column in columns]
    total = sum(len(each) for each in spans)

    def cut(keep: int) -> T:
        counts = level([len(each) for each in spans], keep)
        return make([part_of(*one, left) for one in zip(columns, spans, counts, strict=True)])

    best: T | None = None
    low, high = 0, total  # `low` tokens are known to fit (or low is 0), and `high` tokens are known not to
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


def level(sizes: Sequence[int], keep: int) -> list[int]:
    """Returns how many tokens to keep of each column, `keep` in all, so that the largest columns are cut to one
    size."""
    low, high = 0, max(sizes)
    while low < high:  # searches for the largest cap that leaves at most `keep` tokens
        cap = (low + high + 1) // 2
        low, high = (cap, high) if sum(min(size, cap) for size in sizes) <= keep else (low, cap - 1)
    counts = [min(size, low) for size in sizes]
    spare = keep - sum(counts)
    for i, size in enumerate(sizes):
        if spare > 0 and counts[i] < size:
            counts[i], spare = counts[i] + 1, spare - 1
    return counts


def part_of(text: str, spans: Sequence[tuple[int, int]], count: int, left: bool) -> str:
    """Returns the first `count` tokens of a text, or with `left` the last ones. spans: where each token begins and
    ends."""
    if count >= len(spans):
        return text
    if not count:
        return ""
    return text[spans[-count][0] :] if left else text[: spans[count - 1][1]]
