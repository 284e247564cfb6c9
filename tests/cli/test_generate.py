"""prefold generate, on a tiny random model: answers, jobs, batch lines, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from generating import until_idle

from prefold import LLM
from prefold.cli import main
from prefold.spec.job import job_parameters, task_parameters
from prefold.spec.model import model_fields

SHORT = ("--max-tokens", "6", "--dtype", "float32", "--kv-memory", "20MB")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, dtype="float32", kv_memory=20_000_000)


@pytest.fixture
def table(tmp_path):
    """in.jsonl with 30 questions that share beginnings."""
    records = [{"question": f"the same start {i % 4}, then {i}", "k": i} for i in range(30)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def by_record(found):
    return {line["record"]: line for line in found}


def test_answers_to_prompts(prefold, llm):
    done = prefold("generate", "the cat", "--raw", *SHORT)
    assert done.exit_code == 0 and done.stdout == llm.generate("the cat", max_tokens=6).text + "\n"
    assert "6 tokens generated" in done.stderr and "--max-tokens" in done.stderr
    messages = [{"role": "user", "content": "the cat"}]
    assert prefold("generate", "the cat", *SHORT).stdout == llm.chat(messages, max_tokens=6).text + "\n"
    told = [{"role": "system", "content": "no"}, *messages]
    assert prefold("generate", "the cat", "--system", "no", *SHORT).stdout == llm.chat(told, max_tokens=6).text + "\n"
    done = prefold("generate", "the cat", "a dog", "--raw", "--json", *SHORT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "a dog"]
    assert [line["text"] for line in lines] == [one.text for one in llm.generate(["the cat", "a dog"], max_tokens=6)]
    assert all(line["num_generated"] == 6 for line in lines)
    sampled = ("generate", "the cat", "--n", "2", "--temperature", "1", "--raw", *SHORT)
    several = prefold(*sampled, "--seed", "5").stdout
    assert several.count("the cat\n") == 2 and several != prefold(*sampled, "--seed", "6").stdout
    assert several == prefold(*sampled, "--seed", "5").stdout


def test_a_job_on_a_table_with_its_report(prefold, tmp_path, lines, llm, table):
    done = prefold("generate", "in.jsonl", "--raw", "--id", "k", "-o", "out.jsonl", "--report", "page.html", *SHORT)
    assert done.exit_code == 0, done.stderr
    found = by_record(lines("out.jsonl"))
    want = llm.generate([record["question"] for record in table], max_tokens=6)
    assert [found[i + 1]["text"] for i in range(30)] == [one.text for one in want]
    assert [found[i + 1]["id"] for i in range(30)] == list(range(30))
    assert "generated 180 tokens" in done.stderr and "at peak; without sharing" in done.stderr
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    counted = dict(map(tuple, data["generation"]))
    assert counted["tokens generated"] == "180" and int(counted["maximum of sequences in a step"]) > 1
    assert max(step[5] for step in data["steps"]) > 1
    csv = prefold("run", "in.jsonl", "--task", "generate", "--raw", "--n", "2", "-o", "out.csv", "--quiet", *SHORT)
    assert csv.exit_code == 0 and "choices" in (tmp_path / "out.csv").read_text().splitlines()[0]


def test_conversations_of_a_table(prefold, tmp_path, lines, llm):
    chats = [[{"role": "user", "content": f"hi {i}"}] for i in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    assert prefold("generate", "in.jsonl", "-o", "out.jsonl", *SHORT).exit_code == 0
    found = by_record(lines("out.jsonl"))
    assert [found[i + 1]["text"] for i in range(5)] == [one.text for one in llm.chat(chats, max_tokens=6)]


def test_a_seed_is_drawn_once_a_job(prefold, tmp_path, lines, table):
    options = ("--temperature", "1.5", *SHORT)
    for limit in ("10", "30"):
        assert prefold("generate", "in.jsonl", *options, "--limit", limit, "-o", "a.jsonl").exit_code == 0
    seed = json.loads((tmp_path / "a.jsonl.journal").read_text().splitlines()[0])["job"]["seed"]
    assert prefold("generate", "in.jsonl", *options, "--seed", seed, "-o", "b.jsonl", "--window", "60").exit_code == 0
    one, two = by_record(lines("a.jsonl")), by_record(lines("b.jsonl"))
    assert [one[i]["text"] for i in range(1, 31)] == [two[i]["text"] for i in range(1, 31)]
    other = prefold("generate", "in.jsonl", *options, "--seed", "1", "-o", "a.jsonl")
    assert other.exit_code == 1 and f"seed: {seed} in the journal, 1 now" in other.stderr
    hotter = prefold("generate", "in.jsonl", *SHORT, "--temperature", "2", "-o", "a.jsonl")
    assert hotter.exit_code == 1 and "options.temperature: 1.5 in the journal, 2.0 now" in hotter.stderr
    assert prefold("generate", "in.jsonl", *options, "-o", "a.jsonl", "--overwrite", "--quiet").exit_code == 0
    assert json.loads((tmp_path / "a.jsonl.journal").read_text().splitlines()[0])["job"]["seed"] != seed


def test_an_openai_batch_of_completions(prefold, tmp_path, lines, llm):
    chat = [{"role": "user", "content": "hi"}]
    bodies = [
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 5, "temperature": 0}),
        ("/v1/completions", {"prompt": ["the cat", "a dog"], "max_tokens": 4, "temperature": 0, "logprobs": 2}),
        ("/v1/completions", {"prompt": "the cat", "seed": 3, "n": 2}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/chat/completions", {"messages": chat, "guided_regex": "("}),
        ("/v1/completions", {"prompt": "the cat", "max_tokens": 510}),
        ("/v1/chat/completions", {"messages": chat, "stream": True}),
    ]
    records = [{"custom_id": f"c{i}", "method": "POST", "url": u, "body": b} for i, (u, b) in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    done = prefold("run", "in.jsonl", "-o", "out.jsonl", "--dtype", "float32", "--kv-memory", "20MB")
    assert done.exit_code == 3 and "3 records failed" in done.stderr
    found = {g["custom_id"]: g["response"] for g in lines("out.jsonl")}
    assert [found[f"c{i}"]["status_code"] for i in range(7)] == [200] * 4 + [400] * 3
    answer = found["c0"]["body"]
    assert answer["choices"][0]["message"]["content"] == llm.chat(chat, max_tokens=5).text
    details = answer["usage"]
    assert details["completion_tokens"] == len(llm.chat(chat, max_tokens=5).tokens)
    assert details["total_tokens"] == details["prompt_tokens"] + details["completion_tokens"]
    texts = [choice["text"] for choice in found["c1"]["body"]["choices"]]
    assert texts == [one.text for one in llm.generate(["the cat", "a dog"], max_tokens=4)]
    logprobs = found["c1"]["body"]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 4 and all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    sampled = llm.generate("the cat", max_tokens=16, temperature=1.0, seed=3, n=2)
    assert [choice["text"] for choice in found["c2"]["body"]["choices"]] == [one.text for one in sampled]
    assert found["c4"]["body"]["error"]["param"] == "guided_regex"
    assert "max_tokens 510" in found["c5"]["body"]["error"]["message"]
    assert found["c6"]["body"]["error"]["param"] == "stream"


def test_a_prompt_that_is_a_file(prefold, tmp_path, llm):
    """All of a file is one prompt, but for the line end behind its last line."""
    text = "the cat\n\n  and @yes\n"
    (tmp_path / "prompt.txt").write_text(text + "\n")
    (tmp_path / "windows.txt").write_bytes(b"a dog\r\n")
    want = [one.text for one in llm.generate(["yes no", text, "a dog"], max_tokens=6)]
    options = ("--raw", "--json", *SHORT)
    done = prefold("generate", "yes no", "-f", "prompt.txt", "--prompt-file", "windows.txt", *options)
    assert done.exit_code == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["prompt"] for one in shown] == ["yes no", text, "a dog"] and [one["text"] for one in shown] == want
    piped = prefold("generate", "-f", "-", *options, input=text + "\n")
    assert [json.loads(line)["text"] for line in piped.stdout.splitlines()] == want[1:2]


def test_what_a_prompt_file_cannot_be(prefold, tmp_path, table):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    for arguments, code, says in (
        (["-f", "missing.txt"], 1, "cannot read missing.txt"),
        (["-f", "empty.txt"], 1, "empty.txt is empty"),
        (["-f", "bytes.txt"], 1, "bytes.txt is not valid UTF-8"),
        (["in.jsonl", "-f", "empty.txt"], 2, "for the records of in.jsonl give --prompt @FILE"),
        (["-f", "empty.txt", "-o", "out.jsonl"], 2, "--output is for jobs"),
        ([], 2, "(-f FILE)"),
    ):
        done = prefold("generate", *arguments)
        assert done.exit_code == code and says in done.stderr and "Traceback" not in done.output, done.output


def test_formats_from_the_command_line(prefold, tmp_path):
    done = prefold("generate", "pick", "--choice", "yes", "--choice", "no", *SHORT)
    assert done.stdout in ("yes\n", "no\n")
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    for given in ("schema.json", (tmp_path / "schema.json").read_text()):
        done = prefold("generate", "json", "--json-schema", given, "--max-tokens", "200", "--kv-memory", "20MB")
        assert json.loads(done.stdout)["a"] in ("yes", "no")
    assert re.fullmatch("[0-9]{3}\n", prefold("generate", "x", "--regex", "[0-9]{3}", *SHORT).stdout)
    (tmp_path / "g.lark").write_text('start: "a" "b"')
    assert prefold("generate", "x", "--grammar", "@g.lark", *SHORT).stdout == "ab\n"


def test_plan_counts_prompts_and_outputs(prefold, table):
    done = prefold("plan", "in.jsonl", "--task", "generate", "--max-tokens", "9", "--json")
    counts = json.loads(done.stdout)
    assert (counts["requests"], counts["outputs"], counts["output_tokens"]) == (30, 30, 270)
    assert counts["rows"] < counts["tokens"] and counts["kv_row_bytes"] == 2 * 3 * 2 * 6 * 4
    text = prefold("plan", "in.jsonl", "--task", "generate", "--max-tokens", "9", "--raw").stdout
    assert "30 outputs of up to 270 tokens" in text and "K/V, 288 bytes per row" in text


def test_a_job_is_told_by_every_option_that_changes_a_result():
    told = {"model", "dtype", "seed"}
    # The input is told by its content, the weights by the model; the others only say how the work is done.
    others = {"input", "input_format", "output", "keep_order", "overwrite", "resume", "report", "stream", "quiet"}
    others |= {"limit", "window", "as_json", "template_seconds", "grown", "prompt_file", "ray", "replicas", "patience"}
    others |= {"url", "plugin"} | {name for name, option in model_fields().items() if not option.metadata["journal"]}
    for name in ("generate", "rerank", "embed", "classify", "score"):
        names = {parameter.name for parameter in main.commands[name].params}
        declared = job_parameters() | task_parameters(name) | model_fields()
        told_here = told | {own for own in names & declared.keys() if declared[own].metadata["journal"]}
        assert names - told_here - others == set(), name


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["generate", "x", "--regex", "a", "--json-object"], 2, "exclude each other"),
        (["generate", "x", "--regex", "("], 1, "unclosed group"),
        (["generate", "x", "--logit-bias", "a=b"], 2, "42=-5"),
        (["generate", "x", "--adapter", "nowhere"], 2, "NAME=FOLDER"),
        (["generate", "x", "--adapter", "a=nowhere"], 1, "no folder nowhere"),
        (["generate", "x", "--raw", "--system", "s"], 1, "--system"),
        (["generate", "x", "--tools", "column"], 2, "for jobs"),
        (["generate", "x", "--kv-memory", "lots"], 2, "512MiB"),
        (["generate", "x", "--chat-template-kwargs", "[]"], 1, "not a JSON object"),
        (["generate", "x", "--max-tokens", "600"], 1, "max_tokens 600"),
        (["generate", "in.jsonl", "--adapter", "a=.", "--adapter", "b=."], 1, "--adapter-column"),
        (["generate", "in.jsonl", "--prompt", "nothing", "-o", "o.jsonl"], 3, "30 records failed"),
        (["verify", "batch.jsonl", "--tolerance", "1"], 2, "--tolerance bounds values"),
        (["bench", "in.jsonl", "--task", "embed", "--max-tokens", "3"], 2, "--max-tokens is for generate"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(prefold, tmp_path, table, arguments, code, says):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    done = prefold(*arguments)
    assert done.exit_code == code, done.output
    assert says in done.stderr and "Traceback" not in done.output


@pytest.mark.slow  # test_kills.py does so with jobs of all kinds, in processes that start quickly
def test_killed_again_and_again_a_job_ends_whole(model, tmp_path, slowed):
    count = 300
    records = [{"prompt": f"{i % 11} common {i}"} if i % 50 else {"prompt": None} for i in range(count)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    code = "from prefold.cli import main; main()"
    arguments = ["generate", "in.jsonl", "-m", model, "--max-tokens", "4", "--temperature", "1", "--kv-memory", "20MB"]
    arguments += ["--max-batch-rows", "64"]
    rng = np.random.default_rng(3)
    kills = 0

    def start(*more):
        command = [sys.executable, "-c", code, *arguments, "--quiet", *more]
        return subprocess.Popen(command, cwd=tmp_path, env=slowed)

    out = tmp_path / "out.jsonl"
    for _ in range(12):
        process = start("-o", "out.jsonl")
        before = os.path.getsize(out) if out.exists() else 0
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline and kills < 1:
            time.sleep(0.02)
            if out.exists() and os.path.getsize(out) > before:
                time.sleep(float(rng.uniform(0, 0.5)))
                process.kill()
                kills += process.wait() == -signal.SIGKILL
                (tmp_path / "slow").unlink()
        if process.wait() in (0, 3):
            break
    assert process.returncode == 3 and kills >= 1, kills
    got = by_record(json.loads(line) for line in out.read_text().splitlines())
    assert len(out.read_text().splitlines()) == len(got) == count
    assert sum("error" in line for line in got.values()) == count // 50


@pytest.mark.parametrize("options", [(), ("--n", 3, "--temperature", 1, "--seed", 5), ("--stop", "e")])
def test_texts_are_shown_as_they_come_and_are_those_of_json(prefold, options):
    for prompts in (["the"], ["the", "yes no", "a"]):
        command = ["generate", *prompts, "--max-tokens", 12, "--dtype", "float32", *options]
        records = [json.loads(line) for line in prefold(*command, "--json").stdout.splitlines()]
        answers = [(record["prompt"], choice) for record in records for choice in record.get("choices", [record])]
        heads = [f"{prompt}\n" if len(answers) > 1 else "" for prompt, _ in answers]
        texts = [head + choice["text"] + "\n" for head, (_, choice) in zip(heads, answers, strict=True)]
        shown = prefold(*command)
        assert shown.stdout == "\n".join(texts) and shown.exit_code == 0
        assert shown.stderr.count("(ended by") == sum(choice["finish_reason"] == "length" for _, choice in answers)


def test_text_is_shown_before_the_next_step(model, monkeypatch):
    from prefold import LLM
    from prefold.cli.answers import generate_live

    llm = LLM(model, dtype="float32")
    task = llm.task("generate", max_tokens=30, ignore_eos=True)
    steps, plain, is_shown = [], llm.engine.generator.step, threading.Event()

    def step() -> bool:
        steps.append(1)
        assert len(steps) != 15 or is_shown.wait(60), "nothing was shown in 14 steps"
        return plain()

    monkeypatch.setattr(llm.engine.generator, "step", step)
    events = generate_live(llm.engine, task, task.prepare(["the", "yes"]), 0)
    assert any(isinstance(what, tuple) and what[1] for _, what in events)
    is_shown.set()
    events.close()
    until_idle(llm.engine)


def test_answers_are_shown_in_order():
    from prefold.cli.answers import in_order

    events = [(1, "b1"), (0, "a1"), (2, 13), (1, "b2"), (0, "a2"), (0, 11), (1, 12)]
    seen = []

    def made():
        for number, event in enumerate(events):
            seen.append(number)
            yield event

    want = [(0, "a1"), (0, "a2"), (0, 11), (1, "b1"), (1, "b2"), (1, 12), (2, 13)]
    shown = in_order(made(), 3)
    assert next(shown) == want[0] and seen == [0, 1]  # as soon as it is there
    assert list(shown) == want[1:]
