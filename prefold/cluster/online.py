"""The source of requests that come as a stream: they wait in a live window until the router gives them a replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..stream import Window
from ..stream.live_windows import window_of
from ..stream.order import SpooledRequest
from ..types import Generated
from .dispatch import Dispatcher, Limits
from .leases import Answered, Lease, Places, Source
from .policies import Policy
from .replicas import ReplicaFacts, RunCall, expected_limit, tag_of
from .router import Prompt, Router


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt that has come, and those of its reads that have no answer, by number. key: the number of its first."""

    key: int
    left: dict[int, SpooledRequest]

    @property
    def first(self) -> SpooledRequest:
        return next(iter(self.left.values()))

    @property
    def namespace(self) -> tuple[str | None, str]:
        return (self.first.adapter or None, self.first.salt)


class OnlineSource(Source):
    """Holds the requests of a stream; a place is the request's number of arrival.

    call        what is asked of every request
    max_tokens  of requests that wait
    early       whether the stream is the beginning of a job that is divided later: replicas look ahead less
    see         is shown the windows that are sent
    window      options of the live window
    """

    def __init__(
        self,
        call: RunCall,
        *,
        max_tokens: int,
        early: bool = False,
        policy: Policy | None = None,
        see: Callable[[Window], None] | None = None,
        **window: Any,
    ):
        self.router = Router(policy)
        self.dispatcher = Dispatcher(self.router, limit_of=_limit_of, max_tokens=max_tokens, **window)
        self.window = self.dispatcher.window
        self._call, self._early, self._see = call, early, see
        self._limits: dict[str, Limits] = {}
        self._is_closed = False
        self._late: deque[_Prompt] = deque()  # the window was full when they came, or they come back
        self._prompts: dict[int, _Prompt] = {}  # by the numbers of the reads that have no answer

    @property
    def num_left(self) -> int:
        return len(self._prompts)

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        # What reads bucket by bucket holds nothing afterwards, and reports that.
        reports = facts.reports_cache or not self._call.in_slots
        self.router.join(replica, capacity=facts.cache_rows or None, reports=reports)
        self._limits[replica] = limits_of(facts, self._call, early=self._early)
        self.pause(replica, False)

    def leave(self, replica: str) -> None:
        if self._limits.pop(replica, None) is not None:
            self.router.leave(replica)
            self.dispatcher.leave(replica)

    def pause(self, replica: str, paused: bool) -> None:
        if paused:
            self.dispatcher.leave(replica)
        else:
            self.dispatcher.join(replica, self._limits[replica])

    # ------------------------------------------------------------------------------------------------- coming

    def put(self, reads: Sequence[SpooledRequest], now: float) -> None:
        """Takes the reads of a prompt that has come."""
        prompt = _Prompt(reads[0].number, {read.number: read for read in reads})
        self._prompts.update(dict.fromkeys(prompt.left, prompt))
        self._late.append(prompt)
        self._fill_window(now)

    def close(self) -> None:
        """Nothing comes any more but what lost replicas had: nothing waits for others any longer."""
        self._is_closed = True
        self.window.close()

    @property
    def is_full(self) -> bool:
        """Returns whether no more should be put."""
        return self.window.is_full or len(self._late) > 0

    @property
    def num_waiting(self) -> int:
        """Returns how many prompts wait to leave."""
        return len(self.window) + len(self._late)

    def room(self) -> int:
        """Returns how many rows replicas could be sent now beyond what waits, a step of each at most."""
        free = sum(min(max(0, self.dispatcher.room(n)), facts.max_rows) for n, facts in self.book.takers.items())
        return max(0, free - self.window.num_tokens)

    def _fill_window(self, now: float) -> None:
        while self._late and not self.window.is_full:
            prompt = self._late.popleft()
            how = {"now": now, "what": prompt, "returns": self._is_closed}
            self.window.put(prompt.key, prompt.first.tokens, namespace=prompt.namespace, **how)

    # ------------------------------------------------------------------------------------------------ leaving

    def take(self, now: float) -> Iterator[tuple[str, list[int]]]:
        while self.num_waiting:
            self._fill_window(now)
            some = self.dispatcher.dispatch(now)
            for one in some:
                yield str(one.replica), [number for waiting in one.requests for number in waiting.what.left]
            if not some or not self._late:
                return

    def resend(self, replica: str, prompts: Sequence[Places]) -> None:
        for number, *_ in prompts:
            prompt = self._prompts[number]
            sent = Prompt(prompt.first.tokens, _limit_of(prompt), prompt.namespace)
            self.router.send(prompt.key, sent, replica)

    def windows(self, lease: Lease) -> list[Window]:
        requests = sorted((self._prompts[number].left[number] for number in lease.places), key=lambda read: read[:4])
        windows = []
        for window in window_of(requests, share=self._call.sharing == "full"):
            windows.append(replace(window, tags=[tag_of(lease.number, place) for place in window.numbers.tolist()]))
            if self._see is not None:
                self._see(windows[-1])
        return windows

    # ---------------------------------------------------------------------------------------- what comes back

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        fresh = []
        for number, answer in answers.items():
            prompt = self._prompts.pop(number)
            request = prompt.left.pop(number)
            fresh.append((request.tag, 0 if prompt.left else request.num_tokens, answer))
            if not prompt.left:
                self.router.end(prompt.key, **_said(answer))
        return fresh

    def prompts(self, places: Sequence[int]) -> list[Places]:
        return [tuple(prompt.left) for prompt in dict.fromkeys(self._prompts[number] for number in places)]

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        return 2 * facts.max_running if self._call.readout.kind == "tokens" else len(prompts)

    def put_back(self, prompts: Sequence[Places]) -> None:
        self._late += [self._prompts[number] for number, *_ in prompts]

    def give_up(self, places: Places) -> list[bytes]:
        return [self._prompts.pop(number).left.pop(number).tag for number in places]


def _limit_of(prompt: _Prompt) -> int:
    return expected_limit(prompt.first)


def limits_of(facts: ReplicaFacts, call: RunCall, *, early: bool = False) -> Limits:
    """Returns how much a replica may be sent: what keeps it at work until the next of its answers is taken."""
    if facts.is_server and call.readout.kind != "tokens":
        return Limits(1 << 62, 2 * facts.at_once, facts.at_once, facts.at_once)
    if not call.in_slots:
        return Limits((2 if early else 3) * facts.max_rows, busy=1)
    running = facts.max_running
    rows = max(4 * facts.max_rows, facts.cache_rows + facts.cache_rows // 4) if facts.cache_rows else 1 << 62
    if call.readout.kind != "tokens":
        return Limits(min(rows, 3 * facts.max_rows), busy=1)
    requests = running if early else running + running // 2
    return Limits(rows, requests, max(1, running // 8), max(1, running // 2), facts.reserves_output)


def _said(answer: Any) -> dict[str, int | None]:
    """Returns what an answer says of the rows that it took, for `Router.end`."""
    if isinstance(answer, list) and answer and isinstance(answer[0], Generated):
        return {"output_rows": sum(len(one.tokens) for one in answer), "cached_rows": answer[0].cached_tokens}
    if isinstance(answer, Exception):
        return {"output_rows": None}
    return {"output_rows": 0}
