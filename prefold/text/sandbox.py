"""Runs chat templates in Jinja's sandbox, with bounds on time and on the size of what they make.

A template comes with a checkpoint or with a record of a file, so it cannot be trusted. Jinja's sandbox
keeps it from the machine; it does not keep it from running for hours (`range` in `range` in `range`) or from filling
the memory ("a" * 10**10). Here each round of a loop and each call looks at the clock, and each operator that makes
large things out of small ones looks at the size first. The clock counts the processor time of the thread that
renders, so that a template does not fail because the machine is busy with something else.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["Program", "TemplateLimit", "compile_template", "time_limit"]

# Letters of a text, or items of a list, that a template may make. No conversation that fits a model is that long.
LARGEST = 1 << 26
SIZED = {str, list, tuple}
# Rounds of a loop between two looks at the clock. One look costs about as much as a round.
ROUNDS = 32
# Columns a text may be padded to, or parts a list be cut into.
WIDEST = 1 << 16
# Bits that a whole number may have.
LONGEST_NUMBER = 1 << 12
# Filters and methods that take a width or a count.
WIDE = {"center", "indent", "batch", "slice", "tojson", "ljust", "rjust", "zfill", "expandtabs"}
# Filters and methods, of no use in a conversation, that copy what is left of a text for each of its parts, without a
# look at the clock.
SQUARE = {"striptags", "urlize", "wordwrap"}
# Formats whose width has six digits, or comes from an argument. Both patterns look at each letter a fixed number of
# times.
PERCENT_WIDTH = re.compile(r"%[^%a-zA-Z]*(\*|\d{6})")
BRACE_WIDTH = re.compile(r"\{[^{}:]*:[^{}]*(\{|\d{6})")

_clock = threading.local()


class TemplateLimit(Exception):
    """A template ran too long, or made something too large. The message says which, and the limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Makes templates that run inside, on this thread, raise TemplateLimit after so many seconds of processor time."""
    before = getattr(_clock, "limit", None)
    _clock.limit = (time.thread_time() + seconds, seconds)
    try:
        yield
    finally:
        _clock.limit = before


def check_time() -> None:
    """Raises TemplateLimit once the templates on this thread have taken the time that `time_limit` allows."""
    limit = getattr(_clock, "limit", None)
    if limit is not None and time.thread_time() > limit[0]:
        raise TemplateLimit(f"it ran for more than {limit[1]:g} s")


class Program:
    """A Program is a compiled template.

    variables  every name that it looks up; values of other names have no effect
    """

    def __init__(self, template: jinja2.Template, variables: frozenset[str]):
        self._template = template
        self.variables = variables

    def render(self, values: Mapping[str, Any]) -> str:
        """Returns the text that the template writes. Raises whatever the template does, and TemplateLimit inside
        `time_limit`."""
        return self._template.render(dict(values))


@lru_cache(maxsize=16)
def compile_template(source: str) -> Program:
    """Returns the template with this source. Raises TemplateSyntaxError, or what Python's compiler raises for its
    size."""
    environment = _environment()
    tree = environment.parse(source)
    names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    # Both lists are made before the tree is changed, so that no node put in here is found and wrapped again.
    loops, joins = list(tree.find_all(nodes.For)), list(tree.find_all(nodes.Concat))
    for loop in loops:
        loop.iter = nodes.Filter(loop.iter, "_each_round", [], [], None, None, lineno=loop.lineno)
    for join in joins:
        join.nodes = [nodes.Filter(part, "_as_text", [], [], None, None, lineno=join.lineno) for part in join.nodes]
    code = environment.compile(tree)
    return Program(jinja2.Template.from_code(environment, code, environment.make_globals(None)), names)


class _Environment(ImmutableSandboxedEnvironment):
    """An _Environment is Jinja's sandbox with bounds on what operators and calls make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Returns the text of what is written: by the whole template, in a macro, or within {% set %}."""
        kept = list(_within_limit(parts))
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return _sized(left + right)
        _check_operands(operator, left, right)
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None
        _check_format(BRACE_WIDTH, value.__self__)

        @wraps(made)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_filled(value.__self__, "{", [*args, *kwargs.values()])
            return made(*args, **kwargs)

        return checked

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_time()
        _check_call(getattr(function, "__name__", ""), getattr(function, "__self__", None), args, kwargs)
        return _sized(super().call(context, function, *args, **kwargs))


def _as_text(value: Any) -> Any:
    """Returns a value that is about to become a text. Raises TemplateLimit where that would be too large."""
    if isinstance(value, (list, tuple, dict)):
        _check_parts([value])
    return _sized(value)


def _sized(value: Any) -> Any:
    """Returns the value. Raises TemplateLimit for a text or a list that is too large."""
    if value.__class__ in SIZED and len(value) > LARGEST:
        raise TemplateLimit(f"it made a text of more than {LARGEST:,} letters")
    return value


def _within_limit(parts: Iterable[str]) -> Iterator[str]:
    """Yields the texts. Raises TemplateLimit where they are too large together: one of them may be there many times."""
    size = 0
    for part in parts:
        size += len(part)
        if size > LARGEST:
            raise TemplateLimit(f"it made a text of more than {LARGEST:,} letters")
        yield part


def _check_parts(values: Iterable[Any], between: int = 0) -> int:
    """Returns about how many letters texts have together, and those in lists and mappings, with so many between two of
    them. Raises TemplateLimit where that is too many."""
    size, waiting, looked_at = 0, list(values), 0
    while waiting:
        value, looked_at = waiting.pop(), looked_at + 1
        if not looked_at % 4096:
            check_time()
        size += between + (len(value) if isinstance(value, str) else 1)
        if size > LARGEST:
            raise TemplateLimit(f"it made a text of more than {LARGEST:,} letters")
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value)
            waiting.extend(value.values())
    return size


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateLimit for an operation whose result would be huge, before it is computed."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * other > LARGEST:
                raise TemplateLimit(f"it made a text of more than {LARGEST:,} letters")
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
    elif isinstance(left, str):
        _check_format(PERCENT_WIDTH, left)
        _check_filled(left, "%", right if isinstance(right, tuple) else [right])


def _check_bits(bits: int) -> None:
    if bits > LONGEST_NUMBER:
        raise TemplateLimit(f"it made a number of more than {LONGEST_NUMBER:,} bits")


def _check_format(pattern: re.Pattern[str], text: str) -> None:
    """Raises TemplateLimit for a text with a format of large width ("%1000000000d" makes a text of that size)."""
    if pattern.search(text):
        raise TemplateLimit("it formats with a width that is very large, or computed")


def _check_filled(text: str, sign: str, values: Iterable[Any]) -> None:
    """Raises TemplateLimit where a text with as many places as there are of a sign might become too large."""
    values = list(values)
    values += [one for value in values if isinstance(value, Mapping) for one in value.values()]
    largest = max((64 + _check_parts([value]) for value in values), default=0)
    if len(text) + text.count(sign) * largest > LARGEST:
        raise TemplateLimit(f"it made a text of more than {LARGEST:,} letters")


def _check_call(name: str, owner: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TemplateLimit for an argument that is too large a width, for a `replace` whose result would be too
    large, and for what takes time by the square of its argument."""
    args = list(args)
    if name in SQUARE or (
        name == "sum" and any(isinstance(value, (list, tuple)) for value in [*args, *kwargs.values()])
    ):
        raise TemplateLimit(f"it calls {name!r}, which may take very long on what it is given")
    if name in WIDE and any(isinstance(value, int) and value > WIDEST for value in [*args, *kwargs.values()]):
        raise TemplateLimit(f"it asks for a width of more than {WIDEST:,}")
    if name == "format" and isinstance(owner, str):  # the filter: the method of texts is wrapped
        _check_filled(owner, "%", [*args, *kwargs.values()])
    if name == "string":
        _as_text(owner)
    if name in ("join", "tojson"):
        of_method = name == "join" and isinstance(owner, str)
        between = owner if of_method else args[0] if args else kwargs.get("d", "")
        given = args[0] if of_method and args else owner
        if isinstance(given, (str, list, tuple, dict)):
            _check_parts([given], len(between) if isinstance(between, str) else 0)
    if name == "replace" and all(isinstance(value, str) for value in [owner, *args[:2]]) and len(args) > 1:
        _check_replace(owner, args[0], args[1])


def _check_replace(text: str, old: str, new: str) -> None:
    if (len(text) + 1) * len(new) > LARGEST and text.count(old) * len(new) > LARGEST:
        raise TemplateLimit(f"it made a text of more than {LARGEST:,} letters")


def _each_round(values: Any) -> Iterator[Any]:
    for number, value in enumerate(values):
        if not number % ROUNDS:
            check_time()
        yield value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the filter `function` with a check of the time and of its arguments before it runs."""

    @wraps(function)  # this also copies jinja_pass_arg, which says that Jinja passes an object of its own first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_time()
        first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1
        if name == "join" and isinstance(args[first], Iterator):  # looked at before it is joined
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        values = args[first:]
        _check_call(name, values[0], values[1:], kwargs)
        if name == "format":
            _check_format(PERCENT_WIDTH, str(values[0]))
        return _sized(function(*args, **kwargs))

    return bounded


class _Generation(Extension):
    """Reads {% generation %}, which marks what the assistant wrote (for training), and writes its content."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A _Namespace is Jinja's namespace() without the attributes of Python objects (`__class__` and the like)."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """Returns the sandbox with what transformers gives a template: a `tojson` that does not escape,
    `raise_exception`, ..."""
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_as_text)
    made.filters["tojson"] = _tojson
    made.filters = {name: _bounded(name, function) for name, function in made.filters.items()}
    made.filters |= {"_each_round": _each_round, "_as_text": _as_text}
    made.globals["namespace"] = _Namespace
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    del made.globals["lipsum"]  # it writes texts of any length
    return made
