"""Options that were given and mean nothing to what is to be done are wrong usage."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from prefold.cli import main


@pytest.fixture
def table(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "body": "b", "query": "q", "document": "d", "prompt": "p"}\n' * 2)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("task", "option", "of"),
    [
        ("embed", ("--document", "body"), "rerank"),
        ("embed", ("--query", "query"), "rerank"),
        ("embed", ("--labels", "a,b"), "classify"),
        ("embed", ("--temperature", "1"), "generate"),
        ("embed", ("--raw",), "generate"),
        ("embed", ("--template", "{query}{document}"), "rerank, classify and decide"),
        ("classify", ("--continuation", "body"), "score"),
        ("classify", ("--no-normalize",), "embed"),
        ("rerank", ("--prompt", "text"), "embed, classify, score and generate"),
        ("rerank", ("--messages", "text"), "embed, classify, decide, score and generate"),
        ("rerank", ("--system", "s"), "embed, classify, score and generate"),
        ("score", ("--tools", "body"), "generate"),
        ("generate", ("--dimensions", "3"), "embed"),
    ],
)
def test_options_of_other_tasks(prefold, table, task, option, of):
    done = prefold("run", "in.jsonl", "--task", task, *option)
    assert done.exit_code == 2 and option[0] in done.stderr, done.output
    assert f" is for {of}, and not for {task}" in done.stderr


@pytest.mark.parametrize("command", ["plan", "verify", "bench"])
def test_commands_that_look_at_a_job_refuse_them_too(prefold, table, command):
    done = prefold(command, "in.jsonl", "--task", "embed", "--document", "body")
    assert done.exit_code == 2 and "--document is for rerank, and not for embed" in done.stderr


def test_options_that_no_batch_has(prefold, table):
    done = prefold("run", "batch.jsonl", "--labels", "a,b")
    assert done.exit_code == 2 and "--labels is for classify, and not for OpenAI batch lines" in done.stderr


def test_an_option_with_the_name_of_another_is_heeded(prefold, table):
    done = prefold("verify", "in.jsonl", "--task", "embed", "--seed", "3", "--dtype", "float32")
    assert done.exit_code == 0 and "2 items" in done.stdout


@pytest.mark.parametrize("command", ["embed", "score"])
@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["in.jsonl", "--prompt", "text"], "add --messages COLUMN"),
        (["a text"], "give a file of them with --messages COLUMN, or leave it out"),  # it has no columns
    ],
)
def test_options_of_conversations_without_one(prefold, table, command, arguments, remedy):
    for option in (("--system", "s"), ("--chat-template-kwargs", "{}"), ("--escape-special",)):
        done = prefold(command, *arguments, *option)
        assert done.exit_code == 2 and f"{option[0]} is for conversations; {remedy}" in done.stderr


def test_a_text_with_an_image_is_not_scored_as_a_whole(prefold, table):
    done = prefold("score", "in.jsonl", "--prompt", "text", "--image", "body")
    assert done.exit_code == 2 and "add --continuation COLUMN" in done.stderr


def test_an_empty_file_of_json_lines_is_called_so(prefold, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    done = prefold("run", "empty.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 1 and "empty.jsonl has no line with a JSON object" in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("chat", "there is no command 'chat'; use prefold generate \"a message\""),
        ("embeddings", "there is no command 'embeddings'; use prefold embed"),
        ("clasify", "did you mean classify? see prefold --help"),
    ],
)
def test_a_command_by_another_name_is_told_its_own(command, says):
    done = CliRunner().invoke(main, [command])
    assert done.exit_code == 2 and says in done.stderr


def test_a_plugin_that_is_no_file_is_named(monkeypatch):
    monkeypatch.setenv("PREFOLD_PLUGINS", "")
    done = CliRunner().invoke(main, ["models", "--plugin", "nofile.py"])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "nofile.py (--plugin" in done.stderr
    assert "there is no plugin" in done.stderr and "Error:" not in done.stderr
