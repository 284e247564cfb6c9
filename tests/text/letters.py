"""The rule of stop texts, a letter at a time."""

from __future__ import annotations


def letter_by_letter(text: str, stops: list[str]) -> tuple[str, str | None]:
    """(text before the stop, the stop): the one that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None
