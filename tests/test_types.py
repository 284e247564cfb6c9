"""The type checker, which passes in scripts/check, sees what README and docs/python.md show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[1]

SNIPPETS = """
from typing import assert_type
import numpy as np
from prefold import LLM, Classification, Generated, InputError, Ranking, Score

llm = LLM("smollm2-135m")
assert_type(llm.generate("a"), Generated)
assert_type(llm.generate({"prompt": "a", "adapter": "x"}), Generated)
assert_type(llm.generate(["a", "b"], temperature=0.5, stop="\\n"), list[Generated])
assert_type(llm.generate(["a"], n=2), list[list[Generated]])
assert_type(llm.generate([{"prompt": "a"}], adapter=["x", None]), list[Generated])
assert_type(llm.generate([5, 6]), Generated)
assert_type(llm.generate(["a"], errors="return"), list[Generated | InputError])
assert_type(llm.chat([{"role": "user", "content": "a"}]), Generated)
assert_type(llm.chat([[{"role": "user", "content": "a"}]]), list[Generated])
assert_type(llm.classify("a", ["x", "y"]), Classification)
assert_type(llm.classify(["a"], ["x", "y"]), list[Classification])
assert_type(llm.score("a", " b"), Score)
assert_type(llm.score("a", [" b"]), list[Score])
assert_type(llm.score(["a"], [[" b"]]), list[list[Score]])
assert_type(llm.rerank("a", ["b"]), Ranking)
assert llm.embed(["a"]).shape
llm.generate("a", max_tokns=3)  # error: Unexpected keyword
llm.embed("a", pooling="lst")  # error: incompatible type
llm.chat("a")  # error: No overload
"""


def mypy(*arguments: str) -> str:
    command = [sys.executable, "-m", "mypy", "--no-color-output", "--no-error-summary", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout + done.stderr


def test_what_methods_return_is_known(tmp_path):
    file = tmp_path / "snippets.py"
    file.write_text(SNIPPETS)
    found = {int(line.split(":")[1]) for line in mypy(str(file)).splitlines() if ": error:" in line}
    wanted = {i for i, line in enumerate(SNIPPETS.split("\n"), 1) if "# error" in line}
    assert found == wanted, mypy(str(file))


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_examples_are_typed(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    assert blocks
    file = tmp_path / "examples.py"
    file.write_text("\n".join(blocks))
    assert mypy(str(file)) == ""
