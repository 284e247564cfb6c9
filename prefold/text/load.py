"""Makes the tokenizer of a checkpoint out of a folder's tokenizer.json, or a GGUF file's metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_object
from ..errors import CheckpointError
from .gguf import gguf_tokenizer
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Returns the tokenizer of a checkpoint.

    Raises CheckpointError, naming the file, where there is none or it is broken.

    For a folder it is that of tokenizer.json, with the added and special tokens, the length limit and the chat
    templates of the files beside it. The post-processor of tokenizer.json alone says which special tokens are put
    around a text (as in transformers 5, add_bos_token of tokenizer_config.json does not change it).
    """
    where = str(checkpoint.path or checkpoint.name)
    try:
        if checkpoint.gguf is not None:  # also of random weights modelled on a GGUF file
            return gguf_tokenizer(checkpoint)
        return _folder_tokenizer(checkpoint)
    except CheckpointError:
        raise
    except Exception as error:  # the files may hold values of any type, and the library raises bare Exceptions
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"the tokenizer of {where} is broken: {line}") from error


def _folder_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    path = checkpoint.file("tokenizer.json") if checkpoint.path is not None else None
    if path is None:
        raise CheckpointError(
            f"{checkpoint.name} has no tokenizer.json; save one beside the model with transformers'"
            " AutoTokenizer.from_pretrained(...).save_pretrained(...), or give token ids"
        )
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    config = read_object(checkpoint, "tokenizer_config.json")
    named = _named_tokens(checkpoint, config)
    _add_tokens(backend, config, named)
    if config.get("split_special_tokens"):
        backend.encode_special_tokens = True
    most = config.get("model_max_length")
    return Tokenizer(
        backend,
        special_tokens={name: _content(token) for name, token in named.items()},
        special_ids=_configured_ids(checkpoint, config),
        chat_templates=folder_templates(checkpoint, config),
        # Files of tokenizers without a limit have a number near 1e30.
        max_length=int(most) if isinstance(most, (int, float)) and 0 < most < 1e12 else None,
        truncation_side=config.get("truncation_side", "right"),
    )


def tokenizer_or_none(checkpoint: Checkpoint) -> Tokenizer | None:
    """Returns the tokenizer of a checkpoint, or None for one without: such a model takes token ids only.

    Raises CheckpointError for a tokenizer that cannot be read, UnsupportedModelError for one of a kind that prefold
    lacks. A model of random weights (format "dummy") then has None.
    """
    if checkpoint.gguf is None and checkpoint.file("tokenizer.json") is None:
        return None
    try:
        return load_tokenizer(checkpoint)
    except CheckpointError:
        if checkpoint.format == "dummy":
            return None
        raise


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _named_tokens(checkpoint: Checkpoint, config: dict) -> dict[str, Any]:
    """Returns {"bos_token": "<s>" or {"content": "<s>", ...}, ...}: each from tokenizer_config.json, else from
    special_tokens_map.json."""
    fallback = read_object(checkpoint, "special_tokens_map.json")
    named = {name: config[name] if name in config else fallback.get(name) for name in NAMED}
    return {name: token for name, token in named.items() if token is not None}


def _add_tokens(backend: Any, config: dict, named: dict[str, Any]) -> None:
    """Adds to the backend the tokens that the configuration names and tokenizer.json does not have."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    by_id = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
    wanted: list[Any] = [by_id[token_id] for token_id in sorted(by_id)]
    wanted += [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in wanted:
        if _content(token) not in known:
            known.add(_content(token))
            _add_token(backend, token)


def _add_token(backend: Any, token: Any) -> None:
    from tokenizers import AddedToken

    if isinstance(token, str):
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        return
    flags = {key: bool(token.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
    if token.get("special", True):
        backend.add_special_tokens([AddedToken(token["content"], special=True, **flags)])
    else:
        backend.add_tokens([AddedToken(token["content"], special=False, **flags)])


def _configured_ids(checkpoint: Checkpoint, config: dict) -> dict[str, int]:
    """Returns the ids of special tokens in generation_config.json and config.json, for tokenizers that name none.

    A token that tokenizer_config.json sets to null is meant to be absent.
    """
    generation = read_object(checkpoint, "generation_config.json")
    ids = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        value = generation.get(name + "_id", checkpoint.config.get(name + "_id"))
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and name not in config:
            ids[name] = value
    return ids


def folder_templates(checkpoint: Checkpoint, config: dict | None = None) -> dict[str, str]:
    """Returns {name: chat template} of a checkpoint's folder. config: tokenizer_config.json, where it was read already.

    Template files take the place of tokenizer_config.json's chat_template, which is a text or a list of named texts.
    """
    config = read_object(checkpoint, "tokenizer_config.json") if config is None else config
    files: dict[str, str] = {}
    path = checkpoint.file("chat_template.jinja")
    if path is not None:
        files["default"] = path.read_text(encoding="utf-8")
    if checkpoint.path is not None:
        for path in sorted((checkpoint.path / "additional_chat_templates").glob("*.jinja")):
            files[path.stem] = path.read_text(encoding="utf-8")
    if files:
        return files
    value = config.get("chat_template")
    if value is None:
        value = read_object(checkpoint, "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, dict) and all(isinstance(template, str) for template in value.values()):
        return dict(value)
    if value is not None:
        raise CheckpointError(
            f"chat_template of {checkpoint.name} is {json.dumps(value)[:80]}; it must be a text, or a list of"
            ' {"name": ..., "template": ...}'
        )
    return {}
