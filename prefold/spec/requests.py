"""Requests to an engine, and their results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from ..errors import InputError
from .plugins import load_plugins
from .task import Grammar, LoopedOptions, SamplerOptions

if TYPE_CHECKING:
    import numpy as np

P = TypeVar("P")
D = TypeVar("D")


class Jsonable:
    """Base of results and counters: `to_dict` converts the fields to plain values."""

    __slots__ = ()

    def to_dict(self) -> dict[str, object]:
        """Return {field: JSON value}. Arrays and tuples become lists; an error becomes its text."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if callable(tolist := getattr(value, "tolist", None)):  # an array or a number of NumPy
        return tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return str(value) if isinstance(value, Exception) else value


@dataclass(slots=True)
class GenerationStats(Jsonable):
    """Counters of generation, in addition to the counters of `Stats`.

    Attributes:
        generated_tokens: Tokens of all outputs.
        prefill_rows: Prompt rows computed, including recomputed rows.
        decode_rows: Rows of running sequences: one per sequence and step.
        recomputed_rows: Rows computed again, after a preemption or because a hybrid model's state was missing.
        discarded_rows: Rows of sequences that had already ended, which was known only after the rows had run.
        copied_rows: Prompt rows whose K/V was copied from other positions instead of computed.
        first_admission_hits: Prompt tokens that were in the KV store when the request was first admitted.
        in_step_hits: Prompt tokens shared with a prompt admitted in the same step.
        cross_window_hits: Prompt tokens found in the cache, from an earlier window or call.
        preemptions: Sequences preempted because memory was full.
        kv_bytes_now: Bytes of K/V held.
        kv_bytes_peak: Maximum bytes of K/V held at once.
        kv_bytes_unshared_peak: The same maximum if every sequence had its own K/V.
        steps: Forward passes.
        running_peak: Maximum number of sequences in a step.
        block_calls: Looped models: rows that went through a block, summed over visits.
        block_calls_saved: Looped models: visits skipped by rows that had exited.
    """

    generated_tokens: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    recomputed_rows: int = 0
    discarded_rows: int = 0
    copied_rows: int = 0
    first_admission_hits: int = 0
    in_step_hits: int = 0
    cross_window_hits: int = 0
    preemptions: int = 0
    kv_bytes_now: int = 0
    kv_bytes_peak: int = 0
    kv_bytes_unshared_peak: int = 0
    steps: int = 0
    running_peak: int = 0
    block_calls: int = 0
    block_calls_saved: int = 0

    def __add__(self, other: GenerationStats) -> GenerationStats:
        """Return the sum of all counters, except that peaks are the larger of the two."""
        return GenerationStats(**{field.name: _added(self, other, field.name) for field in fields(self)})


@dataclass(slots=True)
class Stats(Jsonable):
    """Counters of requested tokens, computed rows and time: `LLM.stats`.

    Attributes:
        tokens: Tokens of all prompts, as the user sees them; sharing "off" computes them all. A prompt that is read
            more than once (for labels of one token) counts once. With generation, the tokens of each sample's prompt
            and output, except the last token, which needs no row.
        unique_tokens: Rows of the job's stream: the number of rows if each unique token is computed exactly once.
        rows_computed: Rows that went through the model's position-wise layers.
        requests: Prompts.
        steps: Forward passes.
        path_rows_peak: Maximum number of rows whose K/V was held between two steps.
        state_bytes_peak: Hybrid models: maximum bytes of states held between two steps.
        weight_reads: Windows that ran layer by layer. Each of them read all weights once.
        weight_bytes: Bytes of weights that these windows read.
        tower_runs: Images encoded.
        repeats: Prompts not run, because an equal prompt was.
        kept: Prompts not run, because an earlier run had kept their answers.
        seconds: {part: seconds}, for "plan" (host), "model" (device), "compile" (GPU kernels) and others. Parts may
            overlap.
        generation: Counters of generation; None if no text was generated.

    Example:
        >>> print(f"{llm.stats.saved:.0%} of {llm.stats.tokens:,} tokens were not computed")
    """

    tokens: int = 0
    unique_tokens: int = 0
    rows_computed: int = 0
    requests: int = 0
    steps: int = 0
    path_rows_peak: int = 0
    state_bytes_peak: int = 0
    weight_reads: int = 0
    weight_bytes: int = 0
    tower_runs: int = 0
    repeats: int = 0
    kept: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    generation: GenerationStats | None = None

    def __add__(self, other: Stats) -> Stats:
        """Add the counters of two runs or replicas; peaks are the larger of the two."""
        counts = {field.name: _added(self, other, field.name) for field in fields(self)[:-2]}
        seconds = {
            part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0)
            for part in {**self.seconds, **other.seconds}
        }
        generations = [stats.generation for stats in (self, other) if stats.generation is not None]
        return Stats(**counts, seconds=seconds, generation=sum(generations, GenerationStats()) if generations else None)

    def add_seconds(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def saved(self) -> float:
        """The share of the tokens that was not computed, below 1."""
        return 1.0 - self.rows_computed / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        parts = [
            f"{self.requests:,} prompts, {self.tokens:,} tokens",
            f"{self.rows_computed:,} rows computed ({self.saved:.1%} saved) in {self.steps:,} steps",
        ]
        parts += [counter.text(count) for counter, count in shown(self) if count and counter.is_brief]
        if self.generation is not None:
            parts.append(f"{self.generation.generated_tokens:,} tokens generated")
        spent = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
        return "; ".join([*parts, spent] if spent else parts)


def _added(first: object, second: object, name: str) -> int:
    """Return the larger of two peaks, or the sum of two other counters."""
    counts = getattr(first, name), getattr(second, name)
    return max(counts) if name.endswith("_peak") else sum(counts)


@dataclass(frozen=True, slots=True)
class FeatureCounter:
    """How a feature's counter appears in summaries, reports and metrics."""

    name: str  # field of Stats or GenerationStats
    title: str  # title of the counter's line in a job's summary; a count of 0 has no line
    text: Callable[[int], str]  # returns the text of this line for a count
    is_brief: bool = False  # `str(stats)` contains the text too
    row: str = ""  # name of the counter's row in a report's table of generation; "": no row
    metric: str = ""  # description of the counter's metric in /metrics; "": no metric


_COUNTERS: dict[str, FeatureCounter] = {}


def _repeats(count: int) -> str:
    return f"{count:,} prompts repeat another prompt, and were not computed again"


def _kept(count: int) -> str:
    return f"{count:,} prompts were not run, because an earlier run had kept their answers"


def add_counter(counter: FeatureCounter) -> None:
    """Show a feature's counter in summaries, reports and metrics."""
    _COUNTERS[counter.name] = counter


add_counter(FeatureCounter("repeats", "repeats", _repeats))
add_counter(FeatureCounter("kept", "kept", _kept))


def shown(stats: Stats | GenerationStats) -> list[tuple[FeatureCounter, int]]:
    """Return (counter, count) of each feature counter that these statistics have."""
    load_plugins()  # a process that only sums the counts of others has loaded no plugins
    return [(counter, getattr(stats, name)) for name, counter in _COUNTERS.items() if hasattr(stats, name)]


Sharing = Literal["full", "mlp", "off"]
SHARING_MODES: tuple[Sharing, ...] = ("full", "mlp", "off")
# Fields of Exits whose options have the same names. The other options have the prefix "exit_".
_SAME_NAMES = ("min_visits", "max_visits", "route")


@dataclass(frozen=True, slots=True)
class Exits:
    """The blocks that a looped model's rows visit, and the visit after which a row exits.

    By default an exit means that the row is read, although it makes all visits. With `LoopedSettings.exits` "save" or
    "project" the row makes no further visits; only these two use `change`, `prompts` and `visits`.

    Attributes:
        threshold: For models with an exit gate: exit after the first visit at which the exit probability is at least
            this, in (0, 1]. 1: after the last visit. None: the checkpoint's threshold.
        min_visits: Minimum number of visits before an exit.
        max_visits: Maximum number of visits; None: all.
        change: Exit after the first visit with norm(change of the state) <= change * norm(state before). None: no such
            rule.
        prompts: Whether prompt rows exit too. Otherwise they make all visits.
        route: Blocks to visit, numbered from 0. None: by the model's order or its router.
        visits: Number of visits of each generated token; overrides the other rules. These apply to tokens past its end.
    """

    threshold: float | None = None
    min_visits: int = 1
    max_visits: int | None = None
    change: float | None = None
    prompts: bool = False
    route: tuple[int, ...] | None = None
    visits: tuple[int, ...] = ()

    @classmethod
    def of(cls, o: LoopedOptions, visits: tuple[int, ...] = ()) -> Exits | None:
        """Return the exits that these options set, or None if all are the checkpoint's defaults."""
        route = None if o.route is None else tuple(o.route)
        exits = cls(o.exit_threshold, o.min_visits, o.max_visits, o.exit_change, o.exit_prompts, route, visits)
        return None if exits == _NO_EXITS else exits

    @property
    def given(self) -> dict[str, object]:
        """Values that differ from their defaults, as {name of the option in Sampling: value}."""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return {name if name in _SAME_NAMES else f"exit_{name}": getattr(self, name) for name in changed}


_NO_EXITS = Exits()


def refuse_exits(exits: Exits) -> None:
    """Raise InputError for the first option of `exits`, because the model is not looped."""
    for name in exits.given:
        message = f"{name} is given, but the model is not looped"
        raise InputError(message, field=name, remedy="leave it out", code="not_looped")


@dataclass(frozen=True, slots=True)
class Readout:
    """The read-out of a run: the result of each request, and the rows that it is read from. A run has one kind.

    kind        result                                                   rows
    "last"      hidden state after the final norm, [hidden]              last row
    "mean"      float32 mean of the hidden states, [hidden]              all rows
    "every"     hidden states, [tokens, hidden]; only in a KV store      all rows
    "head"      output of the classification head, [num_labels]          last row
    "logits"    logits of the tokens `ids`, [len(ids)]; with `sums`      last row
                [len(ids) + 2], the last two: log-sum-exp of all
                logits, and the id of the largest logit
    "logprobs"  log-probability of each target, [len(targets)], and      last len(targets) rows
                whether the target is the arg-max
    "tokens"    generated text: list[Generated], one per sample          last row, and each generated row
    """

    kind: Literal["last", "mean", "every", "head", "logits", "logprobs", "tokens"]
    ids: tuple[int, ...] = ()
    exits: Exits | None = None  # of looped models; None: the checkpoint's exits, or with "tokens" the exits in Sampling
    # "logprobs": number of most likely tokens to read beside each target. The result is then [len(targets), 2 + 2 *
    # top]: the target's log-probability and rank (1: most likely), the top log-probabilities, and the top ids.
    top: int | None = None
    sums: bool = False  # "logits": read all logits of the row too
    keeps: bool = False  # "logprobs" in a KV store: keep the states of prompts with one target too


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request whose read-out is not "tokens"."""

    values: np.ndarray  # float32, with the shape in `Readout`
    greedy: np.ndarray | None = None  # "logprobs": bool [len(targets)], whether each target is the arg-max
    cached_tokens: int | None = None  # prompt tokens that were in the KV store at the start; None: unknown


@dataclass(frozen=True, kw_only=True)
class Sampling(LoopedOptions, SamplerOptions):
    """Checked sampling options of one request.

    The fields are the sampling options of `LLM.generate` after checking: `max_tokens` is a number or None (until the
    context is full), and mappings and lists are tuples. If `seed` is None, the seed of the list or job determines it.
    The noise of a draw depends only on seed, sample, position and token, and is equal on CPUs and GPUs. A rounding
    difference in the logits therefore changes a draw only if two tokens are that close.

    Example:
        >>> Sampling(max_tokens=16, temperature=0.7, seed=1)
    """

    max_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    exit_visits: tuple[int, ...] = ()
    route: tuple[int, ...] | None = None

    @cached_property
    def exits(self) -> Exits | None:
        """The exits that these options set; None: the checkpoint's defaults."""
        return Exits.of(self, self.exit_visits)


# What to do with a prompt: continue it, or read values from it. Features find their options in it.
Asked = Sampling | Readout


class Namespace(NamedTuple):
    """A key that separates rows with equal tokens: requests share rows only within one namespace.

    Tries, caches and slots compare whole namespaces.
    """

    adapter: str = ""  # LoRA adapter that computes the rows; "": the base model
    salt: str = ""  # separates the requests of customers who must not share rows
    parts: tuple[Hashable, ...] = ()  # added by features, such as a looped model's route; at most one of each class

    def part(self, kind: type[P], default: D) -> P | D:
        """Return the part of this class, or the default."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return default

    def with_part(self, part: Hashable) -> Namespace:
        """Return the namespace with this part, which replaces a part of the same class."""
        others = (other for other in self.parts if type(other) is not type(part))
        return self._replace(parts=(*others, part))

    def within(self, salt_prefix: str) -> Namespace:
        """Return the namespace with a prefix before its salt; see the function `within`."""
        return self._replace(salt=within(salt_prefix, self.salt))


NO_NAMESPACE = Namespace()


@dataclass(frozen=True, eq=False)
class Medium:
    """An image in prompts. While it is held, its rows have their own ids, above the vocabulary, from `images.table`."""

    key: bytes  # digest of the image's pixels and of their preprocessing
    salt: str  # salt of the requests that may share its rows
    ids: np.ndarray  # int32 [rows]: the image's ids in prompts, in this order; tokens may stand between them
    load: Callable[[], np.ndarray]  # returns the tower's input, float32 [tiles, 3, height, width]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as token ids, and what to do with it.

    Attributes:
        tokens: int32 [n], n >= 1, the prompt. Ids from MEDIA_BASE on are rows of images.
        targets: int32 [m], m <= n, only for readout "logprobs". The log-probability of targets[t] is read at position
            n - m + t. The last token of a continuation is a target but no row: score(P, C) has tokens = P + C[:-1] and
            targets = C.
        sampling: How to choose the tokens of the continuation. None: do not continue the prompt; read the values that
            the run's Readout names.
        namespace: Requests share a prefix only within one namespace. It also names the LoRA adapter.
        priority: In a cache with the "priority" policy, rows with a higher priority are kept longer.
        media: The images with rows among `tokens`; their salt is the namespace's.
    """

    tokens: np.ndarray
    targets: np.ndarray | None = None
    sampling: Sampling | None = None
    namespace: Namespace = NO_NAMESPACE
    priority: int = 0
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant and the class of a request."""

    tenant: Hashable = None  # tenants share the engine; None: no tenant
    is_batch: bool = False  # whether the request may wait until no other request waits


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's share of an engine. None: no limit except memory."""

    weight: float = 1.0  # relative to the weights of the other tenants that have requests at that time
    max_running: int | None = None  # maximum number of sequences that run at once
    max_kept_rows: int | None = None  # maximum number of rows kept after the tenant's requests have ended


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at the position of one generated token, before temperature, penalties and filters.

    Attributes:
        logprob: Log-probability of the generated token.
        top: (id, log-probability) of the most likely tokens, best first.

    Example:
        >>> llm.generate("The sky is", logprobs=3).logprobs[0].top
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generated(Jsonable):
    """One generated answer.

    Attributes:
        tokens: The token ids, without the stop text or stop id.
        text: The decoded text; None without a tokenizer.
        finish_reason: "stop" (end of text, a stop text or id, or the end of the grammar), "length" or "cancelled".
        stop: The stop text or id that ended the answer. None for the end of text, and for "length".
        cached_tokens: Prompt tokens that were not computed for this request; None: the server does not report it.
        logprobs: One entry per token, if `logprobs` was set.
        approximate_tokens: Prompt tokens whose K/V was computed at other positions, after other tokens, and copied.
            0: the result is exact.

    Example:
        >>> llm.generate("The capital of France is", max_tokens=3).text
    """

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: Literal["stop", "length", "cancelled"]
    stop: str | int | None = None
    cached_tokens: int | None = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    approximate_tokens: int = 0

    def __repr__(self) -> str:
        ending = repr(self.finish_reason) + ("" if self.stop is None else f" at {self.stop!r}")
        text = f"tokens={list(self.tokens)}" if self.text is None else f"{self.text!r}, {len(self.tokens)} tokens"
        return f"Generated({text}, {ending})"


def within(salt_prefix: str, salt: str) -> str:
    """Return a salt with a prefix, so that requests share rows only with requests of the same prefix. "" adds none."""
    return f"{salt_prefix}/{salt}" if salt_prefix else salt
