#!/usr/bin/env python3
"""List the error messages of prefold by file, as templates, in tests/messages.txt.

    python scripts/messages.py [--check]

A line has the exception, or the function that makes it, and its texts. Expressions in a text become {name} or {...}.
With --check nothing is written, and the exit status is 1 if the list would change.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, LIST = ROOT / "prefold", ROOT / "tests" / "messages.txt"
BASES = ("Error", "Exception")
# Exceptions that no user sees.
INTERNAL = {"AssertionError", "AttributeError", "KeyError", "NotImplementedError", "StopIteration", "SystemExit"}
QUIET = ("code", "field")  # arguments of errors that are not part of their text


def messages(source: str, exceptions: set[str]) -> list[str]:
    """Return one line for each exception that a file makes with a text, sorted, without repetitions.

    Args:
        source: The Python code of the file.
        exceptions: Names of exception classes, beside names that end in Error or Exception.
    """
    tree = ast.parse(source)
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        is_exception = name in exceptions or name.endswith(BASES) or name in ("UsageError", "BadParameter")
        if name in INTERNAL or not (is_exception or id(node) in raised):
            continue
        arguments = [*node.args, *(one.value for one in node.keywords if one.arg not in QUIET)]
        texts = [text for one in arguments for text in _templates(one)]
        if texts:
            found.add(f"{name}: {' | '.join(texts)}")
    return sorted(found)


def _templates(node: ast.expr) -> Iterator[str]:
    """Yield the texts of an argument, if it contains any: both of a choice, and one of a sum."""
    if isinstance(node, ast.IfExp):
        yield from _templates(node.body)
        yield from _templates(node.orelse)
    elif _has_text(node):
        yield " ".join(_template(node).split())


def _has_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(node.value.strip())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _has_text(node.left) or _has_text(node.right)
    return isinstance(node, ast.JoinedStr)


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _template(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return f"{{{_name(node) or '...'}}}"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def exceptions_of(sources: dict[str, str]) -> set[str]:
    """Return the names of all exception classes that these files define."""
    bases = {
        node.name: {_name(base) for base in node.bases}
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    while (
        new := {name for name, of in bases.items() if any(base.endswith(BASES) or base in found for base in of)} - found
    ):
        found |= new
    return found


def listing() -> str:
    """Return the text of tests/messages.txt."""
    paths = sorted(PACKAGE.rglob("*.py"))
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    exceptions = exceptions_of(sources)
    parts = {name: messages(source, exceptions) for name, source in sources.items()}
    head = "# Error messages by file. scripts/messages.py writes this list.\n"
    return head + "".join(
        f"\n{name}\n" + "".join(f"  {line}\n" for line in lines) for name, lines in parts.items() if lines
    )


def main() -> int:
    """Write or check the list. Return the exit status."""
    text, old = listing(), LIST.read_text(encoding="utf-8") if LIST.exists() else ""
    if "--check" in sys.argv[1:]:
        print(
            *difflib.unified_diff(old.splitlines(), text.splitlines(), "the list", "the code", lineterm="", n=0),
            sep="\n",
        )
        return int(text != old)
    LIST.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
