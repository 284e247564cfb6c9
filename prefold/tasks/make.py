"""Make a task by its name, with the settings in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..checkpoint import read_object
from ..checkpoint.settings import Settings
from ..errors import CheckpointError, InputError, UnsupportedModelError
from ..model import ModelConfig, config_from
from ..spec.calibration import Calibration
from ..spec.requests import Exits
from ..spec.task import FILTERS, ClassifyOptions, DecideOptions, EmbedOptions, RerankOptions, TaskSpec, options_of
from ..text.decisions import CONFIG, DecisionSettings, check_labels
from .base import Inputs, Task
from .classify import ClassifyHeadTask, ClassifyTask, ProblemType
from .decide import DecideTask
from .embed import EmbedTask
from .generate import GenerateTask
from .listwise import RANKERS, ListTask, check_complete
from .readers import HEADS, entry_of, files_of, head_of, names_of
from .rerank import ACTIVATIONS, CosineTask, RerankTask
from .score import ScoreTask
from .sentence import embed_settings, is_embedder, logit_ids, pair_settings

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..text import Tokenizer

# Tokens with which chat templates end a message. If a model's template has one of them, the model also ends its own
# messages with it, even if its files name another EOS.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|eot|>")
GGUF_EOS = ("eos", "eot", "eom")  # the {} of the keys tokenizer.ggml.{}_token_id


def make_task(
    name: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    options: TaskSpec | Mapping[str, Any] | None = None,
    *,
    adapters: Collection[str] = (),
    images: Any = None,
    config: ModelConfig | None = None,
    **values: Any,
) -> Task:
    """Return the task `name` for a checkpoint. `prefold.spec.task` declares its options.

    Raise InputError for an unknown task or option, and for wrong values. Raise UnsupportedModelError if the model
    cannot do the task.

    Args:
        name: A key of TASKS.
        checkpoint: The model.
        tokenizer: The model's tokenizer; None: the task accepts token ids only.
        options: The task's dataclass, or a mapping.
        adapters: Names of the loaded LoRA adapters.
        images: The `ImageInputs`; None: the task accepts text only.
        config: The loaded model's config; None: read the checkpoint's config, as the model is not loaded here.
        values: Options as keywords, in addition to a mapping `options`.
    """
    o = options if isinstance(options, TaskSpec) else options_of(name, {**(options or {}), **values})
    config = config or config_from(checkpoint.config)
    if name in ("score", "generate"):
        require_lm_head(config, checkpoint, name)
    inputs = inputs_of(config, tokenizer, o.max_length, adapter=o.adapter, adapters=adapters)
    task = TASKS[name](checkpoint, inputs, o)
    if images is not None:
        task.inputs = replace(task.inputs, images=images)
    exits = None if name == "generate" else Exits.of(o)
    if exits is not None:
        config.check_exits(exits)
        task.readout = replace(task.readout, exits=exits)
    return task


def inputs_of(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    max_length: int | None = None,
    *,
    adapter: Any = None,
    adapters: Collection[str] = (),
) -> Inputs:
    """Return the Inputs of a model.

    Args:
        max_length: Maximum rows of a request; None: all positions of the model.
    """
    return Inputs(tokenizer, _rows(config, max_length), config.vocab_size, adapter, adapters, config)


def _rows(config: ModelConfig, max_length: int | None) -> int:
    """Return the maximum rows of a request.

    It is limited to the model's positions if the model has no rotary embeddings, or if the context selects their form.
    """
    limit = config.max_positions if max_length is None else max_length
    return min(limit, config.max_positions) if config.rope is None or config.chosen_positions else limit


def _embed(checkpoint: Checkpoint, inputs: Inputs, o: EmbedOptions, kind: type[EmbedTask] = EmbedTask) -> EmbedTask:
    settings = embed_settings(checkpoint)
    overrides = {"pooling": o.pooling, "normalize": o.normalize}
    settings = replace(settings, **{name: value for name, value in overrides.items() if value is not None})
    if o.max_length is None and inputs.config is not None:
        inputs = replace(inputs, max_length=_rows(inputs.config, settings.max_length))
    return kind(inputs, o, settings)


def _rerank(checkpoint: Checkpoint, inputs: Inputs, o: RerankOptions) -> Task:
    assert inputs.config is not None
    if (reader := entry_of(checkpoint, RANKERS)) is not None:
        return ListTask(inputs, o, reader)
    labels = labels_of_head(inputs.config)
    if labels is not None and len(labels) != 1:
        raise UnsupportedModelError(
            f"{checkpoint.name} has a classification head of {len(labels)} labels; reranking needs one, or a causal LM"
        )
    if labels is None and not logit_ids(checkpoint):
        if o.template is None:
            check_complete(checkpoint, inputs.tokenizer)
        asks = o.instruction is not None or o.template is not None or tuple(o.words) != RerankOptions.words
        # Use config.json and not the loaded model, because jobs make tasks before the model is loaded.
        if not asks and (is_embedder(checkpoint) or not config_from(checkpoint.config).lm_head):
            return _embed(checkpoint, inputs, EmbedOptions(max_length=o.max_length, truncate=o.truncate), CosineTask)
        require_lm_head(inputs.config, checkpoint, "rerank")
        return RerankTask(inputs, o)
    if labels is None:
        require_lm_head(inputs.config, checkpoint, "rerank")
    else:
        inputs = replace(inputs, unread=inputs.config.pad_id)
    # A template replaces the checkpoint's own prompt.
    settings = pair_settings(checkpoint, inputs.tokenizer if o.template is None else None)
    if settings.activation not in ACTIVATIONS and not o.raw_scores:
        raise UnsupportedModelError(
            f"{checkpoint.name} makes scores of logits by activation_fn {settings.activation!r}; prefold supports "
            f"{', '.join(ACTIVATIONS)}; ask for raw_scores (--raw-scores), the logits themselves"
        )
    return RerankTask(inputs, o, settings)


def is_reranker(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether a checkpoint was made to rerank.

    Its files say so, or it has a classification head of one label.
    """
    return config.num_labels == 1 or bool(logit_ids(checkpoint)) or bool(names_of(checkpoint, RANKERS))


def _classify(checkpoint: Checkpoint, inputs: Inputs, o: ClassifyOptions) -> Task:
    assert inputs.config is not None
    head = labels_of_head(inputs.config)
    if head is None:
        if o.labels is None:
            message = "the checkpoint has no classification head, so labels are needed"
            raise InputError(message, field="labels", remedy="give two or more (--labels A,B)", code="missing_option")
        require_lm_head(inputs.config, checkpoint, "classify")
        return ClassifyTask(inputs, o)
    if o.labels is not None and list(o.labels) != head:
        message = f"the checkpoint classifies into {', '.join(head)}"
        raise InputError(message, field="labels", remedy="leave labels out, or use a causal LM for other labels")
    if isinstance(o.labels, Mapping) and any(form != name for name, form in o.labels.items()):
        message = "labels have texts or descriptions, which the checkpoint's classification head does not read"
        raise InputError(message, field="labels", remedy="leave labels out, or use a causal LM")
    of_both = {"labels", *(option.name for option in fields(TaskSpec))}
    for option in fields(o):
        if option.name not in of_both and getattr(o, option.name) not in (option.default, []):
            message = f"{option.name} is for label likelihoods; the checkpoint classifies with its own head"
            raise InputError(message, field=option.name, remedy="leave it out, or use a causal LM")
    inputs = replace(inputs, unread=inputs.config.pad_id)
    return ClassifyHeadTask(inputs, head, problem=_problem_type(checkpoint), truncate=o.truncate)


def _decide(checkpoint: Checkpoint, inputs: Inputs, o: DecideOptions) -> DecideTask:
    assert inputs.config is not None
    head = head_of(checkpoint)
    settings = DecisionSettings.of(checkpoint) if head is None else head.settings
    if inputs.adapter is None and settings.adapter is not None:
        inputs = replace(inputs, adapter=inputs.check_adapter(settings.adapter))
    if head is None:
        if checkpoint.format == "dummy" and (files := files_of(checkpoint, HEADS)):
            message = f"{checkpoint.name} decides with the head of its {files[0]}, which is read beside its weights"
            raise UnsupportedModelError(
                f"{message}; load the model in this process, without --url and --load-format dummy"
            )
        require_lm_head(inputs.config, checkpoint, "decide")
    elif head.max_length is not None:
        limit = head.max_length
        inputs = replace(inputs, max_length=limit if inputs.max_length is None else min(limit, inputs.max_length))
    task = DecideTask(inputs, o, settings, head)
    if o.calibration is not None:
        task.calibrate(Calibration.of(o.calibration), checkpoint)
    return task


def _decision_files(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return {name: folder} of the adapter of a decision model, after checking the files of its prompt and labels."""
    head = head_of(checkpoint)
    settings = DecisionSettings.of(checkpoint) if head is None else head.settings
    if head is None and tokenizer is not None:
        check_labels(checkpoint, tokenizer, settings)
    return {} if settings.adapter is None else {settings.adapter: str(checkpoint.folder(settings.adapter, CONFIG))}


# Functions that check the files of a task beside a model's weights, and return {name: folder} of their adapters.
_FILES: tuple[Callable[[Checkpoint, Tokenizer | None], dict[str, str]], ...] = (_decision_files,)


def own_adapters(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, given: Mapping[str, str] | None
) -> dict[str, str]:
    """Return {name: folder} of a model's LoRA adapters: first those named in its files, then the given ones.

    Raise CheckpointError if a task's files do not fit the model, and if two adapters have the same name.
    """
    own = {name: folder for files in _FILES for name, folder in files(checkpoint, tokenizer).items()}
    for name, folder in (given or {}).items():
        if name in own and Path(folder).resolve() != Path(own[name]).resolve():
            message = f"the adapter {name!r} is loaded with {checkpoint.name}, and another one has the same name"
            raise CheckpointError(f"{message}; give {folder} another name")
    return own | dict(given or {})


def _problem_type(checkpoint: Checkpoint) -> ProblemType | None:
    settings = Settings.of(checkpoint.config)
    problem = settings.text("problem_type", None)
    if problem is not None and problem not in get_args(ProblemType):
        raise settings.wrong("problem_type", " or ".join(get_args(ProblemType)))
    return problem


TASKS: dict[str, Callable[..., Task]] = {
    "embed": _embed,
    "rerank": _rerank,
    "classify": _classify,
    "decide": _decide,
    "score": lambda checkpoint, inputs, o: ScoreTask(inputs, o),
    "generate": lambda checkpoint, inputs, o: GenerateTask(inputs, o, context=inputs.config.max_positions),
}


def labels_of_head(config: ModelConfig) -> list[str] | None:
    """Return the labels of the model's classification head, or None if it has no such head."""
    if config.num_labels is None:
        return None
    return list(config.labels) or [f"LABEL_{i}" for i in range(config.num_labels)]


def require_lm_head(config: ModelConfig, checkpoint: Checkpoint, task: str) -> None:
    """Raise UnsupportedModelError if the model has no LM head, and thus no logits.

    Args:
        task: Name of the task, for the error.
    """
    if not config.lm_head:
        has = "a classification head" if config.num_labels else "no head at all"
        message = f"{task} needs a language model's logits; {checkpoint.name} has {has}"
        names = checkpoint.config.get("architectures")
        if not config.num_labels and isinstance(names, list) and names:
            is_missing = str(names[0]).endswith("ForCausalLM")
            why = "its files have no lm_head.weight" if is_missing else f"architectures in its config.json: {names[0]}"
            message += f" ({why}); use it to embed, or a checkpoint ...ForCausalLM with its head"
        raise UnsupportedModelError(message)


def end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the ids that end a text, in ascending order.

    They come from generation_config.json, config.json, the tokenizer, a GGUF file's metadata, and the end-of-message
    tokens of the chat template. Ids from `vocab_size` on are left out: the model has no logits for them.
    """
    config = read_object(checkpoint, "generation_config.json", keys="")
    ids = [*_ids(config.get("eos_token_id")), *_ids(checkpoint.config.get("eos_token_id"))]
    if checkpoint.gguf is not None:
        ids += [i for name in GGUF_EOS for i in _ids(checkpoint.metadata(f"tokenizer.ggml.{name}_token_id"))]
    if tokenizer is not None:
        ids += _ids(tokenizer.eos_id)
        template = "".join(tokenizer.chat_templates.templates.values())
        ids += [i for name in TURN_ENDS if name in template for i in _ids(tokenizer.token_id(name))]
    return tuple(sorted(i for i in set(ids) if vocab_size is None or i < vocab_size))


def recommended_sampling(checkpoint: Checkpoint) -> dict[str, int | float]:
    """Return {field of Sampling: value} as generation_config.json recommends. Filters count only with `do_sample`.

    Raise UnsupportedModelError for a key that asks for an unsupported feature.
    """
    config = read_object(checkpoint, "generation_config.json")
    settings = {name: config[name] for name in ("repetition_penalty",) if config.get(name) is not None}
    if config.get("do_sample"):
        settings |= {"temperature": 1.0} | {name: config[name] for name in FILTERS if config.get(name) is not None}
    return settings


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
