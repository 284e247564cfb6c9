"""The sampler against slow definitions, transformers' own processors, and the distributions it should draw from."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from choosing import OnlyThese, choose_for
from hypothesis import given, settings
from hypothesis import strategies as st
from tritons import on_triton  # noqa: F401 (a fixture)

from prefold.engine.sampling import SamplerState, drawing_of, gumbel, hash_ids
from prefold.spec.requests import Sampling
from prefold.worker.sampler import filter_tokens

VOCAB = 300


def state(sampling: Sampling | None = None, *, position: int = 0, seed: int = 1, **more) -> SamplerState:
    made = SamplerState(sampling or Sampling(), seed=seed, **more)
    made.position = position
    return made


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def slow_logits(logits: np.ndarray, state: SamplerState, prompt: list[int], output: list[int]) -> np.ndarray:
    """A row after everything that comes before the temperature, as the options are defined."""
    row, options = logits.astype(np.float64), state.sampling
    for token, value in options.logit_bias:
        row[token] += value
    if state.matcher is not None:
        row[~state.matcher.allowed] = -np.inf
    for token in set(prompt) | set(output):
        divide = row[token] > 0
        row[token] = row[token] / options.repetition_penalty if divide else row[token] * options.repetition_penalty
    for token in set(output):
        row[token] -= options.presence_penalty + options.frequency_penalty * output.count(token)
    if state.position < options.min_tokens:
        row[state.end_ids] = -np.inf
    return row


def slow_probs(row: np.ndarray, options: Sampling) -> np.ndarray:
    """The distribution that is drawn from, by filters one after the other."""
    row = row / options.temperature
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    if options.top_n_sigma:
        probs[row < row.max() - options.top_n_sigma * row[np.isfinite(row)].std()] = 0
    probs[probs < options.min_p * probs.max()] = 0
    if options.top_k:
        probs[probs < np.sort(probs)[::-1][min(options.top_k, probs.size) - 1]] = 0
    if options.top_p < 1:
        falling = np.sort(probs)[::-1]
        before = falling.cumsum() - falling
        probs[probs < falling[before < max(options.top_p, 1e-9) * probs.sum()][-1]] = 0
    return probs / probs.sum()


def slow_draw(probs: np.ndarray, state: SamplerState) -> int:
    """The token whose log-probability plus noise is the largest, by the definition."""
    noise = gumbel(hash_ids(np.arange(probs.size), np.array([state.key()], np.uint64)))
    with np.errstate(divide="ignore"):
        return int((np.log(probs) + noise).argmax())


OPTIONS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=2.0, top_k=40, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.0, top_k=VOCAB + 5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=5.0, top_p=0.999),
    Sampling(temperature=0.8, top_k=200, top_p=0.5),
    Sampling(temperature=2.0, top_n_sigma=2.0),
    Sampling(temperature=1.5, top_n_sigma=1.2, min_p=0.001, top_k=40, top_p=0.9),
]


@pytest.mark.parametrize("options", [one for one in OPTIONS if not one.top_n_sigma], ids=str)
def test_kept_is_what_the_filters_leave_one_after_the_other(options):
    for seed in range(20):
        row = random_logits(1, seed=seed)
        probs = torch.softmax(row / options.temperature, -1)[0].numpy()
        ids, left = filter_tokens(probs, options.min_p, options.top_k, options.top_p)
        expected = slow_probs(row[0].double().numpy(), options)
        assert ids.tolist() == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(left / left.sum(), expected[ids], rtol=1e-4)


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([-math.inf, 0.0, 0.5, 0.5, 1.0, 7.0]) | st.floats(-5, 5, width=32), min_size=1),
    st.integers(0, 12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_kept_of_odd_rows(row, top_k, top_p, min_p):
    """Equal tokens are kept all or none; at least one is; never one without any probability among others."""
    row = np.array(row, np.float32)
    if not (row > -np.inf).any():
        return
    probs = torch.softmax(torch.from_numpy(row), -1).numpy()
    ids, left = filter_tokens(probs, min_p, top_k, top_p)
    assert ids.size and (np.diff(ids) > 0).all()
    assert left.max() == probs.max()
    out = np.setdiff1d(np.arange(row.size), ids)
    assert not out.size or probs[out].max() < left.min()
    if top_k:
        assert (left > left.min()).sum() < top_k
    mass = probs[probs > left.min()].sum()
    assert top_p == 1.0 or mass <= top_p + 1e-5 or left.min() == left.max()


def test_filters_equal_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    makers = {
        "temperature": process.TemperatureLogitsWarper,
        "min_p": process.MinPLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
    }
    cases = [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.7}, {"min_p": 0.01, "top_k": 30}]
    for options in ({"temperature": 0.6} | case for case in cases):
        scores = random_logits(50)
        rows = scores.clone()
        for name, make in makers.items():
            if name in options:
                scores = make(options[name])(None, scores)
        probs = torch.softmax(rows / options["temperature"], -1).numpy()
        for row, expected in zip(probs, torch.softmax(scores, -1).numpy(), strict=True):
            ids, left = filter_tokens(
                row, options.get("min_p", 0.0), options.get("top_k", 0), options.get("top_p", 1.0)
            )
            assert ids.tolist() == np.flatnonzero(expected).tolist()
            np.testing.assert_allclose(left / left.sum(), expected[ids], rtol=1e-5)


def test_repetition_penalty_equals_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(20)
    for penalty in (1.3, 0.8, 4.0):
        states, sequences = [], []
        for i in range(20):
            order = logits[i].argsort(descending=True).tolist()
            prompt, output = order[1:200:3] * 2, order[: i + 1]
            states.append(state(Sampling(repetition_penalty=penalty), prompt=prompt))
            for token in output:
                states[-1].advance(token)
            sequences.append(prompt + output)
        expected = [
            process.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits[i : i + 1].clone()).argmax()
            for i, ids in enumerate(sequences)
        ]
        assert choose_for(logits, states).ids == [int(token) for token in expected]


def test_everything_together_equals_the_slow_definition():
    """Greedy and drawn, with every option on, along an output that grows."""
    rng = np.random.default_rng(0)
    common = {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.4, "min_tokens": 5}
    for trial in range(2 * len(OPTIONS)):
        some = rng.choice(VOCAB, 40, replace=False).tolist()
        bias = tuple((token, float(rng.normal() * 5)) for token in some[:10])
        filters = OPTIONS[trial // 2]
        drawn = replace(filters, temperature=filters.temperature * (trial % 2), logit_bias=bias, **common)
        prompt, output = rng.integers(0, VOCAB, 30).tolist(), []
        made = state(drawn, prompt=prompt, end_ids=some[:5], matcher=OnlyThese(some), seed=trial)
        for step in range(8):
            logits = random_logits(1, seed=100 * trial + step)
            before = logits.clone()
            row = slow_logits(logits[0].numpy(), made, prompt, output)
            (token,) = choose_for(logits, [made]).ids
            assert torch.equal(logits, before)
            if made.greedy:
                assert token == row.argmax()
            else:
                assert token == slow_draw(slow_probs(row, drawn), made)
            made.advance(token)
            output.append(token)
        assert made.matcher.accepted == output


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """The chance of counts as far from what they should be (Pearson's test)."""
    from scipy.stats import chisquare

    assert not counts[probs == 0].any()
    expected = probs[probs > 0] * counts.sum()
    return chisquare(counts[probs > 0], expected).pvalue


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.top_k != 1 and o.top_p > 0], ids=str)
def test_draws_have_the_right_distribution(options):
    """Over samples at one position, and over positions of one sample."""
    logits = random_logits(1, vocab=12, seed=3) / 3
    expected = slow_probs(logits[0].double().numpy(), options)
    draws = 2000
    samples = [state(options, sample=i, seed=2) for i in range(draws)]
    counts = np.bincount(choose_for(logits, samples, [0] * draws).ids, minlength=12)
    assert chi_square(counts, expected) > 1e-3
    positions = [state(options, position=i, seed=2) for i in range(draws)]
    counts = np.bincount(choose_for(logits, positions, [0] * draws).ids, minlength=12)
    assert chi_square(counts, expected) > 1e-3


@pytest.mark.parametrize("compiled", [True, False], indirect=True)
@pytest.mark.parametrize("vocab", [1, 100, 128, 1000, 49152])
def test_a_whole_row_is_drawn_from_as_defined(vocab, compiled):
    """By the compiled kernel, and by NumPy where there is none."""
    logits = random_logits(4, vocab)
    logits[1] = 0.0
    logits[2, : vocab // 2] = -torch.inf
    logits[3] *= 100
    for temperature in (0.05, 1.0, 30.0):
        probs = torch.softmax(logits.double() / temperature, -1).numpy()
        states = [state(Sampling(temperature=temperature), seed=seed) for _ in range(4) for seed in range(20)]
        rows = [row for row in range(4) for _ in range(20)]
        chosen = choose_for(logits, states, rows).ids
        assert chosen == [slow_draw(probs[row], made) for row, made in zip(rows, states, strict=True)]


def test_a_filter_that_removes_nothing_changes_nothing():
    logits = random_logits(1, 1000)
    for seed in range(200):
        one, other = (state(Sampling(temperature=1.0, top_k=k), seed=seed) for k in (0, 1000 - 1))
        assert choose_for(logits, [one]).ids == choose_for(logits, [other]).ids


def test_keys_are_of_seed_sample_and_position():
    """Whatever was asked before; a seed counts modulo 2**64, as it comes from other libraries."""
    keys = {}
    for seed, sample in ((0, 0), (0, 1), (1, 0), (7, 3), (2**63, 1), (2**64 - 1, 2)):
        made = SamplerState(Sampling(temperature=1.0), seed=seed, sample=sample)
        keys |= {(seed, sample, position): made.key(position) for position in (*range(300), 5, 299, 64)}
        for position in (299, 3):
            made.position = position
            assert made.key(1) == SamplerState(Sampling(), seed=seed, sample=sample).key(position + 1)
    assert len(set(keys.values())) == len(keys) == 6 * 300
    assert SamplerState(Sampling(), seed=-1).key() == SamplerState(Sampling(), seed=2**64 - 1).key()


def test_a_small_change_of_the_logits_changes_no_draw():
    """As another order of float32 sums makes it."""
    logits = random_logits(500, 5000)
    moved = logits + 1e-6 * random_logits(500, 5000, seed=1)
    for options in (
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=2.0, top_k=99),
    ):
        states = [state(options, sample=i % 7, seed=i) for i in range(3000)]
        rows = [i % 500 for i in range(3000)]
        assert choose_for(logits, states, rows).ids == choose_for(moved, states, rows).ids


MIXED = [
    Sampling(),
    Sampling(temperature=0.9),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_k=20, seed=3),
    Sampling(presence_penalty=1.0, logprobs=2),
    Sampling(temperature=0.8, logit_bias=((3, 4.0),), min_tokens=9, logprobs=0),
    Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.5),
]


def test_neighbours_and_their_order_change_nothing(monkeypatch):
    logits = random_logits(40, 1000)
    logits = torch.cat((logits, logits.bfloat16().float()))  # with many equal ones
    rng = np.random.default_rng(1)
    states = []
    for i in range(80):
        made = state(MIXED[i % len(MIXED)], seed=i // 7, sample=i % 3, prompt=range(i), end_ids=[1, 2])
        for token in rng.integers(0, 1000, i % 11).tolist():
            made.advance(token)
        states.append(made)
    whole = choose_for(logits, states)
    alone = [choose_for(logits[i : i + 1], [made]) for i, made in enumerate(states)]
    assert whole.ids == [one.ids[0] for one in alone]
    assert whole.logprobs == [one.logprobs[0] for one in alone]
    order = rng.permutation(80).tolist()
    shuffled = choose_for(logits, [states[i] for i in order], order)
    assert shuffled.ids == [whole.ids[i] for i in order]
    assert shuffled.logprobs == [whole.logprobs[i] for i in order]
    monkeypatch.setattr("prefold.worker.sampler.WORK_SIZE", 3000)
    assert choose_for(logits, states) == whole


def test_samples_of_one_prompt_share_a_row():
    logits = random_logits(2)
    states = [state(Sampling(temperature=3.0), seed=5, sample=i) for i in range(50)]
    ids = choose_for(logits, states, [1] * 50).ids
    assert len(set(ids)) > 5
    assert ids == choose_for(logits[1:], states, [0] * 50).ids


def test_greedy_is_the_first_of_the_most_likely():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, -5.0], [0.0, 0.0, 0.0]])
    plain = [state(), state(Sampling(temperature=1e-6)), state(Sampling(top_k=5, seed=3))]
    assert all(made.plain() for made in plain)
    assert choose_for(logits, plain).ids == [1, 2, 0]
    penalised = [state(Sampling(presence_penalty=1.0)) for _ in range(3)]
    assert choose_for(logits, penalised).ids == [1, 2, 0]
    assert choose_for(logits, []).ids == []


def test_cold_temperatures_do_not_overflow():
    logits = random_logits(10) * 10
    states = [state(Sampling(temperature=2e-5, top_p=0.9 + i / 100)) for i in range(10)]
    assert choose_for(logits, states).ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("options", [Sampling(), *OPTIONS], ids=str)
def test_a_mask_that_leaves_one_token(options):
    logits = random_logits(4)
    states = [state(options, matcher=OnlyThese([i])) for i in (0, 127, 128, VOCAB - 1)]
    assert choose_for(logits, states).ids == [0, 127, 128, VOCAB - 1]


@pytest.mark.parametrize("path", ["cpu", "gpu"])
@pytest.mark.parametrize("vocab", [296, 300, 303])
def test_bits_forbid_what_truth_values_would(vocab, path, request):
    """Of some of the reads, beside a bias, penalties and banned ids; by NumPy, and by what a GPU computes."""
    if path == "gpu":
        request.getfixturevalue("on_triton")
    rng = np.random.default_rng(vocab)
    logits = random_logits(12, vocab)
    options = {"logit_bias": ((3, 4.0), (9, -2.0)), "presence_penalty": 1.0, "min_tokens": 5, "max_tokens": 9}
    states, wanted = [], []
    for i in range(12):
        bare = {"seed": i, "end_ids": [1, 2], "sampling": Sampling(temperature=0.8 * (i % 2), **options)}
        some = None if i % 3 == 0 else OnlyThese(rng.choice(vocab, 1 + 9 * i, replace=False).tolist(), vocab)
        states.append(state(**bare, matcher=some))
        by_hand = state(**bare)
        token = int(rng.integers(vocab) if some is None else np.flatnonzero(some.allowed)[0])
        for made in (states[-1], by_hand):
            made.advance(token)
        wanted.append(
            (by_hand, logits[i] if some is None else logits[i].masked_fill(~torch.tensor(some.allowed), -100))
        )
    found = choose_for(logits, states).ids
    assert found == [choose_for(row[None], [made]).ids[0] for made, row in wanted]


def test_masks_are_bits_in_the_message_of_a_step():
    """64 rows of 151,936 tokens each are 1.2 MB for every rank."""
    vocab = 151_936
    states = [state(matcher=OnlyThese([i], vocab)) for i in range(64)]
    drawing = drawing_of(states, [0] * 64)
    assert drawing.grammar_masks.dtype == np.uint8 and drawing.grammar_masks.shape == (64, vocab // 8)
    assert len(ForkingPickler.dumps(drawing)) < 64 * vocab // 8 + 10_000
    assert drawing.pick(np.array([5, 8])).grammar_masks.nbytes == 2 * vocab // 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_may_follow_there_is_no_token(temperature):
    logits = random_logits(3)
    options = Sampling(temperature=temperature, min_tokens=2, logprobs=1)
    made = [state(options, matcher=OnlyThese(ids), end_ids=[7]) for ids in ([7], [], [7, 8])]
    chosen = choose_for(logits, made)
    assert chosen.ids == [-1, -1, 8]
    assert chosen.logprobs[:2] == [None, None]


def test_min_tokens_ban_the_ends_until_there_are_enough():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9] = 30, 20
    for temperature in (0.0, 1.0):
        made = SamplerState(Sampling(temperature=temperature, min_tokens=2), seed=0, end_ids=[7])
        for expected in (9, 9, 7):
            assert choose_for(logits, [made]).ids == [expected]
            made.advance(expected)


def test_logprobs_are_the_models_own():
    logits = random_logits(3)
    logits[2, :5] = logits[2].max() + 1
    expected = torch.log_softmax(logits.double(), -1).numpy()
    options = {"logit_bias": ((11, 50.0),), "temperature": 1.0}
    states = [state(Sampling(logprobs=k, **options)) for k in (0, 4, 3)]
    chosen = choose_for(logits, states)
    assert chosen.ids == [11, 11, 11]
    for row, (found, count) in enumerate(zip(chosen.logprobs, (0, 4, 3), strict=True)):
        assert found.logprob == pytest.approx(expected[row, 11], abs=1e-5)
        order = np.lexsort((np.arange(VOCAB), -logits[row].numpy()))[:count]
        assert len(found.top) == count
        if row < 2:
            assert [token for token, _ in found.top] == order.tolist()
        for token, value in found.top:
            assert value == pytest.approx(expected[row, token], abs=1e-5)
    many = choose_for(logits, [state(Sampling(logprobs=VOCAB + 9))], [0])
    assert sorted(token for token, _ in many.logprobs[0].top) == list(range(VOCAB))


def test_counts_grow():
    made = state(Sampling(frequency_penalty=1.0, repetition_penalty=1.1), prompt=[5, 3, 5])
    output = [i % 90 for i in range(400)]
    for token in output:
        made.advance(token)
    ids, counts = made.output_counts
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {i: output.count(i) for i in range(90)}
    bare = state(Sampling(presence_penalty=1.0), prompt=[5, 3])
    bare.advance(4)
    assert bare.output_counts[0].tolist() == [4]


def test_levels_of_top_p_are_exact_for_flat_and_peaked_rows():
    """Rows whose nucleus is a few tokens, thousands, or all."""
    for scale, top_p, top_k in itertools.product((0.0, 0.1, 1.0, 6.0), (0.3, 0.9, 0.999), (0, 50, 5000)):
        logits = random_logits(1, 20000) * scale
        options = Sampling(temperature=1.0, top_p=top_p, top_k=top_k)
        probs = torch.softmax(logits, -1)[0].numpy()
        ids, _ = filter_tokens(probs, options.min_p, options.top_k, options.top_p)
        expected = np.flatnonzero(slow_probs(logits[0].double().numpy(), options))
        # Sums of thousands of float32 numbers: the border may lie a token further.
        assert abs(ids.size - expected.size) <= max(1, expected.size // 1000)
        assert np.setdiff1d(expected, ids).size <= max(1, expected.size // 1000)
