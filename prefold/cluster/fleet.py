"""A fleet of replicas. It is an engine that divides requests among the replicas and answers each request once.

One thread makes all decisions of a run: the caller's thread, or the thread of `lanes.py` for submitted requests. A
`Fleet` has the replicas, and a `FleetRun` is one run. The requests of a run come from a sorted job, from a stream, from
a stream and the job that it starts, or from submitted requests. Replicas receive orders and send events. The decisions
are made in `leases.py` and by the sources `offline.py` and `online.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from ..engine.handles import Handle
from ..engine.meter import StepInfo
from ..engine.protocol import EngineFacts, Snapshot
from ..errors import FleetError, InputError, JobError
from ..spec.requests import Generated, GenerationStats, Readout, Request, Sharing, Stats
from ..text import Tokenizer
from ..trie import LiveInput, RowCost, Spool, Windows
from ..trie.order import unique_tokens
from .lanes import Lanes
from .leases import LeaseBook
from .offline import OfflineSource, offline_source
from .online import OnlineSource
from .replicas import ReplicaEvent, ReplicaFacts, ReplicaLost, ReplicaReady, ReplicaReport, Replicas, RunCall, in_words
from .router import Policy

_TICK, _ONLINE_TICK = 0.25, 0.02
_AT_ONCE = 64  # maximum number of events that are handled before new leases are sent


class Fleet:
    """An engine that runs requests on replicas. Raises FleetError with the reasons when no replica is left.

    Args:
        row_cost: the cost of a row, for dividing work
        policy: chooses the replica for a stream's requests; None: prefold's own policy
        window: options of the live window (see `LiveWindow`)
        patience: seconds without progress after which a replica that has work is killed
        notify: receives messages for the user: replicas that were lost or refused
        media: the table of the requests' images; None: the requests have no images
        clock: returns the time in seconds
    """

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
        clock: Callable[[], float] = time.monotonic,
    ):
        self.media, self.clock = media, clock
        self.online_tick = _ONLINE_TICK  # seconds for which new requests are accepted at a time
        self.facts = EngineFacts(sharing, divides=True)
        self.replicas = replicas
        self.row_cost = row_cost
        self.stats = Stats()
        self.steals = self.num_moved = self.losses = 0
        self.re_reported = 0  # number of times that events were missing, so a replica reported its whole cache again
        self.estimated: set[str] = set()  # replicas that do not report their caches; the fleet estimates these caches
        self.counted_apart = False  # True if each replica counted its own unique tokens
        self.policy, self.window = policy, dict(window or {})
        self.patience, self.notify = patience, notify
        self.ready: dict[str, ReplicaFacts] = {}
        self._absent_reasons: dict[str, str] = {}
        self._identity: dict[str, str] | None = None
        self._events: SimpleQueue[tuple[str, ReplicaEvent] | None] = SimpleQueue()
        self.numbers = itertools.count(1)
        # Runs one at a time. None in place of an event makes the run look for new requests.
        self.lanes = Lanes(self._run_submitted, lambda: self._events.put(None))
        replicas.start(lambda name, event: self._events.put((name, event)))

    @property
    def cache(self) -> None:
        """Return None: each replica has its own cache."""

    @property
    def num_ready(self) -> int:
        """Return how many replicas are ready, as of the last event that a run handled."""
        return len(self.ready)

    def _in_words(self) -> str:
        num_replicas = len(self.replicas.names)
        words = f"{self.num_ready} of {num_replicas} at the end"
        words += f", work was redistributed {_count(self.steals, 'time')}" if self.steals else ""
        if self.losses:
            lost = f"{self.losses:,} {'was' if self.losses == 1 else 'were'} lost"
            words += f"; {lost}, {_count(self.num_moved, 'prompt')} went to others"
        if num_estimated := len(self.estimated):
            caches = "its cache" if num_replicas == 1 else _count(num_estimated, "cache")
            caches = "all caches" if 1 < num_replicas == num_estimated else caches
            words += f"; {caches} {'was' if num_estimated == 1 else 'were'} estimated"
        words += "; unique tokens are the sum over replicas" if self.counted_apart else ""
        words += f"; cache events were missing {_count(self.re_reported, 'time')}" if self.re_reported else ""
        return words

    def count(self, **counts: int) -> None:
        """Add to counters, by field of Stats, for requests that the caller answers without a run.

        Only the thread that reads the answers of a run may call this.
        """
        self.stats += Stats(**counts)

    def reset_stats(self) -> Stats:
        """Set the counters to zero, and return their values before."""
        self.stats, before = Stats(), self.stats
        return before

    def close(self) -> None:
        """End all replicas. Requests without an answer are answered with an error."""
        self.lanes.close()
        self.replicas.close()

    def snapshot(
        self, *, rows: bool = False, paths: int = 0, wants: Callable[[Hashable], bool] | None = None
    ) -> Snapshot:
        """Return the counters and the state of the replicas, as of the last event that a run handled.

        The KV stores of replicas are not listed.
        """
        dtype = next((facts.dtype for facts in self.ready.values()), "")
        return Snapshot(self.stats, is_ready=bool(self.ready), replicas=self._in_words(), dtype=dtype)

    def watching(self, on_step: Any = None, **options: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing.

        Replicas report the steps of runs only (see `Engine.run`), and admit requests themselves.
        """
        return nullcontext()

    def submit(
        self,
        requests: Sequence[Request],
        readout: Readout,
        handle: Handle,
        tokenizer: Tokenizer | None = None,
        *,
        text: bool = False,
        share: bool | None = None,
    ) -> None:
        """Accept requests (see `Engine.submit`). They run when no job runs, in the order of their prefixes.

        A fleet ignores the owner of a handle.

        Args:
            share: overrides the fleet's sharing: True is "full", False is "off"
        """
        sharing: Sharing = self.facts.sharing if share is None else "full" if share else "off"
        call = RunCall(readout, sharing, text=readout.kind == "tokens" and tokenizer is not None, online=True)
        self.lanes.submit(call, requests, handle, pieces=text and call.text)

    def cancel(self, *handles: Handle) -> None:
        """Cancel the requests of handles.

        Requests that no replica has are not computed, and answers to the others are dropped.
        """
        self.lanes.cancel(*handles)

    def run(
        self,
        windows: Windows | LiveInput,
        readout: Readout,
        tokenizer: Tokenizer | None = None,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yield (tag, answer) of every request of a spool or a stream (see `Engine.run`).

        The answer to a request with which replicas were lost is an InputError. Submitted requests wait until the run
        has ended. Other options are ignored.
        """
        text = readout.kind == "tokens" and tokenizer is not None
        call = RunCall(readout, sharing or self.facts.sharing, max_batch_rows, text)
        with self.lanes.waiting(), closing(FleetRun(self, on_step)) as run:
            if isinstance(windows, LiveInput):
                run.add_stream(windows, call)
            else:
                run.add_job(windows, call)
            yield from run.answers(stopping or (lambda: False))

    def _run_submitted(self, stopping: Callable[[], bool]) -> Iterator[tuple[bytes, Any]]:
        with closing(FleetRun(self, lanes=self.lanes)) as run:
            yield from run.answers(stopping)

    # ---------------------------------------------------------------------------------------------- replicas

    def next_event(self, timeout: float) -> tuple[str, ReplicaEvent] | None:
        try:
            return self._events.get(timeout=timeout)
        except Empty:
            return None

    def meet(self, name: str, facts: ReplicaFacts) -> bool:
        """Accept a ready replica.

        Return False for a replica whose results would differ from the other replicas' results.
        """
        if self._identity is None:
            self._identity = facts.identity
        different = [key for key, value in facts.identity.items() if self._identity.get(key) != value]
        if different:
            words = ", ".join(f"{key} {facts.identity[key]} (others: {self._identity.get(key)})" for key in different)
            self.leave(name, f"refused, because it has {words}", returns=False)
            self.replicas.kill(name)
            return False
        self._absent_reasons.pop(name, None)
        self.ready[name] = facts
        return True

    def leave(self, name: str, reason: str, *, returns: bool, died: bool = True) -> None:
        """Record that a replica is gone. It counts as lost if it has died or does not come back."""
        is_back = returns and not died
        facts = self.ready.pop(name, None)
        self.losses += facts is not None and not is_back
        if is_back:
            self.notify(f"{name} runs, but messages to or from it were lost: {reason}; its requests are sent again")
        elif self._absent_reasons.get(name) != reason:
            is_server = facts is not None and facts.is_server
            # prefold restarts its own replicas. It only connects to a server again, which the user must restart.
            note = f"it is tried again for {self.patience:.0f} s" if is_server else "it is restarted"
            self.notify(f"{name} is lost: {reason}; {note}" if returns else f"{name} is lost: {reason}")
        if not returns:
            self._absent_reasons[name] = reason

    @property
    def expected(self) -> list[str]:
        """Return the replicas that are ready or may become ready."""
        return [name for name in self.replicas.names if name not in self._absent_reasons]

    def check_alive(self) -> None:
        if not self.expected:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in self._absent_reasons.items())
            raise FleetError(f"no replica is left\n{reasons}")


@dataclass(slots=True)
class _Work:
    """The work of a replica in this run."""

    reported_rows: int = 0  # rows that it reported; only rows of outputs if the run itself counts rows of prompts
    answered_rows: int = 0  # the part of these rows that belongs to requests that it has answered
    drawn_tokens: int = 0  # tokens that it generated
    kept_tokens: int = 0  # the part of these tokens that is in answers
    measured_at: float = 0.0  # when its steps were measured last
    call: RunCall | None = None  # the call of the last lease


class FleetRun:
    """A run of a job, a stream, or submitted requests on a fleet.

    `answers` yields the answers, and `close` ends the run on the replicas.

    Args:
        lanes: the streams of submitted requests; None for a job or a stream
    """

    def __init__(self, fleet: Fleet, on_step: Callable[[StepInfo], None] | None = None, lanes: Lanes | None = None):
        self.fleet, self.on_step, self._lanes = fleet, on_step, lanes
        self.book = LeaseBook(numbers=fleet.numbers, patience=fleet.patience)
        self.offline: OfflineSource | None = None
        self.online: dict[RunCall, OnlineSource] = {}
        self._inputs: dict[RunCall, LiveInput] = {}  # streams that have not ended
        self._work: dict[str, _Work] = {}
        self._pictures = None if fleet.media is None else fleet.media.for_replicas()
        self._killed: set[str] = set()  # replicas that hung, until their `ReplicaLost` arrives
        # Whether the run itself counts unique rows of prompts. Replicas count them if not all prompts are known.
        self._counts_rows = False
        self._generates = False  # True if the job generates text
        self._counted_rows = False  # True if a replica has counted rows; servers and vLLM count none
        self._warm_start: Spool | None = None  # the prompts that run before all are known

    def add_job(self, windows: Windows, call: RunCall) -> None:
        """Add the requests of a sorted job."""
        self._counts_rows, self._generates = True, call.readout.kind == "tokens"
        self.offline = offline_source(windows, call, self.fleet.row_cost, self.fleet.expected)
        self.book.add(self.offline, self.fleet.clock())

    def add_stream(self, source: LiveInput, call: RunCall) -> None:
        """Add the requests of a stream, and of the job that may follow it."""
        is_warm_start = source.rest is not None
        if is_warm_start:
            self._counts_rows, self._generates = True, call.readout.kind == "tokens"
            self._warm_start = Spool()
        else:
            call = replace(call, online=True)
        fleet = self.fleet
        options = {"max_tokens": source.max_tokens, "policy": fleet.policy, **fleet.window}
        options |= {"see": source.see, "wants": source.wants}
        self._inputs[call] = source
        self.online[call] = OnlineSource(call, warm_start=is_warm_start, **options)
        self.book.add(self.online[call], self.fleet.clock())
        self._note_estimated()

    def answers(self, stopping: Callable[[], bool]) -> Iterator[tuple[bytes, Any]]:
        """Yield (tag, answer) of every request, once."""
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
        """Return after how many seconds leases are sent even if no event arrives."""
        if not self._inputs and self._lanes is None:
            return _TICK
        has_come = (
            source.feed.since is not None and not self.online[call].is_full for call, source in self._inputs.items()
        )
        return 0.0 if any(has_come) else self.fleet.online_tick

    def close(self) -> None:
        """End the run on its replicas, and add its counts to the fleet's counts."""
        fleet = self.fleet
        for name in self._work.keys() & fleet.ready.keys():
            fleet.replicas.order(name, "end")
        fleet.steals += 0 if self.offline is None else self.offline.steals
        fleet.num_moved += self.book.num_moved
        if self._counts_rows and (self._counted_rows or not self._generates):
            fleet.stats.unique_tokens += self._unique_rows()
        fleet.counted_apart |= not self._counts_rows and self._counted_rows and len(fleet.replicas.names) > 1
        if self._warm_start is not None:
            self._warm_start.close()

    def _unique_rows(self) -> int:
        """Return how many rows all prompts of the run would have in one stream."""
        if self._warm_start is None or not self._warm_start.num_requests:
            return 0 if self.offline is None else self.offline.num_rows
        return unique_tokens([self._warm_start.order(), *([] if self.offline is None else [self.offline.order])])

    @property
    def _is_done(self) -> bool:
        goes_on = self._lanes is not None and not self._lanes.gives_way
        return not (goes_on or self._inputs or self.book.num_unanswered)

    # ------------------------------------------------------------------------------------------------ sending

    def _send(self) -> None:
        for call, source in self._lanes.streams() if self._lanes is not None else ():
            if call not in self._inputs:
                self.add_stream(source, call)
        for call, source in list(self._inputs.items()):
            self._take_in(source, call)
        order = self.fleet.replicas.order
        for lease in self.book.send(self.fleet.clock()):
            self._begin(lease.replica, lease.source.call)
            windows = lease.source.windows(lease)
            if self._pictures is not None:
                windows, fresh, dropped = self._pictures.send(lease.replica, windows)
                if fresh or dropped:
                    order(lease.replica, "hold", fresh, dropped)
            order(lease.replica, "give", windows)

    def _begin(self, name: str, call: RunCall | None) -> None:
        """Start a replica's run of requests of this call, unless its last requests were of the same call."""
        work = self._work[name]
        if work.call != call:
            work.call = call
            self.fleet.replicas.order(name, "begin", call)
            if self._pictures is not None:
                self._pictures.lose(name)  # a new run starts without images

    def _take_in(self, source: LiveInput, call: RunCall) -> None:
        """Move new requests into the live window. At the end of the input, add the rest of the job."""
        online, feed = self.online[call], source.feed
        if source.rest is not None:
            feed.bound = online.room()
        now = self.fleet.clock()
        until = now + self.fleet.online_tick  # events of replicas wait meanwhile
        while not online.is_full and not feed.is_over and self.fleet.clock() < until:
            if (prompts := feed.take()) is None:
                break
            for reads in prompts:
                online.put(reads, now)
                if self._warm_start is not None:
                    self._warm_start.add(Request(reads[0].tokens, namespace=reads[0].namespace))
        feed.is_hungry = not online.num_waiting and online.room() > 0
        if feed.is_over:
            del self._inputs[call]
            online.close()
            if source.rest is not None:
                self.add_job(source.rest(), call)
        elif self._lanes is not None and self.book.is_idle(online):
            del self._inputs[call], self.online[call]  # added again with the next requests of this call
            self.book.remove(online)

    # ------------------------------------------------------------------------------------------------ events

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
            yield from self._refuse(name, event.failure)
        else:
            yield from self._take_report(name, event)
            if event.failure is not None:
                fleet.notify(f"{name} failed: {in_words(event.failure)}")
                fleet.replicas.kill(name)

    def _refuse(self, name: str, failure: InputError | JobError) -> Iterator[tuple[bytes, Any]]:
        """Answer the submitted requests of a replica's call with an error that any replica would raise for them.

        Other submitted requests continue. For a job, raise the error.
        """
        if self._lanes is None:
            raise failure
        work = self._work.get(name)
        if work is None or work.call is None:
            return  # these requests have been answered already
        self._lanes.fail(failure, work.call)
        work.call = None
        self.fleet.replicas.order(name, "end")
        for tag in self.book.refuse(name, self.fleet.clock()):
            yield tag, failure

    def _take_report(self, name: str, report: ReplicaReport) -> Iterator[tuple[bytes, Any]]:
        now = self.fleet.clock()
        self._count(name, report)
        started = time.perf_counter()
        for step in report.steps if self.on_step is not None else ():
            self.on_step(replace(step, started_at=started - step.started_at))
        if name not in self._work:
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
        """Record a replica's progress and speed, and pass its cache events to the router."""
        if report.shows_progress:
            self.book.note_progress(name, now)
        call = self._work[name].call
        online = None if call is None else self.online.get(call)
        if online is None:
            return
        if report.events is not None and not online.router.take(name, report.events):
            self.fleet.re_reported += 1
            self.fleet.replicas.order(name, "report_anew")
        if not report.steps:
            return
        rows, decode = sum(step.rows for step in report.steps), sum(step.running for step in report.steps)
        work = self._work[name]
        seconds = sum(step.seconds for step in report.steps)
        if self.fleet.ready[name].steps_overlap:
            seconds, work.measured_at = min(seconds, now - work.measured_at), now
        online.router.worked(name, max(0, rows - decode), decode, seconds)

    def _join(self, name: str) -> None:
        fleet, now = self.fleet, self.fleet.clock()
        self._work[name] = _Work(measured_at=now)
        fleet.replicas.order(name, "end")  # a replica that is back may still have requests
        self.book.join(name, fleet.ready[name], now)
        self._note_estimated()

    def _note_estimated(self) -> None:
        """Record the replicas whose caches are estimated because they do not report them."""
        if any(call.in_slots for call in self.online):
            ready = self.fleet.ready
            self.fleet.estimated |= {name for name in self._work if name in ready and not ready[name].reports_cache}

    def _lose(self, name: str, loss: ReplicaLost) -> Iterator[tuple[bytes, Any]]:
        self._count_loss(self._work.pop(name, None))
        self._killed.discard(name)
        if self._pictures is not None:
            self._pictures.lose(name)
        for tag in self.book.lose(name, died=loss.died):
            message = f"replicas were lost while they ran this record, the last one ran it alone: {loss.reason}"
            remedy = "check the record for unusual content, or run it alone"
            yield tag, InputError(message, remedy=remedy, code="replicas_lost")

    def _kill_hung(self) -> None:
        for name in self.book.hung(self.fleet.clock()):
            if name not in self._killed:
                self._killed.add(name)
                self.fleet.notify(f"{name} made no progress for {self.fleet.patience:.0f} s and is killed")
                self.fleet.replicas.kill(name)

    # ------------------------------------------------------------------------------------------------ counting

    def _count(self, name: str, report: ReplicaReport) -> None:
        """Add a replica's counters to the fleet's counters.

        Prompts are counted when they are answered, because some run twice.
        """
        if report.stats is None:
            return
        stats, generation = self.fleet.stats, report.stats.generation
        unique, tokens, requests = stats.unique_tokens, stats.tokens, stats.requests
        self.fleet.stats = stats = stats + report.stats
        stats.tokens, stats.requests = tokens, requests
        rows = report.stats.unique_tokens
        self._counted_rows = self._counted_rows or rows > 0
        if self._counts_rows:  # rows of outputs are unique to their replica
            is_counted = self._counted_rows and generation is not None
            rows = generation.decode_rows - generation.discarded_rows if is_counted else 0
            stats.unique_tokens = unique + rows
        if (work := self._work.get(name)) is not None:
            work.reported_rows += rows
            work.drawn_tokens += 0 if generation is None else generation.generated_tokens

    def _count_answer(self, name: str, tokens: int, answer: Any) -> None:
        stats, work = self.fleet.stats, self._work[name]
        stats.requests += tokens > 0
        if not (isinstance(answer, list) and answer and isinstance(answer[0], Generated)):
            stats.tokens += tokens
            work.answered_rows += 0 if self._counts_rows else tokens
            return
        num_generated = sum(max(0, len(sample.tokens) - 1) for sample in answer)
        stats.tokens += len(answer) * tokens + num_generated
        work.kept_tokens += sum(len(sample.tokens) for sample in answer)
        work.answered_rows += sum(map(_output_rows, answer))
        work.answered_rows += 0 if self._counts_rows else tokens - (answer[0].cached_tokens or 0)

    def _count_loss(self, work: _Work | None) -> None:
        """Count the rows of a lost replica's unanswered requests as recomputed."""
        if work is None or not self._counted_rows or (self._counts_rows and not self._generates):
            return
        unanswered_rows = max(0, work.reported_rows - work.answered_rows)
        stats = self.fleet.stats
        stats.unique_tokens = max(0, stats.unique_tokens - unanswered_rows)
        if stats.generation is not None:
            lost_tokens = max(0, work.drawn_tokens - work.kept_tokens)
            stats.generation += GenerationStats(recomputed_rows=unanswered_rows, generated_tokens=-lost_tokens)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _output_rows(sample: Generated) -> int:
    """Return the number of rows of an output.

    Its last token has a row only if the end of the text was drawn after it.
    """
    return len(sample.tokens) - (sample.finish_reason == "length" and len(sample.tokens) > 0)
