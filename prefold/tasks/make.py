"""Tasks by name, as a checkpoint wants them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ..errors import InputError, UnsupportedModelError
from ..model import ModelConfig, config_from
from ..text import RERANK_INSTRUCTION, FewShotPrompt, RerankPrompt
from ..text.chat import TEMPLATE_SECONDS
from ..types import Sampling
from .base import Task, check_count
from .classify import ClassifyHeadTask, ClassifyTask, Normalization
from .embed import EmbedTask
from .facts import Pooling, embed_settings, inputs_of, labels_of_head, require_lm_head
from .generate import GenerateTask
from .rerank import RerankTask
from .score import ScoreTask

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..text import Tokenizer

__all__ = ["TASKS", "make_task", "task_options"]


def make_task(
    name: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    options: Mapping[str, Any] | None = None,
    *,
    adapters: Collection[str] = (),
    **given: Any,
) -> Task:
    """The task `name` for a checkpoint. Its options, which `task_options(name)` lists, are given as keywords or as a
    mapping.

    max_length, an option of every task, is the most tokens a prompt may have; None means what the
    checkpoint says. tokenizer None: token ids only. adapters: the names of the LoRA adapters that are loaded.
    Raises InputError for an unknown task or option, and for bad values.
    """
    known, options = task_options(name), {**(options or {}), **given}
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            message = f"{name} has no option {option!r}"
            remedy = f"{hint}it has: {', '.join(known)}"
            raise InputError(message, field=option, remedy=remedy, code="unknown_option")
    if options.get("max_length") is not None:
        check_count(options["max_length"], "max_length")
    beside = {"adapters": adapters} if name == "generate" else {}
    return TASKS[name](checkpoint, config_from(checkpoint.config), tokenizer, **beside, **options)


def task_options(name: str) -> dict[str, Any]:
    """{option: default} of a task. Raises InputError for an unknown task."""
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}", field="task", remedy=f"the tasks are {', '.join(TASKS)}")
    parameters = inspect.signature(TASKS[name]).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "adapters"}
    sampling = {field.name: field.default for field in fields(Sampling)} if name == "generate" else {}
    return sampling | own


def _embed(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    max_length: int | None = None,
    truncate: bool = False,
) -> Task:
    settings = embed_settings(checkpoint)
    if pooling is not None:
        settings = replace(settings, pooling=pooling)
    if normalize is not None:
        settings = replace(settings, normalize=normalize)
    return EmbedTask(
        inputs_of(config, tokenizer, max_length if max_length is not None else settings.max_length),
        settings,
        dimensions=dimensions,
        prompt=prompt,
        prompt_name=prompt_name,
        instruction=instruction,
        hidden=config.hidden,
        truncate=truncate,
    )


def _rerank(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    instruction: str = RERANK_INSTRUCTION,
    template: str | RerankPrompt | None = None,
    words: tuple[str, str] = ("yes", "no"),
    raw_scores: bool = False,
    max_length: int | None = None,
    truncate: bool = False,
) -> Task:
    labels = labels_of_head(config)
    if labels is not None and len(labels) != 1:
        raise UnsupportedModelError(
            f"{checkpoint.name} has a classification head of {len(labels)} labels; reranking takes one, or a causal LM"
        )
    if labels is None:
        require_lm_head(config, checkpoint, "rerank")
    return RerankTask(
        inputs_of(config, tokenizer, max_length),
        instruction=instruction,
        template=template,
        words=words,
        head=labels is not None,
        raw_scores=raw_scores,
        truncate=truncate,
    )


def _classify(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    labels: Sequence[str] | Mapping[str, str] | None = None,
    instructions: str = "",
    examples: Sequence[Any] = (),
    template: str = FewShotPrompt.template,
    separator: str = FewShotPrompt.separator,
    normalization: Normalization = None,
    calibrate: bool = False,
    max_length: int | None = None,
    truncate: bool = False,
) -> Task:
    inputs = inputs_of(config, tokenizer, max_length)
    head = labels_of_head(config)
    prompt = {"instructions": instructions, "examples": examples, "template": template, "separator": separator}
    likelihood = prompt | {"normalization": normalization, "calibrate": calibrate}
    if head is None:
        if labels is None:
            message = "the checkpoint has no classification head, so labels are needed"
            raise InputError(message, field="labels", remedy="give two or more", code="missing_option")
        require_lm_head(config, checkpoint, "classify")
        return ClassifyTask(inputs, labels, **likelihood, truncate=truncate)
    if labels is not None and list(labels) != head:
        message = f"the checkpoint classifies into {', '.join(head)}"
        raise InputError(message, field="labels", remedy="leave labels out, or use a causal LM for other labels")
    defaults = task_options("classify")
    for option, value in likelihood.items():
        if value and value != defaults[option]:
            message = f"{option} is for label likelihoods; the checkpoint classifies by its own head"
            raise InputError(message, field=option, remedy="leave it out, or use a causal LM")
    multi_label = checkpoint.config.get("problem_type") == "multi_label_classification"
    return ClassifyHeadTask(inputs, head, multi_label=multi_label, truncate=truncate)


def _score(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    prefix_token: int | None = None,
    max_length: int | None = None,
    truncate: bool = False,
) -> Task:
    require_lm_head(config, checkpoint, "score")
    return ScoreTask(inputs_of(config, tokenizer, max_length), prefix_token=prefix_token, truncate=truncate)


def _generate(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int | str | None = "auto",
    system: str | None = None,
    tools: Any = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    template_seconds: float = TEMPLATE_SECONDS,
    adapter: str | None = None,
    adapters: Collection[str] = (),
    salt: str = "",
    priority: int = 0,
    max_length: int | None = None,
    truncate: bool = False,
    **sampling: Any,
) -> Task:
    require_lm_head(config, checkpoint, "generate")
    return GenerateTask(
        inputs_of(config, tokenizer, max_length),
        context=config.max_positions,
        max_tokens=max_tokens,
        sampling=sampling,
        system=system,
        tools=tools,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        template_seconds=template_seconds,
        adapter=adapter,
        adapters=adapters,
        salt=salt,
        priority=priority,
        truncate=truncate,
    )


TASKS: dict[str, Callable[..., Task]] = {
    "embed": _embed,
    "rerank": _rerank,
    "classify": _classify,
    "score": _score,
    "generate": _generate,
}
