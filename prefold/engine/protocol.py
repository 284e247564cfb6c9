"""What callers know of an engine, be it the engine of one model or a fleet of replicas.

`Engine` is the one door to what computes. There are two engines: `ModelEngine` (`engine.py`) of one model, and `Fleet`
(`cluster/fleet.py`) of many replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..errors import InputError
from ..spec.model import CacheOptions, ModelSpec, SlotOptions, StepOptions, part_of
from ..spec.requests import Owner, Readout, Request, Sharing, Stats
from ..text import Tokenizer
from .cache import CacheReporter, RadixCache
from .cache.listing import HeldRows, TreePath
from .handles import Handle
from .meter import Listener
from .pace import StepPolicy
from .requests import Answer


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SlotOptions):
    """A GenerateOptions says how K/V is held for what is generated. Raises InputError for values out of range.

    cache  the options by which K/V of ended requests is kept; None: it is not kept
    """

    cache: CacheOptions | None = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(StepOptions):
    """An EngineOptions says what an engine does where a run does not say otherwise.

    generation  how K/V is held for what is generated
    eos_ids     the tokens that end a text

    Raises InputError for values out of range.
    """

    generation: GenerateOptions = GenerateOptions()
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharing == "auto":
            object.__setattr__(self, "sharing", "full")

    @classmethod
    def of(cls, options: ModelSpec, eos_ids: tuple[int, ...]) -> EngineOptions:
        """Returns the options of an engine that are among a model's options."""
        return part_of(cls, options, generation=part_of(GenerateOptions, options), eos_ids=eos_ids)


OnCache = Callable[[CacheReporter], None]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An EngineFacts is what a caller knows of an engine for as long as it has it.

    sharing   how requests share rows in a run that does not set `sharing`
    divides   whether a run takes a whole spool, and divides it among replicas

    Of an engine of one model:

    options   the options that it was made with
    adapters  the names of the LoRA adapters that requests may run with
    max_rows  the most rows of a step; they are fewer for a while after memory ran out
    depth     how many steps of a row stream may be in flight
    """

    sharing: Sharing
    divides: bool = False
    options: EngineOptions = EngineOptions()
    adapters: tuple[str, ...] = ()
    max_rows: int = 0
    depth: int = 1


class RunningSequence(NamedTuple):
    """A RunningSequence describes a sequence that runs.

    namespace      of its rows in the KV store
    prompt_tokens  how many tokens its prompt has
    cached_tokens  how many of these were in the KV store when it was admitted
    output_tokens  how many tokens it has made
    limit          the most tokens that it makes
    """

    namespace: Hashable
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    limit: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A Snapshot holds the counters of an engine, and what has become of it and of its KV store.

    stats          the counters
    slots          slots of the KV store; 0: there is no store yet, or the engine is a fleet, whose replicas have stores
    used_slots     slots in use
    cache_seconds  the time spent in the radix cache; None: the engine has no cache
    rows           the rows in the KV store, by namespace
    paths          the paths of the trie, depth-first
    running        the sequences that run
    failure        the error of the last step, if no single request is at fault; None after a step that did not fail
    failed_at      its time.monotonic()
    is_ready       whether requests would be computed now; otherwise the replicas still load the model
    replicas       what became of the replicas, in words; empty for an engine of one model
    dtype          of the replicas; empty while none is ready, and for an engine of one model
    """

    stats: Stats
    slots: int = 0
    used_slots: int = 0
    cache_seconds: float | None = None
    rows: Mapping[Hashable, HeldRows] = field(default_factory=dict)
    paths: Sequence[TreePath] = ()
    running: Sequence[RunningSequence] = ()
    failure: Exception | None = None
    failed_at: float = 0.0
    is_ready: bool = True
    replicas: str = ""
    dtype: str = ""


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

    @property
    def cache(self) -> RadixCache | None:
        """Returns the radix cache, which any thread may use; None if rows of ended requests are not kept here."""

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
        owner: Owner | None = None,
        on_failure: Callable[[Exception], InputError] | None = None,
        on_step: Listener | None = None,
        stopping: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yields (tag, answer) of every request of windows: a Result, with the read-out "tokens" a list of Generated,
        or the InputError of a request that cannot run.

        windows         the Windows of a spool, or a LiveInput; unless `facts.divides`, also any iterable of windows
        tokenizer       of the texts; None: they are made of tokens alone
        sharing         how rows are shared; None: as the engine's facts say
        max_batch_rows  the most rows of a step of a row stream; None: the engine's
        owner           of an engine of one model: the tenant and the class that the requests run for, beside those of
                        others; None: the run may take the whole engine
        on_failure      of such requests: takes the error of steps that fail by the fault of one of them, and returns
                        its answer; None: the error is raised
        on_step         called after every step
        stopping        called after every step: once it returns True, the run ends. None: it ends with the last answer
        """

    def snapshot(
        self, *, rows: bool = False, paths: int = 0, wants: Callable[[Hashable], bool] | None = None
    ) -> Snapshot:
        """Returns the counters as they are now; waits for no step unless more is wanted.

        rows   whether the rows of each namespace are wanted
        paths  how many paths of the trie are wanted, and the sequences that run; 0: neither of them
        wants  whether the paths of a namespace are wanted; None: all are
        """

    def watching(
        self, on_step: Listener | None = None, *, policy: StepPolicy | None = None, on_cache: OnCache | None = None
    ) -> AbstractContextManager[None]:
        """Returns a context in which functions are called after every step of an engine of one model, in its thread.

        policy    admits requests and sizes steps within the context; None: the engine's own rules do
        on_cache  called with what reports the events of the cache
        """

    def count(self, **counts: int) -> None:
        """Adds to counters, by field of Stats, for requests that a caller answers without a run."""

    def reset_stats(self) -> Stats:
        """Sets the counters to zero, and returns what they were."""

    def close(self) -> None:
        """Ends the engine, which runs nothing afterwards."""
