"""The promise of once: rows computed are the unique tokens of the stream, and one path is held between steps."""

from __future__ import annotations

import numpy as np
import pytest
from running import as_request, prompts, run
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.spec.requests import Readout


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("once"), "llama", num_hidden_layers=1)
    return LLM(str(folder), dtype="float32", device="cpu")


def unique_prefixes(token_lists: list[list[int]]) -> int:
    return len({tuple(tokens[: i + 1]) for tokens in token_lists for i in range(len(tokens))})


@pytest.mark.parametrize("kind", ["last", "mean", "logits", "logprobs"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 10_000])
@pytest.mark.parametrize("window", [10_000, 60])
def test_full_sharing_computes_every_unique_token_once(llm, kind, seed, rows, window):
    token_lists = prompts(seed, count=30)
    targets = [tokens[-1:] if kind == "logprobs" else None for tokens in token_lists]
    requests = [as_request(t, target) for t, target in zip(token_lists, targets, strict=True)]
    readout = Readout(kind, (1, 2) if kind == "logits" else ())
    llm.engine.reset_stats()
    run(llm, requests, readout, sharing="full", rows=rows, window=window)
    stats = llm.stats
    assert stats.tokens == sum(map(len, token_lists))
    assert stats.unique_tokens == unique_prefixes(token_lists)
    if window == 10_000:
        assert stats.rows_computed == stats.unique_tokens
    assert stats.path_rows_peak <= max(map(len, token_lists))
    # Several windows: the same, and what a window reads of the path that the one before left is read again.
    assert stats.unique_tokens <= stats.rows_computed <= stats.unique_tokens + stats.tokens // 20


def test_off_computes_every_token_and_mlp_what_is_unique_in_a_batch(llm):
    token_lists = prompts(1, count=20)
    requests = [as_request(t) for t in token_lists]
    llm.engine.reset_stats()
    run(llm, requests, Readout("last"), sharing="off", rows=10_000)
    assert llm.stats.rows_computed == llm.stats.tokens
    llm.engine.reset_stats()
    run(llm, requests, Readout("last"), sharing="mlp", rows=10_000)
    assert llm.stats.rows_computed == llm.stats.unique_tokens == unique_prefixes(token_lists)


@pytest.mark.parametrize("sharing", ["mlp", "off"])
def test_twins_in_a_row_run_once_in_the_baselines_too(llm, sharing):
    requests = [as_request([5, 6, 7], [label]) for label in range(4)] + [
        as_request([5, 6], [1]),
        as_request([5, 6], [2]),
    ]
    llm.engine.reset_stats()
    found = run(llm, requests, Readout("logprobs"), sharing=sharing, rows=100)
    assert llm.stats.rows_computed == {"off": 5, "mlp": 3}[sharing]
    full = run(llm, requests, Readout("logprobs"), sharing="full", rows=100)
    for one, other in zip(found, full, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-5)


@pytest.mark.parametrize("cache_prefill", [True, False])
def test_steps_and_stats_count_a_prompt_once_however_often_it_is_read(llm, cache_prefill):
    prompts = [[5, 6, 7], [5, 6], [9, 8, 7, 6]]
    requests = [as_request(tokens, [label]) for tokens in prompts for label in range(4)]
    with LLM(llm.checkpoint.path, dtype="float32", device="cpu", cache_prefill=cache_prefill) as some:
        told = []
        run(some, requests, Readout("logprobs"), sharing="full", rows=100, on_step=told.append)
        stats = some.stats
        assert (stats.requests, stats.tokens) == (3, sum(map(len, prompts)))
        assert sum(step.requests_done for step in told) == 3
        assert sum(step.tokens_done for step in told) == stats.tokens


def test_path_is_what_lies_above_the_cut(llm):
    """A prompt far longer than a batch: the path grows with it, and goes with it."""
    long = np.arange(200).tolist()
    llm.engine.reset_stats()
    paths = []
    run(
        llm,
        [as_request(long), as_request([*long[:50], 7]), as_request([300])],
        Readout("last"),
        sharing="full",
        rows=32,
        on_step=lambda info: paths.append(info.path_rows),
    )
    assert max(paths) <= 200
    assert llm.stats.rows_computed == 202
    assert paths[0] == 0 and paths[1] > 0


def test_reads_of_one_row_cost_one_row_of_the_last_layer(llm, rows_of_logits):
    """The labels of one prompt hang on its last row: one row is read for all of them."""
    read = rows_of_logits(llm.model)
    requests = [as_request([5, 6, 7], [label]) for label in range(20)]
    run(llm, requests, Readout("logprobs"), sharing="full", rows=100)
    assert read == [1]
