"""The keywords of LLM's methods, for editors and type checkers.

`scripts/generate` writes this file from the options in `prefold.spec`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypedDict

from ..spec.calibration import Calibration
from ..spec.model import CacheOptions, ImageSettings, LoopedSettings
from ..spec.task import Grammar, JsonSpace, Normalization, Pooling, Truncate


class TaskKeywords(TypedDict, total=False):
    """The keywords of all tasks."""

    max_length: int | None
    truncate: Truncate
    exit_threshold: float | None
    min_visits: int
    max_visits: int | None
    exit_change: float | None
    exit_prompts: bool
    route: Sequence[int] | None


class NumberKeywords(TaskKeywords, total=False):
    """The keywords of all tasks that generate no text.

    `adapter` is not in `TaskKeywords`, because the methods for a single prompt have it as a parameter.
    """

    adapter: str | Sequence[str | None] | None
    progress: bool


class EmbedKeywords(NumberKeywords, total=False):
    """The keywords of `embed`."""

    pooling: Pooling | None
    normalize: bool | None
    dimensions: int | None
    prompt: str | None
    prompt_name: str | None
    instruction: str | None


class RerankKeywords(NumberKeywords, total=False):
    """The keywords of `rerank`."""

    instruction: str | None
    template: str | None
    add_special_tokens: bool | None
    words: tuple[str, str]
    raw_scores: bool


class ClassifyKeywords(NumberKeywords, total=False):
    """The keywords of `classify`, except `labels`, which is a parameter of the method."""

    instructions: str
    examples: Sequence[object]
    template: str | None
    separator: str
    normalization: Normalization | None
    calibrate: bool


class DecideKeywords(NumberKeywords, total=False):
    """The keywords of `decide`, except `questions`, which is a parameter of the method."""

    prompt_style: Literal["transformers", "vllm"] | None
    template: str | None
    first: Literal["state", "question"] | None
    temperature: Mapping[str, float] | None
    calibration: Calibration | Mapping[str, object] | None
    review_below: float | None


class ScoreKeywords(NumberKeywords, total=False):
    """The keywords of `score`."""

    prefix_token: int | None


class GenerationKeywords(TaskKeywords, total=False):
    """The keywords of `generate`, `chat` and `stream`, except `n` and `adapter`.

    These two are parameters of the methods: `n` determines whether the answer is a list, and `adapter` may be a list
    only for a list of prompts.
    """

    max_tokens: int | Literal["auto"] | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    stop_ids: int | Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    exit_visits: Sequence[int]
    grammar: Grammar | Mapping[str, object] | None
    system: str | None
    tools: Sequence[object] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, object] | None
    template_seconds: float | None
    escape_special: bool
    max_n: int
    max_logprobs: int
    json_space: JsonSpace
    response_format: type | Mapping[str, object] | None
    salt: str
    priority: int


class LoopedKeywords(TypedDict, total=False):
    """The options of `LLM(looped=)`."""

    exits: Literal["read", "save", "project"]


class ImageKeywords(TypedDict, total=False):
    """The options of `LLM(images=)`."""

    tower: bool
    mmproj: str | None
    media_memory: int
    allow_media_host: Collection[str]


class ModelKeywords(TypedDict, total=False):
    """The keywords of `LLM`, except `model`, `tokenizer` and `media`."""

    load_format: Literal["auto", "dummy"]
    revision: str | None
    context_length: int | None
    seed: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    arithmetic: Literal["float", "int8"]
    weights: Literal["auto", "file", "fast", "dtype", "int8"]
    layerwise: Literal["auto", "on", "off"]
    kv_dtype: Literal["auto", "bfloat16"]
    invariant: bool
    executor: Literal["auto", "native", "torch"]
    device: str
    threads: int | None
    tensor_parallel: int
    adapters: Mapping[str, str] | None
    cache: CacheOptions | Literal["off", "lru", "lfu", "priority"]
    answers: str | None
    answers_bytes: int
    kv_memory: int | None
    state_memory: int | None
    max_running: int
    reserve_output: bool
    looped: LoopedSettings | LoopedKeywords
    sharing: Literal["auto", "full", "mlp", "off"]
    max_batch_rows: int | None
    cache_prefill: bool
    images: ImageSettings | ImageKeywords | bool
