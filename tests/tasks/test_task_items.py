"""What all tasks share: checking values, items and counts, and encoding pieces together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_inputs import FakeCheckpoint, tokenizer

from prefold.errors import InputError, JobError
from prefold.spec.fields import checked
from prefold.spec.requests import Request
from prefold.tasks import EmbedItem, RerankItem, Work, make_task
from prefold.tasks.base import Inputs, TextBatch, as_item, attempt

TOK = tokenizer()
INPUTS = Inputs(TOK, 512, 300)


@pytest.mark.parametrize(
    "value", [[1, 2, 299], (1, 2), np.array([3, 4], np.uint16), [np.int64(5)], np.array([7], np.int64)]
)
def test_token_ids_become_int32(value):
    ids = INPUTS.text(value, "f")
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(value)


def test_text_stays_text():
    assert INPUTS.text("é", "f") == "é"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "null"),
        (5, "wrong_type"),
        (5.0, "wrong_type"),
        (b"x", "wrong_type"),
        ({"a": 1}, "wrong_type"),
        ([1.0, 2.0], "wrong_type"),
        ([True, False], "wrong_type"),
        ([True, 5], "wrong_type"),
        ([1, "a"], "wrong_type"),
        ([[1], [2, 3]], "wrong_type"),
        ([[1, 2]], "wrong_type"),
        (object(), "wrong_type"),
        ({1, 2}, "wrong_type"),
        ([None], "wrong_type"),
        ([], "empty"),
        (np.empty(0, np.int32), "empty"),
        ([-1, 3], "token_out_of_range"),
        ([300], "token_out_of_range"),
        ([2**40], "token_out_of_range"),
        ([2**70], "wrong_type"),
        ("a\ud800b", "invalid_utf8"),
    ],
)
def test_values_that_are_neither(value, code):
    with pytest.raises(InputError) as caught:
        INPUTS.text(value, "field[3]")
    assert caught.value.code == code
    assert caught.value.field == "field[3]"
    assert "field[3]" in str(caught.value)
    assert caught.value.remedy


def test_no_id_of_a_tokenizer_leaves_a_smaller_vocabulary_of_the_model():
    """Prompts, labels, and the words whose logits are compared."""
    small = FakeCheckpoint({"vocab_size": TOK.token_id("ab")})
    for name, options, item in (
        ("embed", {}, "xab"),
        ("rerank", {}, ("xab", "x")),
        ("classify", {"labels": ["x", "y"], "template": "{text}: {label}"}, "xab"),
        ("classify", {"labels": ["x", "xab"], "template": "{text}: {label}"}, "y"),
        ("score", {}, ("x", "xab")),
        ("generate", {}, "xab"),
    ):
        (found,) = make_task(name, small, TOK, **options).prepare([item])
        assert isinstance(found, InputError), name
        assert found.code == "token_out_of_range"
        assert str(TOK.token_id("ab")) in str(found)
    with pytest.raises(InputError, match="'words' holds the token id") as caught:
        make_task("rerank", small, TOK, words=("y", "ab"))
    assert caught.value.field == "words"


def test_without_a_vocabulary_size_only_impossible_ids_are_refused():
    assert Inputs(None).text([10**9], "f").tolist() == [10**9]
    with pytest.raises(InputError, match="2147483648"):
        Inputs(None).text([2**31], "f")


def test_requests_are_checked():
    few = Inputs(TOK, 3, 10)
    assert few.request(np.array([1, 2, 3], np.int32), "f").tokens.tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="4 tokens; the model's limit is 3") as caught:
        few.request(np.array([1, 2, 3, 4], np.int32), "f")
    assert caught.value.code == "too_long"
    with pytest.raises(InputError, match="no tokens"):
        few.request(np.empty(0, np.int32), "f")
    with pytest.raises(InputError, match="token id 10"):
        few.request(np.array([1], np.int32), "f", np.array([10], np.int32))
    assert Inputs(TOK).request(np.zeros(10**5, np.int32), "f").tokens.size == 10**5


def test_items_from_mappings():
    assert as_item(RerankItem, {"query": "q", "documents": ["d"]}) == RerankItem("q", documents=["d"])
    item = EmbedItem("x")
    assert as_item(EmbedItem, item) is item
    for value, field, code in (
        ({"query": "q", "docs": []}, "docs", "unknown_field"),
        ({"document": "d"}, "query", "missing_field"),
        (5, None, "wrong_type"),
        (None, None, "wrong_type"),
    ):
        error = attempt(as_item, RerankItem, value)
        assert isinstance(error, InputError)
        assert (error.field, error.code) == (field, code)


@pytest.mark.parametrize("value", [True, 1.5, "3", None, 0, -2])
def test_counts(value):
    with pytest.raises(InputError):
        checked(int, value, "n", least=1)
    assert checked(int, np.int64(3), "n") == checked(int, 3.0, "n") == 3
    assert checked(int, 0, "n", least=0) == 0


def test_pieces_join_texts_and_keep_ids():
    batch = TextBatch(TOK)
    get = batch.add_pieces(["y", "e", "s", np.array([7, 8], np.int32), "", "n", "o"])
    empty = batch.add_pieces(["", ""])
    one = batch.add_pieces(["yes"])
    batch.encode()
    yes, no = TOK.token_id("yes"), TOK.token_id("no")
    assert get().tolist() == [yes, 7, 8, no]
    assert one().tolist() == [yes]
    assert empty().size == 0


def test_no_tokenizer_takes_token_ids_only():
    task = make_task("embed", FakeCheckpoint(), None)
    good, bad = task.prepare([[1, 2], "text"])
    assert good.requests[0].tokens.tolist() == [1, 2]
    assert bad.code == "no_tokenizer"
    score = make_task("score", FakeCheckpoint(), None, prefix_token=0)
    (work,) = score.prepare([([1], [2, 3])])
    assert work.requests[0].tokens.tolist() == [1, 2]
    (work,) = score.prepare([[4, 5]])
    assert work.requests[0].tokens.tolist() == [0, 4]
    (error,) = make_task("score", FakeCheckpoint(), None).prepare([[4, 5]])
    assert "prefix_token" in str(error)


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 400),
        st.floats(allow_nan=True),
        st.text(st.characters(exclude_categories=[]), max_size=5),
        st.binary(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(
            st.sampled_from(
                ["text", "query", "document", "documents", "prompt", "continuation", "dimensions", "top_n"]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
TASKS = [
    make_task("embed", FakeCheckpoint(), TOK),
    make_task("rerank", FakeCheckpoint(), TOK),
    make_task("classify", FakeCheckpoint(), TOK, labels=["yes", "no"]),
    make_task("score", FakeCheckpoint(), TOK),
    make_task("classify", FakeCheckpoint({"architectures": ["Qwen3ForSequenceClassification"]}), TOK),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@given(items=st.lists(JUNK, max_size=4))
def test_prepare_never_raises_and_keeps_order(task, items):
    good = {"text": "fine"} if task.name in ("embed", "classify", "score") else {"query": "q", "document": "d"}
    works = task.prepare([good, *items, good])
    assert len(works) == len(items) + 2
    assert isinstance(works[0], Work)
    assert works[0].requests[0].tokens.tolist() == works[-1].requests[0].tokens.tolist()
    for work in works:
        if isinstance(work, InputError):
            assert work.remedy
        else:
            assert work.requests
            for request in work.requests:
                assert request.tokens.dtype == np.int32
                assert 0 < request.tokens.size <= 512
                assert 0 <= request.tokens.min() <= request.tokens.max() < 300
                assert request.targets is None or 0 < request.targets.size <= request.tokens.size


def test_an_item_that_raises_anything_fails_alone():
    class Broken:
        """Encodes no batch, and not the text "bad"."""

        def encode_batch(self, texts, special=True):
            raise RuntimeError("one of them is bad")

        def encode(self, text, special=True):
            if text == "bad":
                raise OverflowError("too much")
            return np.array([len(text)], np.int32)

    def plan(item, batch):
        get = batch.add(item.lower())
        return lambda: Work([Request(get())])

    works = Inputs(Broken()).prepare(["a", "bad", 5, "BAD", "abc"], plan)
    assert [w.requests[0].tokens.tolist() for w in (works[0], works[4])] == [[1], [3]]
    for bad, name in ((works[1], "OverflowError: too much"), (works[2], "AttributeError"), (works[3], "OverflowError")):
        assert isinstance(bad, InputError) and bad.code == "unexpected" and name in str(bad)
    assert isinstance(works[2].__cause__, AttributeError)


@pytest.mark.parametrize("error", [OSError("disk"), JobError("no"), ImportError("no library")])
def test_what_is_no_items_fault_is_raised(error):
    def plan(item, batch):
        raise error

    with pytest.raises(type(error)):
        Inputs(None).prepare(["a"], plan)


def test_an_adapter_is_refused_where_none_is_loaded():
    task = make_task("embed", FakeCheckpoint(), TOK)
    good, bad = task.prepare([{"text": "a", "adapter": None}, {"text": "a", "adapter": "xx"}])
    assert good.requests[0].namespace.adapter == ""
    assert isinstance(bad, InputError) and bad.code == "unknown_adapter" and bad.field == "adapter"
