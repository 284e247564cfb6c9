"""Encode a common prefix of neighbouring texts once, and bound a text's token count without encoding it.

A byte-level BPE tokenizer first splits a text into words by a regular expression, and then encodes each word
separately. All expressions known here split between a newline and a letter or digit after it, in every context. So a
text may be cut at the bar in

    a character that is not white space, one newline | an ASCII letter or digit

and its parts encoded separately: together they have the ids of the whole. Few-shot prompts of thousands of tokens that
differ only in their last line then cost one line of encoding each. The expressions differ at empty lines. GPT-2's
expression makes the last newline of white space a separate word, so a text may be cut before that newline. The other
expressions make white space up to the last newline a word that never includes the text after it. So a text may be cut
after that newline.

A BPE tokenizer that does not split into words joins two characters only if they are neighbours in some vocabulary
entry. So a text may be cut between a newline and a character that follows a newline in no entry.

A tokenizer with a part that is not known here encodes every text whole.

The minimum number of tokens is known for a tokenizer that joins only characters listed together in its vocabulary, and
drops only single characters missing from its vocabulary. Each other character then belongs to a token, and no token has
more characters than its vocabulary entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import tokenizers

# The regular expressions by which byte-level BPE tokenizers split text into words. They are part of the models'
# formats, because the merges were learned on these words.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}"
# Mistral's expression splits words between a lower-case and an upper-case letter.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)

# Expressions for which the splits at lines are known.
LINE_SAFE_PATTERNS = frozenset({GPT2, LLAMA3, QWEN2, TEKKEN})


# Characters that two texts must share. For fewer, encoding the shared part separately costs more than it saves.
MIN_SHARED = 192
MAX_DEPTH = 8

EncodeAll = Callable[[list[str]], list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class LineCuts:
    """The places at which texts may be cut for a tokenizer."""

    single: bool  # a text may be cut behind one newline between a non-space character and an ASCII letter or digit
    empty: Literal["", "before", "behind"]  # cut before or behind the last newline of any white space; "": no such cut
    refused: frozenset[str] = frozenset()  # first characters of a line that forbid the cut of `empty`

    def at(self, text: str, start: int) -> int:
        """Return the allowed cut directly before or after the newline above `start`; 0 if no cut is allowed."""
        if start < 2 or text[start - 1] != "\n":
            return 0
        first = text[start : start + 1]
        if self.single and not text[start - 2].isspace() and (not first or (first.isascii() and first.isalnum())):
            return start
        if not self.empty or first in self.refused or not self._begins_word(first):
            return 0
        return start - 1 if self.empty == "before" else start

    def _begins_word(self, first: str) -> bool:
        # Tekken's expression joins newlines and slashes. A number may be split off before GPT-2's expression runs.
        if first.isascii() and not first.isalnum():
            return first.isprintable() and first not in ("", " ", "/")
        return first.isalpha() or (first.isnumeric() and self.empty == "behind")

    def last(self, text: str, limit: int) -> int:
        """Return the last place <= limit at which a text may be cut; 0 if there is none."""
        newline = text.rfind("\n", 1, limit)
        while newline > 0:
            if cut := self.at(text, newline + 1):
                return cut
            newline = text.rfind("\n", 1, newline)
        return 0


def line_cuts(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> LineCuts | None:
    """Return the LineCuts of a tokenizer, or None if its texts must be encoded whole.

    `vocab` includes the added tokens.
    """
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    # An added token with lstrip consumes the newline before it.
    if type(model).__name__ != "BPE" or model.dropout or any(token.lstrip for token in added):
        return None
    pattern = _line_pattern(settings_of(backend.pre_tokenizer))
    if pattern is not None and settings_of(backend.normalizer) in (None, {"type": "NFC"}):
        # An added token with a newline inside could span a cut.
        if any("\n" in token.content for token in added):
            return None
        if pattern != GPT2:
            return LineCuts(single=True, empty="behind")
        # The expression sees a text only up to an added token, and would join all newlines before that token.
        refused = frozenset(token.content[:1] for token in added)
        return LineCuts(True, "" if any(token.rstrip for token in added) else "before", refused)
    if "\n" in vocab and _is_one_word(backend):
        followers = {b for entry in vocab if "\n" in entry for a, b in pairwise(entry) if a == "\n"}
        return LineCuts(single=False, empty="behind", refused=frozenset(followers))
    return None


def _is_one_word(backend: tokenizers.Tokenizer) -> bool:
    """Return True if a tokenizer splits only at spaces, if at all, and joins characters only by its vocabulary."""
    model, space = backend.model, {"String": " "}
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    normalizer, pre_tokenizer = settings_of(backend.normalizer), settings_of(backend.pre_tokenizer)
    if normalizer is not None and (normalizer["type"] != "Replace" or normalizer["pattern"] != space):
        return False
    return pre_tokenizer is None or (pre_tokenizer["type"] == "Split" and pre_tokenizer["pattern"] == space)


def settings_of(part: Any) -> dict[str, Any] | None:
    """Return the settings of a part of a tokenizer, in the form of tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _line_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the expression by which a pre-tokenizer first splits text, if that is known to split at lines.

    Return None if the pre-tokenizer does not split between a newline and a letter or digit, or has unknown parts.
    """
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        parts = pre_tokenizer["pretokenizers"]
        patterns = [_line_pattern(part) for part in parts if _keeps_lines(part)]
        return next(filter(None, patterns), None) if len(patterns) == len(parts) else None
    if not _keeps_lines(pre_tokenizer):
        return None
    if pre_tokenizer["type"] == "ByteLevel":
        return GPT2 if pre_tokenizer["use_regex"] else None
    return str(pre_tokenizer["pattern"]["Regex"]) if pre_tokenizer["type"] == "Split" else None


def _keeps_lines(part: dict[str, Any]) -> bool:
    """Return True if a pre-tokenizer treats the two parts of a cut text exactly like the whole text."""
    kind = part["type"]
    if kind == "ByteLevel":
        return not part["add_prefix_space"]
    if kind == "Split":
        return part["behavior"] in ("Isolated", "Removed") and keeps_all(part)
    return kind == "Digits"


def keeps_all(part: dict[str, Any]) -> bool:
    """Return True if a pre-tokenizer of type Split surely drops nothing.

    The known expressions match every character, and "Removed" with invert keeps the matches.
    """
    is_safe = part["pattern"].get("Regex") in LINE_SAFE_PATTERNS
    return is_safe and part["invert"] == (part["behavior"] == "Removed")


def encode_batch(texts: list[str], encode_all: EncodeAll, places: LineCuts, depth: int = 0) -> list[np.ndarray]:
    """Return the ids of each text, int32, without special tokens. A common prefix of several texts is encoded once.

    Args:
        encode_all: Encodes each text on its own.
        places: The places at which texts may be cut.
        depth: Recursion depth of this call.
    """
    cuts = shared_cuts(texts, places) if depth < MAX_DEPTH else [0] * len(texts)
    heads = {text[:cut]: None for text, cut in zip(texts, cuts, strict=True) if cut}
    # This pays off only if the shared prefixes are shorter in total than the text that they save.
    if not heads or sum(map(len, heads)) > 0.8 * sum(cuts):
        return encode_all(texts)
    head_ids = dict(zip(heads, encode_batch(list(heads), encode_all, places, depth + 1), strict=True))
    tails = encode_all([text[cut:] for text, cut in zip(texts, cuts, strict=True)])
    return [
        np.concatenate((head_ids[text[:cut]], tail)) if cut else tail
        for text, cut, tail in zip(texts, cuts, tails, strict=True)
    ]


def shared_cuts(texts: list[str], places: LineCuts) -> list[int]:
    """Return for each text the cut at which a neighbour has the same prefix; 0 if there is none."""
    cuts = [0] * len(texts)
    for i in range(len(texts) - 1):
        shared = common_prefix_length(texts[i], texts[i + 1])
        if shared >= MIN_SHARED:
            cuts[i] = max(cuts[i], places.last(texts[i], shared))
            cuts[i + 1] = places.last(texts[i + 1], shared)
    return cuts


def common_prefix_length(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts, in characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# NFC composes up to four characters into one (an alpha and three marks). No other step shortens a text.
NFC_CHARACTERS = 4


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """A lower bound on the number of tokens of a text."""

    longest: int  # the most characters of a text that one token can stand for
    dropped: tuple[str, ...]  # characters that may produce no token

    def of(self, text: str) -> int:
        size = len(text) - sum(map(text.count, self.dropped))
        return -(-size // self.longest)


def least_tokens(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> LeastTokens | None:
    """Return the LeastTokens of a tokenizer with this vocabulary; None if a token can stand for text of any length."""
    normalizer, pre_tokenizer = settings_of(backend.normalizer), settings_of(backend.pre_tokenizer)
    shrinks, dropped = _shrinks(normalizer), _dropped(backend, pre_tokenizer, vocab)
    if (
        shrinks is None
        or dropped is None
        or (pre_tokenizer is not None and not _keeps_text(pre_tokenizer))
        # An added token that consumes the white space beside it can stand for white space of any length.
        or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    ):
        return None
    return LeastTokens(max(map(len, vocab), default=1) * shrinks, dropped)


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Return the most characters that a normalizer joins into one; None if unknown."""
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
    """Return True if a pre-tokenizer drops no text."""
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_text(part) for part in pre_tokenizer["pretokenizers"])
    if kind == "Split":
        return pre_tokenizer["behavior"] != "Removed" or keeps_all(pre_tokenizer)
    return kind in ("ByteLevel", "Digits", "Metaspace")


def _dropped(backend: Any, pre_tokenizer: dict[str, Any] | None, vocab: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the characters that may produce no token; None if every character missing from the vocabulary may."""
    from tokenizers import models
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(backend.model, models.BPE):
        return None
    if backend.model.byte_fallback:
        return () if all(f"<0x{byte:02X}>" in vocab for byte in range(256)) else None
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    if not any(part.get("type") == "ByteLevel" for part in parts):
        return None
    # A character of several bytes is dropped only if all its bytes are. All but the first are continuation bytes.
    letters = {ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(i))[0][0]: chr(i) for i in range(128)}
    continuations = {c for i in range(64) for c in ByteLevel(False).pre_tokenize_str(chr(0x80 + i))[0][0][1:]}
    if not all(letter in vocab for letter in continuations):
        return None
    return tuple(character for letter, character in letters.items() if letter not in vocab)
