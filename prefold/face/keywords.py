"""The keywords of the methods of LLM, for editors and type checkers: the fields of `prefold.options`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from ..options import JsonSpace, Normalization, Pooling, Truncate
from ..types import Grammar

__all__ = ["ClassifyKeywords", "EmbedKeywords", "GenerationKeywords", "RerankKeywords", "ScoreKeywords"]


class TaskKeywords(TypedDict, total=False):
    max_length: int | None
    truncate: Truncate


class NumberKeywords(TaskKeywords, total=False):
    """Of the tasks whose answers are numbers. (Those that generate text have `adapter` as a parameter.)"""

    adapter: str | Sequence[str | None] | None


class EmbedKeywords(NumberKeywords, total=False):
    pooling: Pooling | None
    normalize: bool | None
    dimensions: int | None
    prompt: str | None
    prompt_name: str | None
    instruction: str | None


class RerankKeywords(NumberKeywords, total=False):
    instruction: str | None
    template: str | None
    words: tuple[str, str]
    raw_scores: bool


class ClassifyKeywords(NumberKeywords, total=False):
    """`labels` has a place of its own."""

    instructions: str
    examples: Sequence[object]
    template: str | None
    separator: str
    normalization: Normalization | None
    calibrate: bool


class ScoreKeywords(NumberKeywords, total=False):
    prefix_token: int | None


class GenerationKeywords(TaskKeywords, total=False):
    """`n` and `adapter` have places of their own: what comes back depends on the first, the second may be a list."""

    max_tokens: int | Literal["auto"] | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    stop_ids: int | Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    max_n: int
    max_logprobs: int
    grammar: Grammar | Mapping[str, object] | None
    json_space: JsonSpace
    response_format: type | Mapping[str, object] | None
    system: str | None
    tools: Sequence[object] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, object] | None
    template_seconds: float | None
    salt: str
    priority: int
