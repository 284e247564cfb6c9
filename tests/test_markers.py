"""The layers of the tests: what they import, and what stands alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = {path.stem for path in TESTS.rglob("test_*.py")}


def test_unit_tests_run_without_importing_torch():
    """Where unit tests run alone, one that imports torch fails by itself (`same_draws`): here a handful is run so."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "unit and not slow"]
    # The folder has files of another layer too, which are not even imported.
    files = ["tests/schedule", "-k", "test_fair"]
    code = f"import sys, pytest; print('status', int(pytest.main({[*options, *files]!r})), 'torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False)
    assert " passed" in done.stdout and "status 0 False" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_imports_another(path):
    """What two tests need lies in a file beside them that is no test. Programs that tests write are looked at too."""
    for node in ast.walk(ast.parse(path.read_text())):
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
        assert not tests, f"line {node.lineno} imports {tests}: move what both need to a file of its own"
