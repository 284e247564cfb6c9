"""`prefold decide`: a table and a file of questions become columns; lines of a batch; texts."""

from __future__ import annotations

import base64
import csv
import json
import random
import shutil
from pathlib import Path

import PIL.Image
import pytest
import yaml
from adapters import write_adapter
from click.testing import CliRunner
from tiny import tiny_checkpoint
from tiny_vision import drawing, tiny_vision

from prefold import LLM
from prefold.cli import main
from prefold.jobs.report.progress import format_seconds

QUESTIONS = """
refund: {type: noul, instructions: "Is money owed?"}
tone:
  type: choice
  criteria: {calm: polite, angry: null}
bad: {type: score, criteria: [low, middle, high]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))
    return str(folder)


@pytest.fixture
def run(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.yaml").write_text(QUESTIONS)
    (tmp_path / "in.csv").write_text("id,title,body\n7,Twice,charged twice\n8,,\n9,Hello,thanks\n")

    def run(*arguments, status=0):
        own = () if "-m" in arguments else ("-m", model)
        done = CliRunner().invoke(main, [*arguments, *own, "--dtype", "float32"])
        assert done.exit_code == status, done.output
        return done.output

    return run


def rows(path):
    with open(path, newline="") as file:
        return {row["record"]: row for row in csv.DictReader(file)}


def lines():
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_a_table_gets_columns(run):
    run(
        "decide",
        "in.csv",
        "--state",
        "{title}\n{body}",
        "--questions",
        "q.yaml",
        "-o",
        "out.csv",
        "--id",
        "id",
        status=3,
    )
    found = rows("out.csv")
    assert [*found["1"]] == [
        "record", "id", "refund", "refund_p", "tone", "tone_p", "bad", "bad_confidence", "num_tokens", "error"
    ]  # fmt: skip
    assert found["1"]["tone"] in ("calm", "angry") and 0.5 <= float(found["1"]["refund_p"]) <= 1
    assert "'title' is empty" in found["2"]["error"] and found["3"]["id"] == "9"


def test_all_probabilities_as_columns(run):
    options = ("--questions", "q.yaml", "--scores", "all", "--empty", "keep", "--keep", "title")
    run("decide", "in.csv", "--state", "s: {body}", *options, "-o", "out.csv")
    row = rows("out.csv")["1"]
    assert float(row["refund_p_true"]) + float(row["refund_p_false"]) == pytest.approx(1)
    assert sum(float(row[f"bad_p_{i}"]) for i in range(3)) == pytest.approx(1)
    assert row["title"] == "Twice" and 0 < float(row["tone_label_mass"]) < 1 and row["tone_confidence"]


def test_lines_of_json_have_objects_and_states_may_be_objects(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"state": {"title": "Twice"}}\n{"state": "text"}\n{"state": []}\n')
    run("decide", "in.jsonl", "--questions", "q.yaml", "-o", "out.jsonl", status=3)
    first, second, third = sorted(lines(), key=lambda line: line["record"])
    assert [*first["answers"]] == ["refund", "tone", "bad"] and first["answers"]["bad"]["legend"]["2"] == "high"
    assert first["answers"] != second["answers"] and third["error"]["field"] == "state"


def test_lines_of_a_batch(run, tmp_path):
    question = {"type": "choice", "criteria": {"a": None, "b": None}}
    choices = [{"value": "a"}, {"value": "b"}]
    bodies = [
        ("/v1/systemone", {"state": "text", "questions": {"q": question}}),
        ("/v1/decisions", {"input": "text", "questions": [{"type": "choice", "choices": choices}]}),
        ("/v1/systemone", {"state": "text", "questions": {"q": {"type": "choice", "criteria": {"a": None}}}}),
    ]
    sent = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sent))
    run("run", "in.jsonl", "-o", "out.jsonl", status=3)
    found = {line["custom_id"]: line["response"] for line in lines()}
    one, other = found["0"]["body"]["answers"]["q"], found["1"]["body"]["answers"][0]
    assert other["probabilities"][0]["probability"] == one["probabilities"]["a"]
    assert found["2"]["status_code"] == 400 and "1 option" in found["2"]["body"]["error"]["message"]


def test_a_conversation_is_a_text(run, tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"chat": chat}) + '\n{"chat": [{"role": "tool", "content": "x"}]}\n'
    )
    (tmp_path / "in.jsonl").write_text(json.dumps({"state": "user: hi\n\nassistant: hello"}) + "\n")
    run("decide", "chats.jsonl", "--messages", "chat", "--questions", "q.yaml", "-o", "out.jsonl", status=3)
    first, second = sorted(lines(), key=lambda line: line["record"])
    run("decide", "in.jsonl", "--questions", "q.yaml", "-o", "out.jsonl", "--overwrite")
    assert lines()[0]["answers"] == first["answers"] and second["error"]["field"] == "chat[0]"


def test_columns_of_images(run, tmp_path, tmp_path_factory):
    model = tiny_vision(tmp_path_factory.mktemp("seeing"), "gemma3", text={"max_position_embeddings": 2048})
    (model / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))
    for seed in (1, 2):
        PIL.Image.fromarray(drawing(seed, 26, 26)).save(tmp_path / f"{seed}.png")
    data = "data:image/png;base64," + base64.b64encode((tmp_path / "1.png").read_bytes()).decode()
    rows = [{"text": "a", "image": image} for image in ("1.png", "2.png", None, 3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = ("-m", str(model), "--questions", "q.yaml", "--media-folder", ".", "-o", "out.jsonl", "--overwrite")
    run("decide", "in.jsonl", "--state", "text", "--image", "image", *same, status=3)
    one, two, none, bad = sorted(lines(), key=lambda line: line["record"])
    assert len({json.dumps(line["answers"]) for line in (one, two, none)}) == 3 and bad["error"]["field"] == "image[0]"
    part = {"type": "image_url", "image_url": {"url": data}}
    chats = [[{"role": "user", "content": [part, {"type": "text", "text": "a"}]}]]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"chat": chats[0], "image": "2.png"}) + "\n")
    run("decide", "chats.jsonl", "--messages", "chat", *same)
    expected = pytest.approx(one["answers"]["bad"]["value"], abs=1e-4)
    assert lines()[0]["answers"]["bad"]["value"] == expected
    run("decide", "chats.jsonl", "--messages", "chat", "--image", "image", *same, status=3)
    assert "images both in 'chat' and in 'image'" in lines()[0]["error"]["message"]
    asked = [{"type": "score", "levels": [{"label": level} for level in ("low", "middle", "high")]}]
    image = {"type": "input_image", "image_url": data}
    chat = [{"role": "user", "content": [image, {"type": "input_text", "text": "a"}]}]
    question = {"bad": {"type": "score", "criteria": ["low", "middle", "high"]}}
    asset = {"type": "image", "format": "png", "data_base64": data.partition(",")[2]}
    bodies = [
        ("/v1/decisions", {"input": chat, "questions": asked}),
        ("/v1/systemone", {"state": "a", "questions": question, "images": [data]}),
        ("/v1/systemone", {"state": "img-1a", "questions": question, "assets": {"img-1": asset}}),
    ]
    sent = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sent))
    run("run", "batch.jsonl", "-m", str(model), "-o", "out.jsonl", "--overwrite")
    scores = {line["custom_id"]: line["response"]["body"]["answers"] for line in lines()}
    found = [scores["0"][0]["score"], scores["1"]["bad"]["score"], scores["2"]["bad"]["score"]]
    assert found == [expected] * 3
    found = json.loads(run("decide", "a", "-m", str(model), "--questions", "q.yaml", "--image", "1.png", "--json"))
    assert found["answers"]["bad"]["value"] == expected


def test_the_adapter_of_the_settings_is_used_by_jobs_and_lines(run, tmp_path, model):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    write_adapter(folder / "lora", folder)
    (tmp_path / "in.jsonl").write_text('{"state": "text"}\n')
    question = {"refund": {"type": "noul", "instructions": "Is money owed?"}}
    body = {"state": "text", "questions": question}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/systemone", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    model, output = ("-m", str(folder)), ("-o", "out.jsonl", "--overwrite")

    def answers(*options):
        run("decide", "in.jsonl", *model, "--questions", "q.yaml", *output, *options)
        return lines()[0]["answers"]

    given = answers("--adapter", "x=model/lora")
    without = answers()
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}, "adapter": "lora"}))
    assert answers() == given != without
    run("run", "batch.jsonl", *model, *output)
    found = lines()[0]["response"]["body"]["answers"]["refund"]["noul"]
    assert found == pytest.approx(given["refund"]["probabilities"]["true"], abs=1e-5)
    # A job is not continued with other weights of the adapter.
    shutil.rmtree(folder / "lora")
    write_adapter(folder / "lora", folder, seed=1)
    assert "adapter" in run("run", "batch.jsonl", *model, "-o", "out.jsonl", status=1)


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("words", [4, 40])
def test_a_plan_of_both_orders_is_what_is_computed(run, model, tmp_path, count, words):
    draw = random.Random(count)
    asked = {f"q{i}": {"type": "noul", "instructions": f"is {i} {draw.choice('abc')}?"} for i in range(count)}
    states = [" ".join(draw.choice(("refund", "the", "yes")) for _ in range(words)) for _ in range(12)]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"state": state}) + "\n" for state in states))
    options = ("many.jsonl", "--task", "decide", "--questions", "asked.json")
    llm = LLM(model, dtype="float32")
    for first, other in (("state", "question"), ("question", "state")):
        plan = json.loads(run("plan", *options, "--first", first, "--json"))
        before = llm.stats.rows_computed
        llm.decide(states, asked, first=first)
        assert plan["rows"] == llm.stats.rows_computed - before
        swapped = json.loads(run("plan", *options, "--first", other, "--json"))
        assert plan["other_order"] == {"first": other, "rows": swapped["rows"], "flops": swapped["flops"]["full"]}
        assert plan["rows"] != swapped["rows"]
    about = format_seconds(sum(plan["flops"]["full"].values()) / 1e6)
    line = f"with --first question: {plan['rows']:,} rows, about {about}"
    assert line in run("plan", *options, "--gflops", "0.001").splitlines()
    llm.close()


def test_verify_counts_the_answers_that_change_with_the_order(run, model):
    options = ("--task", "decide", "--state", "body", "--questions", "q.yaml", "--empty", "keep")
    plain = json.loads(run("verify", "in.csv", *options, "--json"))
    assert [one["comparison"].split()[0] for one in plain] == ["sharing"]
    (sharing, order) = json.loads(run("verify", "in.csv", *options, "--first", "question", "--json"))
    assert sharing["results"] < 1e-4 and order["comparison"] == "order (question first against state first)"
    questions, llm = yaml.safe_load(QUESTIONS), LLM(model, dtype="float32")
    states = ["charged twice", "thanks"]  # an empty state cannot be asked
    ours, theirs = (llm.decide(states, questions, first=first) for first in ("question", "state"))
    pairs = [(a[name].probabilities, b[name].probabilities) for a, b in zip(ours, theirs, strict=True) for name in a]
    changed = sum(max(a, key=a.get) != max(b, key=b.get) for a, b in pairs)
    assert (order["items"], order["groups"], order["first"]) == (2, 6, changed)
    largest = max(abs(a[option] - b[option]) for a, b in pairs for option in a)
    assert order["results"] == pytest.approx(largest, abs=1e-5) and largest > 1e-3
    text = run("verify", "in.csv", *options, "--first", "state")
    assert (
        "order (state first against question first)" in text and f"answers             {changed} of 6 changed" in text
    )
    llm.close()


def test_texts(run):
    found = json.loads(run("decide", "charged twice", "--questions", "q.yaml", "--json").splitlines()[0])
    assert found["state"] == "charged twice" and found["answers"]["tone"]["type"] == "choice"
    assert "refund: " in run("decide", "charged twice", "--questions", '{"refund": {"type": "noul"}}')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "neither YAML nor JSON"),
        ("a: {type: choice, criteria: {x: null}}", "'a' has 1 option"),
        ("[]", "'questions' is empty"),
    ],
)
def test_questions_that_are_wrong_stop_before_the_first_record(run, tmp_path, text, says):
    (tmp_path / "bad.yaml").write_text(text)
    assert says in run("decide", "in.csv", "--state", "body", "--questions", "bad.yaml", "-o", "out.csv", status=1)
