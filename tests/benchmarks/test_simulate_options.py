"""`python -m benchmarks.simulate` refuses options that do not belong to a case."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.simulate.__main__ import main


@pytest.mark.parametrize(
    "given, said",
    [
        (("repetition", "--limit", "5"), "--limit is not an option of `repetition`"),
        (("trace.jsonl", "--prefixes", "5"), "--prefixes is not an option of a trace"),
        (("published", "--replicas", "5"), "--replicas is not an option of `published`"),
    ],
)
def test_an_option_that_a_case_does_not_take_is_refused(given, said):
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 2 and said in done.stderr


def test_what_was_simulated_is_said():
    options = ("--prompts", "20", "--prefixes", "2", "--replicas", "2", "--machine", "H100")
    said = CliRunner().invoke(main, ["repetition", *options], catch_exceptions=False).stdout.splitlines()
    assert said[0].startswith("Qwen3-8B on H100: 620 TFLOP/s, 2,900 GB/s, 4 ms") and "--model and --machine" in said[0]
    assert said[3].split()[3:6] == ["20", "12,800", "2"]
    assert all(name in "".join(said[4:]) for name in ("in-step", "$/Mtok", "border", "tail"))


@pytest.mark.parametrize("feeder", ["segments", "routed", "stream"])
def test_a_trace_of_nothing_takes_no_time(tmp_path, feeder):
    (tmp_path / "empty.jsonl").write_text("")
    given = [str(tmp_path / "empty.jsonl"), "--feeder", feeder, "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(main, given, catch_exceptions=False)
    (found,) = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert done.exit_code == 0 and found["requests"] == 0
