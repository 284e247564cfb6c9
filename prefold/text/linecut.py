"""Uses properties of tokenizers: encodes the common beginning of neighbouring texts once, and bounds the number of
tokens of a text without encoding it.

A byte-level BPE tokenizer first splits a text into words by a regular expression, and then encodes every word by
itself. All the expressions known here split between a newline and a letter or digit that follows it, whatever stands
further left or right. So a text may be cut after

    a character that is no white space, one newline | an ASCII letter or digit

and its parts encoded apart: the ids are those of the whole. Few-shot prompts of thousands of tokens that differ in
their last line are then encoded at the cost of that line. A tokenizer that has a part not known here encodes every
text whole.

The least number of tokens is known of a tokenizer which joins nothing but what its vocabulary lists, and drops nothing
but single characters that its vocabulary lacks: each other character of a text lies in a token, and no token has more
characters than its entry in the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

# The regular expressions by which byte-level BPE tokenizers split text into words. They are part of the models'
# formats: the merges were learned on these words.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}"
# Mistral's: words are split where a lower-case letter is followed by an upper-case one.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)

# The expressions after which a text may be cut between a newline and an ASCII letter or digit.
LINE_SAFE_PATTERNS = frozenset({GPT2, LLAMA3, QWEN2, TEKKEN})


# Characters that two texts must share. With fewer, encoding the shared part by itself costs more than it saves.
MIN_SHARED = 192
MAX_DEPTH = 8

EncodeAll = Callable[[list[str]], list[np.ndarray]]


def cuts_at_lines(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether the texts of a tokenizer may be cut at lines."""
    model = backend.model
    return (
        type(model).__name__ == "BPE"
        and not model.dropout
        and settings_of(backend.normalizer) in (None, {"type": "NFC"})
        and _splits_at_lines(settings_of(backend.pre_tokenizer))
        # An added token with a newline in it could lie across a cut; one with lstrip takes the newline before it.
        and not any("\n" in token.content or token.lstrip for token in backend.get_added_tokens_decoder().values())
    )


def settings_of(part: Any) -> dict[str, Any] | None:
    """Returns the settings of a part of a tokenizer, in the form of tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _splits_at_lines(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Returns whether a pre-tokenizer always splits between a newline and a letter or digit."""
    if pre_tokenizer is None:
        return False
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        parts = pre_tokenizer["pretokenizers"]
        return all(_keeps_lines(part) for part in parts) and any(_splits_at_lines(part) for part in parts)
    if not _keeps_lines(pre_tokenizer):
        return False
    return kind == "Split" or (kind == "ByteLevel" and pre_tokenizer["use_regex"])


def _keeps_lines(part: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer treats the two parts of a cut text as it treats them within the whole text."""
    kind = part["type"]
    if kind == "ByteLevel":
        return not part["add_prefix_space"]
    if kind == "Split":
        return part["behavior"] in ("Isolated", "Removed") and keeps_all(part)
    return kind == "Digits"


def keeps_all(part: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer of type Split certainly drops nothing.

    The known expressions match every character, and "Removed" with invert keeps what matches.
    """
    is_safe = part["pattern"].get("Regex") in LINE_SAFE_PATTERNS
    return is_safe and part["invert"] == (part["behavior"] == "Removed")


def encode_batch(texts: list[str], encode_all: EncodeAll, depth: int = 0) -> list[np.ndarray]:
    """Returns the ids of each text, int32, without special tokens. A common beginning of several texts is encoded once.

    encode_all  encodes each text by itself
    depth       how many calls of this function this call lies in
    """
    cuts = shared_cuts(texts) if depth < MAX_DEPTH else [0] * len(texts)
    heads = {text[:cut]: None for text, cut in zip(texts, cuts, strict=True) if cut}
    # It pays only where the shared beginnings are shorter in all than what the texts save by them.
    if not heads or sum(map(len, heads)) > 0.8 * sum(cuts):
        return encode_all(texts)
    head_ids = dict(zip(heads, encode_batch(list(heads), encode_all, depth + 1), strict=True))
    tails = encode_all([text[cut:] for text, cut in zip(texts, cuts, strict=True)])
    return [
        np.concatenate((head_ids[text[:cut]], tail)) if cut else tail
        for text, cut, tail in zip(texts, cuts, tails, strict=True)
    ]


def shared_cuts(texts: list[str]) -> list[int]:
    """Returns for each text the place where it may be cut so that a neighbour has the same beginning; 0 if there is
    none."""
    cuts = [0] * len(texts)
    for i in range(len(texts) - 1):
        shared = common_prefix_length(texts[i], texts[i + 1])
        if shared >= MIN_SHARED:
            cuts[i] = max(cuts[i], last_cut(texts[i], shared))
            cuts[i + 1] = last_cut(texts[i + 1], shared)
    return cuts


def common_prefix_length(a: str, b: str) -> int:
    """Returns the length of the common beginning of two texts, in characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def last_cut(text: str, limit: int) -> int:
    """Returns the last place <= limit where `text` may be cut; 0 if there is none."""
    newline = text.rfind("\n", 1, limit)
    while newline > 0:
        after = text[newline + 1 : newline + 2]
        if not text[newline - 1].isspace() and (not after or (after.isascii() and after.isalnum())):
            return newline + 1
        newline = text.rfind("\n", 1, newline)
    return 0


# NFC writes up to four characters as one (an alpha and three marks), and no other step makes a text shorter.
NFC_CHARACTERS = 4


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """A LeastTokens gives a lower bound of the number of tokens of a text.

    longest  characters of a text that a token stands for at most
    dropped  characters that may give no token
    """

    longest: int
    dropped: tuple[str, ...]

    def of(self, text: str) -> int:
        size = len(text) - sum(map(text.count, self.dropped))
        return -(-size // self.longest)


def least_tokens(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> LeastTokens | None:
    """Returns the LeastTokens of a tokenizer with this vocabulary; None if a token may stand for any amount of text."""
    normalizer, pre_tokenizer = settings_of(backend.normalizer), settings_of(backend.pre_tokenizer)
    shrinks, dropped = _shrinks(normalizer), _dropped(backend, pre_tokenizer, vocab)
    if (
        shrinks is None
        or dropped is None
        or (pre_tokenizer is not None and not _keeps_text(pre_tokenizer))
        # An added token that takes the white space beside it may stand for any amount of it.
        or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    ):
        return None
    return LeastTokens(max(map(len, vocab), default=1) * shrinks, dropped)


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Returns how many characters a normalizer joins to one, at most; None if that is unknown."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        parts = [_shrinks(part) for part in normalizer["normalizers"]]
        return None if None in parts else max([1, *(part for part in parts if part is not None)])
    if kind == "Replace":
        return 1 if 0 < len(normalizer["pattern"].get("String", "")) <= len(normalizer["content"]) else None
    return {"NFC": NFC_CHARACTERS, "Prepend": 1}.get(kind)


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer keeps the whole text."""
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_text(part) for part in pre_tokenizer["pretokenizers"])
    if kind == "Split":
        return pre_tokenizer["behavior"] != "Removed" or keeps_all(pre_tokenizer)
    return kind in ("ByteLevel", "Digits", "Metaspace")


def _dropped(backend: Any, pre_tokenizer: dict[str, Any] | None, vocab: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the characters that may give no token; None if any character that the vocabulary lacks may."""
    from tokenizers import models
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(backend.model, models.BPE):
        return None
    if backend.model.byte_fallback:
        return () if all(f"<0x{byte:02X}>" in vocab for byte in range(256)) else None
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    if not any(part.get("type") == "ByteLevel" for part in parts):
        return None
    # A character of several bytes is dropped only where each of its bytes is; all but the first are continuation bytes.
    letters = {ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(i))[0][0]: chr(i) for i in range(128)}
    continuations = {c for i in range(64) for c in ByteLevel(False).pre_tokenize_str(chr(0x80 + i))[0][0][1:]}
    if not all(letter in vocab for letter in continuations):
        return None
    return tuple(character for letter, character in letters.items() if letter not in vocab)
