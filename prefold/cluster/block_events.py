"""What vLLM publishes of its KV cache, as the events that the router knows: each block is a run, named by its hash.

A message is msgpack of [time, events, ...] with a number; events are BlockStored, BlockRemoved and AllBlocksCleared.
vLLM does not merge equal blocks: a hash that was stored twice is there until it was removed twice. And its blocks begin
where blocks begin, so that two that follow the same one may share their first tokens. Runs do not share rows: when one
of such blocks is removed, another that has the rows is told of again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..cache import CacheEvents
from ..cache.events import CacheEvent, EventLog, Removed, RowsStored
from ..stream.window import shared_by

_OLD_FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")  # of events that are lists


@dataclass(slots=True)
class _Block:
    """A block that is there `copies` times, or of which only blocks behind it are left."""

    after: Hashable | None
    tokens: np.ndarray
    namespace: Hashable
    copies: int = 0
    behind: int = 0  # blocks that follow it

    @property
    def head(self) -> Hashable:
        """Returns what blocks have in common that begin with the same row."""
        return self.after, self.namespace, int(self.tokens[0])


class BlockEvents:
    """Keeps what a vLLM engine holds, and tells of what has changed.

    epoch  the first number of the engine's epochs; larger after a restart. A gap in the messages begins a new one
    """

    def __init__(self, epoch: int = 0):
        self.next_message = 0
        self._epoch, self._log = epoch, EventLog(epoch)
        self._blocks: dict[Hashable, _Block] = {}
        self._alike: dict[Hashable, dict[Hashable, None]] = {}  # those held, by what they follow and their first token

    @property
    def rows(self) -> int:
        """Returns how many rows are held, those of equal blocks once."""
        return sum(len(block.tokens) for block in self._blocks.values() if block.copies)

    def take(self, number: int, message: bytes) -> bool:
        """Takes in a message. Returns False where messages before it are missing: it was not taken in, and either they
        come first, or `skip_to` is called."""
        if number < self.next_message:
            return True  # it was taken in before
        if number > self.next_message:
            return False
        self.next_message = number + 1
        for event in _decoded(message):
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self._clear()
            elif event.get("group_idx") not in (None, 0):
                continue  # all groups of a hybrid model have the hashes of the first
            elif kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                for name in event["block_hashes"]:
                    self._remove(name)
        return True

    def skip_to(self, number: int) -> None:
        """Goes on with a later message: what is held is forgotten, as what became of it is not known."""
        self.next_message = number
        self._clear()

    def drain(self) -> CacheEvents | None:
        """Returns the events since the last call, None where there are none."""
        return self._log.drain()

    def tell_anew(self) -> None:
        """Begins a new epoch, whose first events tell of all that is held, for a driver that knows nothing of it."""
        self._begin_epoch()
        # A block is entered after the one that it follows, as blocks of which others are left are kept.
        for name, block in self._blocks.items():
            self._log.add(RowsStored(name, block.after, block.tokens, block.namespace))
        for name, block in self._blocks.items():
            if not block.copies:
                self._log.add(*self._removal(name, block))

    def _clear(self) -> None:
        self._blocks, self._alike = {}, {}
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._log.begin(self._epoch)

    def _store(self, event: dict[str, Any]) -> None:
        names, size, after = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        if len(event["token_ids"]) != len(names) * size:
            return  # blocks between them are not cached
        if after is not None and (after not in self._blocks or not self._blocks[after].copies):
            return  # what they follow was not told
        tokens = np.array(event["token_ids"], np.int32).reshape(len(names), size)
        keys = (event.get("extra_keys") or [None])[0]
        namespace = _namespace(event.get("lora_name"), keys) if after is None else ()
        for name, some in zip(names, tokens, strict=True):
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = _Block(after, some, namespace)
                if after is not None:
                    self._blocks[after].behind += 1
            block.copies += 1
            if block.copies == 1:
                self._alike.setdefault(block.head, {})[name] = None
                self._log.add(RowsStored(name, after, some, namespace))
            after, namespace = name, ()

    def _remove(self, name: Hashable) -> None:
        block = self._blocks.get(name)
        if block is None or not block.copies:
            return
        block.copies -= 1
        if block.copies:
            return
        del self._alike[block.head][name]
        if not self._alike[block.head]:
            del self._alike[block.head]
        self._log.add(*self._removal(name, block))
        gone: Hashable | None = name
        while gone is not None and not (block := self._blocks[gone]).copies and not block.behind:
            del self._blocks[gone]
            gone = block.after
            if gone is not None:
                self._blocks[gone].behind -= 1

    def _removal(self, name: Hashable, block: _Block) -> list[CacheEvent]:
        """Returns events of a removal: rows that the block shared with another are held still."""
        events: list[CacheEvent] = [Removed(name)]
        others = self._alike.get(block.head)
        if others:
            tokens = block.tokens.tobytes()
            other = max(others, key=lambda other: shared_by(tokens, self._blocks[other].tokens.tobytes()))
            twin = self._blocks[other]
            events += [Removed(other), RowsStored(other, twin.after, twin.tokens, twin.namespace)]
        return events


def _namespace(adapter: str | None, keys: Any) -> tuple[str | None, str]:
    """Returns (adapter, salt) of a first block: of the keys that its hash has beside its tokens, the salt is a text."""
    texts = [key for key in keys or () if isinstance(key, str)]
    if adapter is not None and adapter in texts:
        texts.remove(adapter)
    return adapter, texts[0] if texts else ""


def _decoded(message: bytes) -> list[dict[str, Any]]:
    events = msgspec.msgpack.decode(message)[1]
    return [event if isinstance(event, dict) else dict(zip(_OLD_FIELDS, event, strict=False)) for event in events]
