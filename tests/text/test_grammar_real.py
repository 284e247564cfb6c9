"""What a small model answers where it must write JSON: it ends, with no blanks but after commas and colons."""

from __future__ import annotations

import json
import re

import pytest

from prefold import LLM

pytestmark = pytest.mark.slow

CLOSED = {"type": "object", "additionalProperties": False}
POINT = CLOSED | {"properties": {"x": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["x", "ok"]}
SCHEMAS = {
    "integer": CLOSED | {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 9}}, "required": ["a"]},
    "person": CLOSED
    | {
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
    },
    "list": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    "nested": CLOSED
    | {"properties": {"items": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3}}, "required": ["items"]},
    "enum": CLOSED | {"properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]},
}


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", dtype="float32")


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("question", ["Answer with an example in JSON.", "Write pretty JSON, with many blank lines."])
def test_json_is_compact_and_ends(llm, name, question):
    answer = llm.chat([{"role": "user", "content": question}], grammar={"json_schema": SCHEMAS[name]}, max_tokens=100)
    assert answer.finish_reason == "stop"
    json.loads(answer.text)
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', answer.text)
    assert re.fullmatch(r"(\S|(?<=[,:]) )*", outside)


def test_white_space_may_be_free(llm):
    options = {"grammar": {"json_schema": SCHEMAS["person"]}, "max_tokens": 100}
    question = [{"role": "user", "content": "Answer with an example in JSON."}]
    free, compact = llm.chat(question, json_space="free", **options), llm.chat(question, **options)
    assert "\n" in free.text and len(compact.tokens) < len(free.tokens)
