"""Side files of every option: with a byte order mark, in UTF-16, empty. One reader decodes them all."""

from __future__ import annotations

import json

import pytest

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
JOB = ["in.jsonl", "-o", "out.jsonl", "--overwrite", "--quiet"]
# {option: (the text of its file, the command that reads the file F)}
SIDE_FILES = {
    "labels": ("yes\nno\n", ["classify", *JOB, "--labels-file", "F"]),
    "labels as JSON": ('{"a": "yes", "b": "no"}', ["classify", *JOB, "--labels-file", "F"]),
    "examples": ('{"text": "x", "label": "yes"}\n', ["classify", *JOB, "--labels", "yes,no", "--examples", "F"]),
    "instructions": ("Which?", ["classify", *JOB, "--labels", "yes,no", "--instructions", "@F"]),
    "classify's template": ("T: {text} L: {label}", ["classify", *JOB, "--labels", "yes,no", "--template", "@F"]),
    "prompt": ("Read {text}", ["embed", *JOB, "--prompt", "@F"]),
    "documents": ("a sea\na bread\n", ["rerank", "tide", "@F", "--words", "yes,no", "--json", "--raw-scores"]),
    "query": ("{text}?", ["rerank", *JOB, "--query", "@F", "--document", "text", "--words", "yes,no"]),
    "prompt file": ("a dog", ["generate", "-f", "F", "--raw", "--json", "--max-tokens", "1"]),
    "system": ("be brief", ["generate", *JOB, "--system", "@F", "--max-tokens", "1"]),
    "chat template": ("{{ messages[0].content }}", ["generate", *JOB, "--chat-template", "@F", "--max-tokens", "1"]),
    "tools": (json.dumps([TOOL]), ["generate", *JOB, "--tools", "@F", "--max-tokens", "1"]),
    "schema": ('{"enum": ["yes"]}', ["generate", "a", "--json-schema", "F", "--json", "--max-tokens", "9"]),
    "regex": ("yes", ["generate", "a", "--regex", "@F", "--json"]),
    "grammar": ('start: "yes"', ["generate", "a", "--grammar", "@F", "--json"]),
}  # fmt: skip


def read(prefold, command, path):
    done = prefold(*(part.replace("F", path) if part in ("F", "@F") else part for part in command))
    assert done.exit_code == 0, done.output
    return open("out.jsonl", encoding="utf-8").read() if "-o" in command else done.stdout


@pytest.mark.parametrize("option", SIDE_FILES)
def test_a_byte_order_mark_changes_nothing_and_other_files_are_refused_by_name(prefold, tmp_path, option):
    text, command = SIDE_FILES[option]
    suffix = ".jsonl" if option == "examples" else ".txt"
    (tmp_path / "in.jsonl").write_text('{"text": "a fine day"}\n')
    for name, data in {
        "plain": text.encode(),
        "marked": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        "wide": text.encode("utf-16"),
        "empty": b"",
    }.items():
        (tmp_path / f"{name}{suffix}").write_bytes(data)
    want = read(prefold, command, f"plain{suffix}")
    assert read(prefold, command, f"marked{suffix}") == want
    for name, says in (("wide", "is UTF-16; convert it"), ("empty", "")):
        done = prefold(*(part.replace("F", f"{name}{suffix}") if part in ("F", "@F") else part for part in command))
        assert done.exit_code == 1 and f"prefold: {name}{suffix} {says}" in done.stderr, done.output


def test_a_servers_files_are_read_by_the_same_reader(prefold, tmp_path):
    for name, data, says in (
        ("marked", b"\xef\xbb\xbfport = 100000\n", "port"),
        ("wide", "port = 1\n".encode("utf-16-le"), "wide.toml is UTF-16"),
        ("empty", b"", "empty.toml is empty"),
    ):
        (tmp_path / f"{name}.toml").write_bytes(data)
        done = prefold("serve", "--config", f"{name}.toml")
        assert done.exit_code in (1, 2) and says in done.output, done.output
    for name, says in (("wide", "wide.toml is UTF-16"), ("empty", "empty.toml is empty")):
        done = prefold("serve", "--api-keys", f"{name}.toml", "--port", "0")
        assert done.exit_code == 1 and says in done.output, done.output
