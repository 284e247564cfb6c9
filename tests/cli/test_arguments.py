"""What arguments mean: long texts, texts that begin with an @, patterns, and what makes a job another one."""

from __future__ import annotations

import json

import pytest

from prefold.jobs import models


def write(path, count, **more):
    path.write_text("".join(json.dumps({"text": f"the {i}", "@at": i, **more}) + "\n" for i in range(count)))


def test_a_text_that_is_longer_than_a_name_may_be(prefold):
    text = "please summarise the following text in one sentence. " * 8
    done = prefold("generate", text, "--max-tokens", "2", "--json", "--quiet")
    assert done.exit_code == 0 and json.loads(done.stdout)["num_generated"] == 2
    assert done.stderr == ""


def test_names_that_begin_with_an_at_sign(prefold, tmp_path, lines):
    write(tmp_path / "in.jsonl", 5)
    arguments = ("classify", "in.jsonl", "--prompt", "text", "--id", "@at", "--labels", "@yes,@no", "-o", "out.jsonl")
    assert prefold(*arguments).exit_code == 0
    assert {line["id"] for line in lines("out.jsonl")} == set(range(5))
    assert {line["label"] for line in lines("out.jsonl")} <= {"@yes", "@no"}


@pytest.mark.parametrize("pattern", ["*.jsonl", "./*.jsonl", "**/*.jsonl", "part-[ab].jsonl"])
def test_an_output_that_its_own_pattern_would_take_in(prefold, tmp_path, pattern):
    for name in ("part-a.jsonl", "other.jsonl"):
        write(tmp_path / name, 2)
    output = "part-b.jsonl" if pattern.startswith("part") else "out.jsonl"
    done = prefold("embed", pattern, "--prompt", "text", "-o", output)
    assert done.exit_code == 1 and f"would become part of the input {pattern}" in done.stderr
    assert prefold("embed", pattern, "--prompt", "text", "-o", "out.csv").exit_code == 0
    assert prefold("embed", pattern, "--prompt", "text", "-o", "out.csv").exit_code == 0  # nothing left to do


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (["--media-folder", "a"], ["--media-folder", "b"], "media_folder"),
        ([], ["--allow-media-host", "example.org"], "allow_media_host"),
        ([], ["--media-pixels", "100"], "media_pixels"),
        (["--format", "csv"], ["--format", "tsv"], "format"),
    ],
)
def test_what_makes_a_job_another_one(prefold, tmp_path, first, then, told):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "in.jsonl", 3)
    (tmp_path / "in.txt").write_text("text\nthe 1\nthe 2\n")
    name = "in.txt" if "--format" in first else "in.jsonl"
    arguments = ("embed", name, "--prompt", "text", "-o", "out.jsonl")
    assert prefold(*arguments, *first).exit_code == 0
    done = prefold(*arguments, *then)
    assert done.exit_code == 1 and told in done.stderr


def test_the_timed_model_knows_the_images_of_the_prompts(prefold, tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", 3)
    found = []

    def load(model, checkpoint, tokenizer, media=None):
        found.append(media)
        raise LookupError

    table = object()
    monkeypatch.setattr(models.LazyTasks, "media", table)
    monkeypatch.setattr(models, "load_llm", load)
    with pytest.raises(LookupError):
        prefold("bench", "in.jsonl", "--task", "embed", "--prompt", "text")
    assert found == [table]
