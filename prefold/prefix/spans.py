"""The ids of rows that are no tokens, and which of them are spans.

A row of an image has an id above every vocabulary. The rows of one image have ids of their own, which go up by one from
row to row, so that equal images are equal ids: windows, tries, caches and schedulers treat them as tokens. Images whose
rows see each other both ways have ids from SPAN_BASE on, and between two such *spans* an id stays unused. So a span is
a run of ids that go up by one, and whoever cuts sees in the ids where it may not.
"""

from __future__ import annotations

import numpy as np

__all__ = ["MEDIA_BASE", "SPAN_BASE", "clear_of_span", "longest_span", "span_starts"]

# Ids of rows that see what was before them, as tokens do; and of rows of spans. Below are the vocabularies.
MEDIA_BASE = 1 << 30
SPAN_BASE = MEDIA_BASE + (1 << 29)


def span_starts(tokens: np.ndarray) -> np.ndarray | None:
    """Returns of each row in a span the first row of the span, of any other the row itself, int64 [rows], ascending;
    None where there is no span of more than one row. tokens: int32 [rows], of one prompt, or depth-first."""
    inside = _goes_on(tokens)
    if inside is None:
        return None
    return np.maximum.accumulate(np.where(inside, 0, np.arange(len(tokens))))


def longest_span(tokens: np.ndarray) -> int:
    """Returns the rows of the longest span among those of a prompt, 0 where there is none."""
    if not len(tokens) or tokens.max() < SPAN_BASE:
        return 0
    starts = span_starts(tokens)
    return 1 if starts is None else int(np.bincount(starts).max())


def clear_of_span(tokens: np.ndarray, cut: int) -> int:
    """Returns `cut`, or where it falls into a span the first row of that span. tokens: int32 [rows] of a prompt, from a
    row on that is in no span or the first of one."""
    if not 0 < cut < len(tokens) or tokens[cut] < SPAN_BASE or tokens[cut] != tokens[cut - 1] + 1:
        return cut
    starts = span_starts(tokens[: cut + 1])
    assert starts is not None
    return int(starts[-1])


def _goes_on(tokens: np.ndarray) -> np.ndarray | None:
    """Returns which rows go on with the span of the row before, bool [rows]; None: none does."""
    if not len(tokens) or tokens.max() < SPAN_BASE:
        return None
    inside = np.zeros(len(tokens), bool)
    np.equal(tokens[1:], tokens[:-1] + 1, out=inside[1:])
    inside[1:] &= tokens[:-1] >= SPAN_BASE
    return inside if inside.any() else None
