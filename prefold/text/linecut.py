"""Uses properties of tokenizers: encodes the common beginning of neighbouring texts once, and bounds the number of
tokens of a text without encoding it.

A byte-level BPE tokenizer first splits a text into words by a regular expression, and then encodes every word by
itself. All the expressions known here split between a newline and a letter or digit that follows it, whatever stands
further left or right. So a text may be cut after

    a character that is no white space, one newline | an ASCII letter or digit

and its parts encoded apart: the ids are those of the whole. Few-shot prompts of thousands of tokens that differ in
their last line are then encoded at the cost of that line. At empty lines the expressions differ. GPT-2's takes the last
newline of white space as a word, so a text may be cut before that newline. The others take white space up to the last
newline as a word, and never join it with the text behind it, so a text may be cut after that newline.

A BPE tokenizer that does not split into words joins two characters only if an entry of its vocabulary has them side by
side. So a text may be cut between a newline and a character that follows a newline in no entry.

A tokenizer that has a part not known here encodes every text whole.

The least number of tokens is known of a tokenizer which joins nothing but what its vocabulary lists, and drops nothing
but single characters that its vocabulary lacks: each other character of a text lies in a token, and no token has more
characters than its entry in the vocabulary.
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

# Expressions whose splits at lines are known.
LINE_SAFE_PATTERNS = frozenset({GPT2, LLAMA3, QWEN2, TEKKEN})


# Characters that two texts must share. With fewer, encoding the shared part by itself costs more than it saves.
MIN_SHARED = 192
MAX_DEPTH = 8

EncodeAll = Callable[[list[str]], list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class LineCuts:
    """The places at which texts may be cut for a tokenizer.

    single   whether there is a cut behind one newline between a character and an ASCII letter or digit
    empty    where the cut is at a line behind any white space: "before" its newline or "behind" it; "" for no cut
    refused  characters which such a line may not begin with
    """

    single: bool
    empty: Literal["", "before", "behind"]
    refused: frozenset[str] = frozenset()

    def at(self, text: str, start: int) -> int:
        """Returns the place where a text may be cut, behind or before the newline of the line that begins at `start`; 0
        if it may not be cut there."""
        if start < 2 or text[start - 1] != "\n":
            return 0
        first = text[start : start + 1]
        if self.single and not text[start - 2].isspace() and (not first or (first.isascii() and first.isalnum())):
            return start
        if not self.empty or first in self.refused or not self._begins_word(first):
            return 0
        return start - 1 if self.empty == "before" else start

    def _begins_word(self, first: str) -> bool:
        # Tekken's expression joins newlines and slashes. A number may be split off before GPT-2's expression is used.
        if first.isascii() and not first.isalnum():
            return first.isprintable() and first not in ("", " ", "/")
        return first.isalpha() or (first.isnumeric() and self.empty == "behind")

    def last(self, text: str, limit: int) -> int:
        """Returns the last place <= limit where a text may be cut; 0 if there is none."""
        newline = text.rfind("\n", 1, limit)
        while newline > 0:
            if cut := self.at(text, newline + 1):
                return cut
            newline = text.rfind("\n", 1, newline)
        return 0


def line_cuts(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> LineCuts | None:
    """Returns the LineCuts of a tokenizer with this vocabulary, which includes added tokens; None for a tokenizer whose
    texts are encoded whole."""
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    # An added token with lstrip takes the newline before it.
    if type(model).__name__ != "BPE" or model.dropout or any(token.lstrip for token in added):
        return None
    pattern = _line_pattern(settings_of(backend.pre_tokenizer))
    if pattern is not None and settings_of(backend.normalizer) in (None, {"type": "NFC"}):
        # An added token with a newline in it could lie across a cut.
        if any("\n" in token.content for token in added):
            return None
        if pattern != GPT2:
            return LineCuts(single=True, empty="behind")
        # The expression sees a text up to an added token, and would join all newlines before that token.
        refused = frozenset(token.content[:1] for token in added)
        return LineCuts(True, "" if any(token.rstrip for token in added) else "before", refused)
    if "\n" in vocab and _is_one_word(backend):
        followers = {b for entry in vocab if "\n" in entry for a, b in pairwise(entry) if a == "\n"}
        return LineCuts(single=False, empty="behind", refused=frozenset(followers))
    return None


def _is_one_word(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether a tokenizer splits texts at spaces at most, and joins characters by its vocabulary alone."""
    model, space = backend.model, {"String": " "}
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    normalizer, pre_tokenizer = settings_of(backend.normalizer), settings_of(backend.pre_tokenizer)
    if normalizer is not None and (normalizer["type"] != "Replace" or normalizer["pattern"] != space):
        return False
    return pre_tokenizer is None or (pre_tokenizer["type"] == "Split" and pre_tokenizer["pattern"] == space)


def settings_of(part: Any) -> dict[str, Any] | None:
    """Returns the settings of a part of a tokenizer, in the form of tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _line_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Returns the expression by which a pre-tokenizer first splits between a newline and a letter or digit, as it
    always does; None if it does not split there, or if its parts are not known."""
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


def encode_batch(texts: list[str], encode_all: EncodeAll, places: LineCuts, depth: int = 0) -> list[np.ndarray]:
    """Returns the ids of each text, int32, without special tokens. A common beginning of several texts is encoded once.

    encode_all  encodes each text by itself
    places      where texts may be cut
    depth       how many calls of this function this call lies in
    """
    cuts = shared_cuts(texts, places) if depth < MAX_DEPTH else [0] * len(texts)
    heads = {text[:cut]: None for text, cut in zip(texts, cuts, strict=True) if cut}
    # It pays only where the shared beginnings are shorter in all than what the texts save by them.
    if not heads or sum(map(len, heads)) > 0.8 * sum(cuts):
        return encode_all(texts)
    head_ids = dict(zip(heads, encode_batch(list(heads), encode_all, places, depth + 1), strict=True))
    tails = encode_all([text[cut:] for text, cut in zip(texts, cuts, strict=True)])
    return [
        np.concatenate((head_ids[text[:cut]], tail)) if cut else tail
        for text, cut, tail in zip(texts, cuts, tails, strict=True)
    ]


def shared_cuts(texts: list[str], places: LineCuts) -> list[int]:
    """Returns for each text the place where it may be cut so that a neighbour has the same beginning; 0 if there is
    none."""
    cuts = [0] * len(texts)
    for i in range(len(texts) - 1):
        shared = common_prefix_length(texts[i], texts[i + 1])
        if shared >= MIN_SHARED:
            cuts[i] = max(cuts[i], places.last(texts[i], shared))
            cuts[i + 1] = places.last(texts[i + 1], shared)
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
