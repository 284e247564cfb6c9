"""What passes between a fleet and its replicas, and the one protocol of all kinds of replicas."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cache import CacheEvents
from ..engine.meter import StepInfo
from ..engine.requests import PROBED
from ..errors import InputError, PrefoldError
from ..stream import Window
from ..stream.order import SpooledRequest, decode_options
from ..types import GenerationStats, Readout, Sharing, Stats

RESTARTS = 3  # of a replica that has answered nothing since
LONGEST_WAIT = 0.5  # seconds that a report waits for something to be done
_GUESSED_OUTPUT = 256  # tokens, where a request does not say how many it may have
_TAG = struct.Struct("<QQ")  # number of the lease, place of the request in the order


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself when it is ready. Replicas of a fleet must agree in `identity`.

    identity          names what results depend on (versions, weights, dtype), {what: value}
    max_rows          rows of a step, at most
    max_running       sequences that run at once, at most
    at_once           prompts that it reads at once; 0: a step's
    is_server         whether others may use it too, so that only the number of its requests is bounded
    dies_of_requests  whether a request may be why it is lost
    dtype             what it computes in
    cache_rows        rows that its KV store holds; 0: not known
    reports_cache     whether it tells what its cache holds, where it is asked to
    reserves_output   whether it sets room aside for the longest output that a request may have
    steps_overlap     whether the seconds of its steps overlap: its speed is then what it does in the time that passes
    """

    identity: dict[str, str] = field(default_factory=dict)
    max_rows: int = 4096
    max_running: int = 256
    at_once: int = 0
    is_server: bool = False
    dies_of_requests: bool = True
    dtype: str = ""
    cache_rows: int = 0
    reports_cache: bool = False
    reserves_output: bool = False
    steps_overlap: bool = False


@dataclass(frozen=True, slots=True)
class RunCall:
    """What is asked of every request of a run.

    text       whether generated tokens are made text of; a replica has a tokenizer of its own
    online     whether requests come as a stream: where last rows are read, they are read in the KV store, and the
               replica tells what its cache holds
    """

    readout: Readout
    sharing: Sharing = "full"
    max_batch_rows: int | None = None
    text: bool = False
    online: bool = False

    @property
    def in_slots(self) -> bool:
        """Returns whether requests run in the KV store."""
        generates, kind = self.readout.kind == "tokens", self.readout.kind
        return generates or (self.online and self.sharing == "full" and (kind in PROBED or kind == "logprobs"))


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """Says that a replica has loaded its model."""

    facts: ReplicaFacts


@dataclass(slots=True)
class ReplicaReport:
    """What a replica did since its last report.

    answers     (number of the lease, place of the request, what it gave), what it gave as `results_of` yields it
    steps       of its engine, `started` in seconds before the report; of a server and of vLLM the requests that ended
    stats       of its engine, to be added up
    failure     why its engine cannot go on
    events      of its cache since the last report
    is_at_work  whether it says that it makes progress beyond that
    """

    answers: list[tuple[int, int, Any]] = field(default_factory=list)
    steps: list[StepInfo] = field(default_factory=list)
    stats: Stats | None = None
    events: CacheEvents | None = None
    failure: Exception | None = None
    is_at_work: bool = False

    @property
    def shows_progress(self) -> bool:
        """Returns whether the replica got on: it has done a step, its cache has changed, or it says so."""
        return bool(self.steps or self.events is not None or self.is_at_work)


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """Says that a replica is gone, with everything it had.

    returns  whether it comes back
    died     whether it has ended, perhaps of what it ran; otherwise only what it was asked and said was lost on the way
    """

    reason: str
    returns: bool = False
    died: bool = True


class ReplicaDown(Exception):
    """Says why a replica cannot be reached, or used: what it had is lost. The others are as of ReplicaLost."""

    def __init__(self, reason: str, *, returns: bool = True, died: bool = True):
        super().__init__(reason)
        self.returns, self.died = returns, died


def in_words(error: BaseException) -> str:
    """Returns what a person should know of an error."""
    is_plain = isinstance(error, (PrefoldError, ReplicaDown))
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


ReplicaEvent = ReplicaReady | ReplicaReport | ReplicaLost


def cannot_ask(whom: str, what: str, without: str) -> InputError:
    """Returns the error of a request for what a server, or vLLM, lacks. without: what to leave out, in words."""
    remedy = f"leave it out, or run the model {without}"
    return InputError(f"{whom} cannot be asked for {what}", field=what, remedy=remedy, code="unsupported")


def generation_stats(prompt: int, made: int, cached: int) -> Stats:
    """Returns what is counted for a prompt of which so many tokens were cached, and the tokens that were made of it."""
    rows = prompt - cached
    generation = GenerationStats(
        generated_tokens=made, prefill_rows=rows, decode_rows=made, first_admission_hits=cached
    )
    return Stats(tokens=prompt + made, rows_computed=rows + made, requests=1, steps=1, generation=generation)


def expected_limit(request: SpooledRequest) -> int:
    """Returns how many tokens may be generated for a request: a guess where it does not say, 0 for one that is read."""
    sampling, _ = decode_options(request.options)
    if sampling is None:
        return 0
    return (_GUESSED_OUTPUT if sampling.max_tokens is None else sampling.max_tokens) * sampling.n


def tag_of(number: int, place: int) -> bytes:
    """Returns the tag of a request in a lease's windows."""
    return _TAG.pack(number, place)


def place_of(tag: bytes) -> tuple[int, int]:
    """Returns (number of the lease, place of the request) of a request by `tag_of`."""
    number, place = _TAG.unpack(tag)
    return number, place


def requests_of(windows: Sequence[Window]) -> Iterator[tuple[int, int, Any]]:
    """Yields (number of the lease, place, Request) of every request."""
    for window in windows:
        for number, tag in enumerate(window.tags):
            yield *place_of(tag), window.request(number)
