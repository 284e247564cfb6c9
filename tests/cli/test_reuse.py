"""`prefold verify --reuse shifted`, and what starts with the file that it writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError
from prefold.features.shifted.measured import Bound, Drift, Measurement
from prefold.features.shifted.options import SETTINGS, ShiftedReuse
from prefold.integrations.shared import split_options

PARTS = [f"{'abcdef'[i] * 3} passage number {i} says this and that of {'xyzuvw'[i]}. " for i in range(6)]
NUMBERS = ("verify", "in.jsonl", "--task", "embed", "--prompt", "prompt")
VERIFY = ("verify", "in.jsonl", "--task", "generate", "--reuse", "shifted", "--raw", "--dtype", "float32")
VERIFY = (*VERIFY, "--cache-reuse", "20", "--cache-reuse-recompute", "4", "--max-changed", "1")
RUN = ("run", "in.jsonl", "--task", "generate", "--raw", "--dtype", "float32", "--max-tokens", "3", "--quiet")


@pytest.fixture
def table(tmp_path):
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (3, 4, 5), (5, 3, 4), (0, 5, 2)]
    prompts = [f"{n}" + "".join(PARTS[i] for i in order) + f"? {n}" for n, order in enumerate(orders)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


@pytest.fixture
def file(prefold, table):
    done = prefold(*VERIFY, "--tolerance", "1000", "-o", "shifted.json")
    assert done.exit_code == 0, done.output
    return "shifted.json"


def test_what_was_measured(prefold, file, tmp_path):
    found = Measurement.read(file)
    assert found.settings == ShiftedReuse(min_tokens=20, recompute=4)
    assert found.bound == Bound(1000.0, 1.0)
    drift = found.drift
    assert drift.prompts == 6 and drift.shifted == 5
    assert drift.tokens / 2 < drift.approximate_tokens < drift.tokens
    assert 0 < drift.mean_logprob <= drift.logprob
    said = prefold(*VERIFY, "--tolerance", "1000").stdout
    assert "5 of 6" in said and f"{drift.approximate_tokens:,} of {drift.tokens:,}" in said
    as_json = json.loads(prefold(*VERIFY, "--tolerance", "1000", "--json").stdout)
    assert as_json["met"] and as_json["drift"]["approximate_tokens"] == drift.approximate_tokens


def test_rows_that_are_all_computed_do_not_drift(prefold, table):
    done = prefold(*VERIFY, "--tolerance", "1000", "--cache-reuse-recompute", "100000", "-o", "none.json")
    assert done.exit_code == 1 and "no chunk of the 6 prompts was met elsewhere" in done.stderr
    assert Measurement.read("none.json").drift.logprob == 0


def test_a_bound_that_is_not_met(prefold, table):
    done = prefold(*VERIFY, "--tolerance", "0", "-o", "strict.json")
    assert done.exit_code == 1 and "the bound is not met: a log-probability changed by" in done.stderr
    refused = prefold(*RUN, "-o", "out.jsonl", "--cache-reuse-shifted", "strict.json")
    assert refused.exit_code == 1 and "does not meet its bound" in refused.stderr


def test_a_job_says_what_is_approximate(prefold, file, lines):
    done = prefold(*RUN, "-o", "out.jsonl", "--cache-reuse-shifted", file, "--max-running", "1", "--keep-order")
    assert done.exit_code == 0, done.output
    found = [line.get("approximate_tokens", 0) for line in lines("out.jsonl")]
    assert sum(count > 0 for count in found) >= 3
    told = prefold(*RUN[:-1], "-o", "told.jsonl", "--cache-reuse-shifted", file, "--max-running", "1")
    assert f"{sum(found):,} rows of prompts, from other positions: approximate answers" in told.stderr
    exact = prefold(*RUN[:-1], "-o", "exact.jsonl")
    assert "other positions" not in exact.stderr
    assert all("approximate_tokens" not in line for line in lines("exact.jsonl"))
    # The answers of a job with other reuse are other answers.
    other = prefold(*RUN, "-o", "out.jsonl", "--resume")
    assert other.exit_code == 1 and "cache_reuse_shifted" in other.stderr


def test_in_python(model, file):
    with LLM(model, dtype="float32", kv_memory=1 << 23, cache=CacheOptions(shifted=file)) as llm:
        assert llm.cache.options.shifted.min_tokens == 20
        llm.generate("0" + PARTS[0] + PARTS[1], max_tokens=2)
        found = llm.generate("1" + PARTS[1] + PARTS[0], max_tokens=2, n=2, temperature=1.0)
        assert all(one.approximate_tokens > 30 for one in found)
        assert llm.generate("1" + PARTS[1] + PARTS[0], max_tokens=2, salt="other").approximate_tokens == 0


def test_a_server_takes_the_file(prefold, file, monkeypatch):
    made = []
    monkeypatch.setattr("prefold.serve.serve", lambda load, options: made.append(load()))
    done = prefold(
        "serve", "--cache-reuse-shifted", file, "--dtype", "float32", "--kv-memory", "8MiB", "--cache", "lfu"
    )
    assert done.exit_code == 0, done.output
    options = made[0].cache.options
    assert options.policy == "lfu" and options.shifted == ShiftedReuse(min_tokens=20, recompute=4)
    refused = prefold("serve", "--cache-reuse-shifted", file, "--cache", "off")
    assert refused.exit_code == 2 and "leave out --cache off" in refused.stderr


def measured(path, drift=None, **changes):
    content = json.loads(Path(path).read_text())
    content["drift"] |= drift or {}
    Path("changed.json").write_text(json.dumps(content | changes))
    return "changed.json"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": {"model": {"name": "other"}, "dtype": "float32", "adapters": {}}}, "was measured with the model"),
        ({"format": "prefold drift 0"}, "was not written by this version"),
        ({"drift": {"logprob": 1001.0}}, "a log-probability changed by"),
        ({"drift": {"logprob": float("nan")}}, "a log-probability changed by"),
        ({"drift": {"changed": 6}}, "6 of 5 first choices changed"),
        ({"drift": {"more": 5}}, "is damaged"),
        ({"settings": None}, "is damaged"),
        ({"bound": {"logprob": "a", "changed": 1}}, "is damaged"),
    ],
)
def test_files_that_are_refused(model, file, changes, match):
    changed = measured(file, **changes)
    with pytest.raises(InputError, match=match) as error:
        LLM(model, dtype="float32", cache=CacheOptions(shifted=changed))
    assert error.value.field == "cache_reuse_shifted" and "prefold verify --reuse shifted" in str(error.value)


def test_other_dtypes_and_settings_are_refused(model, file, tmp_path):
    with pytest.raises(InputError, match="measured with the dtype"):
        LLM(model, dtype="bfloat16", cache=CacheOptions(shifted=file))
    with pytest.raises(InputError, match="min_overlap is 21"):
        LLM(model, dtype="float32", cache=CacheOptions(shifted=file, min_overlap=21))
    with pytest.raises(InputError, match="cannot be read"):
        LLM(model, dtype="float32", cache=CacheOptions(shifted="nowhere.json"))
    with pytest.raises(InputError, match="needs a file with its measured effect"):
        LLM(model, dtype="float32", cache=CacheOptions(shifted=ShiftedReuse()))


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (VERIFY, 2, "needs --tolerance"),
        ((*NUMBERS, "-o", "x"), 2, "--output is for --reuse"),
        (("verify", "in.jsonl", "--task", "embed", "--cache-reuse-window", "9"), 2, "--cache-reuse-window is for"),
        ((*NUMBERS, "--reuse", "shifted", "--tolerance", "1"), 1, "only generation"),
        ((*RUN, "-o", "o.jsonl", "--cache-reuse-shifted", "in.jsonl", "--cache", "off"), 2, "leave out --cache off"),
        ((*RUN, "-o", "o.jsonl", "--cache-reuse-shifted", "x", "--url", "http://a"), 2, "works only in one process"),
        ((*RUN, "-o", "o.jsonl", "--cache-reuse-shifted", "nowhere"), 1, "cannot read nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(prefold, table, arguments, code, says):
    done = prefold(*arguments)
    assert done.exit_code == code, done.output
    assert says in done.stderr and "Traceback" not in done.output


def test_columns_of_data_frames_are_exact():
    with pytest.raises(InputError, match="columns cannot say"):
        split_options({"cache": CacheOptions(shifted="shifted.json")})
    assert split_options({"cache": CacheOptions(), "n": 1}) == ({"cache": CacheOptions()}, {"n": 1})


def test_every_setting_has_an_option():
    assert {*(setting for setting, *_ in SETTINGS.values()), "trial"} == set(asdict(ShiftedReuse()))


def test_bounds():
    bound = Bound(0.5, 0.25)
    drift = Drift(10, 8, 1000, 500, 0.5, 0.1, 2)
    assert drift.unmet(bound) is None
    assert "log-probability" in Drift(10, 8, 1000, 500, 0.51, 0.1, 2).unmet(bound)
    assert "3 of 8" in Drift(10, 8, 1000, 500, 0.5, 0.1, 3).unmet(bound)
    assert "no chunk" in Drift(10, 0, 0, 0, 0.0, 0.0, 0).unmet(bound)
