"""The commands for a person at a terminal: direct answers, demo, plan, verify, bench, models."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace

import pytest
from tiny import tiny_checkpoint

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.cli.answers import expand
from prefold.cli.specs import job_spec
from prefold.model import config_from


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, dtype="float32")


def test_rerank_of_texts(prefold, llm, tmp_path):
    documents = ["one thing", "another", "a third"]
    want = llm.rerank("the query", documents)
    done = prefold("rerank", "the query", *documents, "--dtype", "float32")
    assert done.exit_code == 0
    ranked = [line.split(None, 2) for line in done.stdout.splitlines()]
    assert [line[2] for line in ranked] == [documents[i] for i in want.order]
    assert float(ranked[0][1]) == pytest.approx(want.scores[want.order[0]], abs=1e-4)
    assert "rows computed" in done.stderr
    (tmp_path / "docs.txt").write_text("\n".join(documents) + "\n\n")
    assert prefold("rerank", "the query", "@docs.txt", "--dtype", "float32").stdout == done.stdout
    assert prefold("rerank", "the query", "-", "--dtype", "float32", input="\n".join(documents)).stdout == done.stdout
    as_json = json.loads(prefold("rerank", "the query", *documents, "--json", "--dtype", "float32").stdout)
    assert as_json["order"] == want.order and as_json["query"] == "the query"


def test_a_text_a_line_and_lines_end_at_line_ends_only(tmp_path):
    texts = ["a form\x0cfeed", "a line\u2028separator", "next\x85line", "last"]
    (tmp_path / "texts.txt").write_bytes("\r\n".join(texts).encode() + b"\n\n")
    assert expand(f"@{tmp_path / 'texts.txt'}") == texts
    assert job_spec({"labels_file": tmp_path / "texts.txt"}, task="classify").tasks["classify"].labels == texts


def test_embed_classify_and_score_of_texts(prefold, llm):
    line = json.loads(prefold("embed", "a text", "--dtype", "float32").stdout)
    assert line["embedding"] == pytest.approx(llm.embed("a text").tolist(), abs=1e-5)
    done = prefold("embed", "a text", "a text", "other")
    assert "3 vectors of 36 values" in done.stdout and " 1.00  1.00" in done.stdout
    done = prefold("classify", "a text", "--labels", "yes,no", "--dtype", "float32")
    assert done.stdout.startswith(llm.classify("a text", ["yes", "no"]).label)
    done = prefold("score", "the cat", " sat", " flew", "--dtype", "float32")
    assert float(done.stdout.split()[0]) == pytest.approx(llm.score("the cat", " sat").logprob, abs=1e-3)
    assert len(done.stdout.splitlines()) == 2
    rolling = prefold("score", "the cat sat", "--dtype", "float32")
    assert float(rolling.stdout.split()[0]) == pytest.approx(llm.score("the cat sat").logprob, abs=1e-3)


def test_bad_texts_are_an_error(prefold):
    done = prefold("classify", "x" * 5000, "--labels", "yes,no")
    assert done.exit_code == 1 and "shorten it" in done.stderr


def test_demo_shows_what_was_shared(prefold, tmp_path):
    done = prefold("demo")
    assert done.exit_code == 0
    for part in ("4 queries", "what causes the ocean tides", "█", "% saved", "times as fast", "prefold rerank"):
        assert part in done.stdout
    assert prefold("demo", "--write", "demo.jsonl").exit_code == 0
    assert prefold("run", "demo.jsonl", "--task", "rerank", "--id", "id", "-o", "out.jsonl").exit_code == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


def test_plan_says_what_a_job_would_do(prefold, tmp_path):
    prefold("demo", "--write", "demo.jsonl")
    done = prefold("plan", "demo.jsonl", "--task", "rerank", "--json")
    counts = json.loads(done.stdout)
    prefold("run", "demo.jsonl", "--task", "rerank", "-o", "out.jsonl", "--report", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f'"totals":{{"tokens":{counts["tokens"]},"rows":{counts["rows"]}}}' in page
    assert counts["records"] == 4 and counts["requests"] == 32
    assert counts["rows"] <= counts["rows_mlp"] < counts["tokens"]
    text = prefold("plan", "demo.jsonl", "--task", "rerank", "--gflops", "100", "--limit", "2").stdout
    assert "2 records, 16 prompts" in text and "100 GFLOP/s, as given" in text and "Judge whether" in text
    (tmp_path / "bad.jsonl").write_text('{"query": null, "documents": ["x"]}\n')
    assert "1 record would fail" in prefold("plan", "bad.jsonl", "--task", "rerank").stdout
    wrong = prefold("plan", "demo.jsonl", "--task", "rerank", "--template", "{query}")  # of no record
    assert wrong.exit_code == 1 and "rerank template" in wrong.stderr and not wrong.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_measures_a_step_of_what_would_run(prefold, model, tmp_path, dtype, monkeypatch):
    """The job's own prompts run in the job's dtype through the engine that the job would have."""
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "yes or no {i}"}}\n' for i in range(40)))
    job = ("in.jsonl", "--task", "classify", "--labels", "yes,no")
    run = prefold("run", *job, "--dtype", dtype, "-o", "out.jsonl").stderr
    passes = re.search(rf"computed in {dtype}; (.*)", run)[1]
    plan = prefold("plan", *job, "--dtype", dtype).stdout
    rows = int(re.search(r"rows +(\d+) computed", run)[1])
    assert f"measured: {rows} rows of this job, random weights in {dtype} on cpu; {passes}; counted in" in plan
    assert "measured: " in prefold("plan", *job, "--dtype", dtype, "--max-batch-rows", "64").stdout
    whole = 4 * config_from(resolve(model).config).num_parameters
    monkeypatch.setattr("prefold.cli.speed.MOST_BYTES", whole - 1)
    assert "; extrapolated from 1 and 2 of 3 layers; counted in" in prefold("plan", *job, "--dtype", "float32").stdout
    monkeypatch.setattr("prefold.cli.speed.MOST_BYTES", 100)
    done = prefold("plan", *job)
    assert done.exit_code == 1 and "give --gflops" in done.stderr


def test_plan_cuts_the_stream_for_replicas(prefold):
    prefold("demo", "--write", "demo.jsonl")
    arguments = ("plan", "demo.jsonl", "--task", "rerank", "--replicas", "3")
    found = json.loads(prefold(*arguments, "--json").stdout)
    assert sum(s["prompts"] for s in found["segments"]) == found["requests"]
    assert sum(s["rows"] - s["again"] for s in found["segments"]) == found["rows"]
    assert found["replicas"] == {"rows": sum(s["rows"] for s in found["segments"]), "rows_twice": rows_twice(found)}
    text = prefold(*arguments, "--gflops", "100").stdout
    assert "3 segments: the costliest 1." in text and "computed twice" in text and text.count("\n       3 ") == 1
    timed = json.loads(prefold(*arguments, "--json", "--gflops", "100").stdout)
    costliest = max(segment["flops"] for segment in timed["segments"])
    assert timed["replicas"]["seconds"] == costliest / 100e9
    assert f"3 replicas like this machine: {timed['replicas']['rows']:,} rows, about" in text
    one = json.loads(prefold(*arguments[:-1], "1", "--json", "--gflops", "100").stdout)
    assert one["replicas"]["rows"] == one["rows"] and not one["replicas"]["rows_twice"]
    assert timed["replicas"]["seconds"] < one["replicas"]["seconds"]


def rows_twice(found) -> int:
    return found["replicas"]["rows"] - found["rows"]


def test_plan_downloads_no_weights(prefold, model, monkeypatch):
    import huggingface_hub

    prefold("demo", "--write", "demo.jsonl")
    wanted = []

    def download(name, *, allow_patterns, **more):
        wanted.append(allow_patterns)
        return model

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for command in ("plan", "rerank"):
        arguments = [command, "demo.jsonl", "-m", "owner/name", "--limit", "1"]
        assert prefold(*arguments, *(["--task", "rerank"] if command == "plan" else [])).exit_code == 0
    assert "*.safetensors" not in wanted[0] and "*.safetensors" in wanted[1]


def test_verify_measures_the_drift(prefold):
    prefold("demo", "--write", "demo.jsonl")
    exact = prefold("verify", "demo.jsonl", "--task", "rerank", "--dtype", "float32", "--json")
    found = json.loads(exact.stdout)
    assert [f["comparison"] for f in found] == ["sharing (full against off, float32)"]
    assert 0 < found[0]["values"] < 1e-4 and found[0]["first"] == 0 and found[0]["groups"] == 4
    done = prefold("verify", "demo.jsonl", "--task", "rerank", "--dtype", "bfloat16", "--sample", "2", "--json")
    drift = json.loads(done.stdout)
    assert len(drift) == 3 and drift[2]["values"] > 1e-3 and drift[0]["groups"] == 2
    text = prefold("verify", "demo.jsonl", "--task", "rerank", "--dtype", "float32").stdout
    assert "largest difference" in text and "4 rankings" in text
    strict = prefold("verify", "demo.jsonl", "--task", "rerank", "--dtype", "float32", "--tolerance", "0")
    assert strict.exit_code == 1 and "sharing changed a value" in strict.stderr


@pytest.mark.skipif(not (kernels.load() and kernels.load().has_int8), reason="no kernels for int8")
def test_verify_measures_int8(prefold):
    prefold("demo", "--write", "demo.jsonl")
    options = ("verify", "demo.jsonl", "--task", "rerank", "--sample", "2", "--arithmetic", "int8", "--json")
    done = prefold(*options, "--dtype", "float32")
    assert done.exit_code == 0, done.output
    drift = json.loads(done.stdout)
    names = [f["comparison"] for f in drift]
    assert names == ["sharing (full against off, int8 in float32)", "arithmetic (int8 in float32 against float32, off)"]
    assert drift[0]["values"] < 1e-2 and 1e-4 < drift[1]["values"] < 1 and drift[1]["groups"] == 2
    drift = json.loads(prefold(*options, "--dtype", "bfloat16", "--weights", "int8").stdout)
    assert [f["comparison"].partition(" ")[0] for f in drift] == ["sharing", "arithmetic", "precision", "both"]


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_where_no_record_is_usable_nothing_is_measured(prefold, tmp_path, command):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x" * 5000}) + "\n")
    options = ["--tolerance", "1"] if command == "verify" else []
    done = prefold(command, "in.jsonl", "--task", "embed", *options)
    assert done.exit_code == 1 and done.stdout == ""
    assert "none of the records that were drawn from in.jsonl is usable" in done.stderr and "shorten it" in done.stderr


def test_verify_leaves_out_what_is_unusable_and_calibrates(prefold, tmp_path):
    texts = ["a good film", "x" * 5000, "a bad film", "neither"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ("verify", "in.jsonl", "--task", "classify", "--labels", "yes,no", "--dtype", "bfloat16")
    text = prefold(*options, "--calibrate").stdout
    assert "3 items of in.jsonl, 1 unusable records left out" in text
    plain, calibrated = (json.loads(prefold(*options, *more, "--json").stdout) for more in ([], ["--calibrate"]))
    for one, other in zip(plain[1:], calibrated[1:], strict=True):
        assert one["values"] == pytest.approx(other["values"], abs=1e-4)
        assert one["results"] != pytest.approx(other["results"], abs=1e-5)


def test_verify_fails_for_what_is_no_number(prefold, tmp_path, monkeypatch):
    from prefold.jobs import verify

    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    compare = verify.compare
    monkeypatch.setattr(verify, "compare", lambda *runs: replace(compare(*runs), values=float("nan")))
    done = prefold("verify", "in.jsonl", "--task", "embed", "--tolerance", "9", "--dtype", "float32", "--json")
    assert done.exit_code == 1 and "by nan" in done.stderr and json.loads(done.stdout)[0]["values"] is None


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_windows_are_as_large_as_was_asked_for(prefold, tmp_path, monkeypatch, command):
    from prefold.tasks import run

    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(9)))
    seen, run_works = [], run.run_works

    def spy(*given, **options):
        seen.append(options["window"])
        return run_works(*given, **options)

    monkeypatch.setattr(run, "run_works", spy)
    assert prefold(command, "in.jsonl", "--task", "embed", "--window", "20").exit_code == 0
    assert set(seen) == {20}


def test_bench_times_the_three_ways(prefold, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "the same start {i}"}}\n' for i in range(20)))
    done = prefold("bench", "in.jsonl", "--task", "embed", "--repeat", "2", "--json")
    found = json.loads(done.stdout)["modes"]
    assert list(found) == ["full", "mlp", "off"] and all(len(m["seconds"]) == 2 for m in found.values())
    assert found["full"]["rows"] < found["off"]["rows"] == found["off"]["tokens"]
    assert found["full"]["rows"] == found["mlp"]["rows"]
    text = prefold("bench", "in.jsonl", "--task", "embed", "--repeat", "1", "--limit", "5").stdout
    assert "rows/s" in text and "1.00x" in text and "the first 5 records" in text


def test_bench_says_what_it_left_out_and_what_repeats(prefold, tmp_path):
    texts = ["the same start", "x" * 5000, "the same start", "another", "the same start"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    said = prefold("bench", "in.jsonl", "--task", "embed", "--repeat", "1").stdout
    assert "the first 100 records; 1 unusable records left out" in said
    assert "4 prompts; 2 of them repeat an earlier" in said
    found = json.loads(prefold("bench", "in.jsonl", "--task", "embed", "--repeat", "1", "--json").stdout)
    assert (found["left_out"], found["prompts"], found["repeated_prompts"]) == (1, 4, 2)


def test_texts_are_timed_and_compared(prefold, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "the same start {i}"}}\n' for i in range(9)))
    options = ("in.jsonl", "--task", "generate", "--raw", "--max-tokens", "12", "--ignore-eos")
    found = json.loads(prefold("bench", *options, "--repeat", "1", "--dtype", "float32", "--json").stdout)["modes"]
    assert list(found) == ["full", "off"] and found["full"]["rows"] < found["off"]["rows"]
    exact = json.loads(prefold("verify", *options, "--dtype", "float32", "--json").stdout)
    assert [(f["texts"], f["first_changed"]) for f in exact] == [(9, [])]
    drift = json.loads(prefold("verify", *options, "--dtype", "bfloat16", "--json").stdout)
    assert [f["comparison"].split(" ")[0] for f in drift] == ["sharing", "precision", "both"]
    assert all(f["texts"] == 9 and all(1 <= n <= 12 for n in f["first_changed"]) for f in drift)
    assert "of 9 changed" in prefold("verify", *options, "--dtype", "float32").stdout


def test_where_texts_part():
    from prefold.jobs.verify import Run, TextDifference, compare_texts
    from prefold.spec.requests import Generated

    def run(*texts):
        return Run(None, [[[Generated(tokens, None, "stop") for tokens in texts]], None])

    one, other = run((1, 2, 3), (1, 2), (4,), (5, 6)), run((1, 2, 3), (1, 2, 9), (3,), (5, 7))
    assert compare_texts(one, other) == TextDifference(4, [3, 1, 2])


def test_models_lists_what_runs(prefold):
    done = prefold("models")
    assert done.exit_code == 0
    for part in ("smollm2-135m", "Qwen3ForCausalLM", "llama3, yarn", "GGUF", "CPU kernels"):
        assert part in done.stdout


@pytest.mark.parametrize("command", ["embed", "generate", "bench", "verify"])
@pytest.mark.parametrize("option", [("--dtype", "float8"), ("--device", "tpu"), ("--device", "cuda:x")])
def test_a_dtype_or_device_that_does_not_exist_is_wrong_usage(prefold, tmp_path, command, option):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "prompt": "a"}\n')
    output = ["-o", "out.jsonl"] if command in ("embed", "generate") else ["--task", "embed"]
    done = prefold(command, "in.jsonl", *output, *option)
    assert done.exit_code == 2
    assert option[1] in done.stderr and ("bfloat16" if option[0] == "--dtype" else "cuda:1") in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_warning_is_one_line(prefold, monkeypatch):
    monkeypatch.setattr(
        "prefold.cli.models.sections", lambda: warnings.warn("install g++", RuntimeWarning, stacklevel=1) or []
    )
    done = prefold("models")
    assert done.stderr == "prefold: install g++\n" and done.exit_code == 0


@pytest.mark.parametrize("task", ["embed", "rerank", "classify", "score", "generate"])
def test_texts_for_a_model_without_a_tokenizer_are_refused_at_once(prefold, tmp_path, task):
    folder = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    record = {"text": "a", "query": "q", "document": "d", "prompt": "p", "messages": [{"role": "user", "content": "c"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    options = ["--labels", "yes,no"] if task == "classify" else []
    job = prefold(task, "in.jsonl", "-o", "out.jsonl", "-m", folder, *options)
    of_messages = (
        [] if task == "rerank" else [prefold(task, "in.jsonl", "--messages", "messages", "-m", folder, *options)]
    )
    for done in (job, prefold(task, "a", "b", "-m", folder, *options), *of_messages):
        assert done.exit_code == 1 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and "has no tokenizer" in done.stderr and "token ids" in done.stderr
    assert not list(tmp_path.glob("out.jsonl*"))


def test_a_shape_has_no_folder_for_a_tokenizer(prefold):
    done = prefold("generate", "a", "-m", "smolvlm-256m", "--load-format", "dummy")
    assert done.exit_code == 1 and "save its tokenizer" not in done.stderr, done.stderr
    assert "has no tokenizer" in done.stderr and "the hub id of a model that has one" in done.stderr, done.stderr
    assert "without a tokenizer" in prefold("models").stdout


def test_batch_lines_of_token_ids_need_no_tokenizer(prefold, tmp_path, lines):
    folder = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": [5, 6, 7]}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    done = prefold("run", "in.jsonl", "-o", "out.jsonl", "-m", folder)
    assert done.exit_code == 0, done.stderr
    assert len(lines("out.jsonl")[0]["response"]["body"]["data"][0]["embedding"])
