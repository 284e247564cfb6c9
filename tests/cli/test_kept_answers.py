"""Jobs with --answers, and `prefold answers`."""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import replace

import pytest

from prefold.spec.requests import Result
from prefold.tasks.kept import answer_bytes, read_answer
from prefold.tasks.kept_file import NAME, AnswersFile

QUESTIONS = {
    "a": {"type": "choice", "instructions": "Is it?", "criteria": {"x": None, "y": None}},
    "b": {"type": "score", "criteria": ["low", "high"]},
}
JOBS = {
    "embed": ["embed", "--prompt", "text"],
    "classify": ["classify", "--prompt", "text", "--labels", "yes,no no"],
    "calibrated": ["classify", "--prompt", "text", "--labels", "yes,no no", "--calibrate"],
    "decide": ["decide", "--state", "text", "--questions", json.dumps(QUESTIONS)],
    "rerank": ["rerank", "--query", "q", "--document", "documents", "--template", "{query} {document} ",
               "--words", "yes,no"],
    "score": ["score", "--prompt", "q", "--continuation", "documents"],
    "generate": ["generate", "--prompt", "text", "--max-tokens", "4", "--logprobs", "1"],
    "seeded": ["generate", "--prompt", "text", "--max-tokens", "4", "--temperature", "1", "--seed", "5"],
    "live": ["embed", "--prompt", "text", "--stream"],
}  # fmt: skip


def write(path, changed=()):
    texts = [f"the {'changed ' * (i in changed)}note {i % 10} yes" for i in range(24)]
    records = [
        {"k": i, "text": text, "q": f"the {i % 4}", "documents": [text, f"no {i % 3}"]} for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def count(said: str, pattern: str) -> int:
    found = re.search(pattern, said)
    return int(found[1].replace(",", "")) if found else 0


def rows_of(said: str) -> int:
    return count(said, r"rows +([\d,]+) computed")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_over_an_edited_table_computes_what_is_new(prefold, tmp_path, lines, name):
    def job(source, out, *more):
        return prefold(*JOBS[name], source, "-o", out, "--id", "k", "--dtype", "float32", *more).stderr

    def by_id(path):
        return {line["id"]: line for line in lines(path)}

    write(tmp_path / "a.jsonl")
    first = job("a.jsonl", "1.jsonl", "--answers", "kept")
    assert not count(first, r"kept +(\d+)")
    known = job("a.jsonl", "2.jsonl", "--answers", "kept")
    asked = count(known, r"in ([\d,]+) prompts")
    assert count(known, r"kept +([\d,]+) prompts") == asked == count(first, r"in ([\d,]+) prompts")
    if name != "calibrated":  # which reads prompts of its own
        assert rows_of(known) == 0 and "sharing" not in known  # no model was loaded
    assert by_id(tmp_path / "2.jsonl").keys() == by_id(tmp_path / "1.jsonl").keys()
    for key, line in by_id(tmp_path / "2.jsonl").items():
        before = by_id(tmp_path / "1.jsonl")[key]
        for one in (line, before):  # what was computed for it
            one.pop("cached_tokens", None)
        assert line == before
    write(tmp_path / "b.jsonl", changed={3})
    edited = job("b.jsonl", "3.jsonl", "--answers", "kept")
    assert 0 < rows_of(edited) < rows_of(first) / 2
    plain, found = job("b.jsonl", "4.jsonl"), by_id(tmp_path / "3.jsonl")
    assert rows_of(plain) > rows_of(edited)
    for key, line in by_id(tmp_path / "4.jsonl").items():
        assert rounded(found[key]) == rounded(line)


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items() if name != "cached_tokens"}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def test_draws_of_a_job_without_a_seed_are_not_kept(prefold, tmp_path, lines):
    write(tmp_path / "a.jsonl")
    options = ["--prompt", "text", "--max-tokens", "8", "--temperature", "1.5", "--answers", "kept"]
    for out in ("1.jsonl", "2.jsonl"):
        prefold("generate", "a.jsonl", "-o", out, *options)
    texts = [[line["text"] for line in lines(tmp_path / out)] for out in ("1.jsonl", "2.jsonl")]
    assert texts[0] != texts[1]
    assert prefold("answers", "kept").stdout.startswith("0 answers")


def test_equal_records_are_counted_in_the_summary(prefold, tmp_path):
    write(tmp_path / "a.jsonl")
    said = prefold("embed", "a.jsonl", "--prompt", "text", "-o", "1.jsonl").stderr
    assert "repeats   14 prompts repeat another prompt, and were not computed again" in said
    assert count(said, r"in ([\d,]+) prompts") == 24


def test_answers_are_listed_pruned_and_verified(prefold, tmp_path):
    write(tmp_path / "a.jsonl", changed=range(24))
    texts = [{"text": f"the note {i} yes"} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))
    prefold("embed", "a.jsonl", "--prompt", "text", "-o", "1.jsonl", "--answers", "kept")
    prefold("generate", "a.jsonl", "--prompt", "text", "-o", "2.jsonl", "--answers", "kept", "--max-tokens", "3")
    (row,) = json.loads(prefold("answers", "kept", "--json").stdout)
    assert row["answers"] == 400 and row["identity"]["options"]["weights"] == "'fast'"
    done = prefold("answers", "kept", "--verify", "100")
    assert done.exit_code == 0 and "the file is intact" in done.stdout
    assert count(done.stdout, r"(\d+) answers recomputed") > 5
    none = prefold("answers", "kept", "--verify", "5", "--dtype", "bfloat16")
    assert none.exit_code == 1 and "with these options can be computed again" in none.stderr
    file = AnswersFile(tmp_path / "kept", 1 << 30, pytest.fail)
    (model,) = file.models()
    for key, _, data in file.with_requests(model.number, 100):
        answer = read_answer(data)
        changed = replace(answer, values=answer.values + 1) if isinstance(answer, Result) else answer
        file.add(model.number, key, answer_bytes(changed))
    file.close()
    false = prefold("answers", "kept", "--verify", "100")
    assert false.exit_code == 1 and "the file is intact" in false.stdout and "differ by at most 1" in false.stdout
    with sqlite3.connect(tmp_path / "kept" / NAME) as db:  # answers of other requests, with their checksums as wrong
        db.execute("UPDATE answers SET answer = (SELECT answer FROM answers LIMIT 1)")
    wrong = prefold("answers", "kept", "--verify", "100", "--json")
    assert wrong.exit_code == 1 and "399 answers do not match" in wrong.stdout + wrong.stderr
    assert "400 answers deleted" in prefold("answers", "kept", "--keep-bytes", "1").stdout
    missing = prefold("answers", "nowhere")
    assert missing.exit_code == 1 and "nowhere contains no answers" in missing.stderr


def test_answers_are_for_one_process(prefold, tmp_path):
    write(tmp_path / "a.jsonl")
    for where in (["--url", "http://localhost:1"], ["--ray"]):
        done = prefold("embed", "a.jsonl", "--prompt", "text", "--answers", "kept", *where)
        assert done.exit_code == 2 and "--answers works only in one process" in done.stderr
    done = prefold("embed", "a text", "--answers", "kept")
    assert done.exit_code == 2 and "--answers is for jobs" in done.stderr
    (tmp_path / "file").write_text("x")
    done = prefold("embed", "a.jsonl", "--prompt", "text", "--answers", "file")
    assert done.exit_code == 1 and "cannot make the folder file" in done.stderr
