"""tests/messages.txt lists the error messages in the code, so that a review can read all of them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "messages.py"


def test_the_list_of_error_messages_is_up_to_date():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/messages.py, and read the new messages:\n{done.stdout}{done.stderr}"


def test_texts_of_exceptions_are_found():
    script = runpy.run_path(str(SCRIPT))
    source = """
class Refusal(Exception): pass
def wrong(text): return InputError(f"{text!r} is not {self.kind}", field="x", remedy="write " + name)
def use(n):
    if n: raise Refusal("no" if n == 1 else "never")
    raise settings.wrong(key, f"a number above {len(key)}")
    raise KeyError("internal")
    raise
"""
    exceptions = script["exceptions_of"]({"a.py": source})
    assert exceptions == {"Refusal"}
    assert script["messages"](source, exceptions) == [
        "InputError: {text} is not {kind} | write {name}",
        "Refusal: no | never",
        "wrong: a number above {...}",
    ]
