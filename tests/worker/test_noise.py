"""The noise of draws: a hash by its definition, that its bits are random in whatever varies, and Gumbel's law."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare, gumbel_r, kstest

from prefold.engine.sampling import gumbel, hash_ids, make_key, make_stream


def slow_hash(token: int, key: int) -> int:
    mask = 2**32 - 1
    x = token ^ key & mask
    x = (x ^ x >> 17) * 0xED5AD4BB & mask
    x = (x ^ x >> 11 ^ key >> 32) * 0xAC4C1B51 & mask
    x = (x ^ x >> 15) * 0x31848BAB & mask
    return x ^ x >> 14


def keys(*, seed: int = 0, samples: int = 1, positions: int = 1) -> np.ndarray:
    streams = [make_stream(seed, sample) for sample in range(samples)]
    return np.array([make_key(stream, position) for stream in streams for position in range(positions)], np.uint64)


def test_hash_by_its_definition():
    rng = np.random.default_rng(0)
    some = rng.integers(0, 2**64, 200, np.uint64)
    ids = rng.integers(0, 2**18, 200)
    assert hash_ids(ids, some).tolist() == [slow_hash(*one) for one in zip(ids.tolist(), some.tolist(), strict=True)]
    assert hash_ids(ids, some[:1]).tolist() == [slow_hash(token, int(some[0])) for token in ids.tolist()]


# Hashes along one thing while all others stay.
ALONG = {
    "tokens": lambda: hash_ids(np.arange(200_000), keys()),
    "positions": lambda: hash_ids(np.full(50_000, 1234), keys(positions=50_000)),
    "samples": lambda: hash_ids(np.full(50_000, 0), keys(samples=50_000)),
    "seeds": lambda: hash_ids(np.full(50_000, 7), np.concatenate([keys(seed=seed) for seed in range(50_000)])),
}


@pytest.mark.parametrize("along", ALONG)
def test_bits_are_random(along):
    """Each bit, each pair of neighbours and their difference: all as often as they should be."""
    hashes = ALONG[along]()
    count = len(hashes)
    bits = hashes[:, None] >> np.arange(32, dtype=np.uint32) & 1
    limit = 5 * np.sqrt(count) / 2
    assert np.abs(bits.sum(0) - count / 2).max() < limit
    assert np.abs((bits[1:] ^ bits[:-1]).sum(0) - count / 2).max() < limit
    assert np.abs((bits[:, 1:] ^ bits[:, :-1]).sum(0) - count / 2).max() < limit
    for numbers in (hashes, hashes[1:] ^ hashes[:-1], hashes[1:] - hashes[:-1]):
        for shift in (0, 24):
            counts = np.bincount(numbers >> np.uint32(shift) & np.uint32(255), minlength=256)
            assert chisquare(counts).pvalue > 1e-4


def test_the_noise_of_two_draws_has_nothing_in_common():
    """Over the tokens, between keys of neighbouring positions, samples and seeds."""
    ids, made = np.arange(50_000), [*keys(samples=3, positions=3), *keys(seed=1), *keys(seed=2**32)]
    noise = np.stack([gumbel(hash_ids(ids, np.array([key]))) for key in made])
    apart = np.corrcoef(noise) - np.eye(len(made))
    assert np.abs(apart).max() < 5 / np.sqrt(len(ids))


def test_noise_follows_gumbels_law():
    noise = gumbel(hash_ids(np.arange(200_000), keys(seed=5)))
    assert kstest(noise, gumbel_r.cdf).pvalue > 1e-3
    ends = gumbel(np.array([0, 2**32 - 1], np.uint32))
    np.testing.assert_allclose(ends, [33 * np.log(2), -np.log(33 * np.log(2))], rtol=1e-9)
