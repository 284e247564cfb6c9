"""What a checkpoint says about its use: length limit, classification head, pooling and prompts for embedding, and
what ends a text and how to sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CheckpointError, UnsupportedModelError
from ..model import ModelConfig
from .base import Inputs

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..text import Tokenizer

__all__ = [
    "EmbedSettings",
    "embed_settings",
    "generation_settings",
    "inputs_of",
    "labels_of_head",
    "require_lm_head",
]

Pooling = Literal["last", "mean", "first"]

# Names of sentence-transformers' pooling modes; the ones not here are refused.
POOLING_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
# {architecture}.pooling_type of GGUF files.
GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
# What chat templates end a message with. A checkpoint that has one of them in its template ends its own with it too,
# also where its files name another EOS.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|eot|>")
GGUF_EOS = ("eos", "eot", "eom")  # tokenizer.ggml.{}_token_id
# generation_config.json's names that Sampling has too.
SAMPLED = ("temperature", "top_k", "top_p", "min_p")


def inputs_of(config: ModelConfig, tokenizer: Tokenizer | None, max_length: int | None = None) -> Inputs:
    """The checks for a model; max_length None means all its positions. Learned ones are all there are."""
    limit = config.max_positions if max_length is None else max_length
    if config.rope is None:
        limit = min(limit, config.max_positions)
    return Inputs(tokenizer, limit, config.vocab_size)


def labels_of_head(config: ModelConfig) -> list[str] | None:
    """The labels of the model's classification head, None when it has none."""
    if config.num_labels is None:
        return None
    return list(config.labels) or [f"LABEL_{i}" for i in range(config.num_labels)]


def require_lm_head(config: ModelConfig, checkpoint: Checkpoint, task: str) -> None:
    """Raises UnsupportedModelError for a model that gives no logits."""
    if not config.lm_head:
        has = "a classification head" if config.num_labels else "no head at all"
        raise UnsupportedModelError(f"{task} needs a language model's logits; {checkpoint.name} has {has}")


@dataclass(frozen=True)
class EmbedSettings:
    """How an embedding checkpoint wants to be used.

    pooling      where the embedding is read
    normalize    scale it to length 1
    max_length   tokens a text may have, None for what the model takes
    prompts      {name: text put before the input}
    default_prompt_name   the prompt used when none is asked for, None for none
    lower_case   texts are lower-cased first
    pool_prompt  the prompt's tokens take part in pooling
    """

    pooling: Pooling = "last"
    normalize: bool = True
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    lower_case: bool = False
    pool_prompt: bool = True


def embed_settings(checkpoint: Checkpoint) -> EmbedSettings:
    """From sentence-transformers' files (modules.json), or a GGUF file's pooling type.

    Without either: the last token, normalised, as Qwen3-Embedding and most embedding models made of
    causal transformers do. Raises UnsupportedModelError for modules and pooling modes prefold lacks.
    """
    modules = checkpoint.read_json("modules.json")
    if not modules:
        return EmbedSettings(pooling=_gguf_pooling(checkpoint))
    steps = [(str(module["type"]).rsplit(".", 1)[-1], module.get("path") or "") for module in modules]
    kinds = [kind for kind, _ in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{checkpoint.name} has the sentence-transformers modules {', '.join(kinds)}; prefold knows Transformer,"
            " Pooling and then, if wanted, Normalize"
        )
    if steps[0][1]:
        where = steps[0][1]
        raise UnsupportedModelError(f"{checkpoint.name} keeps its transformer in the folder {where!r}, not in its root")
    transformer = _transformer_config(checkpoint)
    pooling = checkpoint.read_json(f"{steps[1][1]}/config.json")
    if pooling is None:
        raise CheckpointError(f"{checkpoint.name} has no {steps[1][1]}/config.json, which says how it pools")
    prompts = checkpoint.read_json("config_sentence_transformers.json") or {}
    return EmbedSettings(
        pooling=_pooling_mode(checkpoint, pooling),
        normalize=kinds[-1] == "Normalize",
        max_length=_max_length(checkpoint, transformer),
        prompts={name: text or "" for name, text in (prompts.get("prompts") or {}).items()},
        default_prompt_name=prompts.get("default_prompt_name"),
        lower_case=bool(transformer.get("do_lower_case")),
        pool_prompt=bool(pooling.get("include_prompt", True)),
    )


def _transformer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.read_json("sentence_bert_config.json") or {}
    task = config.get("transformer_task") or "feature-extraction"
    if task != "feature-extraction":
        raise UnsupportedModelError(f"sentence-transformers uses {checkpoint.name} for {task}, not for embedding")
    return config


def _max_length(checkpoint: Checkpoint, transformer: Mapping[str, Any]) -> int | None:
    limits = [transformer.get("max_seq_length")]
    if limits[0] is None:
        # As sentence-transformers does: the tokenizer's own limit counts when the model sets none.
        limits = [(checkpoint.read_json("tokenizer_config.json") or {}).get("model_max_length")]
    limits.append(checkpoint.config.get("max_position_embeddings"))
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < 1e12]
    return min(known) if known else None


def _pooling_mode(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        named = [key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on is True]
        modes = [{"cls_token": "cls", "mean_tokens": "mean"}.get(name, name) for name in named] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        known = ", ".join(POOLING_MODES)
        raise UnsupportedModelError(f"{checkpoint.name} pools by {' and '.join(modes)}; prefold knows one of {known}")
    return POOLING_MODES[modes[0]]


def _gguf_pooling(checkpoint: Checkpoint) -> Pooling:
    if checkpoint.gguf is None:
        return "last"
    kind = checkpoint.metadata(f"{checkpoint.metadata('general.architecture')}.pooling_type")
    return GGUF_POOLING.get(kind, "last")


def generation_settings(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> tuple[tuple[int, ...], dict[str, int | float]]:
    """(ids that end a text, {field of Sampling: value} that the checkpoint recommends).

    The ids are those of generation_config.json, config.json, the tokenizer and a GGUF file's metadata, and what
    the chat template ends a message with. Ids from `vocab_size` on, of which the model has no logits, are left out.
    Recommended is what generation_config.json sets; nothing where it does not ask for sampling.
    """
    config = checkpoint.read_json("generation_config.json") or {}
    ids = [*_ids(config.get("eos_token_id")), *_ids(checkpoint.config.get("eos_token_id"))]
    if checkpoint.gguf is not None:
        ids += [i for name in GGUF_EOS for i in _ids(checkpoint.metadata(f"tokenizer.ggml.{name}_token_id"))]
    if tokenizer is not None:
        ids += _ids(tokenizer.eos_id)
        template = "".join(tokenizer.chat_templates.templates.values())
        ids += [i for name in TURN_ENDS if name in template for i in _ids(tokenizer.token_id(name))]
    recommended = {name: config[name] for name in ("repetition_penalty",) if config.get(name) is not None}
    if config.get("do_sample"):
        recommended |= {"temperature": 1.0} | {name: config[name] for name in SAMPLED if config.get(name) is not None}
    return tuple(sorted(i for i in set(ids) if vocab_size is None or i < vocab_size)), recommended


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
