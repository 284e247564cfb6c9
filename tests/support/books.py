"""Whether the books of schedulers, caches, windows and tries agree: their counts with what they count, and their slots
with the slots that there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from functools import singledispatch
from typing import Any

import numpy as np

from prefold.engine.cache import RadixCache
from prefold.engine.cache.accounts import Account, Accounts
from prefold.engine.cache.tree import Node
from prefold.engine.schedule.admission import Admission
from prefold.engine.schedule.fair import FairAdmission
from prefold.engine.schedule.generate_step import SequenceState
from prefold.engine.schedule.scheduler import Scheduler
from prefold.features.hybrid.scheduler import ZERO, StateScheduler
from prefold.features.shifted.chunks import ChunkIndex, Key, _images_before, window_hashes
from prefold.features.shifted.scheduler import ShiftingScheduler
from prefold.trie import MEDIA_BASE, RadixTrie, Trie, clear_of_span, span_starts
from prefold.trie.live import Bucket, LiveWindow, WaitingNode


@singledispatch
def check_books(books: Any) -> None:
    """Raises AssertionError where counts disagree with what they count: of a scheduler, a cache, a window or a trie."""
    raise TypeError(f"there is no check of a {type(books).__name__}")


@check_books.register(Scheduler)
def _check_scheduler(scheduler: Scheduler) -> None:
    """Slots, users of nodes and states of sequences agree."""
    check_books(scheduler.tree)
    slots_of = [np.arange(start, start + size) for start, size in scheduler.pool.sizes.items()]
    users: dict[Node, int] = {}
    states = {"running": scheduler.running, "waiting": scheduler.waiting, "ending": scheduler.ending}
    in_trie = [sequence for sequences in states.values() for sequence in sequences]
    for sequence in in_trie:
        assert sequence in states[sequence.state] and sequence.key in scheduler.requests
        assert sequence.state != "waiting" or not len(sequence.tail.slots)
        slots_of.append(sequence.tail.slots)
        assert sequence.tail.num_computed <= len(sequence.tail.slots)
        for node in sequence.leaf.path():
            users[node] = users.get(node, 0) + 1
            assert sequence.state == "waiting" or len(node.slots) == len(node)
    for node in scheduler.nodes():
        slots_of.append(node.slots)
        assert node.num_computed <= len(node.slots) <= len(node)
        assert node.users == users.get(node, 0), (node.users, users.get(node, 0))
        assert node.users or node.kept, "a node that no sequence needs"
        for cut in (node.num_computed, len(node)):
            assert clear_of_span(np.asarray(node.tokens), cut) == cut, "a span that is computed in part"
        above = node.parent.tokens[-1:] if node.parent is not None else ()
        assert not len(above) or span_starts(np.array([above[0], node.tokens[0]])) is None, "a span in two nodes"
    slots = np.sort(np.concatenate(slots_of))
    assert np.array_equal(slots, np.arange(1, scheduler.pool.num_slots + 1)), "slots leak, or are used twice"
    assert len(scheduler.running) <= scheduler.max_running
    check_admission(scheduler.waiting, scheduler.running)
    assert set(in_trie) == {sequence for request in scheduler.requests.values() for sequence in request}
    assert all(scheduler.requests.values()), "a request without sequences"
    if scheduler.cache is not None:
        check_books(scheduler.cache)
        holders = [*scheduler.nodes(), *(sequence.tail for sequence in in_trie)]
        for account in scheduler.cache.accounts:
            assert account.num_slots == sum(len(node.slots) for node in holders if node.account is account)


@check_books.register(StateScheduler)
def _check_states(scheduler: StateScheduler) -> None:
    _check_scheduler(scheduler)
    slots = [*scheduler.free_states, *(state.slot for state in scheduler.states.values())]
    assert sorted(slots) == list(range(ZERO + 1, scheduler.state_slots + 1)), "slots of states leak, or are used twice"
    tails = {sequence.tail for sequence in (*scheduler.running, *scheduler.ending)}
    nodes = {*scheduler.nodes(), *tails}
    assert set(scheduler.states) <= nodes
    assert all(0 < state.rows <= node.num_computed for node, state in scheduler.states.items())
    unread = {sequence for sequences in scheduler.unread.values() for sequence in sequences}
    assert unread <= {sequence for request in scheduler.requests.values() for sequence in request}


@check_books.register(ShiftingScheduler)
def _check_shifting(scheduler: ShiftingScheduler) -> None:
    _check_scheduler(scheduler)
    _check_chunks(scheduler.chunks)
    assert scheduler.may_shift <= set(scheduler.requests)
    for node in scheduler.apart:
        above = node.parent
        assert above is not None and (above in scheduler.apart or above.parent is not None)
        assert all(child is not node for child in above.children.values()), "rows apart are met by others"
        assert not node.children


def check_admission(admission: Admission, running: Collection[SequenceState]) -> None:
    """Queues, counts and running sequences agree; where sequences are admitted in their order there is one queue."""
    if not isinstance(admission, FairAdmission):
        return
    admitted = {sequence for queue in admission.queues.values() for sequence in queue.running}
    assert set(running) <= admitted
    assert all(sequence.state in ("running", "ending") for sequence in admitted)
    for is_batch in (False, True):
        queues = [queue for queue in admission.queues.values() if queue.owner.is_batch == is_batch]
        assert admission._num_waiting[is_batch] == sum(len(queue.waiting) for queue in queues)
        assert admission._num_running[is_batch] == sum(len(queue.running) for queue in queues)
        entered = [queue for _, _, queue in admission.heaps[is_batch]]
        assert len(set(entered)) == len(entered)
        assert {queue for queue in queues if queue.entered} == set(entered)
        assert all(queue.entered for queue in queues if queue.may_run), "a sequence is never admitted"
    for queue in admission.queues.values():
        assert list(queue.waiting.values()) == sorted(queue.waiting.values(), reverse=True)


@check_books.register(RadixCache)
def _check_cache(cache: RadixCache) -> None:
    """The cache's counts and the tree agree."""
    cached = [node for node in cache.tree.nodes() if node.kept]
    assert set(cached) == set(cache.kept)
    assert cache.rows == sum(node.num_computed for node in cached if not node.pins)
    assert all(node.users == 0 and node.num_pending == 0 for node in cached)
    evictable = {node for node in cached if not node.children and not node.pins}
    leaves = [entry for account in cache.accounts for entry in account.leaves if cache.is_evictable(entry)]
    assert {entry[2] for entry in leaves} == evictable
    assert all(entry[0] == cache.worth(entry[2]) for entry in leaves)
    nodes: dict[Account | None, list[Node]] = {}
    for node in cached:
        nodes.setdefault(node.account, []).append(node)
    held = Counter[Account | None]()
    for node in cache.tree.nodes():
        held[node.account] += node.num_slots
    for account in cache.accounts:
        own = nodes.get(account, [])
        assert account.rows == sum(node.num_computed for node in own if not node.pins)
        assert account.nodes == len(own)
        assert account.num_slots >= held[account]  # tails hold slots too
        assert account.max_rows is None or account.rows <= account.max_rows
        assert all(entry[2].account is account for entry in account.leaves)
    assert cache.rows == sum(account.rows for account in cache.accounts)
    _check_accounts(cache.accounts)
    pinned = [(node.num_pending, node.parent) for node in cache.tree.nodes() if node.pins]
    assert not any(waits or up is None or (up.parent is not None and not up.pins) for waits, up in pinned)


def _check_accounts(accounts: Accounts) -> None:
    """The order of the accounts and their rows agree."""
    assert set(accounts.with_rows) == {account for account in accounts if account.rows}
    assert all(account in accounts.grown for account in accounts if account.has_grown)
    if len(accounts.with_rows) > 1:
        largest = {account: size for size, _, account in sorted(accounts.by_size, reverse=True)}
        assert all(account.has_grown or largest[account] <= -account.size for account in accounts.with_rows)


def _check_chunks(chunks: ChunkIndex) -> None:
    """The blocks that are noted and the rows of the tree agree."""
    expected: dict[Hashable, dict[Key, set[Node]]] = {}
    for node in chunks.tree.nodes():
        path, stop = node.path(), node.start + node.num_computed
        tokens = np.concatenate([node_above.tokens for node_above in path])[:stop]
        assert path[0].parent is not None
        for end in range(chunks.size, stop + 1, chunks.size):
            block = tokens[end - chunks.size : end]
            if end > node.start and block.max() < MEDIA_BASE:
                key = (_images_before(tokens, end - chunks.size), int(window_hashes(block, chunks.size)[0]))
                expected.setdefault(path[0].parent.namespace, {}).setdefault(key, set()).add(node)
    noted = {name: {key: set(places) for key, places in table.items()} for name, table in chunks.blocks.items()}
    assert noted == expected


@check_books.register(LiveWindow)
def _check_window(window: LiveWindow) -> None:
    """Totals and queues are right."""
    check_books(window.trie)
    sums: dict[WaitingNode, list[int]] = {}
    for key, waiting in window.by_key.items():
        assert waiting.leaf.ending[key] is waiting
        for node in waiting.leaf.path():
            total = sums.setdefault(node, [0, 0])
            total[0] += 1
            total[1] += len(waiting.tokens)
    assert sums == {node: [node.requests, node.tokens] for node in window.trie.nodes()}
    assert sum(len(node.ending) for node in sums) == len(window)
    assert window.num_tokens == sum(len(waiting.tokens) for waiting in window.by_key.values())
    entered = {(node, is_whole, -tokens) for heap in window.heaps.values() for tokens, _, node, is_whole in heap}
    for bucket in buckets_of(window):
        assert (bucket.node, bucket.is_whole, bucket.tokens) in entered, "a bucket that would never leave"


def buckets_of(window: LiveWindow) -> list[Bucket]:
    """All buckets of a window."""
    tops = [child for root in window.trie.roots.values() for child in root.children.values()]
    return [window.bucket(*place) for child in tops for place in window.buckets_below(child)]


@check_books.register(RadixTrie)
def _check_radix(trie: RadixTrie) -> None:
    """Every node is where its tokens lead."""
    for namespace, root in trie.roots.items():
        assert (root.namespace, root.parent, root.start, root.ids) == (namespace, None, 0, b"")
        assert root.children, "a root without children"
    for node in [*trie.roots.values(), *trie.nodes()]:
        for first, child in node.children.items():
            assert type(child) is type(root) and child.parent is node and child.namespace is None
            assert child.ids[:4] == first and len(child.ids) % 4 == 0, "a run that does not begin as its key"
            assert (child.start, child.stop) == (node.stop, node.stop + len(child.ids) // 4)


@check_books.register(Trie)
def _check_trie(trie: Trie) -> None:
    """Every invariant of the layout holds."""
    n, rows = trie.num_rows, np.arange(trie.num_rows)
    assert all(len(a) == n for a in (trie.positions, trie.end, trie.parent))
    assert np.array_equal(np.sort(trie.order), np.arange(trie.num_sequences))
    assert ((trie.end > rows) & (trie.end <= n)).all()
    root = trie.parent < 0
    assert np.array_equal(root, trie.positions == 0)
    above = np.where(root, 0, trie.parent)
    assert (root | (trie.parent < rows)).all()
    assert (root | (trie.positions == trie.positions[above] + 1)).all()
    assert (root | (trie.end <= trie.end[above])).all()
    # The row after a row is its child, or stands where the row's subtree ends.
    assert ((trie.parent[1:] == rows[:-1]) == (trie.end[:-1] > rows[1:])).all()
    # As many subtrees are open at a row as its position says, so `end` and `positions` agree.
    opened = np.arange(n) - np.cumsum(np.bincount(trie.end, minlength=n + 1))[:n]
    assert np.array_equal(opened, trie.positions)
    assert (np.diff(trie.last_row[trie.order]) >= 0).all()
    is_leaf = trie.end == rows + 1
    assert np.isin(rows[is_leaf], trie.last_row).all()
