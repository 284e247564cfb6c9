"""What is to be done with a prompt travels with it: there and back, in memory and on disk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefold.spec.requests import Grammar, Namespace, Request, Sampling
from prefold.trie import Spool
from prefold.trie.order import decode_options, encode_options

texts = st.text(max_size=5)
counts = st.integers(0, 2**53)
grammars = st.builds(Grammar, st.sampled_from(["json_schema", "json", "regex", "choice", "lark"]), texts, st.booleans())
samplings = st.builds(
    Sampling,
    max_tokens=st.none() | counts,
    min_tokens=counts,
    temperature=st.floats(0, 2),
    top_k=counts,
    top_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.lists(st.tuples(counts, st.floats(-100, 100)), max_size=3).map(tuple),
    seed=st.none() | counts,
    n=st.integers(1, 9),
    stop=st.lists(texts, max_size=2).map(tuple),
    stop_ids=st.lists(counts, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | grammars,
    exit_visits=st.lists(counts, max_size=2).map(tuple),
    route=st.none() | st.lists(counts, min_size=1, max_size=3).map(tuple),
)
requests = st.builds(
    Request,
    st.lists(st.integers(0, 3), min_size=1, max_size=6).map(np.array),
    sampling=st.none() | st.just(Sampling()) | samplings,
    namespace=st.tuples(st.text(max_size=5), texts).map(lambda names: Namespace(*names)),
    priority=st.integers(-5, 5),
)


def plain(request):
    return request.tokens.tolist(), request.sampling, request.namespace, request.priority


@given(requests)
def test_there_and_back(request):
    sampling, priority = decode_options(encode_options(request.sampling, request.priority))
    assert (sampling, priority) == (request.sampling, request.priority)
    assert hash(sampling) == hash(request.sampling)  # tuples, as they were


def test_what_is_the_default_takes_no_bytes():
    assert encode_options(None, 0) == b""
    assert encode_options(Sampling(), 0) == b'{"sampling":{}}'
    assert encode_options(Sampling(max_tokens=5), 2) == b'{"priority":2,"sampling":{"max_tokens":5}}'


@given(st.lists(requests, max_size=20), st.sampled_from([1, 1 << 20]), st.integers(1, 30), st.booleans())
def test_every_request_comes_back_as_it_was(job, memory_bytes, max_tokens, share):
    with Spool(memory_bytes=memory_bytes) as spool:
        for i, request in enumerate(job):
            spool.add(request, b"%d" % i)
        windows = list(spool.windows(max_tokens=max_tokens, share=share))
    found = [(w.tags[i], w.request(i)) for w in windows for i in range(w.num_requests)]
    assert sorted(int(tag) for tag, _ in found) == list(range(len(job)))
    for tag, request in found:
        assert plain(request) == plain(job[int(tag)])


@pytest.mark.parametrize("memory_bytes", [1, 1 << 20])
def test_a_request_that_is_not_continued_comes_back_as_one(memory_bytes):
    with Spool(memory_bytes=memory_bytes) as spool:
        spool.add(Request(np.array([1, 2]), np.array([5]), priority=3))
        spool.add(Request(np.array([3]), sampling=Sampling()))
        (window,) = spool.windows(max_tokens=10)
    first, second = window.request(0), window.request(1)
    assert first.sampling is None and first.targets.tolist() == [5] and first.priority == 3
    assert second.sampling == Sampling() and second.targets is None


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("memory_bytes", [1, 1000, 1 << 20])
def test_no_window_holds_two_adapters_or_salts(memory_bytes, share):
    with Spool(memory_bytes=memory_bytes) as spool:
        for i in range(12):
            spool.add(
                Request(np.array([1, 2]), namespace=Namespace(["", "a"][i % 2], ["", "x", "y"][i % 3])), b"%d" % i
            )
        windows = list(spool.windows(max_tokens=100, share=share))
    assert len(windows) == 6
    for window in windows:
        places = [int(tag) for tag in window.tags]
        assert places == sorted(places)
        assert {(i % 2, i % 3) for i in places} == {(places[0] % 2, places[0] % 3)}
        assert window.namespace == Namespace(["", "a"][places[0] % 2], ["", "x", "y"][places[0] % 3])
        assert window.common == 0
