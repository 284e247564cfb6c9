"""Numbers that are read in the slots of the KV store, for replies: what the row stream gives, and each row once."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from books import check_books
from generating import until_idle
from running import as_request, prompts, run
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.api.streams import ResponseStream
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError
from prefold.spec.requests import Owner, Readout
from prefold.trie import Spool

PLACE = {"dtype": "float32", "device": "cpu"}
KINDS = ("last", "mean", "logits", "logprobs")


def ask(llm, *asked):
    """The answers to (requests, readout), all asked at once."""

    async def answers():
        replies = [ResponseStream(asyncio.get_running_loop(), 1) for _ in asked]
        for reply, (requests, readout) in zip(replies, asked, strict=True):
            llm.engine.submit(requests, readout, reply)
        return [await reply.answer() for reply in replies]

    return asyncio.run(answers())


def several_targets(rng, tokens):
    return rng.integers(0, 300, rng.integers(1, len(tokens) + 1)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


KEEPS = CacheOptions(min_overlap=0)


@pytest.mark.parametrize(
    ("family", "rows", "sharing", "cache"),
    [
        ("llama", 3, "full", KEEPS), ("gemma3", 3, "full", "off"), ("gemma3", 1000, "full", KEEPS),
        ("mistral", 5, "full", KEEPS), ("llama", 5, "off", "off"), ("llama", 1000, "mlp", "off"),
    ],
)  # fmt: skip
def test_results_are_those_of_the_stream(tmp_path, family, rows, sharing, cache):
    more = {"sliding_window": 4} if family == "mistral" else {}
    folder = str(tiny_checkpoint(tmp_path, family, **more))
    with LLM(folder, **PLACE) as plain, LLM(folder, **PLACE, sharing=sharing, max_batch_rows=rows, cache=cache) as llm:
        rng = np.random.default_rng(rows)
        for _ in range(2):  # cold, then warm
            asked = []
            for kind in KINDS:
                readout = Readout(kind, (3, 200, 17) if kind == "logits" else (), top=2 if kind == "logprobs" else None)
                targets = kind == "logprobs"
                some = [as_request(t, several_targets(rng, t) if targets else None) for t in prompts(3)]
                asked.append((some, readout))
            for (some, readout), found in zip(asked, ask(llm, *asked), strict=True):
                for one, other in zip(found, run(plain, some, readout, sharing="full", rows=1000), strict=True):
                    np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-4, err_msg=readout.kind)
                    assert (one.greedy is None) == (other.greedy is None)
                    assert one.greedy is None or np.array_equal(one.greedy, other.greedy)
        llm.engine.call(lambda: check_books(llm.engine.generator.scheduler))


@pytest.mark.parametrize("rows", [3, 1000])
def test_every_row_is_that_of_transformers(folder, rows):
    model, token_lists = reference(folder).base_model, prompts(5)
    with LLM(folder, **PLACE, max_batch_rows=rows) as llm:
        requests = [as_request(tokens) for tokens in token_lists]
        every, mean = ask(llm, (requests, Readout("every")), (requests, Readout("mean")))
    with torch.inference_mode():
        for tokens, rows_of, mean_of in zip(token_lists, every, mean, strict=True):
            expected = model(torch.tensor([tokens])).last_hidden_state[0].float().numpy()
            np.testing.assert_allclose(rows_of.values, expected, atol=1e-4)
            np.testing.assert_allclose(mean_of.values, expected.mean(0), atol=1e-4)


def test_rows_are_computed_once_whatever_is_read_of_them(folder):
    """Also by requests that come at the same time, and of those that came before; "last" has rows of its own, which it
    shares with texts."""
    stem = [*range(5, 45)]
    requests = [as_request([*stem, 100 + i, 7], [8, 9]) for i in range(10)]
    with LLM(folder, **PLACE, cache=KEEPS, max_batch_rows=16) as llm:
        asked = [(requests, Readout(kind)) for kind in ("mean", "every", "logprobs")]
        ask(llm, *asked)
        unique = len(stem) + 20
        assert llm.stats.unique_tokens == unique
        # A last row runs once more where it was there before the request could have a part in a step.
        assert unique <= (rows := llm.stats.rows_computed) <= unique + 20
        ask(llm, asked[0])
        assert llm.stats.rows_computed == rows + 10
        ask(llm, (requests, Readout("last")))
        assert llm.stats.unique_tokens == 2 * unique


@pytest.mark.parametrize(("executor", "invariant"), [("native", False), ("native", True), ("torch", False)])
def test_a_mean_reads_the_slots_of_its_text_and_no_others(folder, executor, invariant, monkeypatch):
    """By the rows that are made float32, of which the store has many more."""
    rows, text = [], [*range(5, 45)]
    options = {"dtype": "bfloat16", "device": "cpu", "executor": executor, "invariant": invariant}
    with LLM(folder, **options, cache=KEEPS) as llm:
        arrays = llm.engine.worker._arrays
        float32 = arrays.float32
        monkeypatch.setattr(arrays, "float32", lambda x: rows.append(len(x)) or float32(x))
        (found,) = ask(llm, ([as_request(text)], Readout("mean")))
    assert np.isfinite(found[0].values).all()
    assert rows[0] == len(text) == max(rows)


def test_requests_of_one_target_share_rows_with_those_of_several(folder):
    stem = [*range(5, 45)]
    requests = [as_request(stem, [8]), as_request([*stem, 8], [8, 9]), as_request(stem, [9])]
    with LLM(folder, **PLACE) as llm:
        ask(llm, (requests, Readout("logprobs")))
        assert llm.stats.rows_computed == len(stem) + 1
        assert llm.stats.requests == 3


def test_a_further_read_of_a_prompt_is_not_counted(folder):
    with LLM(folder, **PLACE) as llm:
        ask(llm, ([as_request([5, 6, 7], [label]) for label in (1, 2, 3)], Readout("logprobs")))
        assert (llm.stats.requests, llm.stats.tokens, llm.stats.rows_computed) == (1, 3, 3)


def test_a_prompt_that_the_store_cannot_hold_is_an_error_that_says_so(folder):
    with LLM(folder, **PLACE, kv_memory=1 << 14) as llm:
        slots = llm.engine.generator.scheduler.pool.num_slots
        with pytest.raises(InputError, match=f"{slots + 1} rows.* has only {slots}") as raised:
            ask(llm, ([as_request([1, 2]), as_request([1] * (slots + 1))], Readout("mean")))
        assert raised.value.code == "kv_memory"
        (found,) = ask(llm, ([as_request([1, 2])], Readout("mean")))
        assert len(found) == 1
        until_idle(llm.engine)
        llm.engine.call(lambda: check_books(llm.engine.generator.scheduler))


@pytest.mark.parametrize("kind", ["mean", "logprobs", "every"])
def test_numbers_that_are_cancelled_in_the_middle_leave_nothing(folder, kind, start_by):
    requests = [as_request([*range(5, 25), i // 16, i % 16], [1, 2]) for i in range(200)]
    with LLM(folder, **PLACE, max_batch_rows=8, cache="off") as llm:
        worker, entered = llm.engine.worker, threading.Event()
        steps = []

        def begin(start, message, *more):
            steps.append(message)
            if len(steps) == 3:
                entered.set()
            return start(message, *more)

        start_by(worker, begin)

        async def leave():
            reply = ResponseStream(asyncio.get_running_loop(), 1)
            llm.engine.submit(requests, Readout(kind), reply)
            await asyncio.to_thread(entered.wait)
            llm.engine.cancel(reply)

        asyncio.run(leave())
        until_idle(llm.engine)
        assert len(steps) < 20
        llm.engine.call(lambda: check_books(llm.engine.generator.scheduler))
        assert llm.engine.snapshot().used_slots == 0
        assert not llm.engine.handles


@pytest.mark.parametrize("owner", [None, Owner("a", is_batch=True)])
def test_answers_come_while_the_source_of_windows_pauses(folder, owner):
    """A live input gives None while nothing has come. Requests before it are answered, and do not wait for the next."""
    tags, asked = [bytes([i]) for i in range(6)], [as_request(tokens) for tokens in prompts(1, count=6)]
    answered, pauses = [], []

    def windows():
        for part in (slice(0, 3), slice(3, 6)):
            with Spool() as spool:
                for request, tag in zip(asked[part], tags[part], strict=True):
                    spool.add(request, tag)
                yield from spool.windows(max_tokens=1 << 20)
            while len(answered) < part.stop:
                pauses.append(None)
                assert len(pauses) < 10_000, "the engine asks on and on, and answers nothing"
                yield None

    with LLM(folder, **PLACE) as llm:
        for tag, answer in llm.engine.run(windows(), Readout("last"), cache_prefill=True, owner=owner):
            assert not isinstance(answer, InputError)
            answered.append(tag)
    assert sorted(answered) == tags and pauses
