"""Records made to break things: each is one error line, and the records around it are done."""

from __future__ import annotations

import json

import pytest

DEEP = "[" * 600 + "]" * 600
CHAT = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 1}


def chat_line(custom_id, **body):
    return json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": CHAT | body})


BATCH = {
    "url of a list": '{"custom_id": "x", "url": ["x"], "body": {}}',
    "url of an object": '{"custom_id": "x", "url": {}, "body": {}}',
    "method of a list": '{"custom_id": "x", "url": "/rerank", "method": [], "body": {}}',
    "model of a list": chat_line("x", model=[]),
    "template of a number": chat_line("x", chat_template=5),
    "template of a list": chat_line("x", chat_template=[]),
    "variables of a number": chat_line("x", chat_template_kwargs=5),
    "template with a break": chat_line("x", chat_template="{% break %}"),
    "template with an assertion": chat_line("x", chat_template="{{ 'x'|truncate(-1) }}"),
    "template with a name error": chat_line("x", chat_template="{{ 1e400|int }}"),
    "template out of memory": chat_line("x", chat_template="{{ 'a'*(10**13) }}"),
    "template that writes a surrogate": chat_line("x", chat_template="{{ '\\ud800' }}"),
    "name with a surrogate": chat_line("x", **{"\ud800": 1}),
    "custom_id with a surrogate": chat_line("\ud800"),
    "deep tools": chat_line("x", tools=[{"x": "DEEP"}]).replace('"DEEP"', DEEP),
    "deep schema": chat_line("x", response_format={"type": "json_schema", "json_schema": {"schema": "DEEP"}}).replace(
        '"DEEP"', '{"items":' * 600 + "{}" + "}" * 600
    ),
}


def test_poisoned_batch_lines(prefold, tmp_path, lines):
    parts = [chat_line("good0")]
    for i, line in enumerate(BATCH.values(), 1):
        parts += [line.replace('"x"', f'"bad{i}"', 1), chat_line(f"good{i}")]
    (tmp_path / "in.jsonl").write_text("\n".join(parts) + "\n")
    result = prefold("run", "in.jsonl", "-o", "out.jsonl")
    assert result.exit_code == 3, result.output
    found = lines(tmp_path / "out.jsonl")
    assert len(found) == len(parts)
    done = {line["custom_id"] for line in found if line["response"] and line["response"]["status_code"] == 200}
    assert done == {f"good{i}" for i in range(len(BATCH) + 1)}


TABLES = {
    "id with a surrogate": ('{"text": "yes", "id": "\\ud800"}', ["--id", "id"]),
    "id that is deep": (f'{{"text": "yes", "id": {DEEP}}}', ["--id", "id"]),
    "column with a surrogate": ('{"\\ud800": 1}', []),
    "kept value that is deep": (f'{{"text": "yes", "id": "x", "k": {DEEP}}}', ["--keep", "k"]),
    "text that is deep": (f'{{"text": {DEEP}}}', []),
}


@pytest.mark.parametrize("name", TABLES)
def test_poisoned_tables(prefold, tmp_path, lines, name):
    bad, options = TABLES[name]
    good = '{"text": "no", "id": 1, "k": 1}'
    (tmp_path / "in.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    assert prefold("embed", "in.jsonl", "-o", "out.jsonl", *options).exit_code == 3
    found = {line["record"]: line for line in lines(tmp_path / "out.jsonl")}
    assert sorted(found) == [1, 2, 3] and "error" in found[2] and "embedding" in found[1] and "embedding" in found[3]


def test_surrogates_in_what_is_kept_are_replaced(prefold, tmp_path, lines):
    (tmp_path / "in.jsonl").write_text('{"text": "no", "k": {"a\\ud800": "\\udfff"}}\n')
    assert prefold("embed", "in.jsonl", "-o", "out.jsonl", "--keep", "k").exit_code == 0
    assert lines(tmp_path / "out.jsonl")[0]["k"] == {"a\ufffd": "\ufffd"}


def test_ids_that_are_latin_1(prefold, tmp_path, lines):
    (tmp_path / "in.csv").write_bytes(b"id,text\na,yes\ncaf\xe9,no\nb,abc\n")
    assert prefold("embed", "in.csv", "-o", "out.jsonl", "--id", "id").exit_code == 3
    found = {line["record"]: line for line in lines(tmp_path / "out.jsonl")}
    assert sorted(found) == [1, 2, 3] and found[2]["error"]["code"] == "invalid_utf8"


def test_messages_that_are_deep(prefold, tmp_path, lines):
    good = '{"messages": [{"role": "user", "content": "a"}]}'
    bad = good.replace('"a"', f'"a", "z": {DEEP}')
    (tmp_path / "in.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    options = ["--messages", "messages", "--max-tokens", "1", "-o", "out.jsonl"]
    assert prefold("generate", "in.jsonl", *options).exit_code == 3
    found = {line["record"]: line for line in lines(tmp_path / "out.jsonl")}
    assert found[2]["error"]["code"] == "too_deep" and "text" in found[1] and "text" in found[3]
