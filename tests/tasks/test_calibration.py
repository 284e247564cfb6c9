"""Calibration of decisions: the temperature is that which made the answers, the figures are their definitions, and a
file is applied only to what it was fitted to."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM, Calibration, InputError, JobError
from prefold.tasks import make_task
from prefold.tasks.calibration import (
    BINS,
    BOUNDS,
    LEAST_ROWS,
    calibration_error,
    figures,
    fit_temperature,
    in_fit_half,
    judge,
    log_of,
    reliability,
    threshold_for,
)
from prefold.tasks.classify import softmax
from prefold.tasks.questions import read_questions

QUESTIONS = {
    "refund": {"type": "noul", "instructions": "money back?"},
    "tone": {"type": "choice", "criteria": {"calm": None, "angry": "loud", "sad": ""}},
    "urgency": {"type": "score", "criteria": ["can wait", "soon", "today"]},
}


def answered(temperature, rows=6000, options=4, seed=3):
    """Probabilities that this temperature would make true, and answers drawn from the true ones."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(rows, options)) * 2
    true = softmax(logits)
    gold = (draw.random((rows, 1)) > true.cumsum(axis=1)).sum(axis=1)
    return softmax(logits * temperature), gold, true


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    (path / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}, "temperature": {"choice": 0.5}}))
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_that_made_the_answers_is_found(temperature):
    p, gold, true = answered(temperature)
    assert fit_temperature(np.log(p), gold) == pytest.approx(temperature, rel=0.06)
    (question,), _ = read_questions({"q": {"type": "choice", "criteria": dict.fromkeys("abcd")}})
    found = judge(question, range(1, len(gold) + 1), p, gold, 0.9)
    before, after = found.check.before, found.check.after
    chosen = in_fit_half(range(1, len(gold) + 1))
    assert found.temperature == fit_temperature(np.log(p[chosen]), gold[chosen]) == pytest.approx(temperature, rel=0.1)
    assert after.calibration_error < 0.03 and (temperature == 1 or before.calibration_error > 0.08)
    assert after.log_loss == pytest.approx(figures(true, gold).log_loss, abs=0.03) and before.accuracy == after.accuracy
    assert found.fit.before.rows + found.check.before.rows == found.whole.rows == 6000
    # The threshold keeps its word on rows that it was not chosen by.
    share, decided = found.check.right / found.check.decided, found.check.decided / found.check.before.rows
    assert 0.87 < share < 0.94 and 0.2 < decided < 0.9


def test_the_temperature_is_the_minimum_of_the_log_loss():
    p, gold, _ = answered(1.7, rows=200)
    found = fit_temperature(np.log(p), gold)

    def loss(t):
        return figures(softmax(np.log(p) / t), gold).log_loss

    assert loss(found) <= min(loss(found * 1.001), loss(found / 1.001), loss(1.0))


def test_rows_that_are_all_right_or_certain_have_a_temperature():
    p = np.array([[0.9, 0.1], [0.3, 0.7]] * 5)
    assert fit_temperature(np.log(p), p.argmax(axis=1)) == pytest.approx(BOUNDS[0])
    assert fit_temperature(np.log(p), p.argmin(axis=1)) == pytest.approx(BOUNDS[1])
    certain = np.array([[1.0, 0.0], [0.0, 1.0]] * 5)
    assert np.isfinite(log_of(certain)).all() and fit_temperature(log_of(certain), certain.argmin(axis=1)) > 1
    assert np.isfinite(figures(certain, certain.argmin(axis=1)).log_loss)


def test_figures_are_their_definitions():
    p, gold, _ = answered(2.0, rows=300, options=3)
    found = figures(p, gold, is_score=True)
    top, right = p.max(axis=1), p.argmax(axis=1) == gold
    error = 0.0
    for i in range(BINS):
        inside = (top > i / BINS) & (top <= (i + 1) / BINS)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - top[inside].mean())
    assert found.calibration_error == pytest.approx(error) == calibration_error(top, right)
    assert found.log_loss == pytest.approx(-np.mean([np.log(row[g]) for row, g in zip(p, gold, strict=True)]))
    assert found.mean_error == pytest.approx(
        np.mean([abs(row @ [0, 1, 2] - g) for row, g in zip(p, gold, strict=True)])
    )
    assert figures(p, gold).mean_error is None and sum(part.rows for part in reliability(top, right)) == 300


def test_a_bin_holds_its_upper_edge():
    (edge,) = [i for i, part in enumerate(reliability(np.array([0.2]), np.array([True]), 5)) if part.rows]
    assert edge == 0 and reliability(np.array([1.0]), np.array([False]))[-1].rows == 1


@pytest.mark.parametrize(
    ("confidence", "right", "precision", "threshold"),
    [
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1], 0.75, 0.0),  # all rows reach it
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0], 0.95, 0.75),
        ([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0], 0.66, 0.65),  # the largest part, not the first
        ([0.9, 0.8], [0, 0], 0.5, None),
        ([0.9, 0.9, 0.5], [1, 0, 0], 0.6, None),  # equal rows are on one side
    ],
)
def test_the_threshold_is_the_least_that_reaches_the_precision(confidence, right, precision, threshold):
    found = threshold_for(np.array(confidence), np.array(right, bool), precision)
    assert found == (threshold if threshold is None else pytest.approx(threshold))


def test_halves_do_not_depend_on_the_other_rows():
    whole = in_fit_half(range(1, 2001))
    assert 0.45 < whole.mean() < 0.55 and whole[[4, 9]].tolist() == in_fit_half([5, 10]).tolist()
    (question,), _ = read_questions({"q": {"type": "noul"}})
    few = judge(question, range(1, LEAST_ROWS), np.full((LEAST_ROWS - 1, 2), 0.5), np.zeros(LEAST_ROWS - 1, int), 0.95)
    assert few.temperature is None and few.whole.rows == LEAST_ROWS - 1


@pytest.mark.parametrize(
    ("question", "places"),
    [
        ({"type": "noul"}, {True: 0, "no": 1, "Yes": 0, 0: 1, "FALSE": 1}),
        ({"type": "choice", "criteria": {"a": None, "7": None}}, {"a": 0, "7": 1, 7: 1}),
        ({"type": "choice", "choices": [{"value": True}, {"value": "true"}]}, {True: 0, "true": 1}),
        ({"type": "score", "criteria": ["low", "high"]}, {0: 0, "1": 1, 1.0: 1, "high": 1}),
        ({"type": "score", "criteria": ["1", "2", "3"]}, {1: 0, "3": 2, 2.0: 1}),
        ({"type": "score", "criteria": ["-1", "0.5"]}, {-1: 0, 0.5: 1}),
    ],
)
def test_true_answers_are_options(question, places):
    (read,), _ = read_questions({"q": question})
    assert {value: read.place_of(value, "c") for value in places} == places
    for wrong in ("other", 9, [1], None, 0.25):
        with pytest.raises(InputError, match=r"'c' is .*not an option of the question 'q'; give one of"):
            read.place_of(wrong, "c")


def test_a_level_has_no_number_if_texts_are_numbers():
    (read,), _ = read_questions({"q": {"type": "score", "criteria": ["1", "2", "3"]}})
    with pytest.raises(InputError, match=r"is 0, which is not an option.*one of 1, 2, 3"):
        read.place_of(0, "c")
    (read,), _ = read_questions({"q": {"type": "score", "criteria": ["same", "same", "other"]}})
    with pytest.raises(InputError, match=r"is 'same', which is not an option"):
        read.place_of("same", "c")


def texts(count):
    return [f"{word} {i} {word * 2}" for i, word in enumerate(("refund", "yes", "no", "the abc", "q") * (count // 5))]


def test_llm_calibrates_and_decides(llm):
    states = texts(60)
    plain = llm.decide(states, QUESTIONS)
    likely = [decision["tone"].value for decision in plain]
    others = {"calm": "angry", "angry": "sad", "sad": "calm"}
    gold = {"tone": [one if i % 4 else others[one] for i, one in enumerate(likely)], "refund": [None] * 59 + [True]}
    with pytest.warns(UserWarning, match="refund"):
        made = llm.calibrate(states, QUESTIONS, gold, precision=0.6)
    assert [*made.questions] == ["tone"] and made.precision == 0.6
    own = made.questions["tone"]
    assert own.temperature != 1 and own.figures["check"]["before"]["rows"] == 60 - int(in_fit_half(range(1, 61)).sum())
    again = llm.decide(states, QUESTIONS, calibration=made)
    for before, after in zip(plain, again, strict=True):
        logs = np.log([*before["tone"].probabilities.values()])
        np.testing.assert_allclose([*after["tone"].probabilities.values()], softmax(logs / own.temperature), atol=1e-6)
        assert after["refund"] == before["refund"] and after["refund"].review is None
        assert after["tone"].review == (max(after["tone"].probabilities.values()) < own.threshold)
    assert llm.decide(states, QUESTIONS, calibration=json.loads(json.dumps(made.to_dict()))) == again
    sure = max(again[0]["refund"].probabilities.values()) - 1e-5  # alone it may differ by rounding
    one, other = (llm.decide(states[0], QUESTIONS, calibration=made, review_below=p) for p in (sure, (1 + sure) / 2))
    assert (one["refund"].review, other["refund"].review) == (False, True)
    assert None not in [answer.review for answer in one.values()]
    never = replace(made, questions={"tone": replace(own, threshold=None)})
    assert all(decision["tone"].review for decision in llm.decide(states, QUESTIONS, calibration=never))
    assert llm.decide(states[0], QUESTIONS, calibration=never, review_below=0)["tone"].review is False
    # What is fitted to calibrated answers is the whole correction.
    twice = llm.calibrate(states, QUESTIONS, {"tone": gold["tone"]}, calibration=made)
    assert twice.questions["tone"].temperature == pytest.approx(own.temperature, rel=1e-4)


def test_a_calibration_is_of_a_model_a_prompt_and_questions(llm, folder, tmp_path):
    states = texts(60)
    labels = [decision["tone"].value for decision in llm.decide(states, QUESTIONS)]
    made = llm.calibrate(states, QUESTIONS, {"tone": labels})
    made.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json").to_dict() == json.loads((tmp_path / "c.json").read_text())
    tone = QUESTIONS["tone"]
    for questions, options, says in (
        (
            {"tone": {**tone, "criteria": {"calm": None, "angry": None}}},
            {},
            "'tone' was made with the options calm, angry, sad",
        ),
        ({"tone": {**tone, "instructions": "which?"}}, {}, "was made with other instructions"),
        ({"refund": QUESTIONS["refund"]}, {}, "contains the question 'tone', but the questions are 'refund'"),
        ({"tone": tone}, {"first": "question"}, "made with another prompt"),
        ({"tone": tone}, {"temperature": {"choice": 3.0}}, "made with another prompt"),
        ({"tone": tone}, {"prompt_style": "vllm"}, "made with another prompt"),
    ):
        with pytest.raises(InputError, match=says):
            llm.decide(states[:1], questions, calibration=Calibration.load(tmp_path / "c.json"), **options)
    other = tiny_checkpoint(tmp_path / "other", max_position_embeddings=1024, seed=9)
    (other / "decision.json").write_text((folder / "decision.json").read_text())
    with LLM(str(other), dtype="float32") as llm_of_other, pytest.raises(InputError, match="made with another model"):
        llm_of_other.decide(states[0], {"tone": tone}, calibration=made)
    with pytest.raises(InputError, match="made with the adapter 'a'"):
        llm.decide(states[0], {"tone": tone}, calibration=replace(made, adapter="a"))
    task = make_task("decide", llm.checkpoint, llm.tokenizer, adapters=("a",), calibration=made)
    items = [{"state": "s", "questions": {"tone": question}} for question in (tone, {**tone, "instructions": "?"})]
    good, other, adapted = task.prepare([*items, {**items[0], "adapter": "a"}])
    assert good.requests and "made with other instructions" in str(other)
    assert "was not made with the adapter 'a'" in str(adapted)


def test_true_answers_that_are_wrong_are_named(llm):
    states = texts(10)
    for gold, says in (
        ({"tone": ["calm"] * 9 + ["glad"]}, r"gold\['tone'\]\[9\]"),
        ({"tune": ["calm"] * 10}, "there is no question 'tune'; did you mean tone"),
        ({"tone": ["calm"]}, "1 true answers for 10 states"),
        (["calm"] * 10, "is of type list"),
        ({"tone": ["calm"] * 10}, "enough true answers"),
    ):
        with pytest.raises(InputError, match=says):
            llm.calibrate(states, QUESTIONS, gold)


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    good = {
        "prefold_calibration": 1, "model": "m", "model_digest": "d", "prompt": "p",
        "questions": {"q": {"digest": "d", "type": "noul", "options": ["true", "false"], "temperature": 2}},
    }  # fmt: skip
    assert Calibration.of(good).questions["q"].temperature == 2.0
    own = good["questions"]["q"]
    for bad, says in (
        ({"q": {**own, "temperature": 0}}, r"questions\['q'\].temperature is 0"),
        ({"q": {**own, "temperature": True}}, "temperature is True"),
        ({"q": {**own, "threshold": 1.5}}, "threshold is 1.5"),
        ({"q": {**own, "options": [1, 2]}}, "options is not a list"),
        ({"q": {**own, "treshold": 0.5}}, "treshold is unknown"),
        ({"q": {"digest": "d"}}, "is missing"),
        ([], "questions is of type list"),
    ):
        with pytest.raises(InputError, match=says):
            Calibration.of({**good, "questions": bad})
    with pytest.raises(InputError, match="is not a calibration"):
        Calibration.of({"a": 1})
    with pytest.raises(InputError, match="has the version 7"):
        Calibration.of({**good, "prefold_calibration": 7})
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(JobError, match=r"c\.json is not valid JSON"):
        Calibration.load(tmp_path / "c.json")
