"""Says what a checkpoint's files say about its use: length limit, classification head, ends of a text, how to
sample."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_object
from ..errors import UnsupportedModelError
from ..model import ModelConfig
from ..options import FILTERS
from .base import Inputs

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
