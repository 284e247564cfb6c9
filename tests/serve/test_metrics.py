"""/metrics has the families that vLLM's dashboards read, with vLLM's labels, and the probes of an orchestrator."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import serving, until

from prefold.errors import RankError
from prefold.serve import metrics

# The families in the dashboards of vLLM's examples, without the prefix.
DASHBOARDS = [
    "e2e_request_latency_seconds", "generation_tokens", "inter_token_latency_seconds", "iteration_tokens_total",
    "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "prompt_tokens",
    "request_decode_time_seconds", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds", "request_success",
    "request_time_per_output_token_seconds", "time_to_first_token_seconds",
]  # fmt: skip


def families(server) -> dict:
    text = httpx.get(f"{server.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(server, name: str, **labels: str) -> float:
    family = families(server)["prefold:" + name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")]
    return sum(
        sample.value for sample in family.samples
        if sample.name == f"prefold:{name}" and labels.items() <= sample.labels.items()
    )  # fmt: skip


@pytest.fixture
def measured(llm):
    with serving(llm, served_names=("tiny",)) as made:
        yield made


def test_families_of_vllms_dashboards(measured):
    body = {"prompt": ["a b", "c"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    usage = httpx.post(f"{measured.url}/v1/completions", json=body, timeout=60).json()["usage"]
    streamed = {"prompt": "a", "max_tokens": 1, "ignore_eos": True, "stream": True}
    httpx.post(f"{measured.url}/v1/completions", json=streamed, timeout=60)
    vectors = httpx.post(f"{measured.url}/v1/embeddings", json={"input": ["a b", "c"]}, timeout=60).json()["usage"]
    found = families(measured)
    assert [name for name in DASHBOARDS if f"prefold:{name}" not in found] == []
    assert all(
        sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"
        for name in DASHBOARDS for sample in found[f"prefold:{name}"].samples
    )  # fmt: skip
    assert value(measured, "request_success_total", finished_reason="length") == 5
    assert value(measured, "request_success_total", finished_reason="stop") == 2
    assert value(measured, "request_prompt_tokens_count") == 5
    tokens = value(measured, "prompt_tokens_total")
    assert tokens == value(measured, "request_prompt_tokens_sum") > usage["prompt_tokens"] + vectors["prompt_tokens"]
    assert value(measured, "request_generation_tokens_sum") == 21
    assert value(measured, "request_max_num_generation_tokens_sum") == 11
    assert value(measured, "request_decode_time_seconds_count") == 3
    assert value(measured, "request_prefill_time_seconds_sum") > 0
    assert value(measured, "time_to_first_token_seconds_count") == 3
    assert value(measured, "request_time_per_output_token_seconds_count") == 2
    steps = found["prefold:iteration_tokens_total"].samples
    buckets = [sample.value for sample in steps if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == next(s.value for s in steps if s.name.endswith("_count")) > 0


def test_requests_that_are_given_up_or_fail(measured, submit_by):
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{measured.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_raw())
    until(lambda: value(measured, "request_success_total", finished_reason="abort") == 1)
    submit_by(lambda *args, **options: 1 / 0)
    assert httpx.post(f"{measured.url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 500
    assert value(measured, "request_success_total", finished_reason="error") == 1


def test_the_process_and_the_build(measured):
    found = families(measured)
    assert found["process_resident_memory_bytes"].samples[0].value > 1 << 20
    (build,) = found["prefold:build_info"].samples
    assert build.labels["model_name"] == "tiny" and build.labels["version"] and build.value == 1


def test_sizes():
    registry = metrics.CollectorRegistry()
    sizes = metrics.Sizes("x", "Numbers.", (1, 8, 16), registry)
    sizes.note(1, 1, 8)
    sizes.note(9, 100)
    text = metrics.generate_latest(registry).decode()
    counts = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("x_bucket")]
    assert counts == [2, 3, 4, 5] and "x_count 5.0" in text and "x_sum 119.0" in text


def statuses(server) -> dict[str, int]:
    paths = ("/livez", "/readyz", "/healthz", "/health", "/ping")
    return {path: httpx.get(server.url + path).status_code for path in paths}


def test_probes(llm, tmp_path):
    (tmp_path / "keys.toml").write_text('[[key]]\nkey = "k"\ntenant = "t"\n')
    ready = dict.fromkeys(("/livez", "/readyz", "/healthz", "/health", "/ping"), 200)
    with serving(None) as server:
        assert statuses(server) == dict.fromkeys(ready, 503) | {"/livez": 200}
    with serving(llm, api_keys=str(tmp_path / "keys.toml")) as server:
        assert statuses(server) == ready
        server.state.status = "draining"
        assert statuses(server) == dict.fromkeys(ready, 503) | {"/livez": 200}
        server.state.status = "ready"
        engine = server.state.handler.engine
        engine.note_failure(RankError("gone"))
        assert statuses(server) == dict.fromkeys(ready, 503)
        engine.failure = None
