"""Create the tokenizer of a checkpoint from a folder's tokenizer.json, or from a GGUF file's metadata."""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_object
from ..checkpoint.keys import KEYS, check_keys
from ..errors import CheckpointError, UnsupportedModelError
from .linecut import LLAMA3, QWEN2, TEKKEN
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

    from ..checkpoint import Checkpoint


# The tokenizer of a GGUF file is byte-level BPE or SentencePiece BPE.
#
# For byte-level BPE (tokenizer.ggml.model "gpt2") the file contains tokens, their types and merges. It does not contain
# the rule that splits a text into words, only a name, `tokenizer.ggml.pre`. The name stands for the pre-tokenizer of
# the checkpoint's tokenizer.json. For SentencePiece (model "llama") the file contains pieces, their types and scores.
#
# SentencePiece repeatedly joins the two neighbours that form the best-ranked piece, however that piece was formed. The
# BPE of `tokenizers` joins listed pairs in list order. So every pair that joins to a piece is listed, best piece first.
# A space is the character "▁" (U+2581), and a character without a piece becomes its UTF-8 bytes.

SPACE = "▁"
# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


# For each value of tokenizer.ggml.pre:
# - the regular expression that splits a text into words ("": as byte-level BPE; "digits": each digit is a word too)
# - True if the text is normalised (Unicode NFC) before that
# - True if a word that is a token is never split
# - True if a BOS is added, unless the file says otherwise
PRE_TOKENIZERS: dict[str, tuple[str, bool, bool, bool]] = {
    "default": ("", False, False, False),
    "gpt-2": ("", False, False, False),
    "smollm": ("digits", False, False, False),
    "qwen2": (QWEN2, True, False, False),
    "deepseek-r1-qwen": (QWEN2, True, False, False),
    "llama-bpe": (LLAMA3, False, True, True),
    "llama3": (LLAMA3, False, True, True),
    "llama-v3": (LLAMA3, False, True, True),
    "tekken": (TEKKEN, False, True, True),
}


def gguf_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a GGUF file.

    Raise UnsupportedModelError if the tokenizer is neither SentencePiece nor byte-level BPE with a known pre-tokenizer.
    Raise CheckpointError for inconsistent metadata.
    """
    model = checkpoint.metadata("tokenizer.ggml.model")
    pre = checkpoint.metadata("tokenizer.ggml.pre")
    if model == "gpt2" and not pre:
        warnings.warn(
            f"{checkpoint.name} has no tokenizer.ggml.pre, so texts are split like GPT-2's; if the model's own "
            "tokenizer splits differently, add the key (gguf-new-metadata --pre-tokenizer) or use its HF folder",
            RuntimeWarning,
            stacklevel=2,
        )
    pre = pre or "default"
    if model != "llama" and (model != "gpt2" or pre not in PRE_TOKENIZERS):
        names = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModelError(
            f"{checkpoint.name} has a tokenizer of model {model!r}, pre {pre!r}; for GGUF files prefold supports"
            f" SentencePiece BPE (model 'llama'), and byte-level BPE (model 'gpt2') with pre {names}; use the"
            " checkpoint's Hugging Face folder instead"
        )
    check_keys("GGUF metadata", {key: checkpoint.metadata(key) for key in KEYS["GGUF metadata"]}, checkpoint.name)
    tokens = checkpoint.metadata("tokenizer.ggml.tokens")
    order = checkpoint.metadata(f"tokenizer.ggml.{'scores' if model == 'llama' else 'merges'}")
    types = checkpoint.metadata("tokenizer.ggml.token_type")
    fit = tokens is not None and order is not None and (model == "gpt2" or len(order) == len(tokens))
    if not fit or (types is not None and len(types) != len(tokens)):
        raise CheckpointError(
            f"{checkpoint.name} is broken: tokenizer.ggml.tokens, .merges (or .scores) and .token_type are missing or"
            " of different lengths; download the file again"
        )
    types = [NORMAL] * len(tokens) if types is None else list(types)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: checkpoint.metadata(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special_ids = {name: int(i) for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    special = {name: tokens[i] for name, i in special_ids.items()}
    if model == "llama":
        backend, add_bos = _sentencepiece(checkpoint, tokens, types, order), True
    else:
        backend, add_bos = _byte_level_bpe(pre, tokens, types, order), PRE_TOKENIZERS[pre][3]
    _post_process(backend, checkpoint, special, add_bos)
    return Tokenizer(backend, special_tokens=special, special_ids=special_ids, chat_templates=_templates(checkpoint))


def _sentencepiece(checkpoint: Checkpoint, tokens: list[str], types: list[int], scores: list[float]) -> Any:
    # User-defined pieces are joined before all others. The file writes their spaces as " ", not as "▁".
    pieces = [t.replace(" ", SPACE) if kind == USER_DEFINED else t for t, kind in zip(tokens, types, strict=True)]
    rank = {NORMAL: lambda score: -score, USER_DEFINED: lambda score: -math.inf}
    ranks = [rank[kind](score) if kind in rank else None for kind, score in zip(types, scores, strict=True)]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    named = checkpoint.metadata("tokenizer.ggml.unknown_token_id")
    backend = sentencepiece_backend(
        pieces,
        ranks,
        unknown=tokens[named] if named is not None and named < len(tokens) else unknown,
        prefix_space=bool(checkpoint.metadata("tokenizer.ggml.add_space_prefix", True)),
    )
    # User-defined runs of spaces are not added tokens: normalisation turns spaces into "▁", which rank joins first.
    added = [(t, kind) for t, kind in zip(pieces, types, strict=True) if kind != USER_DEFINED or SPACE not in t]
    _find_tokens(backend, [t for t, _ in added], [kind for _, kind in added])
    return backend


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector, which would scan all the new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _byte_level_bpe(pre: str, tokens: list[str], types: list[int], merges: list[str]) -> Any:
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    split, nfc, whole_words, _ = PRE_TOKENIZERS[pre]
    # Unused tokens pad the vocabulary to a round size; no text contains them.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    try:
        with _without_collector():
            pairs = [tuple(m.split(" ")) for m in merges]
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words)
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the GGUF file's vocabulary and merges do not fit each other: {reason}") from None
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC() if nfc else None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("", "digits"))
    words = {"": [], "digits": [pre_tokenizers.Digits(individual_digits=True)]}
    before = words[split] if split in words else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level]) if before else byte_level
    backend.decoder = decoders.ByteLevel()
    _find_tokens(backend, tokens, types)
    return backend


def _find_tokens(backend: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add control and user-defined tokens, which the backend finds in a text before it splits the rest."""
    from tokenizers import AddedToken

    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])


def _post_process(backend: Any, checkpoint: Checkpoint, special: dict[str, str], add_bos: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = _added(checkpoint, special, "bos", add_bos)
    eos = _added(checkpoint, special, "eos", False)
    if bos or eos:
        used = [(token, backend.token_to_id(token)) for token in bos + eos]
        backend.post_processor = TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=used)


def _added(checkpoint: Checkpoint, special: dict[str, str], name: str, default: bool) -> list[str]:
    flag = checkpoint.metadata(f"tokenizer.ggml.add_{name}_token")
    token = special.get(name + "_token")
    return [token] if token is not None and (default if flag is None else bool(flag)) else []


def _templates(checkpoint: Checkpoint) -> dict[str, str]:
    templates = {"default": checkpoint.metadata("tokenizer.chat_template")}
    for name in checkpoint.metadata("tokenizer.chat_templates") or []:
        templates[name] = checkpoint.metadata(f"tokenizer.chat_template.{name}")
    return {name: template for name, template in templates.items() if template}


def sentencepiece_backend(
    pieces: Sequence[str], ranks: Sequence[float | None], *, unknown: str | None, prefix_space: bool
) -> tokenizers.Tokenizer:
    """Return a SentencePiece BPE tokenizer of these pieces, without added tokens.

    Args:
        pieces: The pieces in the order of their ids, with "▁" for spaces.
        ranks: The rank of each piece; lower ranks are joined first. -inf: before all others, and part of no other
            piece. None: the piece is never a result of joining.
        unknown: The piece for a character without a piece and without byte pieces.
        prefix_space: Encode each text as if a space came before it.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [(left, right) for *_, left, right in sorted(_pairs(pieces, ranks))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_letters, to_spaces = normalizers.Replace(" ", SPACE), decoders.Replace(SPACE, " ")
    before = [normalizers.Prepend(SPACE)] if prefix_space else []
    after = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*before, to_letters])
    backend.decoder = decoders.Sequence([to_spaces, decoders.ByteFallback(), decoders.Fuse(), *after])
    return backend


def _pairs(pieces: Sequence[str], ranks: Sequence[float | None]) -> Iterator[tuple[float, int, int, str, str]]:
    """Yield (rank, ..., left, right) for every pair that joins to a piece.

    Among equal ranks, the longest left part sorts first.
    """
    joined = {piece: rank for piece, rank in zip(pieces, ranks, strict=True) if rank is not None}
    inner = {piece for piece, rank in joined.items() if rank > -math.inf}
    for piece, rank in joined.items():
        parts = inner if rank > -math.inf else joined
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in parts and right in parts:
                yield rank, -cut, cut - len(piece), left, right


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a checkpoint.

    Raise CheckpointError, naming the file, if the tokenizer is missing or broken. For a folder, the tokenizer comes
    from tokenizer.json; added and special tokens, the length limit and the chat templates come from the files beside
    it. Only the post-processor of tokenizer.json decides which special tokens enclose a text. As in transformers 5,
    add_bos_token of tokenizer_config.json has no effect.
    """
    place = str(checkpoint.path or checkpoint.name)
    try:
        if checkpoint.gguf is not None:  # also for random weights modelled on a GGUF file
            return gguf_tokenizer(checkpoint)
        return _folder_tokenizer(checkpoint)
    except CheckpointError:
        raise
    except Exception as error:  # the files may contain values of any type, and the library raises bare Exceptions
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"the tokenizer of {place} is broken: {line}") from error


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
        # Tokenizers without a limit have a number near 1e30 in their files.
        max_length=int(most) if isinstance(most, (int, float)) and 0 < most < 1e12 else None,
        truncation_side=config.get("truncation_side", "right"),
    )


def tokenizer_or_none(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, or None if it has none; the model then accepts only token ids.

    Raise CheckpointError if the tokenizer cannot be read, and UnsupportedModelError if its kind is not supported.
    Models with random weights (format "dummy") get None in these cases.
    """
    in_gguf = checkpoint.gguf is not None
    if checkpoint.metadata("tokenizer.ggml.model") == "no_vocab" if in_gguf else not checkpoint.file("tokenizer.json"):
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
    """Return {"bos_token": "<s>" or {"content": "<s>", ...}, ...} from tokenizer_config.json.

    Missing names come from special_tokens_map.json.
    """
    fallback = read_object(checkpoint, "special_tokens_map.json")
    named = {name: config[name] if name in config else fallback.get(name) for name in NAMED}
    return {name: token for name, token in named.items() if token is not None}


def _add_tokens(backend: Any, config: dict, named: dict[str, Any]) -> None:
    """Add the tokens of the configuration that tokenizer.json lacks to the backend."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    by_id = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
    configured: list[Any] = [by_id[token_id] for token_id in sorted(by_id)]
    configured += [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in configured:
        if _content(token) not in contents:
            contents.add(_content(token))
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
    """Return the ids of special tokens in generation_config.json and config.json, for tokenizers that name none.

    If tokenizer_config.json sets a token to null, the token stays absent.
    """
    generation = read_object(checkpoint, "generation_config.json", keys="")
    ids = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        value = generation.get(name + "_id", checkpoint.config.get(name + "_id"))
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and name not in config:
            ids[name] = value
    return ids


def folder_templates(checkpoint: Checkpoint, config: dict | None = None) -> dict[str, str]:
    """Return {name: chat template} of a checkpoint's folder.

    `config` is tokenizer_config.json, if already read. Template files override its chat_template, which is a text or a
    list of named texts.
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
