"""What is too long is cut where it is longest, and what is around it stays."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_inputs import FakeCheckpoint, chatty, tokenizer

from prefold.errors import InputError
from prefold.tasks import make_task
from prefold.tasks.base import columns_of, cut_columns
from prefold.text import FilledTemplate
from prefold.text.fields import Template

TOK = tokenizer()
WORDS = st.text(st.sampled_from("yesno ab\né🙂"), max_size=60)


def decoded(made, item, part=0):
    (work,) = made.prepare([item])
    if isinstance(work, InputError):
        raise work
    return made.inputs.tokenizer.decode(work.requests[part].tokens), work.requests[part].tokens.size


def test_a_text_of_a_template_knows_its_columns():
    text = Template("Sum {a}: {b}!", "--prompt").render({"a": "xx", "b": 12})
    assert text == "Sum xx: 12!" and text.columns == ["xx", "12"] and text.refilled(["y", ""]) == "Sum y: !"
    assert FilledTemplate.of("Sum {a}: {b}!", a="xx", b="12").parts == text.parts
    assert pickle.loads(pickle.dumps(text)).parts == text.parts
    assert not isinstance(Template("a", "--prompt").render({"a": "xx"}), FilledTemplate)
    for columns in ({}, {"a": "x", "b": "y"}):
        with pytest.raises(InputError, match="column"):
            FilledTemplate.of("{a}", **columns)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.integers(1, 120), st.booleans())
def test_cutting_is_exact_and_keeps_the_frame(parts, room, left):
    text = FilledTemplate(part for literal, column in parts for part in ((literal, False), (column, True)))
    columns, filled = columns_of(text)
    whole = TOK.encode(text, special=False)
    if whole.size <= room:
        return
    cut = cut_columns(
        TOK, columns, lambda values: (values, TOK.encode(filled(values), special=False)), lambda m: m[1].size, room,
        left=left,
    )  # fmt: skip
    frame = TOK.encode(filled([""] * len(columns)), special=False).size
    if cut is None:
        assert frame >= room - 4  # a character of several bytes may not fit either
        return
    values, ids = cut
    assert ids.size <= room and ids.size >= room - 4
    for value, column in zip(values, columns, strict=True):
        assert column.endswith(value) if left else column.startswith(value)
    lengths = [len(TOK.spans(value)) for value in values]
    untouched = [n for n, value, column in zip(lengths, values, columns, strict=True) if value == column]
    shortened = [n for n, value, column in zip(lengths, values, columns, strict=True) if value != column]
    assert not shortened or not untouched or max(untouched) <= min(shortened) + 4


LONG = "b" * 700
PROMPT = FilledTemplate.of("Summarise {title}: {body} In short:", title="yes", body=LONG)


def test_generation_keeps_the_instruction():
    made = make_task("generate", FakeCheckpoint(), chatty(), truncate=True, max_tokens=12)
    text, size = decoded(made, {"prompt": PROMPT})
    assert text.startswith("Summarise yes: bbb") and text.endswith("b In short:") and size == 500
    text, size = decoded(made, [{"role": "user", "content": PROMPT}])
    assert text.startswith("<|im_start|>user\nSummarise yes: bbb") and size == 500
    assert text.endswith("b In short:<|im_end|>\n<|im_start|>assistant\n")
    system = {"role": "system", "content": "Answer. " * 20}
    chat = [system, {"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b" * 40}]
    text, size = decoded(made, [*chat, {"role": "user", "content": "no" * 300}])
    assert size == 500 and system["content"] in text and "b" * 40 in text
    assert abs(text.count("a" * 100) - 1) <= 1 and text.count("no") < 300
    # A prompt that is one column goes on where it ends.
    text, size = decoded(made, {"prompt": "Begin " + LONG + " end"})
    assert size == 500 and text.endswith("bb end") and "Begin" not in text


def test_the_whole_is_cut_where_that_is_asked_for():
    for side, kept in (("left", "b In short:"), ("right", "Summarise yes: b")):
        made = make_task("generate", FakeCheckpoint(), chatty(), truncate=side, max_tokens=12)
        text, size = decoded(made, {"prompt": PROMPT})
        assert size == 500 and kept in text and text != PROMPT
        assert ("Summarise" in text) == (side == "right") and ("In short" in text) == (side == "left")


def test_a_frame_that_fills_the_context_is_an_error():
    made = make_task("generate", FakeCheckpoint(), chatty(), truncate=True, max_tokens=12)
    for item in (
        {"prompt": None, "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "yes"}]},
    ):
        with pytest.raises(InputError, match="shorten the text around its columns"):
            decoded(made, item)


def test_the_other_tasks_keep_their_frames():
    embed = make_task("embed", FakeCheckpoint(), tokenizer("$A <|endoftext|>"), truncate=True, prompt="query: ")
    text, size = decoded(embed, PROMPT)
    assert text.startswith("query: Summarise yes: b") and text.endswith("In short:<|endoftext|>") and size == 512
    left = make_task("embed", FakeCheckpoint(), tokenizer(truncation_side="left"), truncate=True, prompt="query: ")
    text, size = decoded(left, "Begin " + LONG + "end")
    assert text.startswith("query: bb") and text.endswith("end") and size == 512
    classify = make_task("classify", FakeCheckpoint(), TOK, truncate=True, labels=["yes", "no"], instructions="Say.")
    text, size = decoded(classify, PROMPT)
    assert text.rstrip().endswith("In short:\nLabel:") and "Say.\n\nText: Summarise yes: bbb" in text and size == 512
    score = make_task("score", FakeCheckpoint(), TOK, truncate=True)
    text, size = decoded(score, {"prompt": PROMPT, "continuation": " yes no"})
    assert text.startswith("Summarise yes: bbb") and "b In short: yes" in text and size == 512
    rerank = make_task("rerank", FakeCheckpoint(), TOK, truncate=True, template="{query}|{document}|")
    document = FilledTemplate.of("{text} (by {author})", text=LONG, author="ab")
    text, size = decoded(rerank, {"query": "no", "document": document})
    assert text.startswith("no|bbb") and text.endswith("b (by ab)|") and size == 512


@pytest.mark.parametrize(("side", "begins", "ends"), [("left", "b", "Z"), ("right", "A", "b")])
def test_sides_of_the_other_tasks(side, begins, ends):
    text = "A" + LONG + "Z"
    embed = make_task("embed", FakeCheckpoint(), TOK, truncate=side)
    rerank = make_task("rerank", FakeCheckpoint(), TOK, truncate=side, template="{query}|{document}|")
    score = make_task("score", FakeCheckpoint(), TOK, truncate=side)
    classify = make_task(
        "classify", FakeCheckpoint(), TOK, truncate=side, labels=["yes", "no"], template="{text}|{label}"
    )
    for made, item, frame in (
        (embed, text, ("", "")),
        (rerank, {"query": "no", "document": text}, ("no|", "|")),
        (score, {"prompt": text, "continuation": "yes"}, ("", "")),
        (classify, text, ("", "|")),
    ):
        found, size = decoded(made, item)
        assert size == 512
        inner = found.removeprefix(frame[0]).removesuffix(frame[1])
        assert (inner[0], inner[-1]) == (begins, ends), made.name
