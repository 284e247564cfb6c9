"""Conversations that are embedded, classified or scored are written as those that are continued."""

from __future__ import annotations

import json

import pytest

from prefold.checkpoint import resolve
from prefold.cli.specs import job_spec
from prefold.errors import InputError
from prefold.jobs.opening import render_chat
from prefold.text import load_tokenizer

TASKS = ("embed", "classify", "score")
TEXT = [{"role": "user", "content": "yes\nno <|im_end|>"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "yes"}, {"type": "text", "text": "no <|im_end|>"}]}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ mark }}{% endfor %}"


@pytest.fixture(scope="module")
def ids(model):
    """ids(task, messages, **options) -> the token ids of a conversation."""
    tokenizer = load_tokenizer(resolve(model))

    def make(task, messages, **o):
        return render_chat(task, job_spec(o, task=task), tokenizer)(messages).tolist()

    return make


@pytest.mark.parametrize("task", TASKS)
def test_texts_and_their_parts_are_the_same_prompt(ids, task):
    assert ids(task, TEXT) == ids(task, PARTS)
    assert ids(task, PARTS, chat_template=TEMPLATE) == ids(task, TEXT, chat_template=TEMPLATE)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "options",
    [{"chat_template": TEMPLATE}, {"system": "be brief"}, {"escape_special": True}],
    ids=lambda options: next(iter(options)),
)
def test_every_option_of_conversations_is_heeded(ids, task, options):
    assert ids(task, PARTS, **options) != ids(task, PARTS)
    given = {"chat_template": TEMPLATE, "chat_template_kwargs": '{"mark": "!"}'}
    assert ids(task, PARTS, **given) != ids(task, PARTS, chat_template=TEMPLATE)


def test_an_image_in_a_conversation_is_refused(ids):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
    with pytest.raises(InputError, match="holds an image") as caught:
        ids("embed", messages)
    assert caught.value.field == "messages" and caught.value.remedy


def test_a_job_on_conversations(prefold, tmp_path, lines):
    rows = [{"m": TEXT}, {"m": PARTS}, {"m": [{"role": "user", "content": [5]}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for options in ([], ["--chat-template", TEMPLATE], ["--template-seconds", "5"]):
        name = f"out{len(found)}.jsonl"
        done = prefold("embed", "in.jsonl", "--messages", "m", "-o", name, *options)
        assert done.exit_code == 3, done.stderr
        got = {line["record"]: line for line in lines(name)}
        assert got[1]["embedding"] == got[2]["embedding"] and got[3]["error"]["field"].startswith("m[0].content")
        found.append(got[1]["embedding"])
    assert found[0] == found[2] != found[1]


def _called(name, arguments):
    """A row of a conversation that calls one tool, and the tool."""
    kinds = {str: "string", int: "number"}
    properties = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": [*arguments]}
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    return {"m": [*chat, {"role": "tool", "content": "y", "tool_call_id": "1"}], "t": [tool]}


def test_fields_that_arrow_fills_with_null_are_no_part_of_a_prompt(prefold, tmp_path, lines):
    """All structs of a Parquet column have the same fields, so a row's tools have the fields of all rows' tools."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [_called("weather", {"city": "Rome"}), _called("sum", {"a": 1, "b": 2})]
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    template += "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    as_text = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    for name, table in (("structs", rows), ("texts", as_text)):
        pq.write_table(pa.Table.from_pylist(table), tmp_path / f"{name}.parquet")
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[0]["t"][0]["function"]["parameters"]["properties"]["city"]["default"] = None  # the user's own null
    (tmp_path / "null.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def tokens(name):
        options = ["--messages", "m", "--tools", "t", "--chat-template", template, "--max-tokens", "1"]
        done = prefold("generate", name, *options, "-o", f"{name}.out.jsonl", "--keep-order", "--quiet")
        assert done.exit_code == 0, done.output
        return [line["num_tokens"] for line in lines(f"{name}.out.jsonl")]

    want = tokens("plain.jsonl")
    assert tokens("structs.parquet") == tokens("texts.parquet") == want
    assert tokens("null.jsonl")[0] > want[0]
