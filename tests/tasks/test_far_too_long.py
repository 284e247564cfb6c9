"""A text that is far too long is refused, or cut, without being encoded as a whole; what comes of it is the same."""

from __future__ import annotations

import numpy as np
import pytest
from task_inputs import FakeCheckpoint, chatty, tokenizer

from prefold.errors import InputError
from prefold.tasks import make_task
from prefold.text import FilledTemplate

HUGE = "A" + "yes no ab " * 3300 + "Z"
FILLED = FilledTemplate.of("Summarise {title}: {body} In short:", title="yes", body=HUGE)
CASES = {
    "embed": [HUGE, FILLED],
    "classify": [HUGE, FILLED],
    "score": [{"prompt": text, "continuation": "yes"} for text in (HUGE, FILLED)],
    "rerank": [{"query": "no", "document": text} for text in (HUGE, FILLED)],
    "generate": [{"prompt": HUGE}, {"prompt": FILLED}, [{"role": "user", "content": HUGE}]],
}
OPTIONS = {"classify": {"labels": ["yes", "no"]}, "generate": {"max_tokens": 12}}
ALL = [(task, item) for task, items in CASES.items() for item in items]


def task_of(name, **options):
    return make_task(name, FakeCheckpoint(), chatty(), **{**OPTIONS.get(name, {}), **options})


@pytest.fixture
def encoded(monkeypatch):
    """The length of the longest text that was encoded."""
    longest = [0]
    for name in ("encode", "encode_batch", "spans"):
        method = getattr(type(tokenizer()), name)

        def spy(self, text, *arguments, method=method, **options):
            texts = [text] if isinstance(text, str) else text
            longest[0] = max(longest[0], *map(len, texts))
            return method(self, text, *arguments, **options)

        monkeypatch.setattr(type(tokenizer()), name, spy)
    return longest


@pytest.mark.parametrize(("name", "item"), ALL)
def test_it_is_refused(encoded, name, item):
    (error,) = task_of(name).prepare([item])
    assert isinstance(error, InputError) and error.code == "too_long" and "--truncate" in str(error)
    assert encoded[0] < 2000


@pytest.mark.parametrize("truncate", [True, "left", "right"])
@pytest.mark.parametrize(("name", "item"), ALL)
def test_it_is_cut_to_the_same(encoded, monkeypatch, name, item, truncate):
    made = task_of(name, truncate=truncate)
    (work,) = made.prepare([item])
    assert encoded[0] < len(HUGE) // 2
    monkeypatch.setattr(type(tokenizer()), "is_longer", lambda *_: False)
    (whole,) = made.prepare([item])
    assert encoded[0] >= len(HUGE)
    assert len(work.requests) == len(whole.requests)
    for one, other in zip(work.requests, whole.requests, strict=True):
        assert np.array_equal(one.tokens, other.tokens)


def test_what_is_never_cut_is_refused(encoded):
    for name, item, field in (
        ("rerank", {"query": HUGE, "document": "yes"}, "query"),
        ("score", {"prompt": "yes", "continuation": HUGE}, "continuation"),
    ):
        (error,) = task_of(name, truncate=True).prepare([item])
        assert error.field == field and error.code == "too_long" and "truncation cuts the" in str(error)
    assert encoded[0] < 2000


def test_a_text_that_is_scored_whole_may_have_any_length():
    (work,) = task_of("score").prepare([HUGE])
    assert sum(request.targets.size for request in work.requests) > 8000
