"""Equal requests are joined, and every tag comes back, once and with the answer of its own request."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefold.spec.requests import Namespace, Request, Sampling
from prefold.trie import Feed, Spool, read_tags
from prefold.trie.repeats import CountedTag, pack_tags

SAMPLINGS = [None, Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=3), Sampling(max_tokens=4)]
requests = st.lists(
    st.builds(
        lambda tokens, targets, sampling, adapter: Request(
            np.array(tokens),
            None if targets is None or sampling else np.array([targets]),
            SAMPLINGS[sampling],
            Namespace(adapter),
        ),
        st.lists(st.integers(0, 1), min_size=1, max_size=3),
        st.sampled_from([None, 0, 1]),
        st.integers(0, len(SAMPLINGS) - 1),
        st.sampled_from(["", "one"]),
    ),
    max_size=30,
)


def content(request: Request, number: int) -> tuple:
    """The key of equal requests. A draw without a seed has its number in it."""
    targets = None if request.targets is None else tuple(request.targets.tolist())
    sampling = request.sampling
    own = number if sampling is not None and sampling.temperature and sampling.seed is None else None
    return (request.namespace, tuple(request.tokens.tolist()), targets, sampling, own)


@given(requests, st.sampled_from([1, 700, 1 << 20]), st.sampled_from([1, 7, 1000]))
def test_a_spool_joins_equal_requests_and_no_others(job, memory_bytes, max_tokens):
    wanted: dict[tuple, list[int]] = {}
    with Spool(memory_bytes=memory_bytes) as spool:
        for number, request in enumerate(job):
            spool.add(request, b"%d" % number)
            wanted.setdefault(content(request, number), []).append(number)
        order = spool.order(joins=True)
        found, lengths = {}, []
        for window in spool.windows(max_tokens=max_tokens, joins=True):
            for place, packed in enumerate(window.tags):
                num_tokens, tags = read_tags(packed)
                numbers = [int(tag) for tag, _ in tags]
                request = window.request(place)
                assert num_tokens == len(request.tokens)
                assert found.setdefault(content(request, numbers[0]), numbers) is numbers  # once
                lengths.append(num_tokens)
        assert found == wanted
        assert order.lengths.tolist() == lengths
        plain = [
            read_tags(packed)
            for w in spool.windows(max_tokens=max_tokens, share=False, joins=True)
            for packed in w.tags
        ]
        assert sorted(int(tag) for _, ((tag, _),) in plain) == list(range(len(job)))
        assert sum(w.num_requests for w in spool.windows(max_tokens=max_tokens)) == len(job)


def test_a_prompt_that_is_read_again_counts_its_tokens_once():
    """As `Window.twins` has it: two labels of one prompt are two reads of one prompt, in each record."""
    with Spool() as spool:
        for record in range(3):
            for label in range(2):
                spool.add(Request(np.array([5, 6, 7]), np.array([label])), b"%d%d" % (record, label))
        (window,) = spool.windows(max_tokens=100, joins=True)
    first, second = (read_tags(packed)[1] for packed in window.tags)
    assert first == [CountedTag(b"00", 3), CountedTag(b"10", 3), CountedTag(b"20", 3)]
    assert second == [CountedTag(b"01", 0), CountedTag(b"11", 0), CountedTag(b"21", 0)]
    assert window.twins.tolist() == [False, True]


def test_a_table_of_equal_records_is_joined_in_pieces():
    with Spool() as spool:
        for number in range(50):
            spool.add(Request(np.array([1, 2])), b"%0100000d" % number)
        (window,) = spool.windows(max_tokens=10_000, joins=True)
    tags = [[int(tag[-3:]) for tag, _ in read_tags(packed)[1]] for packed in window.tags]
    assert [number for piece in tags for number in piece] == list(range(50))
    assert [len(piece) for piece in tags] == [11, 11, 11, 11, 6]  # about a MiB each
    assert all(counted.tokens == 2 for packed in window.tags for counted in read_tags(packed)[1])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_feed_lets_equal_requests_wait_for_one_answer(sampling):
    feed, request = Feed(joins=True), Request(np.array([4, 5]), sampling=sampling)
    assert feed.put([(request, b"a")]) == feed.put([(request, b"b")]) == [True]
    feed.put([(Request(np.array([4]), sampling=sampling), b"c")])
    taken = []
    while (record := feed.take()) is not None:
        taken += [read.tag for reads in record for read in reads]
    waits = sampling != SAMPLINGS[2]  # drawn without a seed: an answer of its own
    assert [read_tags(packed)[1][0].tag for packed in taken] == ([b"a", b"c"] if waits else [b"a", b"b", b"c"])
    assert [*feed.answered(taken[0])] == ([(b"b", 2)] if waits else [])
    assert [*feed.answered(taken[0])] == []
    feed.put([(request, b"d")])  # after the answer: computed again
    assert [read_tags(reads[0].tag)[1][0].tag for reads in feed.take()] == [b"d"]


def test_reads_of_a_prompt_stay_together_when_some_wait_for_others():
    feed = Feed(joins=True)

    def reads(*labels: int) -> list:
        return [(Request(np.array([4, 5]), np.array([label])), b"%d" % label) for label in labels]

    assert feed.put(reads(1, 2)) == [True, False]
    assert feed.put(reads(1, 2)) == [True, False]  # both wait
    assert feed.put(reads(1, 3, 2, 4)) == [True, False, False, False]
    first, second = feed.take(), feed.take()
    assert feed.take() is None
    assert [len(prompt) for prompt in first] == [2] and [len(prompt) for prompt in second] == [2]
    assert [read_tags(read.tag)[1][0].tag for read in second[0]] == [b"3", b"4"]
    assert [*feed.answered(first[0][0].tag)] == [(b"1", 2), (b"1", 2)]
    assert [*feed.answered(first[0][1].tag)] == [(b"2", 0), (b"2", 0)]


def test_threads_that_put_and_answer_lose_and_double_no_tag():
    """An answer may come while an equal request is put: it gets this answer, or is sent itself."""
    feed, total = Feed(joins=True), 20_000

    def put():
        for number in range(total):
            while not feed.has_room:
                pass
            feed.put([(Request(np.array([number % 3])), b"%d" % number)])
        feed.end()

    thread = threading.Thread(target=put)
    thread.start()
    found, sent = [], 0
    while not feed.is_over:
        for reads in feed.take(1) or ():
            for read in reads:
                sent += 1
                found += [tag for tag, _ in read_tags(read.tag)[1]]
                found += [tag for tag, _ in feed.answered(read.tag)]
    thread.join()
    assert sorted(map(int, found)) == list(range(total)) and sent <= total


def test_tags_come_back():
    tags = [CountedTag(b"", 0), CountedTag(b"x" * 70_000, 2**31), CountedTag(b"y", 1)]
    assert read_tags(pack_tags(9, tags)) == (9, tags)
