"""Makes the tasks by name, and reads from a checkpoint's files how it wants to be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_object
from ..errors import InputError, UnsupportedModelError
from ..images.items import ImageInputs
from ..looped.requests import check_exits
from ..model import ModelConfig, config_from
from ..options import (
    FILTERS,
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
from .base import Inputs, Task
from .classify import ClassifyHeadTask, ClassifyTask
from .embed import EmbedTask
from .generate import GenerateTask
from .rerank import RerankTask
from .score import ScoreTask
from .sentence import PairSettings, embed_settings, pair_settings

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..text import Tokenizer

# What chat templates end a message with. A model whose template has one of them ends its own messages with it too,
# even where its files name another EOS.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|eot|>")
GGUF_EOS = ("eos", "eot", "eom")  # the {} of the keys tokenizer.ggml.{}_token_id


def inputs_of(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    max_length: int | None = None,
    *,
    adapter: Any = None,
    adapters: Collection[str] = (),
) -> Inputs:
    """Returns the checks for a model. max_length: rows of a request, None for all positions of the model.

    Without rotary embeddings a model has no more than its own positions, so max_length cannot be larger.
    """
    limit = config.max_positions if max_length is None else max_length
    if config.rope is None:
        limit = min(limit, config.max_positions)
    return Inputs(tokenizer, limit, config.vocab_size, adapter, adapters, config)


def labels_of_head(config: ModelConfig) -> list[str] | None:
    """Returns the labels of the model's classification head, None when it has none."""
    if config.num_labels is None:
        return None
    return list(config.labels) or [f"LABEL_{i}" for i in range(config.num_labels)]


def require_lm_head(config: ModelConfig, checkpoint: Checkpoint, task: str) -> None:
    """Raises UnsupportedModelError for a model without an LM head, which gives no logits. task: what needs them."""
    if not config.lm_head:
        has = "a classification head" if config.num_labels else "no head at all"
        message = f"{task} needs a language model's logits; {checkpoint.name} has {has}"
        names = checkpoint.config.get("architectures")
        if not config.num_labels and isinstance(names, list) and names:
            message += (
                f" (architectures in its config.json: {names[0]}); use it to embed, or a checkpoint ...ForCausalLM"
            )
        raise UnsupportedModelError(message)


def generation_settings(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> tuple[tuple[int, ...], dict[str, int | float]]:
    """Returns the ids that end a text, and {field of Sampling: value}, the sampling that the checkpoint recommends.

    The ids are those of generation_config.json, config.json, the tokenizer and a GGUF file's metadata, and what the
    chat template ends a message with. Ids from `vocab_size` on are left out, since the model has no logits for them.
    The recommendation is that of generation_config.json; it is empty where that file does not ask for sampling.
    """
    config = read_object(checkpoint, "generation_config.json")
    ids = [*_ids(config.get("eos_token_id")), *_ids(checkpoint.config.get("eos_token_id"))]
    if checkpoint.gguf is not None:
        ids += [i for name in GGUF_EOS for i in _ids(checkpoint.metadata(f"tokenizer.ggml.{name}_token_id"))]
    if tokenizer is not None:
        ids += _ids(tokenizer.eos_id)
        template = "".join(tokenizer.chat_templates.templates.values())
        ids += [i for name in TURN_ENDS if name in template for i in _ids(tokenizer.token_id(name))]
    recommended = {name: config[name] for name in ("repetition_penalty",) if config.get(name) is not None}
    if config.get("do_sample"):
        recommended |= {"temperature": 1.0} | {name: config[name] for name in FILTERS if config.get(name) is not None}
    return tuple(sorted(i for i in set(ids) if vocab_size is None or i < vocab_size)), recommended


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


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
