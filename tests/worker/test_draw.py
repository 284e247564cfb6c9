"""Drawing on a GPU beside drawing in NumPy: the same filters, the same noise, the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from choosing import choose_for, draw_for
from machines import kernels_in_use
from tritons import on_triton, triton_on  # noqa: F401 (a fixture)

from prefold import kernels
from prefold.engine.sampling import SamplerState
from prefold.engine.schedule.steps import NOT_FINITE
from prefold.spec.requests import Sampling
from prefold.worker.sampler import filter_tokens

COMPILED = kernels.load()
OPTIONS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=2.0, top_k=40),
    Sampling(temperature=1.0, top_k=10_000),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.5, min_p=0.05),
    Sampling(temperature=1.0, min_p=0.02, top_k=7, top_p=0.8),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.5, top_n_sigma=1.0),
    Sampling(temperature=3.0, top_n_sigma=1.7, top_p=0.9),
]


@pytest.fixture
def both(on_triton):  # noqa: F811
    """Tokens by NumPy, and by the kernel, which reads the row of each draw out of `logits`."""

    def compare(logits: torch.Tensor, options: list[Sampling], keys: list[int]) -> tuple[list[int], list[int]]:
        rows = [i % len(logits) for i in range(len(options))]
        found = draw_for(logits.to(on_triton), rows, options, keys).tolist()
        with triton_on():
            return found, draw_for(logits, rows, options, keys).tolist()

    return compare


@pytest.mark.parametrize(("vocab", "size"), [(300, 2048), (300, 128), pytest.param(1000, 512, marks=pytest.mark.slow)])
def test_tokens_are_those_of_numpy(both, monkeypatch, vocab, size):
    """In one block a row, and in several."""
    from prefold.worker.torch import draw_triton

    monkeypatch.setattr(draw_triton, "SIZE", size)
    rng = np.random.default_rng(vocab)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    found, wanted = both(logits, OPTIONS, rng.integers(0, 2**64, len(OPTIONS), np.uint64).tolist())
    assert found == wanted


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_equals_are_kept_or_left_together(both, option):
    """Rows of few different numbers: what is drawn is what the filters leave, whatever bound falls among equals."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.integers(-2, 3, (3, 130)).astype(np.float32))
    logits[2] = 1.0
    logits[1, rng.integers(0, 130, 60)] = -torch.inf
    found, wanted = both(logits, [option] * 3, [37] * 3)
    assert found == wanted
    for row, token in zip(logits, found, strict=True):
        probs = torch.softmax(row / option.temperature, -1).numpy()
        assert token in filter_tokens(probs, option.min_p, option.top_k, option.top_p)[0]
        if option.top_n_sigma:
            assert row[token] >= row.max() - option.top_n_sigma * row[row.isfinite()].std(correction=0)
        assert probs[token] > 0


def test_signs_of_zero_are_equal(both):
    logits = torch.tensor([[-0.0, 0.0, -0.0, -5.0]])
    found, wanted = both(logits, [Sampling(temperature=1.0, top_k=1)] * 6, list(range(6)))
    assert found == wanted
    assert set(found) == {0, 1, 2}


def test_odd_rows(both):
    one, none = torch.full((2, 50), -torch.inf)
    one[33] = -70.0
    logits = torch.stack((one, torch.linspace(-300, 300, 50)))
    for option in OPTIONS:
        found, wanted = both(logits, [option] * 2, [5] * 2)
        assert found == wanted
    assert draw_for(none[None], [0], OPTIONS[:1], [5]).tolist() == [-1]
    assert draw_for(none[None], [], [], []).tolist() == []


def test_cold_temperatures_do_not_overflow(both):
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(3)) * 50
    found, wanted = both(logits, [Sampling(temperature=2e-5)], [99])
    assert found == wanted == [int(logits.argmax())]


# The whole sampler


def states(seed: int = 0) -> list[SamplerState]:
    ends = [3, 40]
    asked = [
        Sampling(),
        Sampling(min_tokens=5),
        Sampling(logit_bias=((7, 100.0),)),
        Sampling(temperature=1.0, min_tokens=2),
        Sampling(temperature=0.9, logit_bias=((9, 2.0), (3, -1.0)), top_p=0.9),
        *OPTIONS,
    ]
    made = [SamplerState(options, seed=seed + i, end_ids=ends) for i, options in enumerate(asked)]
    for number, state in enumerate(made):
        state.position = number % 4
    return made


@pytest.mark.parametrize("altered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tokens_of_all_options_are_those_of_numpy(on_triton, altered):  # noqa: F811
    """With tokens that the states have not been told of yet, and several samples of one row."""
    logits = torch.randn(9, 120, generator=torch.Generator().manual_seed(1)) * 2
    logits[:, 3] = 9  # an end that is likely
    some = states() if altered else states()[5:] + states()[:1]
    rows = [(5 * i) % 9 for i in range(len(some))]
    ahead = [i % 2 for i in range(len(some))]
    found = choose_for(logits.to(on_triton), some, rows, ahead)
    for state, n in zip(some, ahead, strict=True):
        state.position += n
    assert found == choose_for(logits.to(on_triton), some, rows)
    with triton_on():
        assert found == choose_for(logits, some, rows)


def test_where_nothing_may_follow_there_is_no_token(on_triton):  # noqa: F811
    logits = torch.full((1, 20), -torch.inf)
    logits[0, 4] = 1.0
    banned = [SamplerState(Sampling(temperature=t, min_tokens=9), seed=0, end_ids=[4]) for t in (0.0, 1.0)]
    assert choose_for(logits.to(on_triton), banned, [0, 0]).ids == [-1, -1]


def test_logits_that_are_not_finite_give_no_token(on_triton):  # noqa: F811
    """On the device and on the host, whatever is asked of them; the rows beside them are as they were."""
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(4))
    logits[1], logits[2, 7], logits[3, 8], logits[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    asked = (Sampling(), Sampling(logit_bias=((7, -50.0),)), Sampling(logprobs=1), OPTIONS[0], OPTIONS[8])
    some = [[SamplerState(options, seed=i) for i in range(6)] for options in asked]
    found = [choose_for(logits.to(on_triton), samples) for samples in some]
    for in_use in (COMPILED, None):
        with triton_on(), kernels_in_use(in_use):
            for one, samples in zip(found, some, strict=True):
                assert one.ids[1:5] == [NOT_FINITE] * 4
                assert one.logprobs[1:5] == [None] * 4
                assert one.ids == choose_for(logits, samples).ids
                assert one.ids[5] == choose_for(logits[5:], samples[5:]).ids[0]
