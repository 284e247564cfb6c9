"""Templates and column paths: the text they make, and the errors they name."""

from __future__ import annotations

import pytest

from prefold.errors import InputError, JobError
from prefold.spec.files import read_argument
from prefold.text.fields import Template, as_texts, lookup

RECORD = {
    "q": "why",
    "n": 3,
    "none": None,
    "flag": True,
    "docs": ["a", "b"],
    "deep": {"list": [{"text": "x"}, {"text": "y"}]},
    "a.b": "dot",
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {q}\nA:", "Q: why\nA:"),
        ("{q}{q} {n}", "whywhy 3"),
        ("{{q}} {q}", "{q} why"),
        ("{deep.list.1.text}{deep[list][0][text]}", "yx"),
        ("q", "why"),
        ("a.b", "dot"),
        ("{a.b}", "dot"),
    ],
)
def test_templates_render(template, text):
    assert Template(template, "--prompt").render(RECORD) == text


@pytest.mark.parametrize(
    ("template", "field", "code"),
    [
        ("{other}", "other", "missing_field"),
        ("{deep.gone}", "deep.gone", "missing_field"),
        ("{docs.7}", "docs.7", "missing_field"),
        ("{none}", "none", "null"),
        ("{flag}", "flag", "wrong_type"),
        ("{docs}", "docs", "wrong_type"),
        ("deep", "deep", "wrong_type"),
    ],
)
def test_bad_values_name_the_field_and_a_remedy(template, field, code):
    with pytest.raises(InputError) as error:
        Template(template, "--prompt").render(RECORD)
    assert (error.value.field, error.value.code) == (field, code)
    assert error.value.remedy and field in str(error.value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("a\ud800", "decode the text again"), (b"a\xff".decode("utf-8", "surrogateescape"), "re-encode it as UTF-8")],
    ids=["half of a pair", "a byte of a file"],
)
def test_lone_surrogates_are_not_text(text, remedy):
    with pytest.raises(InputError) as error:
        Template("{q}", "--prompt").render({"q": text})
    assert error.value.code == "invalid_utf8" and remedy in error.value.remedy


def test_lists_of_texts():
    assert Template("docs", "--document").render_many(RECORD) == ["a", "b"]
    assert Template("deep.list", "--document").render_many(RECORD) == ["x", "y"]
    assert Template("deep.list.text", "--document").render_many(RECORD) == ["x", "y"]
    assert Template("D: {q}", "--document").render_many(RECORD) == "D: why"
    with pytest.raises(InputError, match=r"docs\[1\]"):
        as_texts(["a", None], "docs")
    with pytest.raises(InputError) as error:
        as_texts([], "docs")
    assert error.value.code == "empty"


@pytest.mark.parametrize("template", ["{", "{}", "{q!r}", "{q:>5}", "a } b"])
def test_what_is_no_template_is_refused(template):
    with pytest.raises(JobError, match="--prompt"):
        Template(template, "--prompt")


def test_paths_name_the_columns_used():
    assert Template("{q} {deep.list} {q}", "--prompt").paths == ["q", "deep.list"]
    assert lookup(RECORD, "deep.list.0.text") == "x"


def test_at_file_stands_for_its_text(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Q: {q}\n\n")
    assert read_argument(f"@{path}") == "Q: {q}\n"
    assert read_argument("plain") == "plain"
    with pytest.raises(JobError, match="cannot read"):
        read_argument("@/no/such/file")
