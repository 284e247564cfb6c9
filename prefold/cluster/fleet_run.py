"""One run of a fleet: what is known is divided as segments, what comes goes through the live window and the router.

Here replicas are told of decisions, and answers come back as events; decisions are made in `known.py` and `live.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..engine.meter import StepInfo
from ..errors import InputError, JobError, PrefoldError
from ..images.sending import SentPictures
from ..stream import LiveInput, Spool, Window, Windows
from ..stream.order import unique_tokens
from ..types import Generated, GenerationStats, Request
from .known import Answered, KnownWork
from .live import LiveLeases
from .replicas import ReplicaEvent, ReplicaLost, ReplicaReady, ReplicaReport, RunCall, tagged_windows

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["FleetRun"]

_TICK, _LIVE_TICK = 0.25, 0.02
_KILL_AGAIN = 60.0  # seconds after which one that was killed and is still there is killed once more
_AT_ONCE = 64  # events that are taken before new leases are sent


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
        self.known: KnownWork | None = None
        self.live: LiveLeases | None = None
        self._source: LiveInput | None = None
        self._shown_to = source.see if isinstance(source, LiveInput) else None
        self._begun: dict[str, _Done] = {}
        self._pictures = None if fleet.media is None else SentPictures(fleet.media)
        self._killed: dict[str, float] = {}  # when those were killed that hung, and of which no `ReplicaLost` came yet
        is_known = not isinstance(source, LiveInput)
        is_early = not is_known and source.rest is not None
        self.call = call = replace(call, live=not (is_known or is_early))
        # Whether rows of prompts are counted here; replicas count them where nobody knows all beforehand.
        self._counts_rows = call.readout.kind != "first" and not call.live
        self._generates = call.readout.kind == "tokens"
        self._counted_rows = False  # whether a replica has counted rows: servers and vLLM do not
        self._early = Spool() if is_early else None  # the prompts that run before the others are known
        if isinstance(source, LiveInput):
            self._source = source
            self.live = LiveLeases(
                call, max_tokens=source.max_tokens, numbers=fleet.numbers, patience=fleet.patience, early=is_early,
                policy=fleet.policy, **fleet.live,
            )  # fmt: skip
        else:
            self._know(source)

    def _know(self, windows: Windows) -> None:
        fleet = self.fleet
        self.known = KnownWork(windows, self.call, fleet.row_cost, fleet.numbers, fleet.patience)
        for name in self._begun:
            self.known.join(name, fleet.ready[name], fleet.expected, time.monotonic())

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
        if self._source is None or self.live is None:
            return _TICK
        return _LIVE_TICK if self._source.feed.since is None or self.live.is_full else 0.0

    def end(self) -> None:
        """Ends the run on all replicas that take part."""
        fleet = self.fleet
        for name in self._begun.keys() & fleet.ready.keys():
            fleet.replicas.end(name)
        if self.known is not None and self.known.leases is not None:
            fleet.steals += self.known.leases.steals
            fleet.moved += self.known.leases.moved
        if self.live is not None:
            fleet.moved += self.live.moved
        if self._counts_rows and (self._counted_rows or not self._generates):
            fleet.stats.unique_tokens += self._unique_rows()
        fleet.counted_apart |= self.call.live and self._counted_rows and len(fleet.replicas.names) > 1
        if self._early is not None:
            self._early.close()

    def _unique_rows(self) -> int:
        """Returns the rows of the stream that all prompts of the run make together."""
        if self._early is None or not self._early.num_requests:
            return 0 if self.known is None else self.known.num_rows
        orders = [self._early.order()] + ([] if self.known is None else [self.known.order])
        return unique_tokens(orders)

    @property
    def _is_done(self) -> bool:
        known = self.known is None or self.known.is_done
        return known and self._source is None and (self.live is None or not self.live.num_left)

    # ------------------------------------------------------------------------------------------------ sending

    def _send(self) -> None:
        now = time.monotonic()
        if self._source is not None:
            self._take_in(self._source)
        if self.live is not None and self.live.num_unsent:
            share = self.call.sharing == "full"
            for lease in self.live.dispatch(now):
                windows = list(tagged_windows(lease.number, lease.requests, share=share))
                self._see(windows)
                self._give(str(lease.replica), windows)
                if self.known is not None:
                    self.known.forget_path(str(lease.replica))
        if self.known is not None:
            for name, windows in self.known.send(now):
                self._give(name, windows)

    def _give(self, name: str, windows: list[Window]) -> None:
        if self._pictures is not None:
            windows, fresh, gone = self._pictures.send(name, windows)
            if fresh or gone:
                self.fleet.replicas.hold(name, fresh, gone)
        self.fleet.replicas.give(name, windows)

    def _take_in(self, source: LiveInput) -> None:
        """Moves what has come into the window; where nothing comes any more, begins with the rest."""
        live, feed = self.live, source.feed
        assert live is not None
        if source.rest is not None:
            feed.bound = live.room()
        now = time.monotonic()
        until = now + _LIVE_TICK  # for replicas are not heard meanwhile
        while not live.is_full and not feed.is_over and time.monotonic() < until:
            if (came := feed.take()) is None:
                break
            for reads in came:
                live.put(reads, now)
                if self._early is not None:
                    self._early.add(Request(reads[0].tokens, adapter=reads[0].adapter, salt=reads[0].salt))
        feed.is_hungry = not live.num_unsent and live.room() > 0
        if feed.is_over:
            self._source = None
            live.close()
            if source.rest is not None:
                self._know(source.rest())

    def _see(self, windows: list[Window]) -> None:
        for window in windows if self._shown_to is not None else ():
            self._shown_to(window)

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
                fleet.notify(f"{name} has failed: {_in_words(event.failure)}")
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
            for tag, tokens, answer in self._commit(name, number, answers, now):
                self._count_answer(name, tokens, answer)
                yield tag, answer

    def _commit(self, name: str, number: int, answers: dict[int, Any], now: float) -> Iterator[Answered]:
        if self.live is not None:
            for one, tokens in self.live.commit(name, number, answers, now):
                yield one.tag, tokens, answers[one.number]
        if self.known is not None and self.known.leases is not None:
            yield from self.known.commit(name, number, answers, now)

    def _tell_router(self, name: str, report: ReplicaReport, now: float) -> None:
        """Tells the books of what a replica has done, and the router of what its cache holds."""
        if report.shows_progress:
            for one in (self.live, None if self.known is None else self.known.leases):
                if one is not None:
                    one.heard(name, now)
        if self.live is None:
            return
        if report.events is not None and not self.live.router.take(name, report.events):
            self.fleet.retold += 1
            self.fleet.replicas.retell(name)
        if not report.steps:
            return
        rows, decode = sum(step.rows for step in report.steps), sum(step.running for step in report.steps)
        done = self._begun[name]
        seconds = sum(step.seconds for step in report.steps)
        if self.fleet.ready[name].steps_overlap:
            seconds, done.heard = min(seconds, now - done.heard), now
        self.live.router.worked(name, max(0, rows - decode), decode, seconds)

    def _join(self, name: str) -> None:
        fleet, now = self.fleet, time.monotonic()
        self._begun[name] = _Done(heard=now)
        fleet.replicas.begin(name, self.call)
        if self.live is not None:
            self.live.join(name, fleet.ready[name], now)
            if self.call.in_slots and not fleet.ready[name].reports_cache:
                fleet.estimated.add(name)
        if self.known is not None:
            self.known.join(name, fleet.ready[name], fleet.expected, now)

    def _lose(self, name: str, lost: ReplicaLost) -> Iterator[tuple[bytes, Any]]:
        self._count_loss(self._begun.pop(name, None))
        self._killed.pop(name, None)
        if self._pictures is not None:
            self._pictures.lose(name)
        tags, now, died = [], time.monotonic(), lost.died
        if self.known is not None:
            tags += self.known.lose(name, now, returns=lost.returns, died=died)
        if self.live is not None:
            tags += [request.tag for request in self.live.lose(name, died=died)]
        for tag in tags:
            message = f"replicas were lost while they worked on it, the last one on it alone: {lost.reason}"
            remedy = "see what is unusual about the record, or run it again by itself"
            yield tag, InputError(message, remedy=remedy, code="replicas_lost")

    def _kill_hung(self) -> None:
        now, books = time.monotonic(), (self.live, None if self.known is None else self.known.leases)
        hung = {str(name) for one in books if one is not None for name in one.hung(now)}
        for name in hung:
            killed = self._killed.get(name)
            if killed is None:
                self.fleet.notify(f"{name} has done nothing for {self.fleet.patience:.0f} s and is killed")
            # Ray takes some seconds, and may have started another meanwhile, which must not be killed too.
            if killed is None or now - killed > _KILL_AGAIN:
                self._killed[name] = now
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
        made = sum(max(0, len(one.tokens) - 1) for one in answer)
        stats.tokens += len(answer) * tokens + made
        done.kept += sum(len(one.tokens) for one in answer)
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


def _output_rows(one: Generated) -> int:
    """Returns the rows of an output: its last token has one where another was drawn after it, the end of the text."""
    return len(one.tokens) - (one.finish_reason == "length" and len(one.tokens) > 0)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, PrefoldError) else f"{type(error).__name__}: {error}"
