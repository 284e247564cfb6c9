"""Says what of an answer cannot be equal in two recordings, and compares recordings."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["compare", "joined_events", "normal"]

LINES = 12  # of a difference that are printed
WIDTH = 200  # of such a line

_DATE = r"\d{4}-\d\d-\d\d[T ][\d:.]+(?:Z|[+-]\d\d:?\d\d)?"
# Number behind number, so that an exponent or a fraction goes with it.
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_PATTERNS = [
    (r'("(?:created|\w+_at)": ?)\d{10}(?:\.\d+)?', r'\1"<time>"'),
    (_DATE, "<time>"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:<port>"),
    (rf"{_NUMBER} (records|rows|tokens|prompts)/s", r"<rate> \1/s"),
    (rf"{_NUMBER} a second", "<rate> a second"),
    (rf"\b{_NUMBER} (ms|s|min|h)\b( \d\d (s|min)\b)?", "<seconds>"),
    (r"(?m)^(prefold:\w*(?:seconds|time|lag|bytes|memory|rss|steps)\w*(?:{[^}]*})?) .*$", r"\1 <number>"),
    # A batch that has just been created may have begun.
    (r'("status":"validating".*?"request_counts":)\{[^}]*\}', r'\1"<counts>"'),
    # The page's steps: how many there were, and those of the last minutes, each with its time.
    (r'("rows":\d+,"steps":)\d+', r'\1"<number>"'),
    (r'"steps":\[\[.*?\]\]', '"steps":["<time>"]'),
    (r"(?m)^((?:process|python)_\w+(?:{[^}]*})?) .*$", r"\1 <number>"),
]
_IDS = re.compile(r"(?<![0-9A-Za-z.])(?:[0-9a-f]{24,}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})(?![0-9A-Za-z])")


def normal(text: str, folders: dict[str, str]) -> str:
    """Returns a text with a word in place of what cannot be equal. folders: {path: its word}"""
    for path, word in folders.items():
        text = text.replace(path, word)
    for pattern, word in _PATTERNS:
        text = re.sub(pattern, word, text)
    numbers: dict[str, int] = {}
    return _IDS.sub(lambda match: f"<id {numbers.setdefault(match[0], len(numbers) + 1)}>", text)


# ------------------------------------------------------------------------------------------------------- streams

_GROWING = ("content", "text", "delta", "partial_json", "arguments")


def joined_events(stream: str) -> str:
    """Returns a stream of events, of which those that say more of the same text are joined.

    A server joins pieces that its client has not taken yet, so how many there are depends on the clock.
    """
    made: dict[str, tuple[str, Any]] = {}
    for event in stream.split("\n\n"):
        head, mark, data = event.rpartition("data: ")
        try:
            value = json.loads(data)
        except ValueError:
            made[event] = event, None
            continue
        if isinstance(value, dict):
            value.pop("sequence_number", None)
        key = head + json.dumps(_bare(value))
        before = made.get(key)
        made[key] = head + mark, value if before is None else _joined(before[1], value)
    return "\n\n".join(head if value is None else head + json.dumps(value) for head, value in made.values())


def _bare(value: Any) -> Any:
    """Returns what joined events have in common."""
    if isinstance(value, dict):
        return {
            name: "" if name in _GROWING and isinstance(one, str) else _bare(one)
            for name, one in value.items()
            if name not in ("logprobs", "usage")
        }
    return [_bare(one) for one in value] if isinstance(value, list) else value


def _joined(one: Any, more: Any) -> Any:
    """Returns two values of one form as one: texts and lists of log-probabilities behind each other."""
    if isinstance(one, dict) and isinstance(more, dict):
        found = one | more
        for name in one.keys() & more.keys():
            if name in _GROWING and isinstance(one[name], str):
                found[name] = one[name] + more[name]
            elif name == "logprobs" and one[name] and more[name]:
                found[name] = _joined_logprobs(one[name], more[name])
            elif name != "usage":
                found[name] = _joined(one[name], more[name])
        return found
    if isinstance(one, list) and isinstance(more, list):
        return [_joined(*pair) for pair in zip(one, more, strict=True)]
    return more


def _joined_logprobs(one: Any, more: Any) -> Any:
    if isinstance(one, list):
        return one + more
    return {name: one[name] + more[name] if isinstance(one[name], list) else one[name] for name in one}


# ----------------------------------------------------------------------------------------------------- comparing


def compare(before: Path, after: Path) -> Iterator[str]:
    """Yields lines that say what differs between two recordings; none where they are equal."""
    files = [{str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} for root in (before, after)]
    if not files[0] & files[1]:
        yield f"{before} and {after} have no file in common"
    for name in sorted(files[0] | files[1]):
        if name not in files[0] or name not in files[1]:
            yield f"=== {name}: only in {before if name in files[0] else after}"
            continue
        texts = [(root / name).read_text(encoding="utf-8") for root in (before, after)]
        if texts[0] != texts[1]:
            yield f"=== {name}{_only_numbers(*texts)}"
            found = difflib.unified_diff(*map(_lines, texts), lineterm="", n=1)
            lines = [line if len(line) <= WIDTH else line[:WIDTH] + " ..." for line in found][2:]
            yield from lines[:LINES]
            if len(lines) > LINES:
                yield f"... {len(lines) - LINES} more lines"


def _lines(text: str) -> list[str]:
    """Returns the lines of a text, each object of JSON in lines of its own."""
    found = []
    for line in text.splitlines():
        head, mark, data = line.partition("{")
        try:
            found += (head + json.dumps(json.loads(mark + data), indent=1, ensure_ascii=False)).splitlines()
        except ValueError:
            found.append(line)
    return found or [text]


_FLOAT = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")


def _only_numbers(one: str, other: str) -> str:
    """Returns words that say by how much numbers differ, where nothing else does."""
    if _FLOAT.sub("#", one) != _FLOAT.sub("#", other):
        return ""
    pairs = zip(_FLOAT.findall(one), _FLOAT.findall(other), strict=True)
    return f": numbers differ by at most {max(abs(float(a) - float(b)) for a, b in pairs):.2g}"
