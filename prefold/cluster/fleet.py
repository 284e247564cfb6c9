"""A fleet has the face of an engine: what it is asked to run it divides among replicas, and yields their answers once.

One thread, that of whoever asks, decides and writes: `fleet_run.py` is one run of it. Here is who is there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from ..engine.meter import StepInfo
from ..errors import FleetError
from ..prefix import RowCost
from ..stream import LiveInput, Windows
from ..text import Tokenizer
from ..types import Readout, Sharing, Stats
from .fleet_run import FleetRun
from .policies import Policy
from .replicas import ReplicaEvent, ReplicaFacts, Replicas, RunCall


class Fleet:
    """Runs requests on replicas.

    replicas   what computes
    sharing    of rows between requests
    row_cost   what a row costs, by which work is divided
    policy     by which requests of a stream get their replica; None: ours
    live       options of the live window (see `LiveWindow`)
    patience   seconds without progress after which a replica that has work is killed
    notify     called with what a person should know: replicas that were lost, or refused
    media      gave the images of the requests their ids; None: there are none

    Raises FleetError when no replica is left, with the reasons.
    """

    takes_ranges = True  # of a spool's order, in place of its windows one after the other

    def __init__(
        self,
        replicas: Replicas,
        *,
        sharing: Sharing = "full",
        row_cost: RowCost = RowCost(),  # noqa: B008
        policy: Policy | None = None,
        live: Mapping[str, Any] | None = None,
        patience: float = 300.0,
        notify: Callable[[str], None] = lambda line: None,
        media: Any = None,
    ):
        self.media = media
        self.sharing: Sharing = sharing
        self.replicas = replicas
        self.row_cost = row_cost
        self.stats = Stats()
        self.steals = self.moved = self.losses = 0
        self.retold = 0  # times that events of a cache were missing, and all was asked for anew
        self.estimated: set[str] = set()  # replicas of a stream whose caches nobody tells of
        self.counted_apart = False  # whether replicas of a stream counted unique tokens, each its own
        self.policy, self.live = policy, dict(live or {})
        self.patience, self.notify = patience, notify
        self.ready: dict[str, ReplicaFacts] = {}
        self._gone: dict[str, str] = {}
        self._identity: dict[str, str] | None = None
        self._events: SimpleQueue[tuple[str, ReplicaEvent]] = SimpleQueue()
        self.numbers = itertools.count(1)
        self._turn = threading.Lock()  # one run at a time
        replicas.start(lambda name, event: self._events.put((name, event)))

    @property
    def facts(self) -> ReplicaFacts | None:
        """Returns what the first replica that is ready says of itself; None while none is ready."""
        return next(iter(self.ready.values()), None)

    @property
    def num_ready(self) -> int:
        """Returns how many replicas were ready when the last run looked."""
        return len(self.ready)

    @property
    def in_words(self) -> str:
        """Returns what became of the replicas."""
        words = f"{self.num_ready} of {len(self.replicas.names)} at the end"
        words += f", work was divided anew {self.steals:,} times" if self.steals else ""
        words += f"; {self.losses:,} were lost, {self.moved:,} prompts went to others" if self.losses else ""
        if self.estimated:
            whose = "all" if len(self.estimated) == len(self.replicas.names) else f"{len(self.estimated)}"
            words += f"; what the caches of {whose} hold was estimated"
        words += "; unique tokens are those of each by itself, added up" if self.counted_apart else ""
        words += f"; events of caches were missing {self.retold:,} times" if self.retold else ""
        return words

    def reset_stats(self) -> Stats:
        """Begins to count anew; returns what was counted until now."""
        self.stats, before = Stats(), self.stats
        return before

    def close(self) -> None:
        """Ends all replicas."""
        self.replicas.close()

    def run(
        self,
        windows: Windows | LiveInput,
        readout: Readout,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        text: bool = False,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, result) of every request of a spool, or of a stream, as `Engine.run` does; of a request that
        replicas died of, the InputError. text: as of RunCall."""
        call = RunCall(readout, sharing or self.sharing, max_batch_rows, text)
        with self._turn:
            run = FleetRun(self, windows, call, on_step)
            try:
                yield from run.answers(stopping)
            finally:
                run.end()

    def generate(
        self, windows: Windows | LiveInput, tokenizer: Tokenizer | None, **how: Any
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, a Generated a sample) of every request, as `Engine.generate` does. how: options of `run`."""
        return self.run(windows, Readout("tokens"), text=tokenizer is not None, **how)

    # ---------------------------------------------------------------------------------------------- replicas

    def next_event(self, timeout: float) -> tuple[str, ReplicaEvent] | None:
        try:
            return self._events.get(timeout=timeout)
        except Empty:
            return None

    def meet(self, name: str, facts: ReplicaFacts) -> bool:
        """Takes in a replica that is ready; returns False for one that would give other results than the others."""
        if self._identity is None:
            self._identity = facts.identity
        different = [what for what, value in facts.identity.items() if self._identity.get(what) != value]
        if different:
            what = ", ".join(f"{w} {facts.identity[w]} (others: {self._identity.get(w)})" for w in different)
            self.leave(name, f"refused, for it has {what}", returns=False)
            self.replicas.kill(name)
            return False
        self._gone.pop(name, None)
        self.ready[name] = facts
        return True

    def leave(self, name: str, reason: str, *, returns: bool, died: bool = True) -> None:
        """Notes that a replica is gone; it counts as lost where it has died, or does not come back."""
        is_back = returns and not died
        self.losses += self.ready.pop(name, None) is not None and not is_back
        if is_back:
            self.notify(f"{name} runs, but what passed between was lost: {reason}; what it had is sent again")
        elif self._gone.get(name) != reason:
            again = "; it is started anew" if returns else ""
            self.notify(f"{name} is lost: {reason}{again}")
        if not returns:
            self._gone[name] = reason

    @property
    def expected(self) -> list[str]:
        """Returns the replicas that are there or may come."""
        return [name for name in self.replicas.names if name not in self._gone]

    def check_alive(self) -> None:
        if not self.expected:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in self._gone.items())
            raise FleetError(f"no replica is left\n{reasons}")
