"""`prefold simulate` takes what a case takes, and refuses the rest: numbers are those that were asked for."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from prefold.cli import main


@pytest.mark.parametrize(
    "given, said",
    [
        (("published", "--engine", "vllm"), "--engine is no option of `simulate published`"),
        (("published", "--machine", "H100"), "--machine is no option of `simulate published`"),
        (("published", "--calibrate", "steps.jsonl"), "--calibrate is no option"),
        (("ablation", "--policy", "daft"), "--policy is no option of `simulate ablation`"),
        (("ablation", "--replicas", "2", "--replicas", "4"), "takes --replicas once"),
        (("internet", "--rate", "5"), "--rate is no option of `simulate internet`"),
        (("repetition", "--limit", "5"), "--limit is no option of `simulate repetition`"),
        (("trace.jsonl", "--prefixes", "5"), "--prefixes is no option of a trace"),
    ],
)
def test_an_option_that_a_case_does_not_take_is_refused(given, said):
    done = CliRunner().invoke(main, ["simulate", *given])
    assert done.exit_code == 2 and said in done.stderr


@pytest.mark.parametrize("feeder", ["segments", "static", "stream"])
def test_a_trace_of_nothing_takes_no_time(tmp_path, feeder):
    (tmp_path / "empty.jsonl").write_text("")
    done = CliRunner().invoke(
        main, ["simulate", str(tmp_path / "empty.jsonl"), "--feeder", feeder, "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["requests"] == 0
