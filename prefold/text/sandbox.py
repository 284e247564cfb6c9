"""Runs chat templates in Jinja's sandbox, with bounds on time and on what they make.

A template comes with a checkpoint or with a record of a file, so it cannot be trusted. Jinja's sandbox keeps it from
the machine; it does not keep it from running for hours (`range` in `range` in `range`) or from filling the memory
("a" * 10**10). Here whatever a template does takes from an allowance before it is done (`allowance.py`): rounds of
loops, calls, filters, tests, operators, comparisons, parts of lists, and what is written. What it may call is listed
(`permitted.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .allowance import ITEM, OBJECT, VIEWS, TemplateLimit, size_of, spend
from .permitted import (
    BRACE_WIDTH,
    EACH,
    FILTERS,
    METHODS,
    PERCENT_WIDTH,
    TESTS,
    compared,
    contained,
    filled,
    markup,
    metered,
)  # fmt: skip

__all__ = ["Program", "compile_template"]

# Letters of a template. The longest ones of checkpoints have about 50,000; to compile as many took 0.25 s, and so many
# as here 1.4 s.
LONGEST_TEMPLATE = 1 << 18
# Bits that a whole number may have.
LONGEST_NUMBER = 1 << 12
# Arguments that Jinja adds to calls within loops and blocks, and takes away again.
JINJAS = ("_loop_vars", "_block_vars")
# Letters of a format of times, of which each may stand for 256.
LONGEST_FORMAT = 1000


class Program:
    """A Program is a compiled template.

    variables  every name that it looks up; values of other names have no effect
    """

    def __init__(self, template: jinja2.Template, variables: frozenset[str]):
        self._template = template
        self.variables = variables

    def render(self, values: Mapping[str, Any]) -> str:
        """Returns the text that the template writes. Raises whatever the template does, and TemplateLimit inside
        `allowed`."""
        return self._template.render(dict(values))


@lru_cache(maxsize=16)
def compile_template(source: str) -> Program:
    """Returns the template with this source. Raises TemplateSyntaxError, TemplateLimit for a long one, or what
    Python's compiler raises for one nested deep."""
    if len(source) > LONGEST_TEMPLATE:
        raise TemplateLimit(f"it has more than {LONGEST_TEMPLATE:,} letters")
    environment = _environment()
    tree = environment.parse(source)
    names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    code = environment.compile(_Metering().visit(tree))
    return Program(jinja2.Template.from_code(environment, code, environment.make_globals(None)), names)


class _Metering(NodeTransformer):
    """A _Metering puts filters of ours where Jinja asks nobody: around loops, comparisons, slices, `~` and lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(output.nodes) for output in node.find_all(nodes.Output))
        node.iter = _filter("_each_round", node.iter, nodes.Const(ITEM * (1 + written)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_joined", nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        operator, right = node.ops[0].op, node.ops[0].expr
        if len(node.ops) == 1 and operator in ("in", "notin"):
            if _are_constants(right):
                node.expr = self.visit(node.expr)
                return node
            self.generic_visit(node)
            found = _filter("_contained", node.expr, node.ops[0].expr)
            return found if operator == "in" else nodes.Not(found, lineno=node.lineno)
        is_small = len(node.ops) == 1 and (_is_small(node.expr) or _is_small(right))
        self.generic_visit(node)
        if not is_small:
            node.expr = _filter("_compared", node.expr)
            for operand in node.ops:
                operand.expr = _filter("_compared", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        return _filter("_part", node.node, *(end or nodes.Const(None) for end in (part.start, part.stop, part.step)))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_kept", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_kept", node) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _filter("_compared", node.key)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("chat templates write no HTML: autoescape is not allowed", node.lineno)


def _filter(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _is_small(node: nodes.Node) -> bool:
    """Whether an expression is a constant or a truth value: to compare it takes no time."""
    return isinstance(node, (nodes.Const, nodes.Compare, nodes.Not, nodes.Test))


def _are_constants(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)


class _Environment(ImmutableSandboxedEnvironment):
    """An _Environment is Jinja's sandbox where operators and calls take from the allowance."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Returns the text of what is written: by the whole template, in a macro, or within {% set %}."""
        kept = list(parts)
        spend(sum(map(len, kept)))
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and left.__class__ is right.__class__ is str:
            spend(len(left) + len(right))
            return left + right
        spend(_made(operator, left, right))
        return self.binop_table[operator](left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if argument.__class__ is not str and argument.__class__ is not int:
            spend(size_of(argument))  # it is hashed, and written where nothing is found
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if obj.__class__ is _Namespace:
            return not attr.startswith("_")
        return attr in METHODS.get(obj.__class__, ())

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None

        @wraps(made)
        def checked(*args: Any, **kwargs: Any) -> str:
            spend(filled(value.__self__, "{", BRACE_WIDTH, [*args, *kwargs.values()]))
            return made(*args, **kwargs)

        return checked

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        spend(OBJECT + ITEM * (len(args) + len(kwargs)))
        if isinstance(function, (BuiltinMethodType, MethodType)):
            owner, name = function.__self__, function.__name__
            cost = METHODS.get(owner.__class__, {}).get(name)
            if cost is None:
                raise SecurityError(f"chat templates may not call {name!r} of a {type(owner).__name__}")
            if name == "join" and args and isinstance(args[0], Iterator):
                times = markup(owner)
                args = (metered(args[0], lambda value: times * size_of(value), len(owner)), *args[1:])
            else:
                spend(cost(owner, *args, **{key: value for key, value in kwargs.items() if key not in JINJAS}))
        return super().call(context, function, *args, **kwargs)


def _made(operator: str, left: Any, right: Any) -> float:
    """Returns at most what an operator makes, in letters. Raises TemplateLimit for numbers that would be huge."""
    if isinstance(left, int) and isinstance(right, int):
        bits, more = left.bit_length(), right.bit_length()
        if operator == "**":
            return _number(bits * max(right, 0))
        return _number(bits + more if operator == "*" else max(bits, more) + 1)
    if operator == "+":
        return (_extent(left) + _extent(right)) * markup(left, right)
    if operator == "*":
        return max(_extent(left) * _times(right), _extent(right) * _times(left))
    if operator == "%" and isinstance(left, str):
        return filled(left, "%", PERCENT_WIDTH, right if isinstance(right, tuple) else [right])
    if operator == "-" and isinstance(left, VIEWS):
        raise SecurityError("chat templates may not make sets")
    return 0


def _extent(value: Any) -> int:
    """Returns what a copy of a text or a list is, in letters."""
    if isinstance(value, str):
        return len(value)
    return OBJECT + ITEM * len(value) if isinstance(value, (list, tuple)) else 0


def _times(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _number(bits: int) -> int:
    if bits > LONGEST_NUMBER:
        raise TemplateLimit(f"it made a number of more than {LONGEST_NUMBER:,} bits")
    return bits // 8


def _written(value: Any) -> Any:
    """Returns a value that is about to be written as a text."""
    spend(ITEM + (len(value) if value.__class__ is str else size_of(value)))
    return value


def _joined(parts: tuple[Any, ...]) -> str:
    spend(sum(map(size_of, parts)))
    return "".join(map(str, parts))


def _kept(value: Any) -> Any:
    """Returns a list or an object that a template has just made of single values, for it might keep many of them."""
    spend(OBJECT + ITEM * len(value))
    return value


def _part(value: Any, start: Any, stop: Any, step: Any) -> Any:
    part = slice(start, stop, step)
    if isinstance(value, (str, list, tuple)):
        spend(_extent(value) * len(range(len(value))[part]) // max(len(value), 1))
    return value[part]


def _each_round(values: Any, letters: int) -> Iterator[Any]:
    """Yields the values. letters: what a round may put aside besides what is taken for elsewhere: the value itself,
    where the loop's length is asked for, and what is written as it is in the template."""
    for value in values:
        spend(letters)
        yield value


def _bounded(
    function: Callable[..., Any], cost: Callable[..., float] | None, each: Callable[[Any], float] | None = None
) -> Callable[..., Any]:
    """Returns a filter, or a test, that takes what it will make before it runs."""
    if cost is None:
        return function
    first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # Jinja passes an object of its own

    @wraps(function)  # this also copies jinja_pass_arg
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = args[first:]
        spend(OBJECT + cost(*given, **kwargs))
        if each is not None and given and given[0]:  # what is empty, or missing, stays what it is
            more = sum(map(size_of, given[1:])) + sum(map(size_of, kwargs.values()))
            args = (*args[:first], metered(given[0], each, more), *given[1:])
        return function(*args, **kwargs)

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

    def __init__(*args: Any, **kwargs: Any) -> None:
        jinja2.utils.Namespace.__init__(args[0], _dict(*args[1:], **kwargs))

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a chat template may not set the attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's writes what it holds, however much that is


def _dict(pairs: Any = (), /, **named: Any) -> dict[Any, Any]:
    spend(OBJECT * len(named))
    if isinstance(pairs, Mapping):
        spend(OBJECT * len(pairs))
        return dict(pairs, **named)
    return dict(metered(pairs, lambda pair: OBJECT + size_of(pair)), **named)


def _raise_exception(message: Any) -> None:
    spend(size_of(message))
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    if len(form) > LONGEST_FORMAT:
        raise TemplateLimit(f"it writes the time by a format of more than {LONGEST_FORMAT:,} letters")
    return datetime.now().strftime(form)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """Returns the sandbox with what transformers gives a template: a `tojson` that does not escape,
    `raise_exception`, ..."""
    # Not optimized: else a list that filters make of constants is in the code, and is made anew in each round.
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False, "finalize": _written}
    made = _Environment(extensions=[_Generation, loopcontrols], **options)
    filters = {**made.filters, "tojson": _tojson}
    made.filters = {name: _bounded(filters[name], cost, EACH.get(name)) for name, cost in FILTERS.items()}
    ours = {"_compared": compared, "_contained": contained, "_each_round": _each_round, "_joined": _joined}
    made.filters |= {**ours, "_kept": _kept, "_part": _part}
    tests = {**made.tests, "in": contained}
    made.tests = {name: _bounded(tests[name], cost) for name, cost in TESTS.items()}
    made.globals = {name: made.globals[name] for name in ("range", "cycler", "joiner")}
    made.globals |= {"dict": _dict, "namespace": _Namespace}
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return made
