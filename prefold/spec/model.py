"""The options of a model, in `LLM` and on the command line."""

# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields, replace
from os import PathLike
from typing import Any, Literal, Protocol, TypeVar, cast

from ..errors import InputError
from .fields import check_options, check_values, option, wrong_value

T = TypeVar("T")


class _CheckedOptions:
    """Base of the dataclasses of model options: checks values, and converts a mapping into its group's dataclass."""

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


# Eviction policies: values of `CacheOptions.policy`, and of `LLM(cache=)`.
Policy = Literal["lru", "lfu", "priority"]
POLICIES: tuple[Policy, ...] = ("lru", "lfu", "priority")


class Shifting(Protocol):
    """Settings for reusing chunks of text at other positions.

    Attributes:
        min_tokens: Minimum length of a chunk.
    """

    @property
    def min_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class CacheOptions(_CheckedOptions):
    """The K/V that the cache keeps, and for how long: `LLM(cache=)`.

    Attributes:
        policy: Which rows are evicted first when memory runs out: the least recently used ("lru"), the least often used
            ("lfu"), or the rows with the lowest request priority ("priority"). Ties: the least recently used first.
        ttl: Seconds after its last use at which a row expires; None: never.
        max_tokens: Maximum number of unused rows to keep; None: as many as memory holds.
        min_overlap: Minimum length in tokens of a prefix to reuse or keep.
        shifted: A file that `prefold verify --reuse shifted` wrote. Chunks of text are then also reused at other
            positions, and answers are approximate. None: reuse is exact.

    Raises:
        InputError: A value is out of range.

    Example:
        >>> llm = LLM("smollm2-135m", cache=CacheOptions(policy="lfu", ttl=600))
    """

    policy: Policy = option(
        "lru", "Eviction policy: least recently used, least often used, or lowest priority.", None,
        details="Ties: the least recently used rows are evicted first.",
        group="Performance", one_of=POLICIES,
    )  # fmt: skip
    ttl: float | None = option(
        None, "Seconds after the last use until cached K/V expires (default: never).",
        "cache_reuse_ttl",
        details="Expired rows are evicted at the latest before the next request is admitted.",
        group="Performance", least=0, on="serve", metavar="SECONDS",
    )  # fmt: skip
    max_tokens: int | None = option(
        None, "Maximum number of unused rows to keep in the cache (default: what fits in memory).",
        "cache_reuse_max_tokens", group="Performance", least=0, on="serve",
    )  # fmt: skip
    min_overlap: int = option(
        16, "Minimum length in tokens of a prefix to reuse or to keep in the cache.",
        "cache_reuse",
        details="Shorter prefixes cost less to compute than to manage. They are kept only as the start of longer ones.",
        group="Performance", least=0, on="serve",
    )  # fmt: skip
    shifted: Shifting | str | PathLike[str] | None = option(
        None, "Also reuse text at other positions, approximately, as this file allows (default: off).",
        "cache_reuse_shifted",
        details="`prefold verify --reuse shifted` writes the file if its error bound is met.",
        group="Advanced", on="text", metavar="FILE", journal=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shifted is None or isinstance(self.shifted, (str, PathLike)):
            return
        if self.shifted.min_tokens < self.min_overlap:
            message = f"min_overlap is {self.min_overlap}, but chunks of {self.shifted.min_tokens} tokens are reused"
            remedy = f"give {self.shifted.min_tokens} or less"
            raise InputError(message, field="min_overlap", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class LoopedSettings(_CheckedOptions):
    """How a looped model runs its blocks: `LLM(looped=)`."""

    exits: Literal["read", "save", "project"] = option(
        "read", "Looped models: what happens to a row that exits.",
        details="read: the row is read early but makes all visits. save, project: the row stops. In later visits, other"
        " rows then see the K/V of its last visit to the block (save), or K/V computed from its last state (project).",
        group="Looped models", one_of=("read", "save", "project"), on="engine", journal=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImageSettings(_CheckedOptions):
    """The image inputs of a model: `LLM(images=)`."""

    tower: bool = option(
        True, "Load the model's vision tower.",
        details="Without the tower the model accepts only text, and needs less memory.",
        group="Images",
    )  # fmt: skip
    mmproj: str | None = option(
        None, "GGUF file with the vision tower of a .gguf model.", group="Images", on="model", metavar="FILE"
    )
    media_memory: int = option(
        256 << 20, "Bytes of encoded images to keep for requests about the same image.",
        group="Images", least=0, on="engine",
    )  # fmt: skip
    allow_media_host: Collection[str] = option(
        (), "Host from which images may be fetched by https.",
        group="Images", on="media", metavar="HOST", journal=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.allow_media_host, str):
            raise wrong_value("allow_media_host", self.allow_media_host, "give a list of hosts")


# Model options that are given together as one mapping.
GROUPS: dict[str, type[LoopedSettings] | type[ImageSettings]] = {"looped": LoopedSettings, "images": ImageSettings}


@dataclass(frozen=True, kw_only=True)
class StepOptions(_CheckedOptions):
    """The model options that shape the steps of the engine."""

    sharing: Literal["auto", "full", "mlp", "off"] = option(
        "auto", "Work done once per shared prefix: full, mlp (not attention) or off (default auto: full).",
        group="Performance", one_of=("auto", "full", "mlp", "off"), on="engine",
    )  # fmt: skip
    max_batch_rows: int | None = option(
        None, "Maximum number of rows in a step (default: 4096 on a CPU; on a GPU, what fits).",
        group="Performance", least=1, on="engine",
    )  # fmt: skip
    cache_prefill: bool = option(
        False, "Let embeddings, reranking, classification and scores use the cache of generation.",
        details="This is faster if later calls start with the same text as earlier calls. A server always does it.",
        group="Performance",
    )  # fmt: skip
    images: ImageSettings = option(
        ImageSettings(), "Image settings, as a mapping (False: accept only text).", group="Images"
    )


@dataclass(frozen=True, kw_only=True)
class SlotOptions(_CheckedOptions):
    """The model options that limit the K/V and the states of generated sequences."""

    kv_memory: int | None = option(
        None, "Bytes for the KV cache (default: half of free memory; on a CPU at most 4 GiB).",
        group="Performance", least=1, on="text",
    )  # fmt: skip
    state_memory: int | None = option(
        None, "Hybrid models: bytes for states (default: at most a quarter of the KV cache).",
        details="At most as many sequences run at once as there are states.",
        group="Performance", least=1, on="text",
    )  # fmt: skip
    max_running: int = option(
        256, "Maximum number of sequences generated at once.",
        group="Performance", least=1, on="text",
    )  # fmt: skip
    reserve_output: bool = option(
        True, "Reserve K/V memory for `max_tokens` of a request when it is admitted.",
        details="False: a sequence may be preempted when memory runs out, and its rows are then recomputed.",
        group="Performance",
    )  # fmt: skip
    looped: LoopedSettings = option(
        LoopedSettings(), "Looped models: how to run the blocks, as a mapping.", group="Looped models"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSpec(StepOptions, SlotOptions):
    """The options of `LLM`, fixed when it is made. Raise InputError for a bad value."""

    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: use random weights of the model's shapes, for benchmarks.",
        group="Advanced", one_of=("auto", "dummy"), on="model",
    )  # fmt: skip
    revision: str | None = option(None, "Branch, tag or commit of a hub id.", group="Model")
    context_length: int | None = option(
        None, "Maximum length of a sequence in tokens, output included (default: the model's).",
        details="Models with LongRoPE (Phi) choose the rotary factors of all sequences by it: above the original"
        " training length (4,096), the factors for long sequences.",
        group="Model", least=1, on="model", metavar="TOKENS", journal=True,
    )  # fmt: skip
    seed: int = option(0, "Seed for dummy weights.", group="Advanced")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Compute dtype (default auto: the checkpoint's, or float32 if the hardware lacks it).",
        group="Model", common=True, one_of=("auto", "float32", "bfloat16", "float16"), on="machine",
    )  # fmt: skip
    arithmetic: Literal["float", "int8"] = option(
        "float", "Arithmetic of linear layers; int8 is faster, less exact (CPU with VNNI).",
        details="On ARM the CPU needs dotprod. `prefold verify` measures the error. GGUF blocks are used unchanged;"
        " other weights are quantised to int8. Layers that int8 changes too much keep the dtype, and so do the"
        " embedding, the LM head and experts.",
        group="Performance", one_of=("float", "int8"), on="machine", journal=True,
    )  # fmt: skip
    weights: Literal["auto", "file", "fast", "dtype", "int8"] = option(
        "auto", "Format of weights in CPU memory (default auto: fast for jobs, else file).",
        details="file: as in the checkpoint, in GGUF blocks or 16 bits. dtype: in the compute dtype, which needs more"
        " memory. fast: the faster layout for many rows, if there is enough memory. int8: quantised at load, only with"
        " --arithmetic int8. auto with bfloat16 on a CPU without bfloat16 multiplication: dtype, if there is enough"
        " memory.",
        group="Performance", one_of=("auto", "file", "fast", "dtype", "int8"), on="machine",
    )  # fmt: skip
    layerwise: Literal["auto", "on", "off"] = option(
        "auto", "Read weights layer by layer from the file (default auto: if memory is too small).",
        details="Each layer is read once for many rows. Only for embeddings, reranking, classification, decisions and"
        " scores, on a CPU.",
        group="Performance", one_of=("auto", "on", "off"), on="machine",
    )  # fmt: skip
    kv_dtype: Literal["auto", "bfloat16"] = option(
        "auto", "KV cache dtype, on a CPU (default auto: the compute dtype).",
        details="With float32, bfloat16 halves the KV cache; each value is rounded once.",
        group="Performance", one_of=("auto", "bfloat16"), on="machine", journal=True,
    )  # fmt: skip
    invariant: bool = option(
        False, "Batch-invariant: results are bit-equal in any batch. CPU only, and slower.",
        details="A result does not depend on the other requests, the cache or the job.",
        group="Performance", on="machine", journal=True,
    )  # fmt: skip
    executor: Literal["auto", "native", "torch"] = option(
        "auto", "Compiled CPU kernels (native) or PyTorch (default auto: native if possible).",
        details="GPUs, and models with operations that the kernels lack, need torch.",
        group="Advanced", one_of=("auto", "native", "torch"), on="machine",
    )  # fmt: skip
    device: str = option(
        "auto", "Device: cpu, cuda, or cuda:1 for the second GPU (default auto: a GPU if there is one).",
        group="Model", common=True, on="machine", metavar="NAME",
    )  # fmt: skip
    threads: int | None = option(
        None, "CPU threads of each rank (default: cores or CPU quota, divided by the ranks).",
        group="Performance", common=True, least=1, on="machine",
    )  # fmt: skip
    tensor_parallel: int = option(
        1, "Ranks to split the model over: one process each, on GPUs one GPU each.",
        group="Performance", least=1, on="engine",
    )  # fmt: skip
    adapters: Mapping[str, str] | None = option(
        None, "LoRA adapters that calls may name: {name: PEFT folder}.", group="Model"
    )
    cache: CacheOptions | None = option(
        "lru", "Eviction policy of the KV cache, or off (default: lru; for a job off, unless --stream).",
        details="The cache keeps K/V for later calls, or for later windows of a job. lru evicts the least recently used"
        " rows first, lfu the least often used, priority the lowest priority. In Python also a CacheOptions.",
        group="Performance", on="text",
    )  # fmt: skip

    answers: str | None = option(
        None, "Keep answers in this folder, and compute only missing answers.",
        details="Answers that are sampled without a seed are not kept.",
        group="Output", on="answers", metavar="DIR",
    )  # fmt: skip
    answers_bytes: int = option(
        4 << 30, "Maximum size of the folder; least recently used answers are deleted.",
        group="Output", least=1, on="answers",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "int8" and self.arithmetic != "int8":
            remedy = 'use arithmetic "int8" too (--arithmetic int8)'
            raise InputError("int8 weights need int8 arithmetic", field="weights", remedy=remedy)
        cache: Any = self.cache
        if cache is not None and not isinstance(cache, CacheOptions):
            if cache not in ("off", *POLICIES):
                raise wrong_value("cache", cache, f"use off, {', '.join(POLICIES)}, or CacheOptions")
            object.__setattr__(self, "cache", None if cache == "off" else CacheOptions(policy=cache))

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `LLM` that set these options."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None} | {"cache": self.cache or "off"}

    def for_job(self) -> ModelSpec:
        """Return these options for a job. A job has many rows per step, so automatic weights become "fast"."""
        return replace(self, weights="fast") if self.weights == "auto" else self


def model_options(values: Mapping[str, Any]) -> ModelSpec:
    """Return the model options for keywords of `LLM`. Raise InputError for an unknown option or a bad value."""
    for name in values:
        if group := group_of(name):
            remedy = f'give {group}={{"{name}": ...}}'
            raise InputError(f"{name} is an option of {group}", field=name, remedy=remedy, code="unknown_option")
    check_options("LLM", values, ["model", "tokenizer", "media", *ModelSpec.__dataclass_fields__])
    return ModelSpec(**values)


def group_of(name: str) -> str | None:
    """Return the name of the mapping that an option belongs to ("looped" or "images"), or None."""
    return next((group for group, kind in GROUPS.items() if name in kind.__dataclass_fields__), None)


def model_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of `LLM` for {option: value}. Options of a group are collected in the group's mapping."""
    keywords: dict[str, Any] = {}
    for name, value in values.items():
        group = group_of(name)
        (keywords if group is None else keywords.setdefault(group, {}))[name] = value
    return keywords


def part_of(kind: type[T], options: ModelSpec, **values: Any) -> T:
    """Return a `kind` whose fields have the values of the model options of the same names; `values` override them."""
    names = [entry.name for entry in fields(cast(Any, kind)) if hasattr(options, entry.name)]
    return kind(**{name: getattr(options, name) for name in names} | values)


def model_fields(*kinds: type) -> dict[str, Field[Any]]:
    """Return {command-line parameter: declaration} of the model options that the command line has.

    Args:
        kinds: The dataclasses that declare the options (default: all, with the groups and the cache).
    """
    every = [entry for kind in kinds or (ModelSpec, CacheOptions, *GROUPS.values()) for entry in fields(kind)]
    return {(entry.metadata["cli"] or (entry.name,))[0]: entry for entry in every if entry.metadata["on"] is not None}
