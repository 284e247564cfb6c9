"""Whether the books of a fleet balance: AssertionError where they do not."""

from __future__ import annotations

import numpy as np
from books import check_books

from prefold.cluster.leases import LeaseBook, Source
from prefold.cluster.offline import OfflineSource
from prefold.cluster.online import OnlineSource
from prefold.cluster.prefixes import Place, PrefixIndex
from prefold.cluster.router import Prompt, Router, policy_named
from prefold.integrations.vllm import BlockEvents


def places_of(index: PrefixIndex) -> list[Place]:
    """All places of a router's trie but roots."""
    return list(index.nodes())


def check_router(router: Router) -> None:
    check_books(router.index)
    ends: dict[int, int] = {}
    held: dict[int, int] = {}
    users: dict[int, dict[int, int]] = {}
    for member in router.members.values():
        assert member.cached_rows == sum(place.stop - start for place, start in member.runs.values())
        for place, start in member.runs.values():
            ends[id(place)] = ends.get(id(place), 0) + 1
            at = place
            while at is not None and at.stop > start:
                assert at.start >= start, "a run begins within a place"
                assert not held.get(id(at), 0) >> member.number & 1, "a row is in two runs"
                held[id(at)] = held.get(id(at), 0) | 1 << member.number
                at = at.parent
    for sent in router.in_flight.values():
        number = router.members[sent.replica].number
        ends[id(sent.place)] = ends.get(id(sent.place), 0) + 1
        at = sent.place
        while at is not None and at.parent is not None:
            counts = users.setdefault(id(at), {})
            counts[number] = counts.get(number, 0) + 1
            at = at.parent
    for place in places_of(router.index):
        assert place.ends == ends.get(id(place), 0)
        assert place.holders == held.get(id(place), 0)
        assert (place.users or {}) == users.get(id(place), {})
        assert place.coming_holders == sum(1 << number for number in place.users or {})
        assert place.ends or place.children, "a place that nobody needs"
    for member in router.members.values():
        loads = [sent for sent in router.in_flight.values() if sent.replica == member.name]
        assert member.load.requests == len(loads)
        assert member.load.prefill_rows == sum(len(sent.prompt.tokens) - sent.matched_rows for sent in loads)
        assert member.load.limits == sum(sent.prompt.limit for sent in loads)


def rows_in(blocks: BlockEvents) -> int:
    """The rows that are held, those of equal blocks once."""
    return sum(len(block.tokens) for block in blocks.blocks.values() if block.copies)


def check_blocks(blocks: BlockEvents) -> None:
    behind = dict.fromkeys(blocks.blocks, 0)
    seen = set()
    for name, block in blocks.blocks.items():
        assert block.after is None or block.after in seen
        if block.after is not None:
            behind[block.after] += 1
        seen.add(name)
    for name, block in blocks.blocks.items():
        assert behind[name] == block.behind and (block.copies or block.behind)
        assert bool(block.copies) == (name in blocks.alike.get(block.head, ()))
    assert sum(map(len, blocks.alike.values())) == sum(block.copies > 0 for block in blocks.blocks.values())


def check_book(book: LeaseBook) -> None:
    """No request is in two places, or in none."""
    assert all(group for _, group in book.suspects)
    for replica in book.replicas.values():
        assert all(open_.unanswered for open_ in replica.open.values())
        assert len(replica.open) <= 1 or not any(open_.lease.is_suspect for open_ in replica.open.values())
    for source in book.sources:
        sent = [
            place for name in book.replicas for open_ in book.open_leases(name, source) for place in open_.unanswered
        ]
        places = [*sent, *_unsent(source, set(sent))]
        places += [place for its, group in book.suspects if its is source for own in group for place in own]
        assert len(places) == len(set(places)) == source.num_unanswered, (len(places), source.num_unanswered)


def _unsent(source: Source, sent: set[int]) -> list[int]:
    """The places that have not left. sent: the places of open leases."""
    if isinstance(source, OnlineSource):
        check_router(source.router)
        check_books(source.window)
        assert {source.prompt_of[number].key for number in sent} == set(source.router.in_flight)
        unsent = [*(waiting.payload for waiting in source.window.waiting()), *source.queued]
        return [number for prompt in unsent for number in prompt.unanswered]
    assert isinstance(source, OfflineSource)
    segments = [*source.free, *(one.segment for one in source.replicas.values() if one.segment is not None)]
    assert all(0 <= start < stop <= source.cost.num_prompts for start, stop in segments)
    return [place for start, stop in segments for place in range(start, stop)]


def check_policy_keeps_to_those_allowed(name: str) -> None:
    rng = np.random.default_rng(1)
    router = Router(policy_named(name))
    for replica in range(7):
        router.join(replica, capacity=500)
    for i in range(300):
        among = sorted(set(rng.integers(0, 7, 3).tolist()))
        prompt = Prompt(rng.integers(0, 2, 12), limit=5, prefix=4)
        replica = router.choose(prompt, among)
        assert replica in among
        router.send(i, prompt, replica)
        if i > 20:
            router.end(i - 20, output_rows=5)
    check_router(router)
