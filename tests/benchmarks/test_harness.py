"""The harness of the benchmarks: options, turns, tables and files; and every script uses it."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
import sys

import click
import pytest
from click.testing import CliRunner

from benchmarks import harness


def test_a_file_has_its_command_without_paths_of_the_machine_and_every_round(tmp_path, argv):
    script = harness.ROOT / "benchmarks" / "rerank.py"
    argv(script, "--data", f"{tmp_path}/msmarco.jsonl.gz", "--pairs", "8")
    harness.write_json(tmp_path / "out.json", benchmark="rerank", seconds={"[ a,\n b ]": [1.5, 2.5]})
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["command"] == "python benchmarks/rerank.py --data msmarco.jsonl.gz --pairs 8"
    assert found["seconds"] == {"[ a,\n b ]": [1.5, 2.5]}
    assert {"date", "cpu", "cores", "torch", "prefold"} <= set(found["machine"]) and "commit" in found
    assert "[1.5, 2.5]" in text, "rounds stand on one line"


def test_nothing_is_written_without_a_path():
    harness.write_json(None, seconds={})


def test_systems_take_turns():
    ran = []
    systems = {name: lambda name=name: ran.append(name) for name in "ab"} | {"peer": lambda: 2.5}
    rounds = harness.take_turns(systems, 2, warm=1)
    assert ran == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in rounds.seconds.items()} == {"a": 2, "b": 2, "peer": 2}
    assert rounds.seconds["peer"] == [2.5, 2.5], "a peer times itself"
    rounds.add("a", 9.0, "found")
    assert rounds.seconds["a"][-1] == 9.0 and rounds.found["a"] == "found"
    assert harness.step_seconds(lambda tokens: 1.0 + 0.5 * tokens, 9) == 0.5


def test_a_table_has_medians_spread_and_the_limit():
    shown = harness.compared(
        {"ours": [1.0, 3.0, 2.0], "other": [4.0]}, limit=1.0, columns={"pairs/s": {"ours": "7"}}
    ).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]
    assert cells[0] == ["system", "median, s", "least to most", "rounds", "time, ours = 1", "of the limit", "pairs/s"]
    assert cells[2:] == [
        ["ours", "2", "1-3", "3", "1.00", "50%", "7"],
        ["other", "4", "4-4", "1", "2.00", "25%", ""],
        ["limit of the machine", "1", "", "", "0.50", "100%", ""],
    ]


SCRIPT = """
'''Times nothing.

    as it is written
'''
import click
from benchmarks.harness import NUMBERS, Listed, benchmark

@benchmark("repeats", "smoke", repeats=4)
@click.option("--sizes", type=NUMBERS, default="1,2")
@click.option("--kinds", type=Listed(among=["a", "b"]), default="a")
def main(arguments):
    return {"seconds": {"ours": [0.5] * arguments.repeats}, "sizes": arguments.sizes}
"""


def test_a_script_is_a_command_that_writes_its_file(tmp_path):
    (tmp_path / "one.py").write_text(SCRIPT)
    main = runpy.run_path(str(tmp_path / "one.py"))["main"]
    done = CliRunner().invoke(main, ["--smoke", "--sizes", "8", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0 and "memory GB/s" in done.output and "torch" in done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["benchmark"] == "one" and found["seconds"] == {"ours": [0.5] * 4} and found["sizes"] == [8]
    assert all(rate > 0 for rate in found["machine_limits"].values())
    assert "\n    as it is written\n" in CliRunner().invoke(main, ["--help"]).output
    refused = CliRunner().invoke(main, ["--kinds", "a,c"])
    assert refused.exit_code == 2 and "there is no 'c'; use a, b" in refused.output


BENCHMARKS = harness.ROOT / "benchmarks"
# peers.py runs in other systems' environments, which have neither click nor prefold; resident.py and limited.py in a
# process that imports no more than a user's program.
APART = ("peers", "resident", "limited")
SCRIPTS = {
    path.relative_to(BENCHMARKS).as_posix(): text
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if '__name__ == "__main__"' in (text := path.read_text(encoding="utf-8")) and path.stem not in APART
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_uses_the_harness(name):
    tree = ast.parse(SCRIPTS[name])
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert any(getattr(getattr(one, "func", None), "id", "") == "benchmark" for one in main.decorator_list)
    assert "import argparse" not in SCRIPTS[name] and "json.dump(" not in SCRIPTS[name]


def test_the_table_of_scripts_has_every_script():
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/.]+)`", page, flags=re.M)
    assert sorted(listed) == sorted(name.replace("/__main__.py", "/") for name in SCRIPTS)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_published_command_has_options_of_todays_script(path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    _, script, *arguments = shlex.split(json.loads(path.read_text(encoding="utf-8"))["command"])
    if script == "-m":
        script = arguments.pop(0)
        main = importlib.import_module(f"{script}.__main__").main
    else:
        main = runpy.run_path(str(harness.ROOT / script))["main"]
    main.make_context(script, arguments)
    for name in set(sys.modules) - before:  # `harness` here is `benchmarks.harness` there
        if "." not in name and str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_click_lists_come_as_lists():
    kind = harness.Listed(float)
    assert kind.convert("0.5,1", None, None) == [0.5, 1.0] and kind.convert([2], None, None) == [2]
    with pytest.raises(click.BadParameter, match="not of type float"):
        kind.convert("x", None, None)
