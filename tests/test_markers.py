"""The layers of the tests: what they import, what stands alone, and what a quick run leaves out."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parent
FILES = {path.stem for path in TESTS.rglob("test_*.py")}


def test_unit_tests_run_without_importing_torch():
    """Where unit tests run alone, one that imports torch fails by itself (`same_draws`): here a handful is run so."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "unit and not slow"]
    # The folder has files of another layer too, which are not even imported.
    files = ["tests/engine/schedule", "-k", "test_fair"]
    code = f"import sys, pytest; print('status', int(pytest.main({[*options, *files]!r})), 'torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False)
    assert " passed" in done.stdout and "status 0 False" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_no_test_imports_another():
    """What two tests need lies in a file beside them that is no test. Programs that tests write are looked at too."""
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    # Parsing all takes seconds, and few files have the name of a test in them.
    trees = {path: ast.parse(text) for path, text in texts.items() if FILES & set(re.findall(r"\w+", text))}
    for path, node in ((path, node) for path, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            lines = [line.split() for line in node.value.splitlines()]
            names = [line[1] for line in lines if len(line) > 1 and line[0] in ("from", "import")]
        else:
            continue
        tests = {part for name in names for part in name.split(".")} & FILES
        assert not tests, f"{path}:{node.lineno} imports {tests}: move what both need to a file of its own"


class Item:
    """A test as pytest collects it: a function with parameters, and markers."""

    def __init__(self, function=None, covering=None, together="", **values):
        self.obj, self.callspec, self.markers = function, SimpleNamespace(params=values), []
        self.known = {"covering": covering, "parametrize": together}

    def iter_markers(self, name):
        return [SimpleNamespace(args=(self.known[name],))] if self.known[name] else []

    def get_closest_marker(self, name):
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, name):
        self.markers.append(name)


@pytest.fixture
def conftest(request):
    """The file beside this one."""
    return next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "layer_of", None))


@pytest.mark.parametrize("covering, most", [(None, 18), (1, 4)])
def test_a_quick_run_shows_all_values_and_each_two_of_three_parameters(conftest, covering, most):
    items = [Item(None, covering, a=a, b=b, c=c) for a, b, c in itertools.product(range(3), range(4), range(2))]
    conftest.mark_repetitions(items)
    shown = [set(itertools.combinations(item.callspec.params.items(), covering or 2)) for item in items]
    quick = [pairs for pairs, item in zip(shown, items, strict=True) if not item.markers]
    assert len(quick) <= most and set().union(*quick) == set().union(*shown)


def test_values_that_are_named_together_are_one_parameter(conftest):
    items = [Item(None, None, "a, b, c", a=a, b=b, c=c) for a, b, c in itertools.product(range(2), repeat=3)]
    conftest.mark_repetitions(items)
    assert not any(item.markers for item in items)


def test_a_quick_run_draws_an_eighth_of_the_examples(conftest):
    def property_of(examples):
        return settings(max_examples=examples)(given(st.none())(lambda value: None))

    for examples, few in ((200, 25), (60, 12), (10, 10)):
        items = [Item(property_of(examples))] * 2
        conftest.thin_properties(items, quick=False)
        assert items[0].obj._hypothesis_internal_use_settings.max_examples == examples
        assert bool(items[0].markers) == (few < examples), "these run with -m slow"
        conftest.thin_properties(items, quick=True)
        assert items[0].obj._hypothesis_internal_use_settings.max_examples == few
