"""A block scheduler like vLLM's V1.

Blocks have 16 tokens. The free list, in order of last use, is also the prefix cache. A request is admitted if its next
chunk fits. If memory is full, the latest sequence is preempted and recomputed later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from prefold.engine.cache import CacheEvents
from prefold.engine.cache.events import EventLog, RowsRemoved, RowsStored
from prefold.errors import InputError

from .costs import StepCost, StepRows
from .engines import MOST_ROWS, EndedRequest, Hits, Stretch
from .requests import SimRequest

__all__ = ["BlockEngine", "BlockHits"]


@dataclass(slots=True)
class BlockHits(Hits):
    """Counters that vLLM has too."""

    recompute: int = 0  # tokens found by preempted requests when they were admitted again
    queries: int = 0  # tokens looked up, also for requests that were preempted or did not fit yet
    found: int = 0  # tokens found by these look-ups
    preemptions: int = 0

    def rates(self) -> dict[str, float]:
        """Return the hits as shares of the prompts' tokens, and the hit rate that vLLM would print."""
        again, printed = self.recompute / max(1, self.tokens), self.found / max(1, self.queries)
        return Hits.rates(self) | {"recompute": again, "vllm": printed}


class _BlockSequence:
    """A request that waits or runs.

    Attributes:
        rows: Rows to compute before the next token.
        made: Generated tokens.
    """

    __slots__ = ("blocks", "cached", "computed", "keys", "made", "order", "request", "rows", "turn")

    def __init__(self, request: SimRequest, block: int):
        self.request = request
        self.rows = request.rows
        self.computed = 0
        self.made = 0
        self.blocks: list[int] = []
        self.cached: int | None = None
        self.turn = 0  # number of admissions and preemptions; plans of an earlier turn are void
        self.order = 0
        # Keys of the prompt's full blocks: (part of the block's last row, its place). Later blocks are private.
        self.keys: list[tuple[int, int]] = []
        stop, i = 0, 0
        for number, size in request.path:
            stop += size
            while (i + 1) * block <= stop:
                self.keys.append((number, i))
                i += 1

    def key(self, i: int) -> tuple[int, int]:
        return self.keys[i] if i < len(self.keys) else (-1 - self.request.key, i)


class BlockEngine:
    """The block scheduler of one replica.

    Args:
        cost: Times of a step.
        max_batch_rows: Rows of a step; None: MOST_ROWS.
        blocks: Blocks of the pool; None: as many as fit in memory.
        caching: Whether prefixes are cached.
        reports: Whether to record cache events for a router.
    """

    block = 16
    reserves = False

    def __init__(
        self,
        cost: StepCost,
        *,
        max_batch_rows: int | None = 2048,
        max_running: int = 256,
        blocks: int | None = None,
        caching: bool = True,
        reports: bool = False,
    ):
        self.cost = cost
        self.max_batch_rows = MOST_ROWS if max_batch_rows is None else max_batch_rows
        self.max_running = max_running
        self.num_blocks = cost.kv_rows // self.block if blocks is None else blocks
        self.hits = BlockHits()
        self._caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._users = [0] * self.num_blocks
        self._key: list[tuple[int, int] | None] = [None] * self.num_blocks
        self._fresh: dict[int, int] = {}  # block -> the step that computes it
        self._cached: dict[tuple[int, int], int] = {}
        self._waiting: deque[_BlockSequence] = deque()
        self._running: OrderedDict[_BlockSequence, None] = OrderedDict()
        self._prefilling: OrderedDict[_BlockSequence, None] = OrderedDict()
        self._step = 0
        self._admissions = 0
        self._decoding = 0
        self._context = 0  # rows of K/V that the decode rows of the next step read
        self._need: dict[
            int, list[tuple[_BlockSequence, int]]
        ] = {}  # {step: sequences whose next row needs a new block}
        self._end: dict[int, list[tuple[_BlockSequence, int]]] = {}  # {step: sequences that generate their last token}
        self._log = EventLog() if reports else None

    def submit(self, request: SimRequest) -> None:
        sequence = _BlockSequence(request, self.block)
        if request.rows + request.output > self.num_blocks * self.block:
            raise InputError(
                f"request {request.key} has {request.rows + request.output} rows, the pool "
                f"{self.num_blocks * self.block}",
                field="prompt",
                remedy="name a machine with more memory",
            )
        self.hits.tokens += request.rows
        self._waiting.append(sequence)

    def step(self) -> Stretch | None:
        if not self._waiting and not self._running:
            return None
        self._step += 1
        preemptions = self.hits.preemptions
        self._open_blocks()
        decode, keys = self._decoding, self._context
        budget = self.max_batch_rows - decode
        prefill, pairs, ready = 0, 0, []
        for sequence in list(self._prefilling):
            rows = min(budget, sequence.rows - sequence.computed)
            if rows <= 0 or not self._reach(sequence, sequence.computed + rows):
                break
            budget, prefill, pairs = self._advance(sequence, rows, budget, prefill, pairs, ready)
        if self.hits.preemptions == preemptions:
            while self._waiting and budget > 0 and len(self._running) < self.max_running:
                sequence = self._waiting[0]
                found = self._admit(sequence, budget)
                if found is None:
                    break
                rows = min(budget, sequence.rows - found)
                budget, prefill, pairs = self._advance(sequence, rows, budget, prefill, pairs, ready)
        self.hits.rows_computed += prefill
        ended = self._finish(decode, ready)
        reads = decode + len(ready)
        seconds = self.cost.seconds(StepRows(prefill, decode, keys, pairs, reads))
        return Stretch(seconds, prefill, decode, 1, reads, ended)

    def _advance(
        self, sequence: _BlockSequence, rows: int, budget: int, prefill: int, pairs: int, ready: list[_BlockSequence]
    ) -> tuple[int, int, int]:
        pairs += rows * sequence.computed + rows * (rows + 1) // 2
        sequence.computed += rows
        if sequence.computed == sequence.rows:
            ready.append(sequence)
        else:
            self._prefilling[sequence] = None
        return budget - rows, prefill + rows, pairs

    def _finish(self, decode: int, ready: list[_BlockSequence]) -> list[EndedRequest]:
        """Count a token for each decoding sequence and for each complete prompt. Return the ended requests."""
        self._context += decode
        for sequence in ready:
            self._prefilling.pop(sequence, None)
            left = sequence.request.output - sequence.made - 1
            self._end.setdefault(self._step + left, []).append((sequence, sequence.turn))
            if left:
                # The row of the token it has just made is the next one.
                self._decoding += 1
                self._context += sequence.rows + 1
                sequence.order = self._step - sequence.rows  # rows held after step s: s - order
                step = self._step + 1 + (-sequence.rows) % self.block
                self._need.setdefault(step, []).append((sequence, sequence.turn))
        ended = []
        for sequence, turn in self._end.pop(self._step, ()):
            if sequence.turn != turn:
                continue
            if sequence.computed == sequence.rows and sequence not in ready:
                self._decoding -= 1
                self._context -= self._step - sequence.order + 1
            sequence.turn += 1
            del self._running[sequence]
            self._release(sequence)
            ended.append(EndedRequest(sequence.request, sequence.cached or 0))
        return ended

    def _open_blocks(self) -> None:
        """Give a block to each sequence whose next row needs one. If none is free, preempt the latest sequences."""
        for sequence, turn in self._need.pop(self._step, ()):
            while sequence.turn == turn and not self._free:
                self._preempt(next(reversed(self._running)))
            if sequence.turn != turn:
                continue
            self._keep(sequence, len(sequence.blocks) - 1)
            sequence.blocks.append(self._take())
            self._need.setdefault(self._step + self.block, []).append((sequence, turn))

    def _preempt(self, sequence: _BlockSequence) -> None:
        self.hits.preemptions += 1
        del self._running[sequence]
        if sequence in self._prefilling:
            del self._prefilling[sequence]
        else:
            held = self._step - 1 - sequence.order
            self._decoding -= 1
            self._context -= held + 1
            sequence.made += held - sequence.rows + 1
            sequence.rows = held + 1
        sequence.turn += 1
        sequence.computed = 0
        self._release(sequence)
        self._waiting.appendleft(sequence)

    def _admit(self, sequence: _BlockSequence, budget: int) -> int | None:
        """Admit a sequence and give it the blocks of its next rows.

        Return the number of its leading rows in the cache, or None if it does not fit.
        """
        found = []
        if self._caching:
            for i in range((sequence.rows - 1) // self.block):
                block = self._cached.get(sequence.key(i))
                if block is None:
                    break
                found.append(block)
        hits, cached = self.hits, len(found) * self.block
        hits.queries += sequence.rows
        hits.found += cached
        stop = cached + min(budget, sequence.rows - cached)
        more = -(-stop // self.block) - len(found)
        if more > len(self._free) - sum(not self._users[block] for block in found):
            return None
        self._waiting.popleft()
        in_step = self.block * sum(self._fresh.get(block) == self._step for block in found)
        if sequence.cached is None:
            hits.first_admission += cached - in_step
            hits.in_step += in_step
            sequence.cached = cached
        else:
            hits.recompute += cached
        for block in found:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1
        sequence.blocks = found
        sequence.computed = cached
        self._running[sequence] = None
        self._extend(sequence, stop)
        return cached

    def _reach(self, sequence: _BlockSequence, stop: int) -> bool:
        """Give a sequence the blocks for its rows up to `stop`. If too few are free, preempt the latest sequences.

        Return False if the sequence itself was preempted.
        """
        turn = sequence.turn
        while len(self._free) < -(-stop // self.block) - len(sequence.blocks):
            self._preempt(next(reversed(self._running)))
            if sequence.turn != turn:
                return False
        self._extend(sequence, stop)
        return True

    def _extend(self, sequence: _BlockSequence, stop: int) -> None:
        while len(sequence.blocks) * self.block < stop:
            sequence.blocks.append(self._take())
        for i in range(sequence.computed // self.block, stop // self.block):
            self._keep(sequence, i)

    def _keep(self, sequence: _BlockSequence, i: int) -> None:
        """Add the i-th block of a sequence, which is full, to the prefix cache."""
        key, block = sequence.key(i), sequence.blocks[i]
        if not self._caching or self._key[block] is not None or key in self._cached:
            return
        self._key[block] = key
        self._cached[key] = block
        self._fresh[block] = self._step
        if self._log is not None and i < len(sequence.keys):  # only blocks of prompts can be shared
            tokens = sequence.request.tokens()[i * self.block : (i + 1) * self.block]
            self._log.add(RowsStored(key, sequence.key(i - 1) if i else None, tokens))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key[block]
        if key is not None:
            del self._cached[key]
            self._key[block] = None
            if self._log is not None and key[0] >= 0:
                self._log.add(RowsRemoved(key))
        self._users[block] = 1
        return block

    def _release(self, sequence: _BlockSequence) -> None:
        for block in reversed(sequence.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
        sequence.blocks = []

    def events(self) -> CacheEvents | None:
        return None if self._log is None else self._log.drain()

    def check(self) -> None:
        """Raise AssertionError if counters and blocks are inconsistent."""
        users = [0] * self.num_blocks
        for sequence in self._running:
            for block in sequence.blocks:
                users[block] += 1
        assert users == self._users
        assert set(self._free) == {block for block, count in enumerate(users) if not count}
        assert {block: key for key, block in self._cached.items()} == {
            block: key for block, key in enumerate(self._key) if key is not None
        }
        decoding = [s for s in self._running if s not in self._prefilling]
        assert len(decoding) == self._decoding
        assert self._context == sum(self._step - s.order + 1 for s in decoding)
        for sequence in decoding:
            held = self._step - sequence.order
            assert len(sequence.blocks) == -(-held // self.block), (held, len(sequence.blocks))
