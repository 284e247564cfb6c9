"""vLLM's events against a pool of blocks that behaves as vLLM's does, and against the router that they are for."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from fake_replicas import held_by
from fleet_books import check_blocks, rows_in

from prefold.cluster.router import Router
from prefold.integrations.vllm import BlockEvents
from prefold.spec.requests import Namespace

BLOCK = 2


def named(namespace, tokens) -> bytes:
    return hashlib.blake2b(repr((namespace, tokens)).encode(), digest_size=8).digest()


class Pool:
    """Blocks that are not merged where they are equal, freed from the end, and reused by the time of last use."""

    def __init__(self, rng, size):
        self.rng, self.free = rng, list(range(size))
        self.key: dict[int, tuple] = {}  # block -> (namespace, tokens up to its end)
        self.running: list[list[int]] = []
        self.events: list[dict] = []

    def message(self) -> bytes:
        events, self.events = self.events, []
        return msgspec.msgpack.encode([0.0, events, None])

    def held(self) -> set[tuple]:
        """The rows, as (namespace, the tokens up to it)."""
        return {(space, tokens[: len(tokens) - i]) for space, tokens in self.key.values() for i in range(BLOCK)}

    def submit(self):
        adapter, salt = (None, "fine")[self.rng.integers(2)], ("", "mine")[self.rng.integers(2)]
        tokens = tuple(self.rng.integers(0, 2, BLOCK * self.rng.integers(1, 6)).tolist())
        wanted = [(Namespace(adapter or "", salt), tokens[: (i + 1) * BLOCK]) for i in range(len(tokens) // BLOCK)]
        found = []
        if self.rng.random() < 0.8:  # else at once with an equal one, so that both compute it
            for key in wanted:
                block = next((block for block, other in self.key.items() if other == key), None)
                if block is None:
                    break
                found.append(block)
        fresh = wanted[len(found) :]
        for block in found:
            if block in self.free:
                self.free.remove(block)
        if len(fresh) > len(self.free):
            self.free += [block for block in reversed(found) if not any(block in run for run in self.running)]
            return
        mine = [self.take() for _ in fresh]
        self.key |= dict(zip(mine, fresh, strict=True))
        self.running.append(found + mine)
        if fresh:
            keys = [adapter] * (adapter is not None) + [salt] * bool(salt and not found)
            names = [named(*key) for key in fresh]
            self.events.append(
                {
                    "type": "BlockStored", "block_hashes": names, "block_size": BLOCK, "medium": "GPU",
                    "parent_block_hash": named(*wanted[len(found) - 1]) if found else None,
                    "token_ids": list(tokens[len(found) * BLOCK :]), "lora_id": None, "lora_name": adapter,
                    "extra_keys": [keys or None] * len(names), "group_idx": 0,
                }
            )  # fmt: skip

    def take(self):
        block = self.free.pop(0)
        key = self.key.pop(block, None)
        if key is not None:
            self.events.append({"type": "BlockRemoved", "block_hashes": [named(*key)], "medium": "GPU", "group_idx": 0})
        return block

    def end(self):
        if self.running:
            blocks = self.running.pop(self.rng.integers(len(self.running)))
            users = Counter(block for run in self.running for block in run)
            self.free += [block for block in reversed(blocks) if not users[block]]

    def clear(self):
        if not self.running:
            self.key = {}
            self.events.append({"type": "AllBlocksCleared"})


@pytest.mark.parametrize("seed", range(4))
def test_long_random_runs(seed):
    """Messages are lost and told again, doubled, and a router joins late; after each the picture is what is held."""
    rng = np.random.default_rng(seed)
    pool, blocks, router = Pool(rng, 14), BlockEvents(), Router()
    router.join("a")
    kept: list[bytes] = []
    for step in range(600):
        if rng.random() < 0.005:
            pool.clear()
        (pool.submit if rng.random() < 0.55 else pool.end)()
        kept.append(pool.message())
        if rng.random() < 0.1:
            continue  # this one is lost for now
        number = len(kept) - 1
        if not blocks.take(number, kept[number]):
            assert blocks.next_message < number
            for earlier in range(blocks.next_message, number + 1):
                assert blocks.take(earlier, kept[earlier])
        assert blocks.take(number, kept[number])  # a message that comes twice changes nothing
        if rng.random() < 0.02:
            router = Router()
            router.join("a")
            blocks.drain()
            blocks.tell_anew()
        check_blocks(blocks)
        if (events := blocks.drain()) is not None:
            assert router.take("a", events), step
        assert held_by(router, "a") == pool.held()
        assert rows_in(blocks) == BLOCK * len(set(pool.key.values()))


@pytest.mark.parametrize("seed", range(2))
def test_after_messages_that_nobody_has_any_more_only_what_is_held_is_told(seed):
    rng = np.random.default_rng(seed)
    pool, blocks, router = Pool(rng, 14), BlockEvents(), Router()
    router.join("a")
    held = 0
    for number in range(900):
        (pool.submit if rng.random() < 0.55 else pool.end)()
        message = pool.message()
        if number == 300:
            continue
        if number == 301:
            assert not blocks.take(number, message)
            blocks.skip_to(number)
        assert blocks.take(number, message)
        check_blocks(blocks)
        if (events := blocks.drain()) is not None:
            assert router.take("a", events)
        assert held_by(router, "a") <= pool.held()
        held = len(held_by(router, "a")) if number > 800 else 0
    assert held > len(pool.held()) / 2, "what is stored anew is known again"


def test_events_that_are_lists_and_groups_and_gaps_between_blocks():
    """Older versions write an event as a list. Blocks of other groups, and with gaps between them, are left out."""
    blocks = BlockEvents()
    stored = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU", None]
    assert blocks.take(0, msgspec.msgpack.encode([0.0, [stored]])) and rows_in(blocks) == 4
    other = {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": 2, "token_ids": [1, 2], "block_size": 2}
    gap = other | {"token_ids": [1, 2, 3, 4]}
    assert blocks.take(1, msgspec.msgpack.encode([0.0, [other | {"group_idx": 1}, gap]])) and rows_in(blocks) == 4
    assert blocks.take(2, msgspec.msgpack.encode([0.0, [["BlockRemoved", [1, 2], "GPU"]]])) and rows_in(blocks) == 0
    check_blocks(blocks)
