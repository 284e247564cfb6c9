"""Budgets of lines: a folder that grows makes room, so that what the package is stays small enough to understand."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import prefold

PACKAGE = Path(prefold.__file__).parent
# The most lines of Python that a folder may have, and the number that it is to come down to.
BUDGETS = {
    "files of the root": (1938, 1500),
    "checkpoint": (1213, 1050),
    "prefix": (798, 800),
    "text": (2491, 2100),
    "cache": (1274, 1500),
    "stream": (1378, 1200),
    "schedule": (2241, 2000),
    "kernels": (1631, 900),
    "attention": (2267, 2050),
    "model": (4507, 2900),
    "worker": (2740, 1950),
    "engine": (3548, 2400),
    "experts": (567, 400),
    "hf": (1180, 1200),
    "hybrid": (1973, 1600),
    "looped": (3943, 3400),
    "images": (3001, 2700),
    "shifted": (903, 900),
    "tasks": (2979, 2800),
    "face": (1393, 1200),
    "train": (941, 1000),
    "api": (2352, 1500),
    "records": (1761, 1750),
    "report": (694, 700),
    "job": (2279, 2050),
    "cluster": (4800, 3500),
    "serve": (4227, 3900),
    "simulate": (1223, 1150),
    "integrations": (942, 800),
    "cli": (2871, 2500),
}


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    """Lines of Python by folder; files beside the folders count together, but for the Python face."""
    counts: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        first = path.relative_to(PACKAGE).parts[0]
        folder = {"llm.py": "face"}.get(first, "files of the root" if first.endswith(".py") else first)
        counts[folder] = counts.get(folder, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return counts


def test_every_folder_has_a_budget(lines):
    assert set(lines) == set(BUDGETS)


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_to_its_budget(lines, folder):
    most, target = BUDGETS[folder]
    assert lines[folder] <= most, (
        f"prefold/{folder} has {lines[folder]} lines, and its budget is {most} (it is to come down to {target}): "
        "make room, or raise the budget in this table, with a reason in the message of the commit"
    )


def test_a_step_of_decoding_is_understood_from_few_lines():
    """The reading path in docs/design.md: at most 10 files, and 2,000 lines without docstrings, comments and empty
    lines."""
    text = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
    path = re.findall(r"^\d+\. `([a-z_/]+\.py)`", text.partition("To understand a step of decoding")[2], re.MULTILINE)
    assert 5 < len(path) <= 10
    assert sum(map(lines_of_code, path)) <= 2000


def lines_of_code(name: str) -> int:
    source = (PACKAGE / name).read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)
