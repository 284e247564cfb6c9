"""Bodies of /v1/decisions and /v1/systemone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prefold import InputError
from prefold.tasks.questions import read_questions
from prefold.tasks.results import Decision
from prefold.wire.decisions import Decisions, SystemOne, state_of

CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "42"}]}
QUESTIONS = [
    {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it?"}], "name": "q"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "true"}, {"value": True}], "name": "q"},
    {
        "type": "score",
        "instructions": "How?",
        "levels": [{"label": "low", "description": "not much"}, {"label": "high"}],
    },
]


def decided(questions):
    """A Decision in which the first option of each question has the probability 0.75."""
    good, errors = read_questions(questions)
    rest = {len(one.options): 0.25 / (len(one.options) - 1) for one in good}
    return Decision(
        {
            one.name: one.answer(np.array([0.75] + [rest[len(one.options)]] * (len(one.options) - 1)), 0.9, True)
            for one in good
        },
        errors,
        num_tokens=10,
        cached_tokens=4,
    )


def test_answers_of_openai_come_in_the_order_of_the_questions():
    (item,), meta = Decisions.of({"model": "m", "input": "text", "questions": QUESTIONS}).read({})
    assert item["state"] == "text" and [*item["questions"]] == ["q", "questions[1]", "questions[2]"]
    assert item["questions"]["q"]["instructions"] == "Is it?"
    body = Decisions.response(json.loads(json.dumps(meta)), [decided(item["questions"])], model="m", id="1")
    predicate, choice, score = body["answers"]
    assert predicate == {"type": "predicate", "probability": 0.75, "name": "q"}
    assert choice["choice"] == "true" and choice["probabilities"][1] == {"value": True, "probability": 0.25}
    assert (choice["name"], score["name"]) == ("q", None)
    assert score["probabilities"][0] == {"value": 0, "label": "low", "probability": 0.75} and score["score"] == 0.25
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}


def test_answers_of_system_one():
    questions = {"a": {"type": "noul"}, "b": {"type": "score", "criteria": ["x", "y", "z"]}}
    (item,), meta = SystemOne.of({"state": {"k": 1}, "questions": questions, "assets": {}}).read({})
    body = SystemOne.response(meta, [decided(item["questions"])], model="m", id="1")
    diagnostics = {"label_mass": 0.9, "argmax_is_label": True}
    assert body["answers"]["a"] == {"type": "noul", "noul": 0.75}
    assert body["diagnostics"] == {"a": diagnostics, "b": diagnostics}
    assert body["answers"]["b"]["legend"] == {"0": "x", "1": "y", "2": "z"} and body["answers"]["b"]["score"] == 0.375


def test_a_question_that_cannot_be_answered_is_the_error_of_the_request():
    wrong = decided({"a": {"type": "noul"}, "b": {"type": "choice", "criteria": {"x": None}}})
    with pytest.raises(InputError, match="'b' has 1 option"):
        SystemOne.response({}, [wrong], model="m", id="1")


def test_the_state_of_messages_and_calls():
    user = {
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}, {"type": "input_json", "data": {"a": "é"}}],
    }
    assert state_of([user]) == ('hi\n{"a": "é"}', {})
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]}
    text = 'user: hi\n{"a": "é"}\n\nassistant: let me see\n\nassistant: calls look({"a": 1})\n\nlook returns: 42'
    assert state_of([user, said, CALL, OUTPUT]) == (text, {})


def test_images_of_messages_stand_where_their_parts_are():
    data, address = "data:image/png;base64,AAAA", "https://example.org/a.png"
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": data, "detail": "low"},
        {"type": "input_text", "text": "and"},
        {"type": "input_text", "text": "\U000f0002"},  # the letter that names begin with
        {"type": "input_image", "file_id": "file-1"},
    ]
    asked = [{"type": "predicate", "instructions": [{"type": "image_url", "image_url": {"url": address}}]}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]
    (item,), _ = Decisions.of({"input": chat, "questions": asked}).read({})
    # Instructions of questions are read first.
    third, first, second = item["images"]
    assert list(item["images"].values()) == [{"url": address}, data, "file-1"]
    assert item["state"] == f"user: see{first}and\n\U000f0002{second}\n\nassistant: ok"
    assert item["questions"]["questions[0]"]["instructions"] == third
    assert not any(name in json.dumps(chat, ensure_ascii=False) for name in item["images"])


def test_fields_of_system_one():
    questions = {"a": {"type": "noul"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    body = {"state": None, "questions": questions, "instructions": "Be strict.", "cache_salt": "s", "priority": 3,
            "images": ["data:image/png;base64,BB", image, {"url": "file-1"}], "chat_template_kwargs": {"a": 1},
            "audio": [], "videos": None, "request_id": "x"}  # fmt: skip
    with pytest.raises(InputError, match="'state' is missing"):
        SystemOne.of(body)
    (item,), _ = SystemOne.of(body | {"state": ""}).read({})
    assert item == {
        "state": "", "questions": questions, "instructions": "Be strict.", "salt": "s",
        "chat_template_kwargs": {"a": 1},
        "images": ["data:image/png;base64,BB", {"url": "data:image/png;base64,AA"}, {"url": "file-1"}],
    }  # fmt: skip
    asset = {"type": "image", "format": "jpeg", "data_base64": "CC"}
    (item,), _ = SystemOne.of({"state": "x", "questions": questions, "assets": {"i": asset}}).read({})
    assert item["images"] == {"i": "data:image/jpeg;base64,CC"}
    wrong = [
        ({"assets": []}, None), ({"images": "x"}, "images"),
        ({"images": [3]}, "images[0]"), ({"assets": [3]}, "assets"), ({"images": {}}, None),
        ({"assets": {"i": {"type": "audio"}}}, "assets['i']"), ({"assets": {"i": asset}, "images": ["x"]}, "assets"),
        ({"audio": ["x"]}, "audio"), ({"videos": ["x"]}, "videos"), ({"thinking": True}, "thinking"),
    ]  # fmt: skip
    for fields, field in wrong:
        try:
            SystemOne.of({"state": "x", "questions": questions} | fields).read({})
        except InputError as error:
            assert error.field == field
        else:
            assert field is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": [], "questions": QUESTIONS}, "input"),
        ({"input": [OUTPUT], "questions": QUESTIONS}, "input[0].call_id"),
        ({"input": [{"role": "tool", "content": "x"}], "questions": QUESTIONS}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}], "questions": QUESTIONS},
            "input[0].content[0]",
        ),
        ({"input": "x", "questions": []}, "questions"),
        ({"input": "x", "questions": QUESTIONS[:1] * 401}, "questions"),
        ({"input": "x", "questions": ["q"]}, "questions"),
        ({"questions": QUESTIONS}, "input"),
    ],
)
def test_bodies_that_are_wrong(body, field):
    with pytest.raises(InputError) as caught:
        Decisions.of(body).read({})
    assert caught.value.field == field
