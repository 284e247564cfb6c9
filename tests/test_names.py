"""Names in backticks in docstrings and comments exist in the code."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import prefold

PACKAGE = Path(prefold.__file__).parent
SOURCES = (".cpp", ".h", ".html", ".js")
TICKED = re.compile(r"`+([^`]+)`+")
WORD = re.compile(r"[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
# Names of other programs, and of files outside the package.
FOREIGN = {
    "__class__",
    "map_batches",
    "memcmp",
    "setup.py",
    "tokenizers.decoders.DecodeStream",
    "triple32",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value


def words_of(tree: ast.Module) -> set[str]:
    """The identifiers of a file, and the words of its texts, docstrings left out."""
    documentation = set(docstrings(tree))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in documentation:
            continue
        for field in ("id", "attr", "arg", "name", "module", "value"):
            if isinstance(value := getattr(node, field, None), str):
                found.update(WORD.findall(value))
    return found


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def unknown_names(source: str, known: set[str]) -> list[tuple[int, str]]:
    """Return (line, name) of each name in backticks that has a part not in `known`."""
    texts = [(text.lineno, text.value) for text in docstrings(ast.parse(source))]
    ticked = [(line, name) for line, text in [*texts, *comments(source)] for name in TICKED.findall(str(text))]
    names = [(line, name) for line, name in ticked if NAME.fullmatch(name) and name not in FOREIGN]
    return [(line, name) for line, name in names if not known.issuperset(WORD.findall(name))]


def test_names_in_backticks_exist():
    sources = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    known = set(dir(builtins)).union(*(words_of(ast.parse(source)) for source in sources.values()))
    known.update(part for path in sources for part in path.with_suffix("").parts)
    for path in PACKAGE.rglob("*"):
        if path.suffix in SOURCES:
            known.update(WORD.findall(path.read_text(encoding="utf-8")))
    wrong = [f"{path}:{line} `{name}`" for path, text in sources.items() for line, name in unknown_names(text, known)]
    assert not wrong, "names that no code has: " + ", ".join(wrong)


def test_a_name_that_is_gone_is_found():
    source = '"""Uses `gone` and `here.gone()`, `here` and `not a name`."""\nx = 1  # see `lost`\n'
    assert unknown_names(source, {"here", "x"}) == [(1, "gone"), (1, "here.gone()"), (2, "lost")]
