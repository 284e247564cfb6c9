"""How many of each thing a reader has to know. The numbers are in `ratchet.txt`, and may only fall.

A line of that file is `number  concept`, and where the number has risen the reason: `number  concept: reason`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import prefold

PACKAGE = Path(prefold.__file__).parent
TESTS = Path(__file__).parent
RATCHET = Path(__file__).with_name("ratchet.txt")
# Words that a feature brings. In a file of the core they mean that the core knows the feature. Not among them are
# `exit` and `__exit__`, which are Python's.
FEATURE_WORDS = re.compile(
    r"\b(\w*_)?(looped|exits|exit_(threshold|change|prompts|visits)"
    r"|routed?|routes|image|images|shifted|approximate\w*)(_\w*)?\b"
)


OWN = {"self", "cls", "os", "sys"}
PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_fields_"}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def nodes(kind: type) -> Iterator[ast.AST]:
    return (node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, kind))


@cache
def found_in_tests() -> Counter[Callable[[ast.AST], bool]]:
    """How many nodes of all files of tests are what each of two functions asks for."""
    found = Counter[Callable[[ast.AST], bool]]()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found.update(asked for asked in (is_private, is_patch) if asked(node))
    return found


def is_private(node: ast.AST) -> bool:
    """Whether a test reads or sets an attribute that is another object's own: not of its own class, of the standard
    library, or of a named tuple or structure, whose public names begin so."""
    return (
        isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr) is not None
        and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in OWN)
    )


def is_patch(node: ast.AST) -> bool:
    """Whether a test puts something in the place of an attribute (`monkeypatch.setattr`)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"


def methods(of: ast.ClassDef) -> set[str]:
    return {node.name for node in of.body if isinstance(node, ast.FunctionDef)}


def signatures() -> Iterator[str]:
    """The parameters and the result of each function, as text."""
    for node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)):  # type: ignore[arg-type]
        yield ast.unparse(node.args) + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def names_in(tree: ast.Module) -> set[str]:
    """Identifiers of a file, without its texts and comments."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(value := getattr(node, field, None), str):
                found.add(value)
    return found


def routes_of_run() -> int:
    tree = trees()[Path("engine/engine.py")]
    run = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "run")
    called = {ast.unparse(node.value.func) for node in ast.walk(run) if isinstance(node, ast.YieldFrom)}  # type: ignore[attr-defined]
    return len(called - {"self._run_live"})  # a source of windows for the others


COUNTS: dict[str, Callable[[], int]] = {
    "entries in prefold/": lambda: sum(
        not entry.name.startswith("__") and (entry.is_file() or any(p.suffix != ".pyc" for p in entry.rglob("*.*")))
        for entry in PACKAGE.iterdir()
    ),
    "Python files": lambda: len(trees()),
    "mutable tries": lambda: sum({"insert", "match", "remove"} <= methods(c) for c in nodes(ast.ClassDef)),
    "scheduler classes": lambda: sum(c.name.endswith("Scheduler") for c in nodes(ast.ClassDef)),
    "routes of Engine.run": routes_of_run,
    "functions that read a dictionary of options": lambda: sum(
        bool(re.search(r"\bo: (Options|dict\[str, Any\])", text)) for text in signatures()
    ),
    "`dict[str, Any]` in signatures": lambda: sum(text.count("dict[str, Any]") for text in signatures()),
    "`Any` in signatures": lambda: sum(len(re.findall(r"\bAny\b", text)) for text in signatures()),
    "core files that name a feature": lambda: sum(
        any(FEATURE_WORDS.fullmatch(name) for name in names_in(tree))
        for path, tree in trees().items()
        if path.parts[0] != "features"
    ),
    "private attributes in tests": lambda: found_in_tests()[is_private],
    "patches in tests": lambda: found_in_tests()[is_patch],
}


def recorded() -> dict[str, int]:
    lines = [line for line in RATCHET.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {match[2]: int(match[1]) for line in lines if (match := re.match(r"(\d+)  ([^:]+)(: .+)?$", line))}


def test_each_concept_is_in_the_ratchet():
    assert recorded().keys() == COUNTS.keys()


@pytest.mark.parametrize("concept", COUNTS)
def test_a_number_only_falls(concept):
    most, found = recorded()[concept], COUNTS[concept]()
    assert found <= most, f"{concept}: {found}, was {most}; find the owner of the idea, or give a reason in its line"
    assert found == most, f"{concept}: {found}, was {most}; write the lower number into tests/ratchet.txt"
