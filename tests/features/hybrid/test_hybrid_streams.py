"""Row streams of hybrids: what is read against transformers, and which rows are computed and states kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hybrids import HYBRIDS, hidden_states, hybrid_checkpoint, state_bytes
from running import as_request, prompts, run
from tiny import reference

from prefold import LLM
from prefold.engine.schedule.windows import WindowPlanner
from prefold.spec.requests import Readout

MANY = 1 << 20


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(request, tmp_path_factory):
    folder = hybrid_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return LLM(str(folder), dtype="float32"), reference(folder)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    return LLM(str(hybrid_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2")), dtype="float32")


@pytest.mark.parametrize(
    ("sharing", "rows", "window"),
    [("full", 4096, MANY), ("full", 5, MANY), ("full", 3, 20), ("full", 1, 12), ("mlp", 30, MANY), ("mlp", 4, 20),
     ("off", 4096, MANY), ("off", 3, MANY)],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_last_rows_are_those_of_transformers(pair, sharing, rows, window, seed):
    llm, model = pair
    texts = [*prompts(seed), prompts(8)[0] * 20, prompts(8)[0] * 12]
    results = run(llm, list(map(as_request, texts)), Readout("last"), sharing=sharing, rows=rows, window=window)
    for result, states in zip(results, hidden_states(model, texts), strict=True):
        assert np.abs(result.values - states[-1]).max() < 1e-4


@pytest.mark.parametrize("rows", [4096, 7])
def test_means_and_log_probabilities_are_those_of_transformers(pair, rows):
    llm, model = pair
    texts = prompts(3)
    states = hidden_states(model, texts)
    means = run(llm, list(map(as_request, texts)), Readout("mean"), sharing="full", rows=rows)
    for result, expected in zip(means, states, strict=True):
        assert np.abs(result.values - expected.mean(0)).max() < 1e-4
    pairs = [(tokens[: len(tokens) - 1], tokens[-1:]) for tokens in texts if len(tokens) > 1]
    scored = run(llm, [as_request(*one) for one in pairs], Readout("logprobs"), sharing="full", rows=rows)
    with torch.inference_mode():
        for result, (tokens, target) in zip(scored, pairs, strict=True):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            assert abs(float(result.values[0]) - float(logits.log_softmax(-1)[target[0]])) < 1e-4


def random_cuts(rng: np.random.Generator, llm: LLM, requests, monkeypatch):
    """Runs requests in steps of random sizes."""
    monkeypatch.setattr(WindowPlanner, "_cut", lambda self, start, rows: int(
        min(self.trie.num_rows, start + rng.integers(1, 9))))  # fmt: skip
    return run(llm, requests, Readout("last"), sharing="full", rows=4096)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_cut_anywhere(pair, seed, monkeypatch):
    llm, model = pair
    texts = prompts(seed, count=25)
    results = random_cuts(np.random.default_rng(seed), llm, list(map(as_request, texts)), monkeypatch)
    for result, states in zip(results, hidden_states(model, texts), strict=True):
        assert np.abs(result.values - states[-1]).max() < 1e-4


def tree(rng: np.random.Generator, *levels: tuple[int, int]) -> list[list[int]]:
    """Prompts of a tree. levels: how many children each node has, and how many tokens each of these adds, the first of
    which tells it from the others."""
    found: list[list[int]] = [[]]
    for number, tokens in levels:
        found = [[*above, 3 + i, *rng.integers(3, 300, tokens - 1).tolist()] for above in found for i in range(number)]
    return found


TREES = {
    "64 of 1,000 shared and 100 own": [(1, 1000), (64, 100)],
    "three levels": [(2, 300), (4, 60), (5, 20)],
    "40 shared": [(1, 40), (64, 10)],
}


@pytest.mark.parametrize("levels", TREES.values(), ids=TREES)
@pytest.mark.parametrize("rows", [4096, 500])
def test_each_row_is_computed_once(lfm2, levels, rows):
    texts = tree(np.random.default_rng(0), *levels)
    lfm2.engine.reset_stats()
    run(lfm2, list(map(as_request, texts)), Readout("last"), sharing="full", rows=rows, window=1 << 24)
    unique, nodes = 0, 1
    for number, tokens in levels:
        nodes *= number
        unique += nodes * tokens
    stats = lfm2.engine.stats
    assert stats.rows_computed == stats.unique_tokens == unique
    # States of one path are held: one for each level above the leaves, one at the cut, and at the end of the window.
    assert 0 < stats.state_bytes_peak <= (len(levels) + 1) * state_bytes(lfm2)


def test_the_next_window_goes_on_from_the_states_of_branches(lfm2):
    rng = np.random.default_rng(1)
    texts = tree(rng, (1, 200), (40, 10))
    lfm2.engine.reset_stats()
    run(lfm2, list(map(as_request, texts)), Readout("last"), sharing="full", rows=4096, window=2100)
    assert lfm2.engine.stats.rows_computed == 200 + 40 * 10


def test_a_branch_that_only_the_next_window_knows_is_computed_from_the_state_above(lfm2):
    shared = list(range(3, 103))
    texts = [[*shared, 110 + i] for i in range(5)] + [[*shared[:50], 200, 201], [*shared[:50], 202]]
    lfm2.engine.reset_stats()
    expected = run(lfm2, list(map(as_request, texts)), Readout("last"), sharing="off", rows=4096)
    lfm2.engine.reset_stats()
    results = run(lfm2, list(map(as_request, texts)), Readout("last"), sharing="full", rows=4096, window=510)
    for result, other in zip(results, expected, strict=True):
        assert np.abs(result.values - other.values).max() < 1e-4
    # 105 rows of the first window; no state was kept at the 50th row, so these rows are computed again.
    assert lfm2.engine.stats.rows_computed == 105 + 53
    assert lfm2.engine.stats.unique_tokens == 105 + 3
