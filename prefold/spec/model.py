"""The options of a model, in `LLM` and on the command line."""

# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields, replace
from os import PathLike
from typing import Any, Literal, Protocol, TypeVar, cast

from ..errors import InputError
from .fields import check_options, check_values, option, wrong_value

T = TypeVar("T")


class _CheckedOptions:
    """A _CheckedOptions is a dataclass that checks the values of a model's options, and makes groups of mappings."""

    def __post_init__(self) -> None:
        declared = fields(self)  # type: ignore[arg-type]
        for name in [entry.name for entry in declared if entry.name in GROUPS]:
            value, kind = getattr(self, name), GROUPS[name]
            if isinstance(value, bool) and kind is ImageSettings:
                value = {"tower": value}
            if isinstance(value, Mapping):
                check_options(name, value, [*kind.__dataclass_fields__])
                object.__setattr__(self, name, kind(**value))
            elif not isinstance(value, kind):
                raise wrong_value(
                    name, value, f"give a mapping of {', '.join(kind.__dataclass_fields__)}", "wrong_type"
                )
        check_values(self, [entry for entry in declared if entry.metadata])


# What the names of policies are in `CacheOptions`, and what `LLM(cache=)` takes beside one.
Policy = Literal["lru", "lfu", "priority"]
POLICIES: tuple[Policy, ...] = ("lru", "lfu", "priority")


class Shifting(Protocol):
    """A Shifting is the choice of the chunks of text that are reused at other positions. min_tokens: the fewest tokens
    of a chunk."""

    @property
    def min_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class CacheOptions(_CheckedOptions):
    """A CacheOptions holds what the cache keeps, and for how long. Raises InputError for values out of range."""

    policy: Policy = option(
        "lru",
        "Which rows go first when room is needed: the least recently used (lru), the least often used (lfu), or those"
        " of the lowest priority of a request (priority); among equals the least recently used.",
        None, one_of=POLICIES,
    )  # fmt: skip
    ttl: float | None = option(
        None, "What is kept goes so long after its last use, at the latest before a later request is taken in; by"
        " default never.",
        "cache_reuse_ttl", least=0, on="serve", metavar="SECONDS",
    )  # fmt: skip
    max_tokens: int | None = option(
        None, "Rows kept beside those in use; by default what the memory holds.",
        "cache_reuse_max_tokens", least=0, on="serve",
    )  # fmt: skip
    min_overlap: int = option(
        16, "Prefixes of fewer tokens are neither used nor kept, but where longer ones begin with them: they cost less"
        " to compute than to look after.",
        "cache_reuse", least=0, on="serve",
    )  # fmt: skip
    shifted: Shifting | str | PathLike[str] | None = option(
        None, "Reuse chunks of text at other positions too, for approximate answers, as the file says that `prefold"
        " verify --reuse shifted` wrote when its bound was met. By default reuse is exact.",
        "cache_reuse_shifted", on="text", metavar="FILE", journal=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shifted is None or isinstance(self.shifted, (str, PathLike)):
            return
        if self.shifted.min_tokens < self.min_overlap:
            message = f"chunks of {self.shifted.min_tokens} tokens are to be reused, and prefixes of {self.min_overlap}"
            remedy = f"give {self.shifted.min_tokens} or less"
            raise InputError(message, field="min_overlap", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class LoopedSettings(_CheckedOptions):
    """How the rows of a looped model go through its blocks: `LLM(looped=)`."""

    exits: Literal["read", "save", "project"] = option(
        "read",
        "Looped models: what an exit means. read: rows make all visits, and are read earlier. save, project: rows leave"
        " for good; later visits see the K/V of the row's last visit to the block (save), or K/V computed from the"
        " row's last state (project).",
        one_of=("read", "save", "project"), on="engine", journal=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImageSettings(_CheckedOptions):
    """An ImageSettings holds what a model that sees images takes and keeps: `LLM(images=)`."""

    tower: bool = option(
        True, "Whether the model's tower is loaded. Without it the model takes text alone, and the tower's memory is"
        " free for other things.",
    )  # fmt: skip
    mmproj: str | None = option(
        None, "The GGUF file of the tower that belongs to a .gguf file.", on="model", metavar="FILE"
    )
    media_memory: int = option(
        256 << 20,
        "Bytes of what the tower made of images that are kept for later requests about the same image; by default"
        " 256 MiB.",
        least=0, on="engine",
    )  # fmt: skip
    allow_media_host: Collection[str] = option(
        (), "A host from which images are fetched, where they are given by https address. May be repeated.",
        on="media", metavar="HOST", journal=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.allow_media_host, str):
            raise wrong_value("allow_media_host", self.allow_media_host, "give a list of hosts")


# The options of a model that stand together in a mapping.
GROUPS: dict[str, type[LoopedSettings] | type[ImageSettings]] = {"looped": LoopedSettings, "images": ImageSettings}


@dataclass(frozen=True, kw_only=True)
class StepOptions(_CheckedOptions):
    """A StepOptions holds the options of a model that say how its steps are made."""

    sharing: Literal["auto", "full", "mlp", "off"] = option(
        "auto",
        "What is computed once for a shared prefix: everything (full), all but attention (mlp), nothing (off); auto:"
        " full.",
        one_of=("auto", "full", "mlp", "off"), on="engine",
    )  # fmt: skip
    max_batch_rows: int | None = option(
        None,
        "Rows of a step, at most; by default 4,096 on a CPU, on a GPU what its memory takes.",
        least=1, on="engine",
    )  # fmt: skip
    cache_prefill: bool = option(
        False,
        "Embeddings, reranking, classification and scores use and fill the cache of generation too, which pays if later"
        " calls begin as earlier ones did. A server's always do.",
    )  # fmt: skip
    images: ImageSettings = option(
        ImageSettings(), "Of a model that sees images: its settings, as a mapping; False: it takes text alone."
    )


@dataclass(frozen=True, kw_only=True)
class SlotOptions(_CheckedOptions):
    """A SlotOptions holds the options of a model that say how K/V is held for generated text."""

    kv_memory: int | None = option(
        None,
        "Bytes of keys and values while text is generated; by default half of what is free, on a CPU at most 4 GiB.",
        least=1, on="text",
    )  # fmt: skip
    state_memory: int | None = option(
        None,
        "Bytes of states of a model with layers of states (a hybrid) while text is generated; by default a quarter of"
        " what keys and values may take, or less. As many sequences run at once as there are states, at most.",
        least=1, on="text",
    )  # fmt: skip
    max_running: int = option(256, "Sequences that are generated at once, at most; by default 256.", least=1, on="text")
    reserve_output: bool = option(
        True,
        "Set aside memory for a whole output where max_tokens is given. Otherwise an output may be interrupted when"
        " memory runs out, and is then computed again.",
    )
    looped: LoopedSettings = option(LoopedSettings(), "Looped models: how rows go through the blocks, as a mapping.")


@dataclass(frozen=True, kw_only=True)
class ModelSpec(StepOptions, SlotOptions):
    """A ModelSpec holds the options of `LLM`, which are fixed when it is made. Raises InputError for a bad value."""

    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: random weights of the model's shapes, for benchmarks.", one_of=("auto", "dummy"), on="model"
    )
    revision: str | None = option(None, "The branch, tag or commit of a hub id.")
    context_length: int | None = option(
        None,
        "Tokens of the longest sequence that there may be, an output included; by default what the model was made for."
        " Of models with LongRoPE (Phi) it says which rotary factors all sequences have: those of long ones where it"
        " is more than the model was first trained on (4,096).",
        least=1, on="model", metavar="TOKENS", journal=True,
    )  # fmt: skip
    seed: int = option(0, 'Of the random weights of load_format="dummy".')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "What is computed in; auto: what the checkpoint is stored in, where the machine computes natively in it, else"
        " float32.",
        one_of=("auto", "float32", "bfloat16", "float16"), on="machine",
    )  # fmt: skip
    arithmetic: Literal["float", "int8"] = option(
        "float",
        "What linears multiply in. int8: rows are quantised like weights, on a CPU with VNNI (ARM: dotprod), which is"
        " faster and less exact; `prefold verify` measures by how much. GGUF's blocks are used as they are; of other"
        " weights int8 is made. Layers that it changes too much keep the dtype, as do embedding, LM head and experts.",
        one_of=("float", "int8"), on="machine", journal=True,
    )  # fmt: skip
    weights: Literal["auto", "file", "fast", "dtype", "int8"] = option(
        "auto",
        "How weights lie in the memory of a CPU. file: as the checkpoint stores them, in GGUF's blocks or in 16 bits;"
        " dtype: in the compute dtype, which takes more memory; fast: what is faster for many rows if memory is plenty;"
        " auto: fast for jobs, else file; in bfloat16 on a CPU that does not multiply it, dtype if memory is plenty."
        " int8: quantise to 8 bits at load, only with --arithmetic int8.",
        one_of=("auto", "file", "fast", "dtype", "int8"), on="machine",
    )  # fmt: skip
    layerwise: Literal["auto", "on", "off"] = option(
        "auto",
        "Whether weights are read from the file layer by layer, once for many rows, instead of staying in memory: for"
        " embeddings, reranking, classification, decisions and scores on a CPU. auto: if the weights do not fit.",
        one_of=("auto", "on", "off"), on="machine",
    )  # fmt: skip
    kv_dtype: Literal["auto", "bfloat16"] = option(
        "auto",
        "What keys and values are kept in while text is generated, on a CPU. bfloat16: in half of the memory where the"
        " dtype is float32, each number rounded once; auto: the dtype.",
        one_of=("auto", "bfloat16"), on="machine", journal=True,
    )  # fmt: skip
    invariant: bool = option(
        False,
        "Batch-invariant: a result is the same, bit for bit, whatever else is in the batch, the cache or the job. On a"
        " CPU, and slower.",
        on="machine", journal=True,
    )  # fmt: skip
    executor: Literal["auto", "native", "torch"] = option(
        "auto",
        "What runs the model. native: compiled kernels on a CPU, without PyTorch; torch: PyTorch, for GPUs and models"
        " that the kernels lack; auto: native where it runs the model.",
        one_of=("auto", "native", "torch"), on="machine",
    )  # fmt: skip
    device: str = option(
        "auto", "auto (a GPU, if there is one), cpu, cuda, or cuda:1 for the second GPU.", on="machine", metavar="NAME"
    )
    threads: int | None = option(
        None,
        "CPU threads of each rank. By default the cores, at most a container's CPU quota, shared by the ranks.",
        least=1, on="machine",
    )  # fmt: skip
    tensor_parallel: int = option(
        1, "Ranks that the model is split over: processes of this machine, on GPUs one each.", least=1, on="engine"
    )
    adapters: Mapping[str, str] | None = option(None, "LoRA adapters that calls may name, {name: PEFT folder}.")
    cache: CacheOptions | None = option(
        "lru",
        "By what policy keys and values that are kept for later calls are forgotten: lru, lfu, priority; off: none are"
        " kept. A job keeps them for later windows, by default of a stream alone. In Python also a CacheOptions.",
        on="text",
    )  # fmt: skip

    answers: str | None = option(
        None,
        "Keep answers in this folder, and compute only those that it does not hold. Answers drawn without a seed are"
        " not kept.",
        on="answers", metavar="DIR",
    )  # fmt: skip
    answers_bytes: int = option(
        4 << 30, "Maximum size of the answers in that folder; the least recently used are deleted first.",
        least=1, on="answers",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "int8" and self.arithmetic != "int8":
            remedy = 'use arithmetic "int8" too (--arithmetic int8)'
            raise InputError("weights of int8 are for int8 arithmetic alone", field="weights", remedy=remedy)
        cache: Any = self.cache
        if cache is not None and not isinstance(cache, CacheOptions):
            if cache not in ("off", *POLICIES):
                raise wrong_value("cache", cache, f"use off, {', '.join(POLICIES)}, or CacheOptions")
            object.__setattr__(self, "cache", None if cache == "off" else CacheOptions(policy=cache))

    def keywords(self) -> dict[str, Any]:
        """Return the keywords with which `LLM` has these options."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None} | {"cache": self.cache or "off"}

    def for_job(self) -> ModelSpec:
        """Return these options for a job, whose steps have many rows."""
        return replace(self, weights="fast") if self.weights == "auto" else self


def model_options(values: Mapping[str, Any]) -> ModelSpec:
    """Returns the options of a model by keywords of `LLM`. Raises InputError for an unknown one, and for bad values."""
    for name in values:
        if group := group_of(name):
            remedy = f'give {group}={{"{name}": ...}}'
            raise InputError(f"{name} is one of the options {group}", field=name, remedy=remedy, code="unknown_option")
    check_options("LLM", values, ["model", "tokenizer", "media", *ModelSpec.__dataclass_fields__])
    return ModelSpec(**values)


def group_of(name: str) -> str | None:
    """Returns the group of a model's option; None for an option without a group."""
    return next((group for group, kind in GROUPS.items() if name in kind.__dataclass_fields__), None)


def model_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keywords of `LLM` out of values by the names of options: those of groups are put into mappings."""
    keywords: dict[str, Any] = {}
    for name, value in values.items():
        group = group_of(name)
        (keywords if group is None else keywords.setdefault(group, {}))[name] = value
    return keywords


def part_of(kind: type[T], options: ModelSpec, **values: Any) -> T:
    """Returns an object of a dataclass that has the values of the model's options of the same names, and `values`."""
    names = [entry.name for entry in fields(cast(Any, kind)) if hasattr(options, entry.name)]
    return kind(**{name: getattr(options, name) for name in names} | values)


def model_fields(*kinds: type) -> dict[str, Field[Any]]:
    """Returns {parameter of the command line: declaration} of a model's options. kinds: dataclasses whose options are
    returned; by default all of them, with those of groups and of the cache."""
    every = [entry for kind in kinds or (ModelSpec, CacheOptions, *GROUPS.values()) for entry in fields(kind)]
    return {(entry.metadata["cli"] or (entry.name,))[0]: entry for entry in every if entry.metadata["on"] is not None}
