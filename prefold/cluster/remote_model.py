"""A model that is known by whoever runs it, a server or vLLM: the tasks need its name, a tokenizer, and no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, resolve
from ..text import Tokenizer, tokenizer_or_none
from .http_bodies import MESSAGES

# What the tasks ask of a model's config. Whether a prompt is too long, the server decides.
_ANY: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1 << 20, "num_hidden_layers": 1,
    "num_attention_heads": 1, "head_dim": 64, "intermediate_size": 1, "vocab_size": 1 << 24,
    "max_position_embeddings": (1 << 31) - 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
# What a conversation is written as, for the server to write in its model's own template.
_TEMPLATE = MESSAGES + "{{ ({'messages': messages, 'tools': tools} if tools else {'messages': messages}) | tojson }}"


def remote_model(
    model: str, tokenizer: str | None, over: str = "over HTTP", notify: Callable[[str], None] = lambda line: None
) -> tuple[Checkpoint, Tokenizer]:
    """Returns (checkpoint, tokenizer) for a model on a server, or in vLLM.

    model      its name there; also its folder, where there is one of that name
    over       where it is, in words
    tokenizer  a folder or hub id with the model's tokenizer; None: that of a folder `model`, else prompts are texts

    Where prompts are texts, a token is a byte of them, so that they are sorted by their bytes.
    """
    where = tokenizer or (model if Path(model).is_dir() else None)
    if where is None:
        return _checkpoint(f"{model} {over}", None, {}), _bytes()
    found = resolve(where, load_format="dummy", notify=notify)
    own = tokenizer_or_none(found)
    known = {name: found.config[name] for name in ("max_position_embeddings",) if found.config.get(name)}
    return _checkpoint(f"{model} {over}", found.path, known), own or _bytes()


def context_of(checkpoint: Checkpoint) -> int | None:
    """Returns the tokens of the context of a remote model's checkpoint, None where its files do not say."""
    found: int = checkpoint.config["max_position_embeddings"]
    return None if found == _ANY["max_position_embeddings"] else found


def is_of_bytes(tokenizer: Tokenizer) -> bool:
    """Returns whether a tokenizer's ids are bytes, and not those of the model."""
    return tokenizer.chat_templates.templates.get("default") == _TEMPLATE


def _checkpoint(name: str, path: Path | None, known: dict[str, Any]) -> Checkpoint:
    return Checkpoint.dummy({**_ANY, **known}, name=name, path=path)


def _bytes() -> Tokenizer:
    """Returns a tokenizer whose tokens are the bytes of a text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_templates={"default": _TEMPLATE})
