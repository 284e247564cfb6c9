"""The columns of decisions in tables: each number stands under its own name."""

from __future__ import annotations

import numpy as np
import pytest

from prefold.jobs.tables import Columns, DecisionColumns
from prefold.tasks.questions import read_questions
from prefold.tasks.results import Decision
from prefold.text.fields import Template

QUESTIONS = [
    {"type": "noul", "name": "refund"},
    {"type": "choice", "name": "record", "choices": [{"value": "a"}, {"value": True}, {"value": False}]},
    {"type": "score", "name": "title", "criteria": ["low", "middle", "high"]},
    {"type": "choice", "name": "wrong", "choices": [{"value": "a"}]},
]
PROBABILITIES = {"refund": [0.3, 0.7], "record": [0.2, 0.5, 0.3], "title": [0.1, 0.3, 0.6]}
MASS = {"refund": 0.91, "record": 0.82, "title": 0.73}


def line(**options):
    good, errors = read_questions(QUESTIONS)
    answers = {one.name: one.answer(np.array(PROBABILITIES[one.name]), MASS[one.name], True) for one in good}
    decision = Decision(answers, errors, num_tokens=12)
    columns = Columns(state=Template("text", "--state"), keep={"title": "title"})
    return DecisionColumns("decide", columns, **options).line(3, {"keep": {"title": "T"}}, [decision])


def test_the_usual_columns():
    found = line()
    error = found.pop("wrong_error")
    assert "'wrong' has 1 option" in error and found == {
        "record": 3, "title": "T", "num_tokens": 12,
        "refund": False, "refund_p": 0.7,
        # A name that the line has, or repeats, is not taken by a question.
        "answer_record": True, "record_p": 0.5,
        "answer_title": pytest.approx(1.5), "title_confidence": pytest.approx(1 - (0.3 + 0.2) / (2 / 3)),
    }  # fmt: skip


def test_all_columns():
    usual, found = line(), line(every=True)
    more = {name: value for name, value in found.items() if name not in usual}
    assert more == {
        "refund_confidence": pytest.approx(0.4), "refund_p_true": 0.3, "refund_p_false": 0.7,
        "refund_label_mass": 0.91,
        "record_confidence": pytest.approx(0.25), "record_p_a": 0.2, "record_p_true": 0.5, "record_p_false": 0.3,
        "record_label_mass": 0.82,
        "title_p_0": 0.1, "title_p_1": 0.3, "title_p_2": 0.6, "title_label_mass": 0.73,
    }  # fmt: skip
    assert "answers" not in found and line(keeps=True)["answers"]["refund"]["label_mass"] == 0.91
