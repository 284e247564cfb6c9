"""Makes the tasks by name, as a checkpoint wants them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError, UnsupportedModelError
from ..images.items import ImageInputs
from ..looped.requests import check_exits
from ..model import ModelConfig, config_from
from ..options import (
    ClassifyOptions,
    EmbedOptions,
    GenerationOptions,
    RerankOptions,
    ScoreOptions,
    TaskOptions,
    options_of,
)
from ..text import RERANK_INSTRUCTION, FewShotPrompt
from ..types import Exits
from .base import Task
from .classify import ClassifyHeadTask, ClassifyTask
from .embed import EmbedTask
from .facts import inputs_of, labels_of_head, require_lm_head
from .generate import GenerateTask
from .rerank import RerankTask
from .score import ScoreTask
from .sentence import PairSettings, embed_settings, pair_settings

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..text import Tokenizer


def make_task(
    name: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    options: TaskOptions | Mapping[str, Any] | None = None,
    *,
    adapters: Collection[str] = (),
    images: ImageInputs | None = None,
    **given: Any,
) -> Task:
    """Returns the task `name` for a checkpoint, with the options that `prefold.options` has for it.

    options    as the task's dataclass or as a mapping; or else they are given as keywords
    tokenizer  None: the task takes token ids only
    adapters   the names of the LoRA adapters that are loaded
    images     what reads images; None: the task takes text alone

    Raises InputError for an unknown task or option, and for bad values; UnsupportedModelError for a model that cannot
    do the task.
    """
    if not isinstance(options, TaskOptions):
        options = options_of(name, {**(options or {}), **given})
    place = (checkpoint, config_from(checkpoint.config), tokenizer)
    task = TASKS[name](*place, options, adapters)
    if images is not None:
        task.inputs = replace(task.inputs, images=images)
    if name != "generate":
        route = None if options.route is None else tuple(options.route)
        o = options
        exits = Exits(o.exit_threshold, o.min_visits, o.max_visits, o.exit_change, o.exit_prompts, route)
        exits = check_exits(None if exits == Exits() else exits, task.inputs.config)
        task.readout = replace(task.readout, exits=exits)
    return task


def _embed(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    o: EmbedOptions,
    adapters: Collection[str] = (),
) -> Task:
    settings = embed_settings(checkpoint)
    if o.pooling is not None:
        settings = replace(settings, pooling=o.pooling)
    if o.normalize is not None:
        settings = replace(settings, normalize=o.normalize)
    return EmbedTask(
        inputs_of(
            config,
            tokenizer,
            settings.max_length if o.max_length is None else o.max_length,
            adapter=o.adapter,
            adapters=adapters,
        ),
        settings,
        dimensions=o.dimensions,
        prompt=o.prompt,
        prompt_name=o.prompt_name,
        instruction=o.instruction,
        hidden=config.hidden,
        truncate=o.truncate,
    )


def _rerank(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    o: RerankOptions,
    adapters: Collection[str] = (),
) -> Task:
    labels = labels_of_head(config)
    if labels is not None and len(labels) != 1:
        raise UnsupportedModelError(
            f"{checkpoint.name} has a classification head of {len(labels)} labels; reranking takes one, or a causal LM"
        )
    if labels is None:
        require_lm_head(config, checkpoint, "rerank")
    own = PairSettings() if labels is None or o.template is not None else pair_settings(checkpoint, tokenizer)
    pair = labels is not None and o.template is None and own.prompt is None
    if pair and o.instruction is not None:
        message = f"{checkpoint.name} reads query and document as they are, without an instruction"
        raise InputError(message, field="instruction", remedy="leave it out, or give a template that has {instruction}")
    return RerankTask(
        inputs_of(config, tokenizer, o.max_length, adapter=o.adapter, adapters=adapters),
        instruction=RERANK_INSTRUCTION if o.instruction is None else o.instruction,
        template=o.template or own.prompt,
        words=o.words,
        head=labels is not None,
        pair=pair,
        raw_scores=o.raw_scores or own.raw,
        truncate=o.truncate,
    )


def _classify(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    o: ClassifyOptions,
    adapters: Collection[str] = (),
) -> Task:
    inputs = inputs_of(config, tokenizer, o.max_length, adapter=o.adapter, adapters=adapters)
    head = labels_of_head(config)
    if head is None:
        if o.labels is None:
            message = "the checkpoint has no classification head, so labels are needed"
            raise InputError(message, field="labels", remedy="give two or more", code="missing_option")
        require_lm_head(config, checkpoint, "classify")
        return ClassifyTask(
            inputs,
            o.labels,
            instructions=o.instructions,
            examples=o.examples,
            template=FewShotPrompt.template if o.template is None else o.template,
            separator=o.separator,
            normalization=o.normalization,
            calibrate=o.calibrate,
            truncate=o.truncate,
        )
    if o.labels is not None and list(o.labels) != head:
        message = f"the checkpoint classifies into {', '.join(head)}"
        raise InputError(message, field="labels", remedy="leave labels out, or use a causal LM for other labels")
    for one in fields(o):
        of_both = one.name == "labels" or one.name in {common.name for common in fields(TaskOptions)}
        if not of_both and getattr(o, one.name) not in (
            one.default,
            [],
        ):
            message = f"{one.name} is for label likelihoods; the checkpoint classifies by its own head"
            raise InputError(message, field=one.name, remedy="leave it out, or use a causal LM")
    multi_label = checkpoint.config.get("problem_type") == "multi_label_classification"
    return ClassifyHeadTask(inputs, head, multi_label=multi_label, truncate=o.truncate)


def _score(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    o: ScoreOptions,
    adapters: Collection[str] = (),
) -> Task:
    require_lm_head(config, checkpoint, "score")
    return ScoreTask(
        inputs_of(config, tokenizer, o.max_length, adapter=o.adapter, adapters=adapters),
        prefix_token=o.prefix_token,
        truncate=o.truncate,
    )


def _generate(
    checkpoint: Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    o: GenerationOptions,
    adapters: Collection[str] = (),
) -> Task:
    require_lm_head(config, checkpoint, "generate")
    inputs = inputs_of(config, tokenizer, o.max_length, adapter=o.adapter, adapters=adapters)
    return GenerateTask(inputs, o, context=config.max_positions)


TASKS: dict[str, Callable[..., Task]] = {
    "embed": _embed,
    "rerank": _rerank,
    "classify": _classify,
    "score": _score,
    "generate": _generate,
}
