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
    """Jsonable is the base of what a user is given: `to_dict` makes plain values of its fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, object]:
        """Returns {name of a field: its value as JSON knows it}: arrays and tuples become lists, errors their text."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if callable(tolist := getattr(value, "tolist", None)):  # a value of NumPy
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
    """A GenerationStats counts what generation did, beside what `Stats` counts.

    generated_tokens        tokens of all outputs
    prefill_rows            rows of prompts, those computed again included
    decode_rows             rows of running sequences: one for each sequence and step
    recomputed_rows         rows computed again, after a preemption or because a state of a hybrid was not there
    copied_rows             rows of prompts whose K/V was copied from other positions, in place of being computed
    discarded_rows          rows of sequences that had ended already, which showed only while they ran
    first_admission_hits    tokens of prompts that were there when the request was first admitted
    in_step_hits            tokens of prompts shared with a prompt admitted in the same step
    cross_window_hits       tokens of prompts found in the cache, from an earlier window or call
    preemptions             sequences taken out because memory was full
    kv_bytes_now            bytes of K/V held
    kv_bytes_peak           most bytes of K/V held at once
    kv_bytes_unshared_peak  most bytes of K/V held at once, had every sequence K/V of its own
    steps                   forward passes
    running_peak            most sequences running in one step

    of a looped model:

    block_calls             rows that went through a block, summed over visits
    block_calls_saved       visits that rows did not make because they had left
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
        """Returns the counts of both: the larger one of each peak, the sum of all else."""
        return GenerationStats(**{field.name: _added(self, other, field.name) for field in fields(self)})


@dataclass(slots=True)
class Stats(Jsonable):
    """A Stats counts the tokens of requests and the rows that were computed, and says where the time went.

    tokens          tokens of all prompts, as the user sees them: what sharing "off" computes. A prompt that is read
                    more than once (for labels of one token) counts once. Where text is generated, the tokens of each
                    sample's prompt and output, but for the last token, which needs no row
    unique_tokens   rows of the job's stream: its unique tokens, were each computed exactly once
    rows_computed   rows that went through the model's position-wise layers
    requests        prompts
    steps           forward passes
    path_rows_peak  most rows whose K/V was held between two steps
    state_bytes_peak  most bytes of states that were held between two steps, of a model with layers of states
    weight_reads    windows that went through the model layer by layer, each of which read all weights once
    weight_bytes    bytes of weights that these windows read
    tower_runs      images that were encoded
    repeats         prompts that were not run, as they got the answer of an equal prompt
    kept            prompts that were not run, as an earlier run had kept their answers
    seconds         by part: "plan" (host), "model" (device), "compile" (of kernels for a GPU), ...; parts may overlap
    generation      what generation did, None without any
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
        """Returns the counts of both, as of two runs or replicas: the larger one of each peak, the sum of all else."""
        counts = {field.name: _added(self, other, field.name) for field in fields(self)[:-2]}
        seconds = {
            part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0)
            for part in {**self.seconds, **other.seconds}
        }
        generations = [stats.generation for stats in (self, other) if stats.generation is not None]
        return Stats(**counts, seconds=seconds, generation=sum(generations, GenerationStats()) if generations else None)

    def add_seconds(self, part: str, seconds: float) -> None:
        """Adds to the seconds of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def saved(self) -> float:
        """Returns the share of the tokens that was not computed, below 1."""
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
    """Returns two counters of this name as one."""
    counts = getattr(first, name), getattr(second, name)
    return max(counts) if name.endswith("_peak") else sum(counts)


@dataclass(frozen=True, slots=True)
class FeatureCounter:
    """How a counter of a feature is shown.

    name      of the field of Stats or GenerationStats
    title     of its line in the summary of a job, which has the line if the count is not 0
    text      returns the text of this line, for a count
    is_brief  whether the text is part of a Stats as a text, too
    row       its name in the table of generation of a report; "": it has no row there
    metric    what /metrics says that it counts; "": it is no metric
    """

    name: str
    title: str
    text: Callable[[int], str]
    is_brief: bool = False
    row: str = ""
    metric: str = ""


_COUNTERS: dict[str, FeatureCounter] = {}


def _repeats(count: int) -> str:
    return f"{count:,} prompts repeat another one, which was computed once for all of them"


def _kept(count: int) -> str:
    return f"{count:,} prompts were not run, as an earlier run had kept their answers"


def add_counter(counter: FeatureCounter) -> None:
    """Has summaries, reports and metrics show a counter of a feature."""
    _COUNTERS[counter.name] = counter


add_counter(FeatureCounter("repeats", "repeats", _repeats))
add_counter(FeatureCounter("kept", "kept", _kept))


def shown(stats: Stats | GenerationStats) -> list[tuple[FeatureCounter, int]]:
    """Returns the counters of features that are fields of these statistics, each with its count."""
    load_plugins()  # a process that only adds up what others counted has loaded none
    return [(counter, getattr(stats, name)) for name, counter in _COUNTERS.items() if hasattr(stats, name)]


Sharing = Literal["full", "mlp", "off"]
SHARING_MODES: tuple[Sharing, ...] = ("full", "mlp", "off")
# Fields of Exits that options are called by too; to the others' names they put "exit_".
_SAME_NAMES = ("min_visits", "max_visits", "route")


@dataclass(frozen=True, slots=True)
class Exits:
    """An Exits says which blocks a looped model's rows visit, and after which visit they are read, or leave.

    threshold   of a model with a gate: a row is read after the first visit at which its probability of having left is
                at least this, in (0, 1]; 1: after its last visit; None: the checkpoint's own
    min_visits  no row is read after fewer visits
    max_visits  no row is read after more visits; None: it may make all of the model's

    where rows leave for good (`GenerateOptions.exits`):

    change      a row leaves after the first visit that changes its state by at most this part of it (the norm of the
                difference over that of the state before); None: however little it changes
    prompts     whether rows of prompts leave by these rules too; otherwise they make all visits
    route       the blocks visited, from 0; None: as the model's order or its router says
    visits      after how many visits the row of each generated token leaves, as far as it goes, whatever else is said
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
        """Returns what these options ask for; None: nothing but the checkpoint's own."""
        route = None if o.route is None else tuple(o.route)
        exits = cls(o.exit_threshold, o.min_visits, o.max_visits, o.exit_change, o.exit_prompts, route, visits)
        return None if exits == _NO_EXITS else exits

    @property
    def given(self) -> dict[str, object]:
        """Returns the values that differ from their defaults, by the names of the options (those of Sampling)."""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return {name if name in _SAME_NAMES else f"exit_{name}": getattr(self, name) for name in changed}


_NO_EXITS = Exits()


def refuse_exits(exits: Exits) -> None:
    """Raise InputError if any exits are given. The model is not looped."""
    for name in exits.given:
        message = f"{name} is given, and the model is not looped"
        raise InputError(message, field=name, remedy="leave it out", code="not_looped")


@dataclass(frozen=True, slots=True)
class Readout:
    """A Readout says what a run reads from the model; a run has one kind.

    kind        result of a request                                   read at
    "last"      hidden state after the final norm, [hidden]           its last row
    "mean"      the float32 mean of these hidden states, [hidden]     all its rows
    "head"      the checkpoint's classification head, [num_labels]    its last row
    "logits"    logits of the vocabulary ids `ids`, [len(ids)];       its last row
                with `sums` also the log-sum-exp of all logits, and
                the id of the largest: [len(ids) + 2]
    "every"     these hidden states, [tokens, hidden]                 all its rows; in the slots of a KV store alone
    "logprobs"  log-probability of each target, [len(targets)],       its last len(targets) rows
                and whether the target is the arg-max
    "tokens"    what is generated after it: list[Generated], one      its last row, and each row
                a sample                                              that is generated

    top         of "logprobs": how many of the most likely tokens are read beside each target; the result of a target is
                then a row of its log-probability, its rank (1 and the number of tokens that are more likely), the
                log-probabilities of the most likely tokens, and their ids; None: its log-probability alone
    exits       after which visit of a looped model rows are read; None: as the checkpoint, of "tokens" Sampling, says
    sums        of "logits": whether all logits of the row are looked at
    keeps       of "logprobs" in the slots: whether prompts of one target, too, are among rows whose states are kept
    """

    kind: Literal["last", "mean", "every", "head", "logits", "logprobs", "tokens"]
    ids: tuple[int, ...] = ()
    exits: Exits | None = None
    top: int | None = None
    sums: bool = False
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What a read-out gave.

    Attributes:
        values: float32
        greedy: of "logprobs", bool, one for each target
        cached_tokens: tokens of the prompt that were in the KV store when the request began; None: not known
    """

    values: np.ndarray
    greedy: np.ndarray | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling(LoopedOptions, SamplerOptions):
    """A Sampling says how the tokens of a request are chosen, and when they end.

    Its fields are the options that `prefold.spec.task` declares, after they have been checked: max_tokens is no longer
    "auto", and mappings and lists are tuples. seed None: it is made of the seed of the list or job. The noise of a draw
    depends on seed, sample, position and token alone, on a CPU or a GPU; rounding of the logits changes a draw only
    where two tokens are that close.
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
        """Returns after which visits rows are read; None: as the checkpoint says."""
        return Exits.of(self, self.exit_visits)


# What is wanted of a prompt beside its tokens: it is continued, or numbers are read. Features find their options in it.
Asked = Sampling | Readout


class Namespace(NamedTuple):
    """What separates rows beside their tokens: requests share rows only within one namespace. Tries, caches and slots
    compare namespaces as a whole.

    adapter  the LoRA adapter that computes the rows; "": the base model
    salt     a text that keeps requests from sharing rows with the requests of other customers
    parts    what an engine and its features add, such as the route of a looped model: at most one value of each class
    """

    adapter: str = ""
    salt: str = ""
    parts: tuple[Hashable, ...] = ()

    def part(self, kind: type[P], default: D) -> P | D:
        """Returns the part of this class; the default if there is none."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return default

    def with_part(self, part: Hashable) -> Namespace:
        """Returns the namespace with this part, in place of a part of the same class."""
        others = (other for other in self.parts if type(other) is not type(part))
        return self._replace(parts=(*others, part))

    def within(self, salt_prefix: str) -> Namespace:
        """Returns the namespace with a prefix before its salt, outside of which nothing is shared; "" is no limit."""
        return self._replace(salt=within(salt_prefix, self.salt))


NO_NAMESPACE = Namespace()


@dataclass(frozen=True, eq=False)
class Medium:
    """A Medium is an image in prompts. Its rows have ids of their own, above the vocabulary, as long as it is held
    (`images.table` gives them).

    key   what tells it from other images: a digest of its pixels and of all that is done to them
    salt  of the requests that may share its rows
    ids   int32 [rows]: in prompts they stand for the image, in this order; between them there may be tokens
    load  returns its tiles as the tower reads them, float32 [tiles, 3, height, width]
    """

    key: bytes
    salt: str
    ids: np.ndarray
    load: Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class Request:
    """A Request is one prompt, as token ids, and what is wanted of it.

    tokens    int32 [n], n >= 1: the rows of the prompt; those from MEDIA_BASE on are rows of images
    targets   int32 [m], m <= n, for readout "logprobs" only: targets[t] is the token whose log-probability is wanted
              at the row of position n - m + t. A continuation's last token is a target and no row: score(P, C) is
              tokens = P + C[:-1], targets = C
    sampling  how the tokens that continue the prompt are chosen; None: the prompt is not continued, and numbers are
              read as the run's Readout says
    namespace requests share a prefix only within one namespace; it names the LoRA adapter too
    priority  what a request of larger priority computed is kept longer, in a cache with the "priority" policy
    media     the images that have rows among `tokens`, of the namespace's salt
    """

    tokens: np.ndarray
    targets: np.ndarray | None = None
    sampling: Sampling | None = None
    namespace: Namespace = NO_NAMESPACE
    priority: int = 0
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class Owner:
    """An Owner says for whom a request is run.

    tenant    the engine is shared among tenants; None: the request has none
    is_batch  whether it may wait until no other request waits
    """

    tenant: Hashable = None
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """A Share says how much of an engine a tenant gets.

    weight         its part, relative to those of the other tenants that have requests at that time
    max_running    the most sequences that run at once; None: as many as there is room for
    max_kept_rows  the most rows that are kept for it after its requests have ended; None: as many as there is room for
    """

    weight: float = 1.0
    max_running: int | None = None
    max_kept_rows: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A TokenLogprobs holds one generated token's log-probability, and the most likely (id, log-probability) at its
    place, best first.

    They are those of the model's own distribution: before temperature, penalties and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generated(Jsonable):
    """A Generated is one sample of a request.

    tokens         the ids, without what ended them
    text           the decoded text, None without a tokenizer
    finish_reason  "stop" (end of text, a stop text or id, the grammar's end), "length", "cancelled"
    stop           the text or id that ended it, None for the end of text and for "length"
    cached_tokens  tokens of the prompt that were not computed for this request; None: the server does not say
    logprobs       one for each token, if asked for
    approximate_tokens   tokens of the prompt whose K/V was computed at other positions, behind other tokens, and copied
                   for this request; 0: the result is exact
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
    """Returns a salt with a prefix, outside of which nothing is shared; "" is no limit."""
    return f"{salt_prefix}/{salt}" if salt_prefix else salt
