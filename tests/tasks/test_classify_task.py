"""Classification: prompts and labels as scored pairs, normalisation and calibration by hand, heads."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from task_inputs import FakeCheckpoint, ids, result, tokenizer

from prefold.errors import InputError
from prefold.spec.requests import Readout
from prefold.tasks import ClassifyHeadTask, make_task

TOK = tokenizer()
EXAMPLES = [("good {x}", "yes"), {"text": "bad", "label": "no"}]


def classify(tok=TOK, labels=("yes", "no"), config=None, **options):
    return make_task("classify", FakeCheckpoint(config), tok, labels=labels, **options)


def pairs(work) -> list[tuple[list[int], list[int]]]:
    return [(request.tokens.tolist(), request.targets.tolist()) for request in work.requests]


@pytest.mark.parametrize("post", [None, "<|im_start|> $A"])
@pytest.mark.parametrize("template", ["Text: {text}\nLabel: {label}", "{text} {label}", "{text}\nso {label}"])
def test_requests_are_those_of_scoring_each_label(post, template):
    tok = tokenizer(post)
    labels = {"Y": "yes", "N": "no", "both": "yes and no"}
    task = classify(tok, labels, instructions="Say.", examples=[("a", "Y"), ("b", "both")], template=template)
    score = make_task("score", FakeCheckpoint(), tok)
    assert task.readout == score.readout
    texts = ["nice", "y", "{label} {text}", "two\nlines"]
    for text, work in zip(texts, task.prepare(texts), strict=True):
        shots = [template.replace("{text}", t).replace("{label}", labels[n]) for t, n in (("a", "Y"), ("b", "both"))]
        left, _, _ = template.partition("{label}")
        prompt = "\n\n".join(["Say.", *shots, left.replace("{text}", text)])
        expected = score.prepare([(prompt, label) for label in labels.values()])
        assert pairs(work) == [pair for one in expected for pair in pairs(one)]
        assert json.loads(json.dumps(work.note)) == work.note


def test_probabilities_are_the_softmax_of_summed_log_likelihoods():
    task = classify(labels=["yes", "no", "yes no"])
    (work,) = task.prepare(["x"])
    out = task.finish(work.note, [result(-1.0), result(-0.5), result(-0.5, -0.75)])
    weights = [math.exp(-1.0), math.exp(-0.5), math.exp(-1.25)]
    assert out.label == "no"
    assert out.logprobs == {"yes": -1.0, "no": -0.5, "yes no": -1.25}
    assert list(out.probabilities.values()) == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
    assert out.num_tokens == sum(request.tokens.size for request in work.requests)
    json.dumps(out.line())


def test_very_small_likelihoods_do_not_underflow():
    task = classify()
    (work,) = task.prepare(["x"])
    out = task.finish(work.note, [result(-2000.0), result(-2001.0)])
    assert out.probabilities["yes"] == pytest.approx(1 / (1 + math.exp(-1)))


@pytest.mark.parametrize(
    ("normalization", "scores"),
    [(None, [-3.0, -3.2]), ("tokens", [-1.0, -3.2]), ("bytes", [-3.0 / 5, -3.2 / 3])],
)
def test_normalization(normalization, scores):
    task = classify(labels={"a": "yés!", "b": "yes"}, normalization=normalization)
    (work,) = task.prepare(["x"])
    out = task.finish(work.note, [result(-1.0, -1.5, -0.5), result(-3.2)])
    weights = np.exp(scores)
    assert list(out.probabilities.values()) == pytest.approx((weights / weights.sum()).tolist(), rel=1e-6)
    assert out.logprobs == {"a": -3.0, "b": pytest.approx(-3.2)}


def test_contextual_calibration():
    task = classify(calibrate=True)
    items = task.calibration_items()
    assert [item.text for item in items] == ["N/A", "", "[MASK]"]
    works = task.prepare(items)
    outputs = []
    for p, work in zip((0.9, 0.8, 0.7), works, strict=True):
        outputs.append(task.finish(work.note, [result(math.log(p)), result(math.log(1 - p))]))
    calibrated = task.with_calibration(outputs)
    (work,) = task.prepare(["x"])
    results = [result(math.log(0.7)), result(math.log(0.3))]
    assert task.finish(work.note, results).label == "yes"
    out = calibrated.finish(work.note, results)
    # W p with W = diag(1 / p_cf): 0.7 / 0.8 against 0.3 / 0.2, scaled to sum to 1.
    a, b = 0.7 / 0.8, 0.3 / 0.2
    assert out.label == "no"
    assert out.probabilities == {
        "yes": pytest.approx(a / (a + b), rel=1e-5),
        "no": pytest.approx(b / (a + b), rel=1e-5),
    }
    assert out.logprobs["yes"] == pytest.approx(math.log(0.7))
    same = task.with_calibration(np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]))
    assert same.finish(work.note, results).probabilities == pytest.approx(out.probabilities, rel=1e-5)
    assert calibrated.calibration_items() == []
    assert len(task.calibration_items()) == 3
    assert classify().calibration_items() == []
    even = task.with_calibration(np.array([0.7, 0.3])).finish(work.note, results)
    assert even.probabilities["yes"] == pytest.approx(0.5, rel=1e-5)
    for bad in ([0.5], [[0.5, 0.5, 0.0]], [math.nan, 1], [-1.0, 2.0]):
        with pytest.raises(InputError, match="calibration"):
            task.with_calibration(np.array(bad))


@pytest.mark.parametrize("post", [None, "<|im_start|> $A"])
def test_token_ids_stand_where_the_text_would(post):
    tok = tokenizer(post)
    task = classify(tok, instructions="Say.", examples=EXAMPLES)
    text = "x" * 30
    as_text, as_ids = task.prepare([text, ids(tok, text)])
    # One token a byte: encoding the parts apart changes nothing here.
    assert pairs(as_text) == pairs(as_ids)
    bare = classify(tok, template="{text} {label}")
    as_text, as_ids = bare.prepare(["xxx", ids(tok, "xxx")])
    assert pairs(as_text) == pairs(as_ids)


def test_too_long_texts():
    task = classify(max_length=60, instructions="Say.")
    size = max(len(tokens) for tokens, _ in pairs(classify(instructions="Say.").prepare(["x"])[0])) - 1
    fits, too_long = task.prepare(["x" * (60 - size), "x" * (61 - size)])
    assert max(len(tokens) for tokens, _ in pairs(fits)) == 60
    assert (too_long.field, too_long.code) == ("text", "too_long")
    cutting = classify(max_length=60, instructions="Say.", truncate=True)
    kept, cut, listed = cutting.prepare(["x" * (60 - size), "x" * 100, ids(TOK, "x" * 100)])
    assert pairs(kept) == pairs(cut) == pairs(listed) == pairs(fits)
    hopeless = classify(max_length=size - 1, instructions="Say.", truncate=True)
    assert hopeless.prepare(["x" * 9])[0].code == "too_long"


@pytest.mark.parametrize(
    ("labels", "field", "message"),
    [
        (["yes"], "labels", "labels is"),
        ([], "labels", "labels is"),
        ("yes", "labels", "labels is"),
        (5, "labels", "labels is"),
        (["yes", "yes"], "labels[1]", "'yes' is given twice"),
        ({"a": "yes", "b": "yes"}, "labels[1]", "text of a label 'yes' is given twice"),
        (["yes", ""], "labels[1]", "a label is empty"),
        (["yes", " \n"], "labels[1]", "a label is empty"),
        ({"a": "yes", "b": ""}, "labels[1]", "empty"),
        (["yes", 5], "labels[1]", "of type int"),
        (["yes", None], "labels[1]", "null"),
        (["yes", "\ud800"], "labels[1]", "surrogate"),
    ],
)
def test_labels_that_cannot_be_told_apart(labels, field, message):
    with pytest.raises(InputError, match=message) as caught:
        classify(labels=labels)
    assert caught.value.field == field


def test_labels_that_encode_alike():
    from tokenizers import normalizers

    tok = tokenizer()
    tok.backend.normalizer = normalizers.Lowercase()
    with pytest.raises(InputError, match="'YES' encodes like 'yes'"):
        classify(tok, labels=["yes", "YES"])
    with pytest.raises(InputError, match="'s' has no tokens of its own"):
        classify(labels=["s", "no"], template="{text} ye{label}")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"normalization": "chars"}, "normalization"),
        ({"template": "{text}"}, "template"),
        ({"instructions": 5}, "instructions"),
        ({"separator": None}, "separator"),
        ({"template": b"x"}, "template"),
        ({"examples": ["ab"]}, "examples[0]"),
        ({"examples": [("a", "yes"), ("a", "maybe")]}, "examples[1].label"),
        ({"examples": [("a", None)]}, "examples[0].label"),
        ({"examples": [{"label": "yes"}]}, "examples[0].text"),
        ({"labels": None}, "labels"),
    ],
)
def test_bad_options(options, field):
    with pytest.raises(InputError) as caught:
        classify(**options)
    assert caught.value.field == field


def test_a_label_that_melts_into_one_text_only():
    task = classify(labels=["s", "no"], template="{text}{label}")
    good, bad = task.prepare(["x", "ye"])
    assert len(good.requests) == 2
    assert bad.field == "text"


# Heads.

HEAD = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"1": "bad", "0": "good", "2": "ugly"}}


def head(config=HEAD, **options):
    return make_task("classify", FakeCheckpoint(config), tokenizer("$A <|endoftext|>"), **options)


def test_a_head_of_several_labels():
    task = head()
    assert isinstance(task, ClassifyHeadTask)
    assert task.readout == Readout("head")
    assert task.calibration_items() == []
    work, listed = task.prepare(["ab", [5, 6]])
    assert work.requests[0].tokens.tolist() == [*ids(TOK, "ab"), 0]
    assert listed.requests[0].tokens.tolist() == [5, 6]
    out = task.finish(work.note, [result(1.0, 3.0, 2.0)])
    weights = [math.exp(v) for v in (1, 3, 2)]
    assert out.label == "bad"
    assert out.logits == {"good": 1.0, "bad": 3.0, "ugly": 2.0}
    assert list(out.probabilities.values()) == pytest.approx([w / sum(weights) for w in weights])
    json.dumps(out.line())


def test_a_head_where_several_labels_hold_and_one_of_one_label():
    task = head(HEAD | {"problem_type": "multi_label_classification"})
    out = task.finish({"tokens": 1}, [result(0.0, 2.0, -800.0)])
    assert list(out.probabilities.values()) == pytest.approx([0.5, 1 / (1 + math.exp(-2)), 0.0], abs=1e-12)
    reward = head(HEAD | {"id2label": {"0": "LABEL_0"}})
    assert reward.finish({"tokens": 1}, [result(1.0)]).probabilities == {
        "LABEL_0": pytest.approx(1 / (1 + math.exp(-1)))
    }


def test_the_default_of_two_labels_that_config_json_leaves_out():
    task = head({"architectures": ["LlamaForSequenceClassification"]})
    assert task.labels == ["LABEL_0", "LABEL_1"]


def test_options_that_a_head_does_not_take():
    assert head(labels=["good", "bad", "ugly"]).labels == ["good", "bad", "ugly"]
    with pytest.raises(InputError, match="classifies into good, bad, ugly"):
        head(labels=["a", "b"])
    for option, value in {
        "instructions": "x",
        "examples": [1],
        "normalization": "bytes",
        "calibrate": True,
        "template": "y",
    }.items():
        with pytest.raises(InputError, match="with its own head") as caught:
            head(**{option: value})
        assert caught.value.field == option


def test_head_truncation():
    (work,) = head(max_length=4, truncate=True).prepare(["abcdefgh"])
    assert work.requests[0].tokens.size == 4
    assert work.requests[0].tokens[-1] == 0
    assert head(max_length=4).prepare(["abcdefgh"])[0].code == "too_long"


def test_descriptions_stand_once_in_the_shared_beginning():
    labels = {"Y": {"description": "it is so", "text": "yes"}, "no": {"description": "it is not"}, "both": {}}
    task = classify(labels=labels, instructions="Say.", examples=[("a", "Y")])
    assert task.words == ["yes", "no", "both"] and task.labels == ["Y", "no", "both"]
    described = "Labels:\nyes: it is so\nno: it is not\nboth"
    assert task.prompt.head == f"Say.\n\n{described}\n\nText: a\nLabel: yes\n\nText: "
    works = task.prepare(["one", "two"])
    head = ids(TOK, task.prompt.head)
    for request in [request for work in works for request in work.requests]:
        assert request.tokens.tolist()[: len(head)] == head
    assert classify(labels={"Y": "yes", "no": {"text": "no"}}).prompt.head == "Text: "


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"a": {"desc": "x"}, "b": "b"}, "the label 'a' has 'desc'"),
        ({"a": {"description": " "}, "b": "b"}, "the description of 'a'"),
        ({"a": {"description": 5}, "b": "b"}, "the description of 'a'"),
        ({"a": {"text": ""}, "b": "b"}, "a text of a label is empty"),
    ],
)
def test_a_wrong_description_is_named(labels, says):
    with pytest.raises(InputError, match=says):
        classify(labels=labels)


def test_labels_that_differ_much_in_length_get_a_warning(recwarn):
    long = {"card": "lost, stolen, late or broken cards", "other": "x"}
    with pytest.warns(UserWarning, match="'other' has .* tokens, 'card' has .*normalization") as caught:
        classify(labels=long)
    assert caught[0].filename == __file__
    recwarn.clear()
    for options in ({"normalization": "tokens"}, {"normalization": "bytes"}, {"calibrate": True}):
        classify(labels=long, **options)
    classify(labels={"card": {"description": long["card"]}, "other": {}}, normalization=None)
    classify(labels=["yes", "no"])
    assert not recwarn.list


def test_a_classification_head_has_no_descriptions():
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    assert isinstance(classify(labels={"a": "a", "b": "b"}, config=config), ClassifyHeadTask)
    with pytest.raises(InputError, match="head does not read"):
        classify(labels={"a": {"description": "x"}, "b": "b"}, config=config)
