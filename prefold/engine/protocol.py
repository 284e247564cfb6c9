"""The interface of an engine, for one model or for a fleet of replicas.

`Engine` is the only way to run requests. It has two implementations: `ModelEngine` (`engine.py`) for one model, and
`Fleet` (`cluster/fleet.py`) for many replicas.
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
    """Options for the K/V of generation. Raise InputError for values out of range."""

    cache: CacheOptions | None = None  # options of the radix cache; None: K/V of ended requests is not kept


@dataclass(frozen=True, kw_only=True)
class EngineOptions(StepOptions):
    """Options of an engine, used if a run does not override them. Raise InputError for values out of range."""

    generation: GenerateOptions = GenerateOptions()
    eos_ids: tuple[int, ...] = ()  # the tokens that end a text

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharing == "auto":
            object.__setattr__(self, "sharing", "full")

    @classmethod
    def of(cls, options: ModelSpec, eos_ids: tuple[int, ...]) -> EngineOptions:
        """Return the engine options from a model's options."""
        return part_of(cls, options, generation=part_of(GenerateOptions, options), eos_ids=eos_ids)


OnCache = Callable[[CacheReporter], None]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine that do not change. From `options` on, they are set only for an engine of one model."""

    sharing: Sharing  # how requests share rows if a run does not set `sharing`
    divides: bool = False  # a run takes a whole spool, and divides it among replicas
    options: EngineOptions = EngineOptions()
    adapters: tuple[str, ...] = ()  # names of the loaded LoRA adapters
    max_rows: int = 0  # limit on the rows of a step; the current limit is lower for a while after memory ran out
    depth: int = 1  # how many steps of a row stream may be in flight


class RunningSequence(NamedTuple):
    """A running sequence, as a snapshot shows it."""

    namespace: Hashable  # the namespace of the rows in the KV store
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were in the KV store at admission
    output_tokens: int  # tokens generated so far
    limit: int  # the most tokens to generate


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters of an engine, and the state of its KV store."""

    stats: Stats
    slots: int = 0  # slots of the KV store; 0 before there is a store, and for a fleet (its replicas have stores)
    used_slots: int = 0
    cache_seconds: float | None = None  # time spent in the radix cache; None without a cache
    rows: Mapping[Hashable, HeldRows] = field(default_factory=dict)  # rows in the KV store, by namespace
    paths: Sequence[TreePath] = ()  # paths of the trie, depth-first
    running: Sequence[RunningSequence] = ()
    failure: Exception | None = None  # error of the last step if no single request can cause it
    failed_at: float = 0.0  # time.monotonic() of the failure
    is_ready: bool = True  # requests would run now; False while all replicas still load the model
    replicas: str = ""  # state of the replicas, in words; empty for an engine of one model
    dtype: str = ""  # the replicas' dtype; "" while none is ready, and for an engine of one model


class Engine(Protocol):
    """Computes requests. Any thread may call its methods.

    A caller with many requests at once, such as a job, calls `run` and consumes the answers. A caller with a few
    requests at a time, such as a server, calls `submit`, and handles receive the answers.
    """

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine that do not change."""

    @property
    def stats(self) -> Stats:
        """The current counters."""

    @property
    def cache(self) -> RadixCache | None:
        """The radix cache, which any thread may use; None if rows of ended requests are not kept here."""

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
        """Submit requests for the owner of the handle. The handle receives their answer as its last event.

        The answer is a list with the Result of each request. With the read-out "tokens" there must be one request, and
        the answer is a list with a Generated per sample. If a request cannot run or the engine fails, the answer is an
        exception.

        Args:
            tokenizer: Decodes tokens to text; None if only tokens are needed.
            text: With the read-out "tokens", send pieces of text to the handle before the answer. A fleet sends the
                whole text of a sample as one piece.
            share: Requests share rows with others; None: as in the engine's facts.
        """

    def cancel(self, *handles: Handle) -> None:
        """End the requests of handles. The handles get no further events."""

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
        """Yield (tag, answer) of every request of windows.

        An answer is a Result, a list of Generated for the read-out "tokens", or the InputError of a request that cannot
        run.

        Args:
            windows: The Windows of a spool, or a LiveInput. Unless `facts.divides`, any iterable of windows works.
            tokenizer: Decodes tokens to text; None if only tokens are needed.
            sharing: How rows are shared; None: as in the engine's facts.
            max_batch_rows: Limit on the rows of a step of a row stream; None: the engine's.
            owner: For an engine of one model: the tenant and the class of the requests, which run beside other
                requests. None: the run may use the whole engine.
            on_failure: With `owner`: called with the error of steps that fail because of one request; returns the
                request's answer. None: raise the error.
            on_step: Called after every step.
            stopping: Called after every step; once it returns True, the run ends. None: the run ends with the last
                answer.
        """

    def snapshot(
        self, *, rows: bool = False, paths: int = 0, wants: Callable[[Hashable], bool] | None = None
    ) -> Snapshot:
        """Return the current counters. Waits for a step only if `rows` or `paths` ask for more.

        Args:
            rows: Include the rows of each namespace.
            paths: Include at most this many paths of the trie, and the running sequences; 0: neither.
            wants: wants(namespace) -> True to include its paths; None: include all.
        """

    def watching(
        self, on_step: Listener | None = None, *, policy: StepPolicy | None = None, on_cache: OnCache | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which functions are called after every step of an engine of one model, in its thread.

        Args:
            on_step: Called with every step.
            policy: Admits requests and sizes steps in the context; None: the engine's own rules.
            on_cache: Called with the reporter of cache events.
        """

    def count(self, **counts: int) -> None:
        """Add to counters, by field of Stats, for requests that a caller answers without a run."""

    def reset_stats(self) -> Stats:
        """Set the counters to zero, and return their old values."""

    def close(self) -> None:
        """End the engine, which runs nothing afterwards."""
