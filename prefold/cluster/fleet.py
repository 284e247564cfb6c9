"""A fleet runs requests as an engine does: it divides them among replicas, and yields the answer to each once.

One thread, the caller's, decides and writes. A `Fleet` knows which replicas there are; a `FleetRun` is one run of it,
whose lease book is fed by a sorted job, by a stream, or by both one after the other. Replicas are told of decisions,
and answers come back as events; decisions are made in `leases.py`, and by the sources `offline.py` and `online.py`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from ..engine.meter import StepInfo
from ..errors import FleetError, InputError, JobError
from ..prefix import RowCost
from ..stream import LiveInput, Spool, Windows
from ..stream.order import unique_tokens
from ..text import Tokenizer
from ..types import Generated, GenerationStats, Readout, Request, Sharing, Stats
from .leases import LeaseBook
from .offline import OfflineSource, offline_source
from .online import OnlineSource
from .replicas import ReplicaEvent, ReplicaFacts, ReplicaLost, ReplicaReady, ReplicaReport, Replicas, RunCall, in_words
from .router import Policy

_TICK, _ONLINE_TICK = 0.25, 0.02
_AT_ONCE = 64  # events that are taken before new leases are sent


class Fleet:
    """Runs requests on replicas.

    replicas   what computes
    sharing    of rows between requests
    row_cost   what a row costs, by which work is divided
    policy     by which requests of a stream get their replica; None: ours
    window     options of the live window (see `LiveWindow`)
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
        window: Mapping[str, Any] | None = None,
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
        self.estimated: set[str] = set()  # replicas of a stream whose caches are not reported
        self.counted_apart = False  # whether replicas of a stream counted unique tokens, each its own
        self.policy, self.window = policy, dict(window or {})
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
        self, windows: Windows | LiveInput, tokenizer: Tokenizer | None, **options: Any
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, a Generated a sample) of every request, as `Engine.generate` does. options: of `run`."""
        return self.run(windows, Readout("tokens"), text=tokenizer is not None, **options)

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
        different = [key for key, value in facts.identity.items() if self._identity.get(key) != value]
        if different:
            words = ", ".join(f"{key} {facts.identity[key]} (others: {self._identity.get(key)})" for key in different)
            self.leave(name, f"refused, for it has {words}", returns=False)
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


@dataclass(slots=True)
class _Done:
    """What a replica has done in this run, as it reported, and of that what was for requests that it has answered.

    reported, answered  rows: of outputs alone where rows of prompts are counted here
    drawn, kept         tokens that it drew, and those that are in answers
    """

    reported: int = 0
    answered: int = 0
    drawn: int = 0
    kept: int = 0
    heard: float = 0.0  # when it was measured last


class FleetRun:
    """Runs some requests on a fleet: `answers` yields them, `end` ends what is left of it on the replicas."""

    def __init__(
        self,
        fleet: Fleet,
        source: Windows | LiveInput,
        call: RunCall,
        on_step: Callable[[StepInfo], None] | None,
    ):
        self.fleet, self.on_step = fleet, on_step
        self.offline: OfflineSource | None = None
        self.online: OnlineSource | None = None
        self._input: LiveInput | None = None
        self._begun: dict[str, _Done] = {}
        self._pictures = None if fleet.media is None else fleet.media.for_replicas()
        self._killed: set[str] = set()  # those that hung, and of which no `ReplicaLost` came yet
        is_warm_start = isinstance(source, LiveInput) and source.rest is not None
        self.call = call = replace(call, online=isinstance(source, LiveInput) and not is_warm_start)
        # Whether rows of prompts are counted here; replicas count them where not all are known beforehand.
        self._counts_rows = call.readout.kind != "first" and not call.online
        self._generates = call.readout.kind == "tokens"
        self._counted_rows = False  # whether a replica has counted rows: servers and vLLM do not
        self._warm_start = Spool() if is_warm_start else None  # the prompts that run before the others are known
        self.book = LeaseBook(numbers=fleet.numbers, patience=fleet.patience)
        if isinstance(source, LiveInput):
            self._input = source
            options = {"max_tokens": source.max_tokens, "policy": fleet.policy, "see": source.see, **fleet.window}
            self.online = OnlineSource(call, warm_start=is_warm_start, **options)
            self.book.add(self.online)
        else:
            self._divide(source)

    def _divide(self, windows: Windows) -> None:
        self.offline = offline_source(windows, self.call, self.fleet.row_cost, self.fleet.expected)
        self.book.add(self.offline, time.monotonic())

    def answers(self, stopping: Callable[[], bool]) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, answer) of every request, once."""
        fleet = self.fleet
        for name in [] if self._is_done else list(fleet.ready):
            self._join(name)
        while not self._is_done:
            fleet.check_alive()
            if stopping():
                return
            self._send()
            for number in range(_AT_ONCE):
                event = fleet.next_event(0.0 if number else self._pause)
                if event is None:
                    break
                yield from self._take(*event)
            self._kill_hung()

    @property
    def _pause(self) -> float:
        """Returns the seconds after which it looks again at what may be sent, though nothing has been told."""
        if self._input is None or self.online is None:
            return _TICK
        return _ONLINE_TICK if self._input.feed.since is None or self.online.is_full else 0.0

    def end(self) -> None:
        """Ends the run on all replicas that take part."""
        fleet = self.fleet
        for name in self._begun.keys() & fleet.ready.keys():
            fleet.replicas.order(name, "end")
        fleet.steals += 0 if self.offline is None else self.offline.steals
        fleet.moved += self.book.moved
        if self._counts_rows and (self._counted_rows or not self._generates):
            fleet.stats.unique_tokens += self._unique_rows()
        fleet.counted_apart |= self.call.online and self._counted_rows and len(fleet.replicas.names) > 1
        if self._warm_start is not None:
            self._warm_start.close()

    def _unique_rows(self) -> int:
        """Returns the rows of the stream that all prompts of the run make together."""
        if self._warm_start is None or not self._warm_start.num_requests:
            return 0 if self.offline is None else self.offline.num_rows
        return unique_tokens([self._warm_start.order(), *([] if self.offline is None else [self.offline.order])])

    @property
    def _is_done(self) -> bool:
        return self._input is None and not self.book.num_left

    # ------------------------------------------------------------------------------------------------ sending

    def _send(self) -> None:
        if self._input is not None:
            self._take_in(self._input)
        order = self.fleet.replicas.order
        for lease in self.book.send(time.monotonic()):
            windows = lease.source.windows(lease)
            if self._pictures is not None:
                windows, fresh, gone = self._pictures.send(lease.replica, windows)
                if fresh or gone:
                    order(lease.replica, "hold", fresh, gone)
            order(lease.replica, "give", windows)

    def _take_in(self, source: LiveInput) -> None:
        """Moves what has come into the window; where nothing comes any more, begins with the rest."""
        online, feed = self.online, source.feed
        assert online is not None
        if source.rest is not None:
            feed.bound = online.room()
        now = time.monotonic()
        until = now + _ONLINE_TICK  # for replicas are not heard meanwhile
        while not online.is_full and not feed.is_over and time.monotonic() < until:
            if (came := feed.take()) is None:
                break
            for reads in came:
                online.put(reads, now)
                if self._warm_start is not None:
                    self._warm_start.add(Request(reads[0].tokens, adapter=reads[0].adapter, salt=reads[0].salt))
        feed.is_hungry = not online.num_waiting and online.room() > 0
        if feed.is_over:
            self._input = None
            online.close()
            if source.rest is not None:
                self._divide(source.rest())

    # ---------------------------------------------------------------------------------------- what comes back

    def _take(self, name: str, event: ReplicaEvent) -> Iterator[tuple[bytes, Any]]:
        fleet = self.fleet
        if isinstance(event, ReplicaReady):
            if fleet.meet(name, event.facts):
                self._join(name)
            else:
                yield from self._lose(name, ReplicaLost("refused"))
        elif isinstance(event, ReplicaLost):
            fleet.leave(name, event.reason, returns=event.returns, died=event.died)
            yield from self._lose(name, event)
        elif event.failure is not None and isinstance(event.failure, (InputError, JobError)):
            raise event.failure  # any replica would say so
        else:
            yield from self._take_report(name, event)
            if event.failure is not None:
                fleet.notify(f"{name} has failed: {in_words(event.failure)}")
                fleet.replicas.kill(name)

    def _take_report(self, name: str, report: ReplicaReport) -> Iterator[tuple[bytes, Any]]:
        now = time.monotonic()
        self._count(name, report)
        started = time.perf_counter()
        for step in report.steps if self.on_step is not None else ():
            self.on_step(replace(step, started=started - step.started))
        if name not in self._begun:
            return
        self._tell_router(name, report, now)
        by_lease: dict[int, dict[int, Any]] = {}
        for number, place, answer in report.answers:
            by_lease.setdefault(number, {}).setdefault(place, answer)
            if self._pictures is not None:
                self._pictures.answered(name, number, place)
        for number, answers in by_lease.items():
            for tag, tokens, answer in self.book.commit(name, number, answers, now):
                self._count_answer(name, tokens, answer)
                yield tag, answer

    def _tell_router(self, name: str, report: ReplicaReport, now: float) -> None:
        """Tells the books of what a replica has done, and the router of what its cache holds."""
        if report.shows_progress:
            self.book.heard(name, now)
        if self.online is None:
            return
        if report.events is not None and not self.online.router.take(name, report.events):
            self.fleet.retold += 1
            self.fleet.replicas.order(name, "retell")
        if not report.steps:
            return
        rows, decode = sum(step.rows for step in report.steps), sum(step.running for step in report.steps)
        done = self._begun[name]
        seconds = sum(step.seconds for step in report.steps)
        if self.fleet.ready[name].steps_overlap:
            seconds, done.heard = min(seconds, now - done.heard), now
        self.online.router.worked(name, max(0, rows - decode), decode, seconds)

    def _join(self, name: str) -> None:
        fleet, now = self.fleet, time.monotonic()
        self._begun[name] = _Done(heard=now)
        fleet.replicas.order(name, "begin", self.call)
        self.book.join(name, fleet.ready[name], now)
        if self.online is not None and self.call.in_slots and not fleet.ready[name].reports_cache:
            fleet.estimated.add(name)

    def _lose(self, name: str, lost: ReplicaLost) -> Iterator[tuple[bytes, Any]]:
        self._count_loss(self._begun.pop(name, None))
        self._killed.discard(name)
        if self._pictures is not None:
            self._pictures.lose(name)
        for tag in self.book.lose(name, died=lost.died):
            message = f"replicas were lost while they worked on it, the last one on it alone: {lost.reason}"
            remedy = "see what is unusual about the record, or run it again by itself"
            yield tag, InputError(message, remedy=remedy, code="replicas_lost")

    def _kill_hung(self) -> None:
        for name in self.book.hung(time.monotonic()):
            if name not in self._killed:
                self._killed.add(name)
                self.fleet.notify(f"{name} has done nothing for {self.fleet.patience:.0f} s and is killed")
                self.fleet.replicas.kill(name)

    # ------------------------------------------------------------------------------------------------ counting

    def _count(self, name: str, report: ReplicaReport) -> None:
        """Adds up what replicas count. Prompts are counted as they are answered: some are run twice."""
        if report.stats is None:
            return
        stats, generation = self.fleet.stats, report.stats.generation
        unique, tokens, requests = stats.unique_tokens, stats.tokens, stats.requests
        self.fleet.stats = stats = stats + report.stats
        stats.tokens, stats.requests = tokens, requests
        rows = report.stats.unique_tokens
        self._counted_rows = self._counted_rows or rows > 0
        if self._counts_rows:  # rows of outputs are no other replica's
            is_counted = self._counted_rows and generation is not None
            rows = generation.decode_rows - generation.discarded_rows if is_counted else 0
            stats.unique_tokens = unique + rows
        if (done := self._begun.get(name)) is not None:
            done.reported += rows
            done.drawn += 0 if generation is None else generation.generated_tokens

    def _count_answer(self, name: str, tokens: int, answer: Any) -> None:
        stats, done = self.fleet.stats, self._begun[name]
        stats.requests += tokens > 0
        if not (isinstance(answer, list) and answer and isinstance(answer[0], Generated)):
            stats.tokens += tokens
            done.answered += 0 if self._counts_rows else tokens
            return
        made = sum(max(0, len(sample.tokens) - 1) for sample in answer)
        stats.tokens += len(answer) * tokens + made
        done.kept += sum(len(sample.tokens) for sample in answer)
        done.answered += sum(map(_output_rows, answer))
        done.answered += 0 if self._counts_rows else tokens - (answer[0].cached_tokens or 0)

    def _count_loss(self, done: _Done | None) -> None:
        """What a lost replica had computed of requests that it has not answered is computed again."""
        if done is None or not self._counted_rows or (self._counts_rows and not self._generates):
            return
        again = max(0, done.reported - done.answered)
        stats = self.fleet.stats
        stats.unique_tokens = max(0, stats.unique_tokens - again)
        if stats.generation is not None:
            drawn = max(0, done.drawn - done.kept)
            stats.generation += GenerationStats(recomputed_rows=again, generated_tokens=-drawn)


def _output_rows(sample: Generated) -> int:
    """Returns the rows of an output: its last token has one where another was drawn after it, the end of the text."""
    return len(sample.tokens) - (sample.finish_reason == "length" and len(sample.tokens) > 0)
