"""Helpers of the simulator's tests."""

from __future__ import annotations

from benchmarks.simulate.engines import RowEngine
from benchmarks.simulate.requests import SimRequest


def unique_rows(requests: list[SimRequest]) -> int:
    """Returns the rows of the requests' trie."""
    rows: dict[tuple[int, ...], int] = {}
    for request in requests:
        path: tuple[int, ...] = ()
        for number, size in request.path:
            path = (*path, number)
            rows[path] = max(size, rows.get(path, 0))
    return sum(rows.values())


def check_books(engine: RowEngine) -> None:
    """AssertionError where the books do not balance."""
    unseen, rows, evictable = [engine._root], 0, 0
    while unseen:
        node = unseen.pop()
        unseen.extend(node.children.values())
        rows += node.rows
        evictable += 0 if node.users else node.rows
        assert (node in engine._evictable) == (not node.users and not node.children and node is not engine._root)
    outputs = sum(s.request.limit - 1 for s in engine._prefilling)
    outputs += sum(s.request.limit - 1 for _, _, s in engine._decoding)
    assert engine.free + rows + outputs == engine.slots and engine.free >= 0
    assert evictable == engine._evictable_rows
