"""Other systems' policies by their rules, on the router of a real fleet."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate import policies  # noqa: F401  # they are put into the table
from prefold.cache import CacheEvents
from prefold.cache.events import CacheCleared, RowsStored
from prefold.cluster.router import Prompt, Router, Speed, policy_named
from tests.cluster.checks import check_policy_keeps_to_those_allowed


@pytest.mark.parametrize("name", ["daft", "sglang", "preble"])
def test_every_policy_chooses_among_those_allowed(name):
    check_policy_keeps_to_those_allowed(name)


def test_daft_never_forgets_what_it_sent():
    router = Router(policy_named("daft"))
    for name in "ab":
        router.join(name)
    prompt = Prompt(np.arange(10), prefix=5)
    chosen = []
    for i in range(600):
        chosen.append(router.choose(prompt))
        router.send(i, prompt, chosen[-1])
        router.end(i, output_rows=1)
    assert chosen[:257] == ["b"] * 257  # though each had ended before the next was sent
    assert chosen[257] == "a"


def test_sglang_balances_when_far_apart():
    router = Router(policy_named("sglang"))
    for name in "ab":
        router.join(name)
    chosen = []
    for i in range(70):
        prompt = Prompt(np.append(np.arange(10), i))
        chosen.append(router.choose(prompt))
        router.send(i, prompt, chosen[-1])
    assert chosen == ["a"] * 65 + ["b"] + ["a"] + ["b"] + ["a"] + ["b"]


def test_preble_exploits_what_is_mostly_cached():
    router = Router(policy_named("preble"))
    for name in "ab":
        router.join(name, speed=Speed(prefill=1e-3))
    router.take("a", CacheEvents(0, 0, (CacheCleared(), RowsStored(1, None, np.arange(6)))))
    router.send(0, Prompt(np.arange(50, 60)), "a")
    assert router.choose(Prompt(np.arange(10))) == "a"  # 6 of 10 are cached, whatever waits there
    assert router.choose(Prompt(np.arange(13))) == "b"  # 6 of 13 are not enough
