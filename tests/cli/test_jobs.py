"""Jobs from the shell, on a tiny random model: right results, exit codes, files, resuming."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.cli import main
from prefold.cli.job import summary_lines
from prefold.jobs.run import Summary
from prefold.spec.job import JobSpec
from prefold.spec.requests import Stats


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, dtype="float32")


FLOAT32 = ("--dtype", "float32", "--quiet")


def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_rerank_of_a_table_is_what_the_llm_says(prefold, tmp_path, lines, llm):
    documents = [[f"because {j} of {i}" for j in range(1 + i % 4)] for i in range(12)]
    records = [{"q": f"why {i % 3}", "docs": docs, "k": i} for i, docs in enumerate(documents)]
    write(tmp_path / "in.jsonl", records)
    done = prefold("rerank", "in.jsonl", "--query", "q", "--document", "docs", "--id", "k", "-o", "out.jsonl", *FLOAT32)
    assert done.exit_code == 0 and done.output == ""
    got = {line["record"]: line for line in lines("out.jsonl")}
    assert sorted(got) == list(range(1, 13))
    for number, record in enumerate(records, 1):
        want = llm.rerank(record["q"], record["docs"])
        np.testing.assert_allclose(got[number]["scores"], want.scores, atol=1e-5)
        assert got[number]["id"] == record["k"] and got[number]["order"] == want.order


def test_embed_to_parquet_in_order(prefold, tmp_path, llm):
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in.csv").write_text("a,b\n" + "".join(f"x{i},y{i % 2}\n" for i in range(20)))
    done = prefold("embed", "in.csv", "--prompt", "{a}: {b}", "--keep", "b", "--keep-order", "--dimensions", 7,
                   "-o", "out.parquet", *FLOAT32)  # fmt: skip
    assert done.exit_code == 0
    table = pq.read_table("out.parquet")
    assert table["record"].to_pylist() == list(range(1, 21)) and table["b"].to_pylist() == ["y0", "y1"] * 10
    want = llm.embed([f"x{i}: y{i % 2}" for i in range(20)], dimensions=7)
    np.testing.assert_allclose(np.array(table["embedding"].to_pylist()), want, atol=1e-5)


def test_classify_with_examples_labels_and_calibration(prefold, tmp_path, lines, llm):
    write(tmp_path / "shots.jsonl", [{"text": "good one", "label": "yes"}, {"text": "bad one", "label": "no"}])
    texts = ["a good film", "a bad film", "neither"]
    write(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    options = ["--labels", "yes, no", "--instructions", "Good?", "--examples", "shots.jsonl", "--calibrate"]
    assert prefold("classify", "in.jsonl", *options, "-o", "out.jsonl", *FLOAT32).exit_code == 0
    examples = [("good one", "yes"), ("bad one", "no")]
    want = llm.classify(texts, ["yes", "no"], instructions="Good?", examples=examples, calibrate=True)
    for line, text in zip(sorted(lines("out.jsonl"), key=lambda v: v["record"]), want, strict=True):
        assert line["label"] == text.label
        assert line["probabilities"] == pytest.approx(text.probabilities, abs=1e-5)
    (tmp_path / "labels.json").write_text('{"yes": "yes", "no": "no"}')
    options[0:2] = ["--labels-file", "labels.json"]
    assert prefold("classify", "in.jsonl", *options, "-o", "again.jsonl", *FLOAT32).exit_code == 0
    key = lambda line: line["record"]  # noqa: E731
    assert sorted(lines("again.jsonl"), key=key) == sorted(lines("out.jsonl"), key=key)


def test_score_of_lists_rolling_and_chat(prefold, tmp_path, lines, llm):
    write(tmp_path / "in.jsonl", [{"p": "the cat", "c": [" sat", " ran off"]}])
    done = prefold("score", "in.jsonl", "--prompt", "p", "--continuation", "c", "-o", "a.jsonl", *FLOAT32)
    assert done.exit_code == 0
    want = llm.score(["the cat", "the cat"], [" sat", " ran off"])
    got = lines("a.jsonl")[0]["results"]
    assert [r["logprob"] for r in got] == pytest.approx([s.logprob for s in want], abs=1e-4)
    assert prefold("score", "in.jsonl", "--prompt", "p", "-o", "b.jsonl", *FLOAT32).exit_code == 0
    assert lines("b.jsonl")[0]["logprob"] == pytest.approx(llm.score("the cat").logprob, abs=1e-4)
    messages = [{"role": "user", "content": "hi"}]
    write(tmp_path / "chat.jsonl", [{"m": messages, "c": "yes"}])
    done = prefold("score", "chat.jsonl", "--messages", "m", "--continuation", "c", "-o", "c.jsonl", *FLOAT32)
    assert done.exit_code == 0
    text = llm.tokenizer.render_chat(messages, add_generation_prompt=True)
    want = llm.score([llm.tokenizer.encode(text, special=False)], [llm.tokenizer.encode("yes")])[0]
    assert lines("c.jsonl")[0]["logprob"] == pytest.approx(want.logprob, abs=1e-4)


def test_an_openai_batch(prefold, tmp_path, lines, llm):
    def line(i, url, body):
        return {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body}

    records = [
        line(1, "/v1/embeddings", {"model": "gpt", "input": ["x", "the y"]}),
        line(2, "/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 1}),
        line(3, "/v1/score", {"text_1": "q", "text_2": "a"}),
        line(4, "/v1/chat/completions", {"messages": []}),
        line(1, "/rerank", {"query": "q", "documents": ["a"]}),
        line(5, "/v1/embeddings", {"input": "x" * 5000}),
        line(6, "/v1/embeddings", {"input": [0, 99999]}),
        '{"custom_id": "c7"',
    ]
    write(tmp_path / "in.jsonl", records)
    done = prefold("run", "in.jsonl", "-o", "out.jsonl", "--dtype", "float32")
    assert done.exit_code == 3
    assert "5 records failed" in done.stderr and "  model     1 request asked for 'gpt'; " in done.stderr
    got = lines("out.jsonl")
    assert sorted(str(g["custom_id"]) for g in got) == ["None", "c1", "c1", "c2", "c3", "c4", "c5", "c6"]
    ok = {g["custom_id"]: g["response"]["body"] for g in got if g["response"] and g["response"]["status_code"] == 200}
    vectors = [d["embedding"] for d in ok["c1"]["data"]]
    np.testing.assert_allclose(vectors, llm.embed(["x", "the y"]), atol=1e-5)
    ranking = llm.rerank("q", ["a", "b"])
    assert ok["c2"]["results"][0]["index"] == ranking.order[0] and len(ok["c2"]["results"]) == 1
    assert ok["c3"]["data"][0]["score"] == pytest.approx(ranking.scores[0], abs=1e-5)
    bad = {g["custom_id"]: g["response"]["body"]["error"] for g in got if g["response"] and g["custom_id"] not in ok}
    assert bad["c5"]["param"] == "input" and bad["c5"]["code"] == "too_long" and "'input'" in bad["c5"]["message"]
    assert bad["c6"]["param"] == "input"


def test_a_batch_of_numbers_needs_no_language_model(prefold, tmp_path, lines):
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=1)
    bodies = [("/rerank", {"query": "q", "documents": ["a", "b"]}), ("/v1/embeddings", {"input": "x"})]
    bodies.append(("/v1/completions", {"prompt": "p"}))
    records = [{"custom_id": f"c{i}", "method": "POST", "url": u, "body": b} for i, (u, b) in enumerate(bodies)]
    write(tmp_path / "in.jsonl", records)
    done = prefold("run", "in.jsonl", "-o", "out.jsonl", "-m", folder)
    assert done.exit_code == 3, done.stderr
    got = {line["custom_id"]: line["response"] for line in lines("out.jsonl")}
    assert [got[f"c{i}"]["status_code"] for i in range(3)] == [200, 200, 400]
    assert "the task 'generate' cannot be run" in got["c2"]["body"]["error"]["message"]


def test_bad_records_are_lines_and_status_3(prefold, tmp_path, lines):
    bad = {
        2: ({"other": "x"}, "missing_field"),
        3: ({"text": None}, "null"),
        4: ({"text": {"a": 1}}, "wrong_type"),
        5: ({"text": "x" * 5000}, "too_long"),
        6: ("nonsense", "invalid_json"),
        7: ({"text": "\ud800"}, "invalid_utf8"),
        8: ({"text": ""}, "empty"),
    }
    write(tmp_path / "in.jsonl", [{"text": "fine"}, *(record for record, _ in bad.values()), {"text": "fine"}])
    done = prefold("embed", "in.jsonl", "-o", "out.jsonl", "--prompt", "text")
    assert done.exit_code == 3 and "9 records" in done.stderr and "7 records failed" in done.stderr
    assert "the first: record 2: column 'text' is missing; the record has: other" in done.stderr
    got = {line["record"]: line for line in lines("out.jsonl")}
    assert len(got) == 9 and "embedding" in got[1] and "embedding" in got[9]
    for number, (_, code) in bad.items():
        assert got[number]["error"]["code"] == code, number
        assert got[number]["error"]["message"]
        if code != "invalid_json":
            assert got[number]["error"]["field"] == "text" and got[number]["error"]["remedy"]
    done = prefold("embed", "in.jsonl", "-o", "cut.jsonl", "--prompt", "text", "--truncate", "--quiet")
    assert "embedding" in {line["record"]: line for line in lines("cut.jsonl")}[5]


def test_standard_input_to_standard_output(prefold):
    done = prefold("embed", "-", "--quiet", input='{"text": "a"}\n{"text": "b"}\n')
    assert done.exit_code == 0
    assert [json.loads(line)["record"] for line in done.stdout.splitlines()] == [1, 2]
    done = prefold("embed", "-", "--quiet", "--stream", "--window", "1", "--format", "csv", input="text\na\nb\n")
    assert [json.loads(line)["record"] for line in done.stdout.splitlines()] == [1, 2]


def test_a_finished_job_is_left_alone_and_another_is_refused(prefold, tmp_path, lines):
    write(tmp_path / "in.jsonl", [{"text": str(i)} for i in range(5)])
    assert prefold("embed", "in.jsonl", "-o", "out.jsonl", "--limit", "2").exit_code == 0
    assert len(lines("out.jsonl")) == 2
    assert prefold("embed", "in.jsonl", "-o", "out.jsonl").exit_code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    again = prefold("embed", "in.jsonl", "-o", "out.jsonl", "--sharing", "off")
    assert again.exit_code == 0 and "nothing left to do" in again.stderr
    other = prefold("embed", "in.jsonl", "-o", "out.jsonl", "--pooling", "mean")
    assert other.exit_code == 1 and 'options.pooling: null in the journal, "mean" now' in other.stderr
    write(tmp_path / "in.jsonl", [{"text": "new"}])
    other = prefold("embed", "in.jsonl", "-o", "out.jsonl")
    assert other.exit_code == 1 and "input." in other.stderr and "--overwrite" in other.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert prefold("embed", "in.jsonl", "-o", "out.jsonl", "--overwrite").exit_code == 0
    assert len(lines("out.jsonl")) == 1
    (tmp_path / "own.jsonl").write_text("mine\n")
    refused = prefold("embed", "in.jsonl", "-o", "own.jsonl")
    assert refused.exit_code == 1 and "--overwrite" in refused.stderr
    assert (tmp_path / "own.jsonl").read_text() == "mine\n"


def test_the_report_is_written(prefold, tmp_path):
    write(tmp_path / "in.jsonl", [{"query": "the q", "document": f"d {i}"} for i in range(9)])
    done = prefold("rerank", "in.jsonl", "-o", "out.csv", "--report", "page.html", "--max-batch-rows", "64")
    assert done.exit_code == 0 and "page.html" in done.stderr
    assert len(list(csv.DictReader((tmp_path / "out.csv").open(newline="")))) == 9
    data = json.loads(re.search(r'application/json">(.*?)</script>', (tmp_path / "page.html").read_text(), re.S)[1])
    assert len(data["nodes"]) > 9 and len(data["steps"]) > 1
    assert data["totals"]["rows"] == sum(node[2] for node in data["nodes"])
    assert "Judge whether" in data["nodes"][1][7]
    assert str(data["totals"]["tokens"]) in done.stderr.replace(",", "")
    page = (tmp_path / "page.html").read_bytes()
    again = prefold("rerank", "in.jsonl", "-o", "out.csv", "--report", "page.html")
    assert again.exit_code == 0 and "nothing was computed; page.html is unchanged" in again.stderr
    assert (tmp_path / "page.html").read_bytes() == page
    another = prefold("rerank", "in.jsonl", "-o", "out.csv", "--report", "new.html")
    assert another.exit_code == 0 and "nothing was computed; there is no new.html" in another.stderr
    assert not (tmp_path / "new.html").exists()


def test_what_is_said_of_a_resumed_job_is_of_this_run(prefold, tmp_path):
    write(tmp_path / "in.jsonl", [{"text": f"d {i}"} for i in range(9)])
    assert prefold("embed", "in.jsonl", "-o", "out.csv", "--limit", 6).exit_code == 0
    done = prefold("embed", "in.jsonl", "-o", "out.csv", "--report", "page.html")
    assert "9 records written to out.csv, 6 of them before" in done.stderr
    assert "in 3 prompts, of the 3 records of this run" in done.stderr
    data = json.loads(re.search(r'application/json">(.*?)</script>', (tmp_path / "page.html").read_text(), re.S)[1])
    assert data["cards"][:2] == [["records", "9"], ["of them in this run", "3"]]
    assert "resumed: 6 records were written before this run" in data["when"] and "not counted" in data["when"]
    assert "1 step," in data["stepsText"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["embed", "missing.jsonl"], 1, "there is no input file"),
        (["run", "in.jsonl"], 1, "--task"),
        (["run", "in.jsonl", "--task", "classify"], 1, "give two or more (--labels A,B)"),
        (["generate", "in.jsonl", "--json-schema", "no.json"], 1, "cannot read no.json"),
        (["generate", "in.jsonl", "--max-tokens", "many"], 2, "'many' is not a valid whole number"),
        (["embed", "in.csv", "--prompt", "texts"], 1, "no column 'texts'; did you mean text? it has: text"),
        (["embed", "in.jsonl", "--prompt", "{"], 1, "--prompt"),
        (["rerank", "in.jsonl"], 1, "--query"),
        (["embed", "in.jsonl", "--messages", "text", "--prompt", "text"], 2, "exclude each other"),
        (["embed", "in.jsonl", "--keep-order"], 1, "-o FILE"),
        (["embed", "in.jsonl", "--resume"], 2, "-o FILE"),
        (["embed", "in.jsonl", "--resume", "-o", "new.jsonl"], 1, "nothing to resume"),
        (["embed", "in.jsonl", "-o", "no/such/folder.jsonl"], 1, "no folder"),
        (["embed", "in.jsonl", "-o", "./in.jsonl", "--overwrite"], 1, "would replace the input"),
        (["embed", "in.jsonl", "-o", "new.html", "--report", "new.html"], 1, "would replace the output"),
        (["classify", "in.jsonl", "--labels", "a,b", "--keep", "label=text"], 1, "--keep my_label=label"),
        (["embed", "in.jsonl", "-m", "no-such-model"], 1, "no model 'no-such-model'"),
        (["embed", "in.jsonl", "-m", "smolm2-135"], 1, "did you mean smollm2-135m?"),
        (["embed", "in.csv", "--prompt", "Sum up: text"], 1, "columns stand in braces: '... {column} ...'"),
        (["embed", "in.csv", "--prompt", "{other}"], 1, "no column 'other'"),
        (["embed", "in.jsonl", "--pooling", "max"], 2, "max"),
        (["embed", "in.jsonl", "--dimensions", "9999"], 1, "dimensions"),
        (["classify", "in.jsonl", "--labels", "a,b", "--labels-file", "x"], 2, "exclude each other"),
        (["embed", "text one", "text two", "-o", "x.jsonl"], 2, "--output is for jobs"),
        (["rerank", "only a query"], 2, "no such file"),
        (["generate", "hi", "--tokenizer", "m"], 2, "is for jobs on servers (--url) or with --backend vllm"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(prefold, tmp_path, arguments, code, says):
    write(tmp_path / "in.jsonl", [{"text": "a"}])
    (tmp_path / "in.csv").write_text("text\na\n")
    done = prefold(*arguments)
    assert done.exit_code == code, done.output
    assert says in done.stderr and "Traceback" not in done.output
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("new")) == []


def test_interrupted_it_prints_the_command_that_resumes(prefold, model, tmp_path, slowed):
    write(tmp_path / "in.jsonl", [{"text": f"{i} " * 20} for i in range(150)])
    arguments = ["embed", "in.jsonl", "-o", "my out.jsonl", "-m", model, "--max-batch-rows", "64", "--overwrite"]
    code = "from prefold.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=slowed, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        if (tmp_path / "my out.jsonl").exists() and (tmp_path / "my out.jsonl").stat().st_size:
            break
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    command = errors.strip().splitlines()[-1].strip()
    assert command == f"prefold embed in.jsonl -o 'my out.jsonl' -m {model} --max-batch-rows 64"
    written = len((tmp_path / "my out.jsonl").read_text().splitlines())
    assert 0 < written < 150
    done = prefold(*arguments[:-1], "--limit", "150")
    assert done.exit_code == 0 and f"resuming my out.jsonl: {written:,} records are done" in done.stderr
    got = [json.loads(line)["record"] for line in (tmp_path / "my out.jsonl").read_text().splitlines()]
    assert sorted(got) == list(range(1, 151))


def test_a_closed_pipe_is_no_traceback(model, tmp_path, environment):
    write(tmp_path / "in.jsonl", [{"text": f"{i} " * 20} for i in range(300)])
    code = "from prefold.cli import main; main()"
    command = f"{sys.executable} -c '{code}' embed in.jsonl -m {model} | head -n 1"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr and json.loads(done.stdout)["record"]


@pytest.mark.slow  # test_kills.py does so with jobs of all kinds, in processes that start quickly
def test_killed_again_and_again_a_job_ends_whole(model, tmp_path, slowed):
    count = 400
    write(tmp_path / "in.jsonl", [{"text": f"{i % 11} common {i}"} if i % 50 else {} for i in range(count)])
    code = "from prefold.cli import main; main()"
    arguments = ["embed", "in.jsonl", "--prompt", "text", "-o", "out.jsonl", "-m", model, "--max-batch-rows", "64"]
    rng = np.random.default_rng(3)
    kills = 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", code, *arguments, "--quiet"], cwd=tmp_path, env=slowed)
        before = os.path.getsize(tmp_path / "out.jsonl") if (tmp_path / "out.jsonl").exists() else 0
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline and kills < 2:
            time.sleep(0.02)
            if (tmp_path / "out.jsonl").exists() and os.path.getsize(tmp_path / "out.jsonl") > before:
                time.sleep(float(rng.uniform(0, 0.5)))
                process.kill()
                kills += process.wait() == -signal.SIGKILL
        if kills == 2:
            (tmp_path / "slow").unlink(missing_ok=True)
        if process.wait() in (0, 3):
            break
    assert process.returncode == 3 and kills >= 1, kills
    got = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(line["record"] for line in got) == list(range(1, count + 1))
    assert sum("error" in line for line in got) == count // 50


def test_a_job_over_two_processes_survives_the_death_of_one(prefold, model, tmp_path, slowed):
    write(tmp_path / "in.jsonl", [{"text": f"{i} " * 20} for i in range(150)])
    arguments = ["embed", "in.jsonl", "-o", "out.jsonl", "-m", model, "--max-batch-rows", "64", *FLOAT32]
    code = "from prefold.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments, "--tensor-parallel", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, env=slowed, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
        if (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").stat().st_size:
            break
    (rank,) = psutil.Process(process.pid).children()
    rank.kill()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert "rank 1 was ended by SIGKILL" in errors and "ended by a failure; finished records are written" in errors
    assert prefold(*arguments).exit_code == 0
    got = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(line["record"] for line in got) == list(range(1, 151))
    want = LLM(model, dtype="float32").embed([f"{i} " * 20 for i in range(150)])
    for line in got:
        np.testing.assert_allclose(line["embedding"], want[line["record"] - 1], atol=1e-5)


def test_the_summary_says_what_compiling_took():
    stats = Stats(tokens=10, unique_tokens=8, rows_computed=8, requests=2, seconds={"compile": 4.04})
    summary = Summary(records=2, stats=stats, seconds=9, load_seconds=2.5)
    said = "\n".join(summary_lines(summary, JobSpec(), None))
    assert "2.5 s of them loading the model, 4.0 s compiling kernels for the GPU (they are kept)" in said
    stats.seconds.clear()
    assert "compiling" not in "\n".join(summary_lines(summary, JobSpec(), None))


def test_a_broken_quote_costs_one_record(prefold, tmp_path, lines):
    rows = [f"r{i},it was row {i}" for i in range(1, 31)]
    rows[9] = 'r10,"he said it was good'
    write(tmp_path / "in.csv", ["id,text", *rows])
    done = prefold("embed", "in.csv", "-o", "out.jsonl", "--id", "id", "--dimensions", "1")
    assert done.exit_code == 3 and "1 record failed" in done.stderr
    got = {line["record"]: line for line in lines("out.jsonl")}
    assert sorted(got) == list(range(1, 31)) and [n for n in got if "error" in got[n]] == [10]
    assert "line 11 has a quote that is never closed" in got[10]["error"]["message"]
    assert [got[n]["id"] for n in (9, 11, 30)] == ["r9", "r11", "r30"]
    write(tmp_path / "lost.csv", ["id;text", '1;"some', "lines", 'more" of it', "2;x"])
    done = prefold("embed", "lost.csv", "-o", "lost.jsonl", "--delimiter", ";", "--dimensions", "1")
    assert "3 records failed" in done.stderr and len(lines("lost.jsonl")) == 4


def test_kept_columns_add_up(prefold, tmp_path, lines):
    write(tmp_path / "in.csv", ["text,gold,stars,label", "yes,1,2,3", ",4,5,6"])
    run = ["classify", "in.csv", "--labels", "yes,no", "-o"]
    options = ["--keep", "gold", "--keep", "s=stars,gold"]
    assert prefold(*run, "a.jsonl", *options).exit_code == 3
    first, second = sorted(lines("a.jsonl"), key=lambda line: line["record"])
    assert (first["gold"], first["s"]) == ("1", "2") and "stars" not in first
    assert second["error"]["code"] == "empty" and second["error"]["field"] == "text"
    kept = ["--prompt", "is it {text}", "--keep", "*", "--empty", "keep"]
    assert prefold(*run, "b.jsonl", *kept).exit_code == 0
    first, second = sorted(lines("b.jsonl"), key=lambda line: line["record"])
    assert (first["gold"], first["stars"], first["input_label"], second["text"]) == ("1", "2", "3", "")


def test_several_inputs(prefold, tmp_path, lines):
    (tmp_path / "data").mkdir()
    for name, texts in (("a", "yes no"), ("b", "abc")):
        write(tmp_path / f"data/{name}.jsonl", [json.dumps({"text": text}) for text in texts.split()])
    options = ["--dimensions", "1", "-o"]
    for inputs in (["data"], ["data/*.jsonl"], ["data/a.jsonl", "data/b.jsonl"]):
        assert prefold("embed", *inputs, *options, "out.jsonl", "--overwrite").exit_code == 0
        assert sorted(line["record"] for line in lines("out.jsonl")) == [1, 2, 3]
    again = prefold("embed", "data", *options, "out.jsonl")
    assert again.exit_code == 0 and "nothing left to do" in again.stderr
    write(tmp_path / "data/c.jsonl", ['{"text": "new"}'])
    assert "another job" in prefold("embed", "data", *options, "out.jsonl").stderr
    inside = prefold("embed", "data", *options, "data/out.jsonl")
    assert inside.exit_code == 1 and "would become part of the input" in inside.stderr
    assert prefold("run", "data", "--task", "embed", *options, "run.jsonl").exit_code == 0
    assert "4 records, 4 prompts" in prefold("plan", "data/*.jsonl", "--task", "embed").stdout


def test_standard_input_is_texts_or_json_lines(prefold, tmp_path):
    options = ["--max-tokens", "1", "--json"]
    done = prefold("generate", "-", *options, input="hello\n\nyou\n")
    assert done.exit_code == 0 and [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["hello", "you"]
    done = prefold("generate", "-", *options[:2], input='{"text": "hello"}\n')
    assert done.exit_code == 0 and json.loads(done.stdout)["record"] == 1
    done = prefold("generate", "-", "--format", "csv", *options[:2], input="text\nhello\n")
    assert done.exit_code == 0 and json.loads(done.stdout)["record"] == 1


@pytest.mark.parametrize("task", ["generate", "embed", "classify", "rerank"])
def test_an_empty_text_is_an_error(prefold, task):
    options = {"classify": ["--labels", "a,b"], "rerank": ["x"]}.get(task, [])
    done = prefold(task, "", *options)
    assert done.exit_code == 1 and "a text is empty" in done.stderr


def test_the_summary_says_what_the_weights_are_stored_and_computed_in():
    stats = Stats(tokens=10, unique_tokens=8, rows_computed=8, requests=2)
    summary = Summary(records=2, stats=stats, seconds=9, load_seconds=2.5, dtype="bfloat16")
    said = "\n".join(summary_lines(summary, JobSpec(), None, "Q4_1 GGUF"))
    assert "model     stored as Q4_1 GGUF, computed in bfloat16" in said


def test_an_input_without_records_is_said_to_have_none(prefold, tmp_path):
    (tmp_path / "in.csv").write_text("text,k\n")
    done = prefold("embed", "in.csv", "--keep", "k", "-o", "out.csv")
    assert done.exit_code == 0 and "the input holds no records" in done.stderr and "nothing left" not in done.stderr
    assert (tmp_path / "out.csv").read_text() == "record,k,embedding,num_tokens\n"


def test_an_id_column_of_that_name_is_kept_once(prefold, tmp_path, lines):
    (tmp_path / "in.csv").write_text("text,id,k\na,7,x\n")
    write(tmp_path / "in.jsonl", [{"text": "a", "id": 7, "k": "x"}])
    for name in ("in.csv", "in.jsonl"):
        assert prefold("embed", name, "--keep", "*", "--id", "id", "-o", "out.jsonl", "--overwrite").exit_code == 0
        assert list(lines("out.jsonl")[0]) == ["record", "id", "text", "k", "embedding", "num_tokens"]
        assert prefold("embed", name, "--keep", "*", "--id", "k", "-o", "out.jsonl", "--overwrite").exit_code == 0
        assert list(lines("out.jsonl")[0])[:5] == ["record", "id", "text", "input_id", "k"]


SCHEMA = {
    "type": "object",
    "properties": {
        "k": {"type": "integer", "enum": [3]},
        "mood": {"$ref": "#/$defs/mood"},
        "text": {"type": ["null", "string"], "enum": ["x"]},
        "sure": {"type": "boolean"},
        "parts": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/part"}]}, "minItems": 1, "maxItems": 1},
    },
    "required": ["k", "mood", "text", "sure", "parts"],
    "additionalProperties": False,
    "$defs": {
        "mood": {"enum": ["good", "bad"]},
        "part": {
            "type": "object",
            "properties": {"share": {"const": 0.5}},
            "required": ["share"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("embed", []),
        ("classify", ["--labels", "yes,no"]),
        ("rerank", []),
        ("score", ["--prompt", "text", "--continuation", "query"]),
        ("generate", ["--raw", "--max-tokens", "2", "--ignore-eos"]),
        ("generate", ["--raw", "--max-tokens", "2", "--ignore-eos", "--n", "2", "--logprobs", "1"]),
        ("generate", ["--raw", "--max-tokens", "200", "--json-schema", json.dumps(SCHEMA), "--json-columns"]),
    ],
)
def test_a_table_without_rows_has_the_columns_of_one_with_rows(prefold, tmp_path, task, options):
    pq = pytest.importorskip("pyarrow.parquet")
    header = "text,query,document,k\n"
    (tmp_path / "none.csv").write_text(header)
    (tmp_path / "some.csv").write_text(f"{header}a text,a query,a document,1\n")
    for name in ("none", "some"):
        for form in ("csv", "parquet"):
            out = f"{name}.out.{form}"
            done = prefold(task, f"{name}.csv", *options, "--id", "k", "--keep", "t=text", "-o", out)
            assert done.exit_code == 0, done.output
    assert (tmp_path / "none.out.csv").read_text() == (tmp_path / "some.out.csv").read_text().splitlines(True)[0]
    assert pq.read_schema(tmp_path / "none.out.parquet") == pq.read_schema(tmp_path / "some.out.parquet")


def test_a_standard_output_that_is_not_utf_8(model, tmp_path, monkeypatch):
    """JSON lines are UTF-8 whatever the locale. In texts, letters that the terminal lacks are replaced."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "河 is a river"}\n', encoding="utf-8")

    def shown(*arguments):
        done = CliRunner(charset="latin-1").invoke(main, [*arguments, "-m", model])
        assert done.exit_code == 0 and done.exception is None, done.output
        return done.stdout_bytes

    assert json.loads(shown("embed", "in.jsonl", "--keep", "text", "--quiet"))["text"] == "河 is a river"
    assert json.loads(shown("embed", "河", "--json", "--quiet"))["text"] == "河"
    assert "  ? ü" in shown("rerank", "q", "河 ü", "--words", "yes,no", "--quiet").decode("latin-1")
    # Under an ASCII locale, Python leaves the bytes of an argument as surrogates.
    undecoded = "河 ü".encode().decode("ascii", "surrogateescape")
    assert json.loads(shown("embed", undecoded, "--json", "--quiet"))["text"] == "河 ü"
    chosen = shown("generate", "a", "--raw", "--choice", undecoded, "--json", "--quiet")
    assert json.loads(chosen)["text"] == "河 ü"
    assert "text" in json.loads(shown("generate", "a", "--raw", "--stop", undecoded, "--max-tokens", "1", "--json"))


def test_a_job_whose_rows_nearly_all_get_one_label_says_so(prefold, tmp_path):
    labels = {"yes": {"description": "it is so"}, "no": {"description": "it is not"}}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    for count, warns in ((49, False), (50, True)):
        (tmp_path / "in.jsonl").write_text('{"text": "the same"}\n' * count)
        arguments = ["in.jsonl", "--labels-file", "labels.json", "-o", "out.jsonl", "--overwrite"]
        done = prefold("classify", *arguments)
        assert done.exit_code == 0, done.output
        assert (f"{count} of {count} texts got the label" in done.stderr) == warns, done.stderr
    assert "--normalization tokens" in done.stderr


def test_a_table_for_people_has_a_column_for_the_labels_probability(prefold, tmp_path, lines):
    (tmp_path / "in.jsonl").write_text(
        '{"id": 7, "price": 2, "text": "a fine day"}\n{"id": 8, "price": 3, "text": ""}\n'
    )
    job = ["in.jsonl", "--labels", "yes,no", "--keep", "id,price", "--keep-order", "--quiet"]
    assert prefold("classify", *job, "-o", "out.jsonl").exit_code == 3
    want = lines("out.jsonl")[0]
    assert want["id"] == 7 and {"probabilities", "logprobs"} <= want.keys()

    def table(name, *options):
        assert prefold("classify", *job, "-o", name, *options).exit_code == 3
        with open(name, newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    header, row, bad = table("out.csv")
    assert header == ["record", "id", "price", "label", "p", "num_tokens", "error"]
    assert row[:4] == ["1", "7", "2", want["label"]] and float(row[4]) == want["probabilities"][want["label"]]
    assert bad[:5] == ["2", "8", "3", "", ""]
    header, row, _ = table("all.csv", "--scores", "all")
    assert header == ["record", "id", "price", "label", "p", "p_yes", "p_no", "num_tokens", "error"]
    assert [float(cell) for cell in row[5:7]] == list(want["probabilities"].values())
    pq = pytest.importorskip("pyarrow.parquet")
    prefold("classify", *job, "-o", "out.parquet")
    assert pq.read_table("out.parquet").to_pylist()[0].items() >= {"p": float(row[4]), "label": row[3]}.items()
    prefold("classify", *job, "-o", "all.parquet", "--scores", "all")
    assert pq.read_schema("all.parquet").names == header


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--keep", "*"], ["id", "price", "text"]),
        (["--keep", "id,price"], ["id", "price"]),
        (["--keep", "*", "--id", "price"], ["id", "input_id", "price", "text"]),
        (["--keep", "id,price", "--id", "id"], ["id", "price"]),
    ],
)
def test_an_id_that_no_other_id_needs_keeps_its_name(prefold, tmp_path, options, names):
    (tmp_path / "in.csv").write_text("id,price,text\n7,2,a\n")
    done = prefold("embed", "in.csv", "--dimensions", "1", "--quiet", *options)
    assert done.exit_code == 0, done.output
    assert [*json.loads(done.stdout)][1:-2] == names, done.stdout


def test_a_json_file_over_several_lines_is_said_to_be_one(prefold, tmp_path):
    (tmp_path / "in.json").write_text(json.dumps({"text": "a"}, indent=1))
    done = prefold("embed", "in.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "in.json has JSON objects over several lines, not one per line; convert it: jq -c . in.json" in done.stderr
