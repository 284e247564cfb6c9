"""What a chat template may call: methods of texts, lists and objects, filters and tests. Nothing else can be called.

Beside each is what a call makes, in letters at most: a function of the same arguments, which also takes the time of
what is only looked at. So a call is bounded before it is made. What is not here has no use in a conversation, or
cannot be bounded so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

from jinja2.filters import _GroupTuple
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Cycler
from markupsafe import Markup

from .allowance import ITEM, OBJECT, TemplateLimit, size_of, spend, take

__all__ = [
    "BRACE_WIDTH", "EACH", "FILTERS", "METHODS", "PERCENT_WIDTH", "TESTS", "compared", "contained", "filled", "markup",
    "metered",
]  # fmt: skip

# Letters of a text that is read as a number, which takes time by their square, and digits that a number is rounded to:
# it is divided by a power of ten.
LONGEST_NUMBER, MOST_DIGITS = 4096, 300
# Letters that one field of a format may be padded to. Wider ones are refused, by the two patterns.
FIELD = 1000
PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z]*(\*|\d{4})")
BRACE_WIDTH = re.compile(r"\{[^{}:]*:[^{}]*(\{|\d{4})")
# Places where a text is filled in as Python would write it, each letter escaped at worst.
QUOTED = re.compile(r"%[^%a-zA-Z]*[ra]|![ra]")
# Sorting compares each item about so often.
SORTING = 16
# Letters of a part of a text that is looked for in the simple way.
SHORT = 100
# Ends of lines, as `splitlines` finds them.
ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Cost = Callable[..., float]


def markup(*values: Any) -> int:
    """Returns by how much what is made of texts may be longer: where one is marked as safe, the others are escaped."""
    return 5 if any(isinstance(value, Markup) for value in values) else 1


def filled(text: Any, sign: str, pattern: re.Pattern[str], values: Iterable[Any]) -> int:
    """Returns at most how long a text with places for values becomes: as many as there are of a sign. Raises
    TemplateLimit for places of a large width, or of one that is computed."""
    text = _text(text)
    if pattern.search(text):
        raise TemplateLimit(f"it formats with a width of more than {FIELD - 1:,} letters, or a computed one")
    each = 12 if QUOTED.search(text) else 1
    values = list(values)
    values += [one for value in values if isinstance(value, Mapping) for one in value.values()]
    largest = max((each * size_of(value) for value in values), default=0)
    return (len(text) + text.count(sign) * (FIELD + largest)) * markup(text)


def metered(values: Iterable[Any], cost: Callable[[Any], float], more: float = 0) -> Iterator[Any]:
    """Yields the values. What is made or compared for each is taken before: its cost, and so much more."""
    size: float = 0
    for number, value in enumerate(values):
        each = cost(value) + more
        spend(each)
        take(number)  # in a set, values may be chosen so that each is compared with all before it
        size += each
        yield value
    take(SORTING * size)


def compared(value: Any) -> Any:
    """Returns a value that is about to be compared or hashed; the time of it is taken."""
    take(size_of(value))
    return value


def contained(item: Any, values: Any) -> bool:
    """Returns whether the values hold the item; the time of looking is taken."""
    if isinstance(item, str) and isinstance(values, str):
        _search(values, item)
    elif isinstance(values, Iterator):
        values = metered(values, size_of)
    elif not isinstance(values, dict):
        take(size_of(values))
    take(size_of(item))
    return item in values


def _search(text: str, part: Any) -> None:
    """Takes the time of looking for a part of a text. At worst some of it is found in each place; long ones are
    looked for by another algorithm."""
    take(len(text) * (1 + min(len(part), SHORT) // 4))


def _search_from_end(text: str, part: Any) -> None:
    """Takes the time of looking for a part of a text from its end: there is one algorithm for short and long."""
    take(len(text) * (1 + len(part) // 4))


def _text(value: Any) -> str:
    """Returns what a filter makes of a value first, which is taken here."""
    if isinstance(value, str):
        return value
    spend(size_of(value))
    return str(value)


def _length(value: Any) -> int:
    """Returns at most how long a text is that is as long as a value, but for what letters become in upper case."""
    if isinstance(value, str):
        return len(value) if value.isascii() else 3 * len(value)
    return size_of(value)


def _changed(text: Any, *args: Any, **kwargs: Any) -> float:
    return _length(text)


def _looked_at(value: Any, *args: Any, **kwargs: Any) -> float:
    """For what makes nothing, and compares a value with others."""
    take(size_of(value))
    for arg in args:
        take(size_of(arg))
    return 0


def _nothing(*args: Any, **kwargs: Any) -> float:
    return 0


def _got(mapping: Any, key: Any, default: Any = None) -> float:
    take(size_of(key))
    return 0


def _found(text: str, part: Any, *args: Any) -> float:
    _search(text, part)
    return 0


def _found_from_end(text: str, part: Any, *args: Any) -> float:
    _search_from_end(text, part)
    return 0


def _stripped(text: str, letters: Any = None) -> float:
    if isinstance(letters, str):
        take(len(text) * len(letters))
    return len(text)


def _trimmed(value: Any, chars: Any = None) -> float:
    return _stripped(_text(value), chars)


def _split(text: str, sep: Any = None, maxsplit: Any = -1) -> float:
    if isinstance(sep, str):
        _search(text, sep)
    parts = (text.count(sep) if isinstance(sep, str) and sep else len(text) // 2) + 1
    if maxsplit >= 0:
        parts = min(parts, maxsplit + 1)
    return len(text) + (OBJECT + ITEM) * parts


def _split_from_end(text: str, sep: Any = None, maxsplit: Any = -1) -> float:
    if isinstance(sep, str):
        _search_from_end(text, sep)
    return _split(text, sep, maxsplit)


def _parted(text: str, sep: Any) -> float:
    return _split(text, sep, 2)


def _parted_from_end(text: str, sep: Any) -> float:
    return _split_from_end(text, sep, 2)


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, ENDS))


def _split_lines(text: str, keepends: Any = False) -> float:
    return len(text) + (OBJECT + ITEM) * _lines(text)


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> float:
    text, old, new = _text(text), _text(old), _text(new)
    _search(text, old)
    return (len(text) + text.count(old) * len(new)) * markup(text, old, new)


def _joined(between: str, values: Any = ()) -> float:
    """For what is not made one by one: `sandbox` meters that."""
    if isinstance(values, str):
        return len(values) * (1 + len(between))
    return size_of(values, len(between)) * markup(between)


def _padded(text: Any, width: Any = 80, *args: Any) -> float:
    return _length(text) + (width if isinstance(width, int) else 0)


def _indented(text: Any, width: Any = 4, *args: Any, **kwargs: Any) -> float:
    wide = len(width) if isinstance(width, str) else max(int(width), 0)
    text = _text(text)
    return (2 * len(text) + (_lines(text) + 1) * (OBJECT + wide)) * markup(text, width)


def _truncated(text: Any, length: Any = 255, killwords: Any = False, end: Any = "...", leeway: Any = None) -> float:
    return 2 * size_of(text) + size_of(end) * markup(text)


def _titled(text: Any) -> float:
    """For a filter that makes a list of the words."""
    return OBJECT * size_of(text)


def _json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> float:
    width = len(indent) if isinstance(indent, str) else max(int(indent or 0), 0)
    size = size_of([value], 0 if separators is None else size_of(separators), width)
    if indent is not None:  # Python code writes it
        take(SORTING * size)
    return size


def _formatted(text: Any, *args: Any, **kwargs: Any) -> float:
    return filled(text, "%", PERCENT_WIDTH, [*args, *kwargs.values()])


def _safe(value: Any) -> float:
    return size_of(value)


def _html(value: Any) -> float:
    return 5 * size_of(value)


def _read(value: Any, *args: Any, **kwargs: Any) -> float:
    if isinstance(value, str) and len(value) > LONGEST_NUMBER:
        raise TemplateLimit(f"it reads a number of more than {LONGEST_NUMBER:,} letters")
    return size_of(value)


def _rounded(value: Any, precision: Any = 0, method: Any = "common") -> float:
    if isinstance(precision, int) and abs(precision) > MOST_DIGITS:
        raise TemplateLimit(f"it rounds to more than {MOST_DIGITS} digits")
    return 0


def _added(values: Any, attribute: Any = None, start: Any = 0) -> float:
    if not isinstance(start, (int, float)):
        raise TemplateLimit("it adds up what is no number, which copies the sum for each item")
    return 0


def _reversed(value: Any) -> float:
    return len(value) if isinstance(value, str) else ITEM * length_hint(value)


def _parts(values: Any, count: Any = 0, *args: Any, **kwargs: Any) -> float:
    return OBJECT * count if isinstance(count, int) else 0


def _item(value: Any) -> float:
    return OBJECT


# Methods that a template may call, by the class of their object, and attributes that are none of these (None).
METHODS: dict[type, dict[str, Cost | None]] = {
    str: {
        **dict.fromkeys(("lower", "upper", "title", "capitalize", "swapcase", "casefold"), _changed),
        **dict.fromkeys(("strip", "lstrip", "rstrip"), _stripped),
        **dict.fromkeys(("removeprefix", "removesuffix"), _changed),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
        **dict.fromkeys(("startswith", "endswith"), _looked_at),
        **dict.fromkeys(("find", "index", "count"), _found),
        **dict.fromkeys(("rfind", "rindex"), _found_from_end),
        **dict.fromkeys(
            ("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle",
             "isupper"), _looked_at),
        "split": _split, "rsplit": _split_from_end, "partition": _parted, "rpartition": _parted_from_end,
        "splitlines": _split_lines, "replace": _replaced, "join": _joined,
        "format": None, "format_map": None,  # the sandbox has them in another form
    },
    dict: {"get": _got, "items": _nothing, "keys": _nothing, "values": _nothing},
    list: {"index": _looked_at, "count": _looked_at},
    tuple: {"index": _looked_at, "count": _looked_at},
    _GroupTuple: {"grouper": None, "list": None},
    LoopContext: {
        **dict.fromkeys(
            ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0", "previtem",
             "nextitem"), None),
        "cycle": _nothing, "changed": _looked_at,
    },
    Macro: {"name": None, "arguments": None},
    Cycler: {"next": _nothing, "reset": _nothing, "current": None},
}  # fmt: skip
METHODS[Markup] = METHODS[str]

# Filters: what one makes. None: it makes nothing, and looks at no more than one item.
FILTERS: dict[str, Cost | None] = {
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "items", "last", "length"), None),
    **dict.fromkeys(("capitalize", "lower", "upper"), _changed),
    **dict.fromkeys(("groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr",
                     "sort", "unique"), _nothing),
    **dict.fromkeys(("safe", "string"), _safe),
    **dict.fromkeys(("e", "escape"), _html),
    **dict.fromkeys(("float", "int"), _read),
    **dict.fromkeys(("batch", "slice"), _parts),
    "center": _padded, "dictsort": _safe, "format": _formatted, "indent": _indented, "replace": _replaced,
    "reverse": _reversed, "round": _rounded, "sum": _added, "title": _titled, "tojson": _json, "trim": _trimmed,
    "truncate": _truncated,
}  # fmt: skip
# Filters that go through the items of what they are given: what they make for each.
EACH: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(("batch", "list", "map", "reject", "rejectattr", "select", "selectattr", "slice", "sum"), _item),
    **dict.fromkeys(("groupby", "join", "max", "min", "sort", "unique"), size_of),
}

# Tests: what one looks at. None: no more than the kind of a value.
TESTS: dict[str, Cost | None] = {
    **dict.fromkeys(("boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "float", "integer",
                     "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "true",
                     "undefined"), None),
    **dict.fromkeys(("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "filter", "ge", "greaterthan", "gt", "le",
                     "lessthan", "lt", "ne", "test"), _looked_at),
    **dict.fromkeys(("lower", "upper"), _safe),
    "in": _nothing,  # `contained` itself
}  # fmt: skip
