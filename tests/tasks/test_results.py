"""What a task answers: one frozen object, of which lines, columns and Python show the fields."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from answering import answer_of

from prefold.jobs.columns import TableForm
from prefold.jobs.record import dumps
from prefold.jobs.tables import reserved_names
from prefold.tasks.results import Embedding, Generation, Ranking, Score, TextScore, all_finite

LINES = [
    {"embedding": [1.0, 0.5], "num_tokens": 3},
    {"score": 0.5, "num_tokens": 2, "image_notes": ["a.gif is an animation"]},
    {"scores": [0.25, 0.75], "order": [1, 0], "num_tokens": 4, "documents": ["b", "a"]},
    {"label": "a", "probabilities": {"a": 1.0}, "logits": {"a": 2.0}, "num_tokens": 3},
    {"logprob": -0.5, "logprobs": [-0.5], "greedy": True, "num_tokens": 1},
    {"logprob": -0.5, "logprobs": [-0.5], "greedy": True, "num_tokens": 1, "num_bytes": None},
    {"text": "no", "finish_reason": "stop", "stop": "\n", "num_tokens": 2, "num_generated": 1, "cached_tokens": 0},
    {
        "choices": [{"text": text, "finish_reason": "length"} for text in ("a", "b")],
        **{"num_tokens": 2, "num_generated": 4, "cached_tokens": 1, "approximate_tokens": 1},
    },
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: next(iter(line)))
def test_a_line_has_the_fields_that_were_set_in_their_order(line):
    shown = json.loads(dumps(answer_of(**line).line()))
    assert shown == line and [*shown] == [*line]


def test_fields_of_requests_over_http_and_of_python_are_in_no_line():
    made = answer_of(text="a", prompt_ids=[1], thinks=True, reasoning_tokens=1, prompt=[], num_generated=1)
    assert [*made.line()] == ["text", "finish_reason", "num_tokens", "num_generated", "cached_tokens"]
    ranking = Ranking(np.array([0.5]), [0], cached_tokens=3)
    assert [*ranking.line()] == ["scores", "order", "num_tokens"]
    with pytest.raises(FrozenInstanceError):
        ranking.cached_tokens = 4


def test_numbers_that_are_not_finite_are_found_in_what_was_computed():
    assert not all_finite(Embedding(np.array([0, np.nan], np.float32)))
    assert not all_finite(Score(-np.inf, np.array([-np.inf]), False))
    assert not all_finite(TextScore(-1.0, np.array([np.nan]), False, num_bytes=None))
    entry = {"id": 1, "logprob": float("nan"), "top": []}
    assert not all_finite(answer_of(text="a", logprobs=[entry]))
    assert not all_finite(Generation((), prompt=[entry]))
    assert all_finite(answer_of(text="a")) and all_finite(Ranking(np.array([0.5]), [0]))


def test_names_of_lines_and_columns_of_real_numbers_follow_from_the_fields():
    own = {"record", "error", "results", "num_tokens", "image_notes"}
    assert reserved_names("embed", has_id=False) == own | {"embedding", "embeddings"}
    assert reserved_names("rerank") == own | {"id", "score", "scores", "order", "documents"}
    # A column called "prompt" can be repeated in a line of "generate".
    counts = {"num_generated", "cached_tokens", "approximate_tokens"}
    texts = {"text", "tokens", "finish_reason", "stop", "logprobs", "choices"}
    assert reserved_names("generate", has_id=False) == own | texts | counts
    form = TableForm()
    real = ["embedding", "score", "scores", "logprob", "logprobs", "probabilities", "logits"]
    assert all(form.kind(name).real for name in real)
    assert not any(form.kind(name).real for name in ("order", "num_tokens", "text", "num_bytes", "prompt"))
