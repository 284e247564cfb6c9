"""What callers know of an engine, be it the engine of one model or a fleet of replicas.

`Engine` is the one door to what computes. There are two engines: `ModelEngine` (`engine.py`) of one model, and `Fleet`
(`cluster/fleet.py`) of many replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..cache.listing import HeldRows, TreePath
from ..text import Tokenizer
from ..types import Readout, Request, Sharing, Stats
from .handles import Handle
from .meter import StepInfo
from .requests import Answer


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An EngineFacts is what a caller knows of an engine, and chooses by how it sends requests.

    sharing      how requests share rows in a run that does not set `sharing`
    divides      whether a run takes a whole spool or live input, and divides it among replicas
    is_ready     whether requests would be computed now; otherwise the replicas still load the model
    replicas     what became of the replicas, in words; empty for an engine of one model
    max_rows     of an engine of one model: the most rows of a step now
    max_running  of an engine of one model: the most sequences that run at once
    depth        of an engine of one model: steps of a row stream that may be in flight
    """

    sharing: Sharing
    divides: bool = False
    is_ready: bool = True
    replicas: str = ""
    max_rows: int = 0
    max_running: int = 0
    depth: int = 1


class RunningSequence(NamedTuple):
    """A RunningSequence describes a sequence that runs.

    namespace  of its rows in the KV store
    prompt     how many tokens its prompt has
    cached     how many of these were in the KV store when it was admitted
    made       how many tokens it has made
    limit      the most tokens that it makes
    """

    namespace: Hashable
    prompt: int
    cached: int
    made: int
    limit: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A Snapshot holds the counters of an engine, and how full its KV store is.

    stats          the counters
    slots          slots of the KV store; 0: there is no store yet, or the engine is a fleet, whose replicas have stores
    used_slots     slots in use
    cache_seconds  the time spent in the radix cache; None: the engine has no cache
    held           the rows in the KV store, by namespace
    paths          the paths of the trie, depth-first
    running        the sequences that run
    """

    stats: Stats
    slots: int = 0
    used_slots: int = 0
    cache_seconds: float | None = None
    held: Mapping[Hashable, HeldRows] = field(default_factory=dict)
    paths: Sequence[TreePath] = ()
    running: Sequence[RunningSequence] = ()


class Engine(Protocol):
    """An Engine computes what requests ask for. Any thread may call its methods.

    A caller that has many requests at once, such as a job, calls `run` and takes the answers as they come. A caller
    that has a few now and others later, such as a server, calls `submit`, and the answers reach its handles.
    """

    @property
    def facts(self) -> EngineFacts:
        """Returns what callers choose by."""

    @property
    def stats(self) -> Stats:
        """Returns the counters, as a snapshot has them."""

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
        """Takes requests, which run for the owner of the handle. Their answer is put into the handle as its last event.

        The answer is a list with the Result of each request; with the read-out "tokens" there is one request, and the
        answer is a list with a Generated for each of its samples. It is an exception where a request cannot run, or the
        engine fails.

        tokenizer  of the texts; None: they are made of tokens alone
        text       with the read-out "tokens": whether pieces of the text are put into the handle before the answer. A
                   fleet puts the whole text of a sample as one piece
        share      whether requests share rows with others; None: as the engine's facts say
        """

    def cancel(self, *handles: Handle) -> None:
        """Ends the requests of handles. The handles get no further events."""

    def run(
        self,
        windows: Any,
        readout: Readout,
        tokenizer: Tokenizer | None = None,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yields (tag, answer) of every request of windows: a Result, with the read-out "tokens" a list of Generated,
        or the InputError of a request that cannot run.

        windows         the Windows of a spool; where `facts.divides` also a LiveInput, and otherwise any iterable of
                        windows
        tokenizer       of the texts; None: they are made of tokens alone
        sharing         how rows are shared; None: as the engine's facts say
        max_batch_rows  the most rows of a step of a row stream; None: the engine's
        on_step         called after every step
        stopping        called after every step: once it returns True, the run ends
        """

    def snapshot(
        self, *, held: bool = False, paths: int = 0, wants: Callable[[Hashable], bool] | None = None
    ) -> Snapshot:
        """Returns the counters as they are now; waits for no step unless more is wanted.

        held   whether the rows of each namespace are wanted
        paths  how many paths of the trie are wanted, and the sequences that run; 0: neither of them
        wants  whether the paths of a namespace are wanted; None: all are
        """

    def reset_stats(self) -> Stats:
        """Sets the counters to zero, and returns what they were."""

    def close(self) -> None:
        """Ends the engine, which runs nothing afterwards."""
