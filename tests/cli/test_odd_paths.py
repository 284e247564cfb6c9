"""Inputs that are pipes, and outputs that are another name of a file that is read."""

from __future__ import annotations

import json
import os
import threading

import pytest

EMBED = ["--quiet", "--dimensions", "4"]


@pytest.fixture
def pipe(tmp_path):
    """pipe(name, text) -> a named pipe into which the text is written, as <(COMMAND) of a shell is one."""

    def make(name, text):
        path = tmp_path / name
        os.mkfifo(path)
        threading.Thread(target=path.write_text, args=(text,), daemon=True).start()
        return name

    return make


def test_a_pipe_is_read_as_standard_input_is(prefold, pipe):
    objects = '{"text": "a"}\n{"text": "b"}\n'
    want = prefold("embed", "-", *EMBED, input=objects).stdout
    assert len(want.splitlines()) == 2 and "embedding" in want
    assert prefold("embed", pipe("63", objects), *EMBED).stdout == want
    assert prefold("run", pipe("in.jsonl", objects), "--task", "embed", *EMBED).stdout == want
    table = pipe("table", "text\na\nb\n")
    assert prefold("embed", table, "--format", "csv", *EMBED).stdout == want
    texts = prefold("embed", "-", "--json", *EMBED, input="a\nb\n").stdout
    assert prefold("embed", pipe("64", "a\nb\n"), "--json", *EMBED).stdout == texts != want
    ranked = prefold("rerank", "q", "a", "b", "--words", "yes,no", "--json").stdout
    assert prefold("rerank", "q", pipe("65", "a\nb\n"), "--words", "yes,no", "--json").stdout == ranked


def test_what_cannot_be_read_from_a_pipe(prefold, pipe):
    done = prefold("embed", pipe("one", '{"text": "a"}\n'), pipe("two", '{"text": "a"}\n'))
    assert done.exit_code == 1 and "the pipe one cannot be combined with other inputs" in done.stderr
    done = prefold("embed", pipe("in.parquet", "x"), "--format", "parquet")
    assert done.exit_code == 1 and "cannot be read from in.parquet" in done.stderr


def test_a_side_file_that_is_a_pipe_is_read_once(prefold, pipe, tmp_path, lines):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    done = prefold("classify", "in.jsonl", "--labels-file", pipe("labels", "yes\nno\n"), "-o", "out.jsonl", "--quiet")
    assert done.exit_code == 0 and [*lines("out.jsonl")[0]["probabilities"]] == ["yes", "no"], done.output


@pytest.mark.parametrize(
    ("link", "output", "says"),
    [
        (os.link, "out.jsonl", "the output out.jsonl would replace the input in.jsonl"),
        (os.symlink, "out.jsonl", "the output out.jsonl would replace the input in.jsonl"),
        (os.link, "out.csv.partial", "the partial output out.csv.partial would replace the input in.jsonl"),
        (os.link, "out.jsonl.journal", "the journal out.jsonl.journal would replace the input in.jsonl"),
    ],
)
def test_an_output_that_is_a_link_of_the_input_is_refused(prefold, tmp_path, link, output, says):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    link(tmp_path / "in.jsonl", tmp_path / output)
    name = output.removesuffix(".partial").removesuffix(".journal")
    done = prefold("embed", "in.jsonl", "-o", name, "--overwrite", *EMBED)
    assert done.exit_code == 1 and says in done.stderr, done.output
    assert (tmp_path / "in.jsonl").read_text() == '{"text": "a"}\n'


def test_an_output_that_is_a_side_file_is_refused(prefold, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "shots.jsonl").write_text('{"text": "a", "label": "yes"}\n')
    options = ["--labels", "yes,no", "--examples", "shots.jsonl", "-o", "shots.jsonl", "--overwrite"]
    done = prefold("classify", "in.jsonl", *options)
    assert done.exit_code == 1 and "would replace the file of --examples shots.jsonl" in done.stderr
    assert json.loads((tmp_path / "shots.jsonl").read_text())["label"] == "yes"


def test_a_loop_of_links_is_one_line(prefold, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    os.symlink("loop.jsonl", tmp_path / "loop.jsonl")
    done = prefold("embed", "in.jsonl", "-o", "loop.jsonl", *EMBED)
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "loop.jsonl is a loop of symbolic links; give another name" in done.stderr
