"""Sampling options as users write them."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

from prefold.errors import InputError
from prefold.spec.requests import Grammar, Sampling
from prefold.tasks.sampling import grammar_from, sampling_from

VOCAB = 100
TOKENIZER = object()  # that there is one is all that matters


def made(defaults: Sampling | None = None, tokenizer: object = TOKENIZER, **options) -> Sampling:
    return sampling_from(options, vocab_size=VOCAB, tokenizer=tokenizer, defaults=defaults)


def refused(field: str, code: str, message: str | None = None, **options) -> None:
    with pytest.raises(InputError, match=message) as caught:
        made(**options)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert caught.value.remedy


def test_nothing_given_is_the_defaults():
    assert made() == Sampling()
    defaults = Sampling(temperature=0.5, stop=("x",), max_tokens=3)
    assert made(defaults) == defaults
    assert made(defaults, temperature=None, stop=None, n=None) == defaults
    assert made(defaults, max_tokens=None).max_tokens is None
    assert made(defaults, stop=[], top_k=4) == Sampling(temperature=0.5, max_tokens=3, top_k=4)


def test_every_option_is_taken():
    values = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 1,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 0.25,
        "logit_bias": {"3": 1.5, 4: -100},
        "seed": 2**64 - 1,
        "n": 2,
        "stop": ["\n", "é"],
        "stop_ids": [5, 6],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "grammar": {"choice": ["a"]},
        "exit_threshold": 0.5,
        "min_visits": 2,
        "max_visits": 3,
        "exit_change": 0.5,
        "exit_prompts": True,
        "exit_visits": [3, 1],
        "route": [0, 1, 1],
    }
    assert set(values) == {field.name for field in fields(Sampling)}, "each option of Sampling needs a value here"
    expected = values | {"logit_bias": ((3, 1.5), (4, -100.0)), "stop": ("\n", "é"), "stop_ids": (5, 6)}
    expected |= {"exit_visits": (3, 1), "route": (0, 1, 1)}
    sampling = made(**values)
    assert sampling == Sampling(**expected | {"grammar": Grammar("choice", '["a"]')})
    assert made(sampling) == sampling
    again = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
    assert made(**again) == sampling
    hash(sampling)


def test_other_ways_to_write_them():
    assert made(stop="\n", stop_ids=5, top_k=-1) == Sampling(stop=("\n",), stop_ids=(5,))
    numpy = made(top_k=np.int64(4), top_p=np.float32(0.5), ignore_eos=np.True_, stop_ids=np.array([1, 2]), n=2.0)
    assert numpy == Sampling(top_k=4, top_p=0.5, ignore_eos=True, stop_ids=(1, 2), n=2)
    assert type(numpy.top_k) is int and type(numpy.top_p) is float and type(numpy.n) is int
    assert made(logit_bias=[(3, 1), ("3", 2)]).logit_bias == ((3, 3.0),)
    assert made(logit_bias={}).logit_bias == ()
    assert made(tokenizer=None, stop=[]) == Sampling()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1]),
        ("min_tokens", [-1]),
        ("temperature", [-0.1, float("nan"), float("inf")]),
        ("top_k", [-2]),
        ("top_p", [-0.1, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, 1e-46, 1e300, float("inf")]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1]),
        ("seed", [2**64, -(2**63) - 1]),
        ("n", [0]),
        ("logprobs", [-1, 2**31, 2**63]),
        ("exit_threshold", [0, 1.01, float("nan")]),
        ("min_visits", [0]),
        ("max_visits", [0]),
        ("exit_change", [0, float("nan")]),
        ("route", [[0, -1]]),
        ("exit_visits", [[-1]]),
        ("stop_ids", [VOCAB, -1, [3, VOCAB]]),
        ("logit_bias", [{VOCAB: 1}, {"-1": 1}, {3: 101}, {3: float("nan")}]),
    ],
)
def test_out_of_range(name, values):
    for value in values:
        refused(name, "out_of_range", **{name: value})


def test_the_least_repetition_penalty_is_named():
    """float32 takes smaller ones for 0, which would end an answer before its first token."""
    with pytest.raises(InputError) as caught:
        made(repetition_penalty=1e-46)
    assert "1e-30 or more" in caught.value.remedy and made(repetition_penalty=1e-30).repetition_penalty == 1e-30


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *[(name, ["1", True, [1], 1.5]) for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")],
        *[(name, ["1", True, [1]]) for name in ("temperature", "top_p", "repetition_penalty", "presence_penalty")],
        ("ignore_eos", [1, "true"]),
        ("stop", [3, [3], {"a": 1}]),
        ("route", ["0,1", 0, [0.5]]),
        ("exit_visits", [["3"]]),
        ("stop_ids", ["a", [True], [1.5]]),
        ("logit_bias", [3, "ab", [1, 2], {"a": 1}, {3: "1"}, {3: None}]),
        ("grammar", [3, "x", {}, {"regex": "a", "json": True}, {"xml": "a"}]),
    ],
)
def test_wrong_types(name, values):
    for value in values:
        refused(name, "wrong_type", **{name: value})


def test_other_refusals():
    refused("temperatur", "unknown_option", "did you mean temperature", temperatur=1)
    refused("foo", "unknown_option", "it has: max_tokens", foo=1)
    refused("stop", "empty", stop=["a", ""])
    refused("stop", "null", stop=[None])
    refused("stop", "invalid_utf8", stop="\ud83d")
    refused("stop", "no_tokenizer", tokenizer=None, stop="a")
    refused("grammar", "no_tokenizer", tokenizer=None, grammar={"json": True})
    refused("min_tokens", "out_of_range", min_tokens=5, max_tokens=4)
    assert sampling_from({"stop_ids": 10**6}, vocab_size=None, tokenizer=None).stop_ids == (10**6,)


def test_grammars():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é"]}}}
    text = json.dumps(schema, ensure_ascii=False)
    assert grammar_from({"json_schema": schema}) == grammar_from({"json_schema": text}) == Grammar("json_schema", text)
    assert grammar_from({"json_schema": True}) == Grammar("json_schema", "{}")
    assert grammar_from({"json": True}) == Grammar("json")
    assert grammar_from({"regex": "a+"}) == grammar_from(Grammar("regex", "a+")) == Grammar("regex", "a+")
    assert grammar_from({"choice": ("a", "é")}) == Grammar("choice", '["a", "é"]')
    assert grammar_from({"lark": 'start: "a"'}) == Grammar("lark", 'start: "a"')


@pytest.mark.parametrize(
    ("value", "field", "code"),
    [
        ({"json_schema": 3}, "grammar.json_schema", "wrong_type"),
        ({"json_schema": {"a": {1, 2}}}, "grammar.json_schema", "wrong_type"),
        ({"json_schema": {"type": "nope"}}, "grammar", "invalid_grammar"),
        ({"json_schema": "{"}, "grammar", "invalid_grammar"),
        ({"json": False}, "grammar.json", "wrong_type"),
        ({"regex": 3}, "grammar.regex", "wrong_type"),
        ({"regex": "("}, "grammar", "invalid_grammar"),
        ({"choice": []}, "grammar.choice", "wrong_type"),
        ({"choice": "ab"}, "grammar.choice", "wrong_type"),
        ({"choice": ["a", 3]}, "grammar.choice", "wrong_type"),
        ({"choice": [""]}, "grammar", "invalid_grammar"),
        ({"lark": "start: x"}, "grammar", "invalid_grammar"),
        (Grammar("regex", "("), "grammar", "invalid_grammar"),
    ],
)
def test_refused_grammars(value, field, code):
    with pytest.raises(InputError) as caught:
        grammar_from(value)
    assert (caught.value.field, caught.value.code) == (field, code)
