"""True answers and doubtful ones of `prefold decide`: figures, a calibration, and a file for a person to label."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny import tiny_checkpoint

from prefold.cli import main
from prefold.jobs.journal import Journal
from prefold.tasks.calibration import in_fit_half

QUESTIONS = """
tone: {type: choice, criteria: {calm: polite, angry: null}}
bad: {type: score, criteria: [low, middle, high]}
"""
COUNT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    (folder / "decision.json").write_text(json.dumps({"temperature": {"choice": 40, "score": 40}}))
    return str(folder)


@pytest.fixture
def run(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.yaml").write_text(QUESTIONS)
    write_table()

    def run(*arguments, status=0):
        state = () if arguments[0] == "a text" else ("--state", "body")
        fixed = ("--questions", "q.yaml", "-m", model, "--dtype", "float32")
        done = CliRunner().invoke(main, ["decide", *arguments, *state, *fixed])
        assert done.exit_code == status, done.output
        return done.output

    return run


def write_table(**cells):
    """in.csv, whose true answers are right and wrong in turn, and three are not known. cells: {record: its gold}"""
    lines = ["id,body,label,level"]
    for i in range(1, COUNT + 1):
        label = "" if i % 20 == 0 else ("calm", "angry")[i * 7 % 3 % 2]
        lines.append(f"r{i},{('yes', 'no', 'abc')[i % 3]} {i} text,{cells.get(f'r{i}', label)},{i % 3}")
    Path("in.csv").write_text("\n".join(lines) + "\n")


def table(name):
    with open(name, newline="") as file:
        return list(csv.DictReader(file))


def figures(output):
    """{question: (records, accuracy, log loss, ECE)} of a summary."""
    found = re.findall(r"gold +(\w+): ([\d,]+) records?, accuracy ([\d.]+), log loss ([\d.]+), ECE ([\d.]+)", output)
    return {name: tuple(map(float, values)) for name, *values in found}


GOLD = ("--gold", "tone=label,bad=level")


def test_the_summary_compares_with_true_answers(run):
    said = run("in.csv", *GOLD, "-o", "out.csv", "--scores", "all", "--keep", "label,level")
    rows = table("out.csv")
    known = [row for row in rows if row["label"]]
    assert len(known) == COUNT - 3
    tone, bad = figures(said)["tone"], figures(said)["bad"]
    right = sum(row["tone"] == row["label"] for row in known) / len(known)
    assert tone[0] == len(known) and tone[1] == pytest.approx(right, abs=6e-4) and 0 < right < 1
    best = [max(range(3), key=lambda i: float(row[f"bad_p_{i}"])) for row in rows]
    right = sum(b == int(row["level"]) for b, row in zip(best, rows, strict=True)) / COUNT
    assert bad[1] == pytest.approx(right, abs=6e-4)
    distance = sum(abs(float(row["bad"]) - int(row["level"])) for row in rows) / COUNT
    assert f"mean error {distance:.3f} levels" in said and "temperature" in said
    # Nothing is left to do, and the figures are there all the same.
    assert figures(run("in.csv", *GOLD, "-o", "out.csv", "--scores", "all", "--keep", "label,level")) == figures(said)


def test_true_answers_in_an_object_or_a_table_are_the_same(run):
    want = figures(run("in.csv", *GOLD, "-o", "out.csv"))
    rows = table("in.csv")
    lines = [
        {"body": row["body"], "gold": {"tone": row["label"] or None, "bad": int(row["level"])}} for row in rows
    ]  # fmt: skip
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert figures(run("in.jsonl", "--gold", "gold")) == want
    assert figures(run("in.jsonl", "--gold", "tone=gold.tone", "--gold", "bad=gold.bad")) == want
    with open("gold.csv", "w") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "tone_gold", "bad_gold"])
        writer.writerows([row["id"], row["label"], row["level"]] for row in reversed(rows))
        writer.writerow(["r999", "calm", 0])
    said = run("in.csv", "--gold-file", "gold.csv", "--id", "id")
    assert figures(said) == want and " 1 row of gold.csv belongs to no record" in said
    # A record of JSON lines without a true answer is not counted.
    Path("in.jsonl").write_text('{"body": "a"}\n{"body": "b", "gold": {"tone": "calm"}}\n')
    said = run("in.jsonl", "--gold", "gold")
    assert figures(said)["tone"][0] == 1 and "bad: no record has a true answer" in said and "too few" in said


def test_a_true_answer_that_is_no_option_is_an_error_of_its_record(run):
    write_table(r2="glad")
    said = run("in.csv", *GOLD, "--id", "id", "--keep", "body", "-o", "out.csv", status=3)
    bad = [row for row in table("out.csv") if row["error"]]
    assert [(row["record"], row["id"], row["body"]) for row in bad] == [("2", "r2", "abc 2 text")]
    assert (
        "'label' is 'glad', which is not an option of the question 'tone'; give one of calm, angry" in bad[0]["error"]
    )
    assert figures(said)["tone"][0] == COUNT - 4 and "1 record failed" in said
    Path("in.jsonl").write_text('{"body": "a", "g": {"tune": "calm"}}\n{"body": "b", "g": "calm"}\n{"body": "c"}\n')
    run("in.jsonl", "--gold", "g", "-o", "out.jsonl", status=3)
    errors = {line["record"]: line["error"]["message"] for line in lines_of("out.jsonl") if "error" in line}
    assert errors.keys() == {1, 2}
    assert "'tune', which is not asked" in errors[1] and "does not name its question" in errors[2]


def lines_of(name):
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_a_calibration_is_written_and_applied(run):
    said = run("in.csv", *GOLD, "--save-calibration", "c.json", "--precision", "0.5", "-o", "out.jsonl")
    file = json.loads(Path("c.json").read_text())
    tone = file["questions"]["tone"]
    assert f"temperature {tone['temperature']:.3g}" in said and file["precision"] == 0.5
    check = tone["figures"]["check"]
    known = [i for i in range(1, COUNT + 1) if i % 20]
    assert check["before"]["rows"] == len(known) - int(in_fit_half(known).sum())
    applied = run("in.csv", *GOLD, "--calibration", "c.json", "-o", "after.jsonl", "--keep-order")
    before = {line["record"]: line for line in lines_of("out.jsonl")}
    for line in lines_of("after.jsonl"):
        own = line["answers"]["tone"]
        plain = before[line["record"]]["answers"]["tone"]["probabilities"]
        p = {name: value ** (1 / tone["temperature"]) for name, value in plain.items()}
        total = sum(p.values())
        assert own["probabilities"] == pytest.approx({name: value / total for name, value in p.items()}, abs=1e-6)
        assert own["review"] == (tone["threshold"] is None or max(own["probabilities"].values()) < tone["threshold"])
    # The calibrated job has the figures that the first job promised for all rows together.
    parts = [tone["figures"][half]["after"] for half in ("fit", "check")]
    loss = sum(part["log_loss"] * part["rows"] for part in parts) / sum(part["rows"] for part in parts)
    assert figures(applied)["tone"][2] == pytest.approx(loss, abs=6e-4)
    doubtful = sum(any(a["review"] for a in line["answers"].values()) for line in lines_of("after.jsonl"))
    assert f"{doubtful} record" in applied and not Path("after.review.jsonl").exists()


def test_a_calibration_of_other_questions_is_refused(run):
    run("in.csv", *GOLD, "--save-calibration", "c.json")
    Path("q.yaml").write_text("tone: {type: choice, criteria: {calm: polite, angry: null}}")
    assert "contains the question 'bad', but the questions are 'tone'" in run(
        "in.csv", "--calibration", "c.json", status=1
    )
    Path("q.yaml").write_text(QUESTIONS.replace("angry", "furious"))
    assert "'tone' was made with the options calm, angry" in run("in.csv", "--calibration", "c.json", status=1)
    Path("q.yaml").write_text(QUESTIONS)
    Path("c.json").write_text(Path("c.json").read_text().replace('"prompt": "', '"prompt": "x'))
    assert "was made with another prompt" in run("in.csv", "--calibration", "c.json", status=1)


@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (("--gold", "tune=label"), "there is no question 'tune'; did you mean tone", 2),
        (("--gold", "tone=label,level"), "write QUESTION=COLUMN for each, or one column", 2),
        (("--gold", "lable"), "the input has no column 'lable'; did you mean label", 1),
        (("--save-calibration", "c.json"), "--save-calibration needs true answers; add --gold", 2),
        (("--precision", "0.9"), "--precision needs true answers", 2),
        (("--review", "r.csv"), "needs a rule for doubtful answers", 2),
        (("--gold-file", "q.yaml"), "cannot", 1),
        (("--gold-file", "in.csv"), "has no column record", 1),
        (("--gold-file", "gold.csv"), "has no column tone_gold or bad_gold; it has: record, gold", 1),
        (("--gold-file", "gold.csv", "--gold", "tone=gold"), "row 2 of --gold-file gold.csv has the record of", 1),
        (("--gold", "label", "--save-calibration", "in.csv"), "would replace the input", 1),
        (("--review-below", "1.5"), "1.5", 2),
        (("--review-below", "0.5", "--review", "r.txt"), "r.txt cannot be written", 1),
        (("--gold", "label", "--save-calibration", "c", "--adapter-column", "id"), "is of one adapter", 2),
    ],
)
def test_options_that_are_wrong_stop_before_the_first_record(run, arguments, says, status):
    Path("gold.csv").write_text("record,gold\n1,calm\n1,angry\n")
    assert says in " ".join(run("in.csv", *arguments, "-o", "out.csv", status=status).split())


def test_doubtful_rows_go_to_a_person_and_back(run):
    plain = run("in.csv", "-o", "out.csv", "--id", "id", *GOLD)
    ordered = sorted(float(row["tone_p"]) for row in table("out.csv"))
    below = str((ordered[9] + ordered[10]) / 2)
    said = run("in.csv", "-o", "some.csv", "--id", "id", *GOLD, "--review-below", below)
    marked = {row["record"]: row for row in table("some.csv")}
    rows = table("some.review.csv")
    assert [row["record"] for row in rows] == sorted((row["record"] for row in rows), key=int)
    want = {n for n, row in marked.items() if "true" in (row["tone_review"], row["bad_review"])}
    assert {row["record"] for row in rows} == want and len(rows) >= 10 and f"{len(rows)} record" in said
    inputs = table("in.csv")
    for row in rows:
        own = inputs[int(row["record"]) - 1]
        assert (row["id"], row["body"], row["tone_gold"], row["bad_gold"]) == (
            own["id"], own["body"], own["label"], own["level"]
        )  # fmt: skip
        assert row["tone_p"] == marked[row["record"]]["tone_p"] and float(row["bad_p"]) > 1 / 3
    assert figures(said) == figures(plain)
    # Labels that a person wrote are not lost.
    for row in rows:
        row["tone_gold"] = "angry"
    with open("some.review.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    labelled = Path("some.review.csv").read_bytes()
    again = run("in.csv", "-o", "some.csv", "--id", "id", *GOLD, "--review-below", below)
    assert "was not replaced" in again and Path("some.review.csv").read_bytes() == labelled
    other = run("in.csv", "-o", "other.csv", "--review-below", below, "--review", "some.review.csv", status=1)
    assert "exists, and may contain labels" in other and not Path("other.csv").exists()
    said = run("in.csv", "--gold-file", "some.review.csv", "--id", "id", "-o", "back.csv")
    assert figures(said)["tone"][0] == len(rows)
    assert figures(said)["tone"][1] == pytest.approx(sum(r["tone"] == "angry" for r in rows) / len(rows), abs=6e-4)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_file_of_doubtful_rows_has_a_format_and_may_be_empty(run, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    Path("in.jsonl").write_text('{"body": {"deep": [1, "a"]}}\n{"body": "b"}\n')
    run("in.jsonl", "--review-below", "1", "--review", name)
    rows = read_any(name)
    assert [row["record"] for row in rows] == [1, 2] and [row["tone_gold"] for row in rows] == [None, None]
    run("in.jsonl", "--review-below", "0", "--review", f"none{name}")
    assert read_any(f"none{name}") == [] and Path(f"none{name}").exists()


def read_any(name):
    if name.endswith("jsonl"):
        return lines_of(name)
    import pyarrow.parquet

    return pyarrow.parquet.read_table(name).to_pylist()


@pytest.mark.parametrize(("name", "lost"), [("out.jsonl", "lines"), ("out.csv", "entry"), ("out.csv", "lines")])
def test_a_job_that_was_killed_has_each_record_once(run, name, lost):
    """The files are as a crash leaves them: the journal's last entry is torn, or the disk has lost committed lines."""
    options = (*GOLD, "--review-below", "1", "--id", "id", "--keep-order")
    want = run("in.csv", *options, "-o", f"want{name}")
    review = Path(name).with_suffix(f".review{Path(name).suffix}")
    for limit in (10, 25):
        run("in.csv", *options, "-o", name, "--limit", str(limit))
        assert len(table_of(review)) == limit
        review.unlink()  # the job refuses to replace it
    file, lines = Path(f"{name}.journal"), Path(f"{name}.partial")
    entries = file.read_bytes().splitlines(keepends=True)
    commits = [i for i, entry in enumerate(entries) if entry.startswith(b'{"to"')]
    if lost == "entry":
        file.write_bytes(b"".join(entries[: commits[-1]]) + entries[commits[-1]][:40])
    else:
        lines.write_bytes(lines.read_bytes()[: json.loads(entries[commits[-1]])["to"] - 5])
    said = run("in.csv", *options, "-o", name)
    assert "10 records are done" in said and figures(said) == figures(want)
    for got, wanted in ((Path(name), Path(f"want{name}")), (review, Path(f"want{review}"))):
        columns = ("record", "id", "body", "tone_gold")  # probabilities differ in their last digits
        assert [[row.get(column) for column in columns] for row in table_of(got)] == [
            [row.get(column) for column in columns] for row in table_of(wanted)
        ]
    assert len(table_of(review)) == COUNT
    journal = Journal(file)
    assert sorted(extra[0] for extra in journal.extras()) == [*range(1, COUNT + 1)]
    journal.close()


def table_of(path):
    return table(path) if path.suffix == ".csv" else lines_of(path)


def test_other_answers_than_those_of_the_journal_are_refused(run):
    run("in.csv", *GOLD, "-o", "out.csv")
    assert 'gold: ["tone=label,bad=level"] in the journal' in run(
        "in.csv", "--gold", "tone=label", "-o", "out.csv", status=1
    )
    Path("gold.csv").write_text("record,tone_gold\n1,calm\n")
    run("in.csv", "--gold-file", "gold.csv", "-o", "two.csv")
    Path("gold.csv").write_text("record,tone_gold\n1,angry\n")
    assert "gold_file: " in run("in.csv", "--gold-file", "gold.csv", "-o", "two.csv", status=1)


def test_the_report_draws_the_figures(run):
    run("in.csv", *GOLD, "-o", "out.csv", "--report", "r.html")
    page = Path("r.html").read_text()
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, flags=re.S)[1])
    tone, bad = data["calibration"]
    assert (tone["name"], bad["name"]) == ("tone", "bad") and len(tone["check"]["bins"][1]) == 15
    assert sum(part["rows"] for part in tone["bins"]) == tone["whole"]["rows"] == COUNT - 3
    assert bad["whole"]["mean_error"] > 0 and any("temperature" in line for line in tone["lines"])
    run("in.csv", "-o", "plain.csv", "--report", "p.html")
    assert '"calibration":[]' in Path("p.html").read_text()


def test_lines_of_a_batch_are_calibrated_and_have_no_review_file(run, model):
    run("in.csv", *GOLD, "--save-calibration", "c.json")
    file = json.loads(Path("c.json").read_text())
    question = {"type": "choice", "criteria": {"calm": "polite", "angry": None}}
    body = {"state": "yes 1 text", "questions": {"tone": question}}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/systemone", "body": body}
    Path("in.jsonl").write_text(json.dumps(line) + "\n")

    def lines(*arguments, status=0):
        done = CliRunner().invoke(main, ["run", "in.jsonl", "-m", model, "--dtype", "float32", *arguments])
        assert done.exit_code == status, done.output
        return done.output

    lines("-o", "plain.jsonl")
    lines("-o", "after.jsonl", "--calibration", "c.json")
    bodies = [lines_of(name)[0]["response"]["body"] for name in ("plain.jsonl", "after.jsonl")]
    plain, after = (body["answers"]["tone"] for body in bodies)
    p = {
        name: value ** (1 / file["questions"]["tone"]["temperature"]) for name, value in plain["probabilities"].items()
    }
    assert after["probabilities"] == pytest.approx(
        {name: value / sum(p.values()) for name, value in p.items()}, abs=1e-6
    )
    unmarked, marked = (body["diagnostics"]["tone"] for body in bodies)
    assert isinstance(marked["review"], bool) and "review" not in unmarked
    assert "--review is for tables" in lines("--review", "r.csv", "--review-below", "0.5", status=2)


def test_texts_are_marked(run):
    assert "doubtful" in run("a text", "--review-below", "1")
    assert "doubtful" not in run("a text", "--review-below", "0")
    assert "--gold is for jobs" in run("a text", "--gold", "label", status=2)
