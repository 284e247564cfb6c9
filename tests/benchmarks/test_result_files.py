"""The file of a benchmark says where, from which commit and by which command its figures came, with every round."""

from __future__ import annotations

import ast
import json
import sys

import pytest

from benchmarks import common


def test_a_file_has_its_command_without_paths_of_the_machine_and_every_round(tmp_path, monkeypatch):
    script = common.ROOT / "benchmarks" / "rerank.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--data", f"{tmp_path}/msmarco.jsonl.gz", "--pairs", "8"])
    common.write_json(tmp_path / "out.json", benchmark="rerank", seconds={"[ a,\n b ]": [1.5, 2.5]})
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["command"] == "python benchmarks/rerank.py --data msmarco.jsonl.gz --pairs 8"
    assert found["seconds"] == {"[ a,\n b ]": [1.5, 2.5]}
    assert {"date", "cpu", "cores", "torch", "prefold"} <= set(found["machine"]) and "commit" in found
    assert "[1.5, 2.5]" in text, "rounds stand on one line"


def test_nothing_is_written_without_a_path():
    common.write_json(None, seconds={})


# The sources of all that takes arguments of its own when it is run. harness_tasks.py writes data for harness.py.
SCRIPTS = {
    path: text
    for path in sorted((common.ROOT / "benchmarks").rglob("*.py"))
    if "argparse.ArgumentParser(" in (text := path.read_text(encoding="utf-8")) and "__main__" in text
    if path.stem != "harness_tasks"
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(common.ROOT)))
def test_every_benchmark_writes_its_file_through_the_one_helper(path):
    calls = [node for node in ast.walk(ast.parse(SCRIPTS[path])) if isinstance(node, ast.Call)]
    options = [call.args[0].value for call in calls if getattr(call.func, "attr", "") == "add_argument"
               if call.args and isinstance(call.args[0], ast.Constant)]  # fmt: skip
    assert "--json" in options
    assert any(getattr(call.func, "id", "") == "write_json" for call in calls)
