"""Scoring: prompts and continuations split as evaluation harnesses do, rolling texts, the arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_inputs import FakeCheckpoint, backend, ids, result, tokenizer

from prefold.errors import InputError
from prefold.tasks import ScoreItem, make_task
from prefold.tasks.score import rolling_stretches

transformers = pytest.importorskip("transformers")
BOS, EOS = 1, 2


def score(tok=None, **options):
    return make_task("score", FakeCheckpoint(), tok or tokenizer(), **options)


def pairs(work) -> list[tuple[list[int], list[int]]]:
    return [(request.tokens.tolist(), request.targets.tolist()) for request in work.requests]


def harness_pair(theirs, context: str, continuation: str, prefix: int) -> tuple[list[int], list[int]]:
    """What lm-evaluation-harness makes of a request of a causal model: the ids of context and continuation."""
    if context == "":
        ids = theirs.encode(continuation, add_special_tokens=False)
        return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    special = not context.startswith(theirs.bos_token)
    whole = theirs.encode(context + continuation, add_special_tokens=special)
    first = theirs.encode(context, add_special_tokens=special)
    return first, whole[len(first) :]


CASES = [
    ("The cat", " sat"),
    ("The cat ", "sat"),
    ("The cat \n\t", "sat on"),
    ("ye", "s no"),
    ("Question: a\nAnswer:", " yes"),
    ("x a", "b a b"),
    ("", "yes no"),
    ("", "<|im_start|>yes"),
    ("<|im_start|>user", " no"),
    ("é日", "本😀"),
]


@pytest.mark.parametrize("post", [None, "<|im_start|> $A"])
@pytest.mark.parametrize(("context", "continuation"), CASES)
def test_pairs_equal_the_harness(post, context, continuation):
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(post), bos_token="<|im_start|>")
    first, second = harness_pair(theirs, context, continuation, BOS)
    (work,) = score(tokenizer(post)).prepare([(context, continuation)])
    if second:
        assert pairs(work) == [(first + second[:-1], second)]
    else:
        assert work.field == "continuation"


def test_trailing_special_tokens_are_not_scored():
    (work,) = score(tokenizer("$A <|endoftext|>")).prepare([("a", "x")])
    tok = tokenizer()
    assert pairs(work) == [(ids(tok, "a"), ids(tok, "x"))]


def test_a_continuation_that_melts_into_the_prompt_is_an_error():
    (error,) = score().prepare([("ye", "s")])
    assert (error.field, error.code) == ("continuation", "empty")
    (work,) = score().prepare([("ye", "s no")])
    tok = tokenizer()
    assert pairs(work)[0][1] == ids(tok, "yes no")[1:]


def test_token_ids_are_taken_as_they_are():
    tok = tokenizer("<|im_start|> $A")
    works = score(tok).prepare(
        [([5, 6], [7, 8]), ([], [7, 8]), ("a", [7, 8]), ([5], "ab"), {"prompt": [5], "continuation": [7]}]
    )
    assert [pairs(work)[0] for work in works] == [
        ([5, 6, 7], [7, 8]),
        ([BOS, 7], [7, 8]),
        ([BOS, *ids(tok, "a"), 7], [7, 8]),
        ([5, *ids(tok, "ab")[:-1]], ids(tok, "ab")),
        ([5], [7]),
    ]


def test_white_space_alone_is_no_prompt():
    tok = tokenizer()
    (work,) = score(tok).prepare([("  ", "x")])
    assert pairs(work) == [([BOS, *ids(tok, "  x")[:-1]], ids(tok, "  x"))]


def test_the_prefix_token():
    only_eos = tokenizer(special_tokens={"eos_token": "<|im_end|>"})
    neither = tokenizer(special_tokens={})
    assert pairs(score(only_eos).prepare([("", [7])])[0]) == [([EOS], [7])]
    assert pairs(score(only_eos, prefix_token=0).prepare([("", [7])])[0]) == [([0], [7])]
    (error,) = score(neither).prepare([("", "x")])
    assert error.field == "prompt"
    assert "prefix_token" in error.remedy
    (error,) = score(neither).prepare(["x"])
    assert error.field == "text" and "the tokenizer has neither" in error.message
    (error,) = make_task("score", FakeCheckpoint(), None).prepare([[5, 6]])
    assert "the model has no tokenizer, and so neither a BOS nor an EOS token" in error.message


def test_too_long_and_truncation():
    # Rows are prompt + continuation - 1: a model of 4 takes 5 tokens in all.
    item = ([5, 6, 7], [8, 9])
    assert pairs(score(max_length=4).prepare([item])[0]) == [([5, 6, 7, 8], [8, 9])]
    (error,) = score(max_length=3).prepare([item])
    assert (error.field, error.code) == ("prompt", "too_long")
    assert pairs(score(max_length=3, truncate=True).prepare([item])[0]) == [([6, 7, 8], [8, 9])]
    assert pairs(score(max_length=2, truncate=True).prepare([item])[0]) == [([7, 8], [8, 9])]
    (error,) = score(max_length=1, truncate=True).prepare([item])
    assert (error.field, error.code) == ("continuation", "too_long")


@given(st.integers(1, 40), st.integers(1, 12))
def test_rolling_stretches_score_every_token_once(length, max_length):
    """Each stretch is a piece of prefix + text, as long as the model allows; its targets are the piece one further."""
    text = np.arange(100, 100 + length)
    full = [7, *text.tolist()]
    scored = []
    stretches = list(rolling_stretches(text, np.array([7]), max_length))
    for tokens, targets in stretches:
        at = full.index(tokens[0])
        assert tokens.tolist() == full[at : at + tokens.size]
        assert targets.tolist() == full[at + 1 : at + 1 + tokens.size][-targets.size :]
        assert tokens.size == min(max_length, length)
        scored += targets.tolist()
    assert scored == text.tolist()
    assert len(stretches) == -(-length // max_length)
    ((tokens, targets),) = rolling_stretches(text, np.array([7]), None)
    assert (tokens.tolist(), targets.tolist()) == (full[:-1], full[1:])


def harness_stretches(token_list: list[int], prefix_token: int, max_seq_len: int) -> list[tuple[list[int], list[int]]]:
    """The harness's stretches with context_len=1, as model inputs and targets."""
    out, done = [], 0
    while done < len(token_list):
        n = min(max_seq_len, len(token_list) - done)
        stop = done + n
        inputs = [prefix_token, *token_list]
        start = 0 if done == 0 else stop - max_seq_len
        out.append((inputs[start:stop], token_list[done:stop]))
        done = stop
    return out


@given(st.lists(st.integers(3, 99), min_size=1, max_size=30), st.integers(1, 9))
def test_rolling_stretches_equal_the_harness(tokens, max_length):
    ours = rolling_stretches(np.array(tokens), np.array([1]), max_length)
    assert [(a.tolist(), b.tolist()) for a, b in ours] == harness_stretches(tokens, 1, max_length)


def test_rolling_texts():
    tok = tokenizer("<|im_start|> $A")
    text, listed, named = score(tok, max_length=4).prepare(["é yes no", [5, 6, 7, 8, 9], ScoreItem(text="a")])
    encoded = ids(tok, "é yes no")
    assert pairs(text) == harness_stretches(encoded, BOS, 4)
    assert pairs(listed) == [([BOS, 5, 6, 7], [5, 6, 7, 8]), ([5, 6, 7, 8], [9])]
    assert pairs(named) == [([BOS], ids(tok, "a"))]
    assert text.note == {"bytes": 9}
    assert listed.note == {"bytes": None}


def test_results():
    task = score(max_length=4)
    pair, rolling = task.prepare([("a", "bcd"), [5, 6, 7, 8, 9]])
    out = task.finish(pair.note, [result(-0.5, -0.25, -2, greedy=[True, True, False])]).line()
    assert out == {"logprob": -2.75, "logprobs": [-0.5, -0.25, -2.0], "greedy": False, "num_tokens": 3}
    assert task.finish(pair.note, [result(-1, greedy=[True])]).greedy is True
    out = task.finish(
        json.loads(json.dumps(rolling.note)),
        [result(-1, -2, -3, -4, greedy=[True] * 4), result(-5, greedy=[True])],
    ).line()
    assert out == {
        "logprob": -15.0,
        "logprobs": [-1.0, -2.0, -3.0, -4.0, -5.0],
        "greedy": True,
        "num_tokens": 5,
        "num_bytes": None,
    }
    json.dumps(out)


def test_bad_items_name_their_field():
    items = [
        ({"prompt": "a"}, "continuation"),
        ({"continuation": "a"}, "prompt"),
        ({}, "prompt"),
        ({"text": "a", "prompt": "b"}, "text"),
        (("a", ""), "continuation"),
        (("", ""), "continuation"),
        (("a", 5), "continuation"),
        (("a\ud800", "b"), "prompt"),
        ("", "text"),
        ([], "text"),
        ([500], "text"),
        ({"txt": 1}, "txt"),
    ]
    for (_, field), error in zip(items, score().prepare([item for item, _ in items]), strict=True):
        assert isinstance(error, InputError)
        assert error.field == field, error


def test_a_bad_prefix_token():
    with pytest.raises(InputError, match="prefix_token"):
        score(prefix_token="<s>")
