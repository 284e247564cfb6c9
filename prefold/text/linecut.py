"""Encodes what neighbouring texts begin with in common only once.

A byte-level BPE tokenizer first splits a text into words by a regular expression, and then encodes every word by
itself. All the expressions known here split between a newline and a letter or digit that follows it, whatever stands
further left or right. So a text may be cut after

    a character that is no white space, one newline | an ASCII letter or digit

and its parts encoded apart: the ids are those of the whole. Few-shot prompts of thousands of tokens that differ in
their last line are then encoded at the cost of that line. A tokenizer that has a part not known here encodes every
text whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .patterns import LINE_SAFE_PATTERNS

if TYPE_CHECKING:
    import tokenizers

# Characters that two texts must share. With fewer, encoding the shared part by itself costs more than it saves.
MIN_SHARED = 192
MAX_DEPTH = 8

EncodeAll = Callable[[list[str]], list[np.ndarray]]


def line_cut(backend: tokenizers.Tokenizer) -> LineCut | None:
    """Returns a LineCut for a tokenizer whose texts may be cut at lines, else None."""
    model = backend.model
    safe = (
        type(model).__name__ == "BPE"
        and not model.dropout
        and settings_of(backend.normalizer) in (None, {"type": "NFC"})
        and _splits_at_lines(settings_of(backend.pre_tokenizer))
        # An added token with a newline in it could lie across a cut; one with lstrip takes the newline before it.
        and not any("\n" in token.content or token.lstrip for token in backend.get_added_tokens_decoder().values())
    )
    return LineCut() if safe else None


def settings_of(part: object) -> dict | None:
    """Returns the settings of a part of a tokenizer, as tokenizer.json has them."""
    return None if part is None else json.loads(part.__getstate__())  # type: ignore[attr-defined]


def _splits_at_lines(pre_tokenizer: dict | None) -> bool:
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


def _keeps_lines(part: dict) -> bool:
    """Returns whether a pre-tokenizer treats the two parts of a cut text as it treats them within the whole text."""
    kind = part["type"]
    if kind == "ByteLevel":
        return not part["add_prefix_space"]
    if kind == "Split":
        return part["behavior"] in ("Isolated", "Removed") and keeps_all(part)
    return kind == "Digits"


def keeps_all(part: dict) -> bool:
    """Returns whether a pre-tokenizer of type Split is known to drop nothing.

    The known expressions match every character, and "Removed" with invert keeps what matches.
    """
    known = part["pattern"].get("Regex") in LINE_SAFE_PATTERNS
    return known and part["invert"] == (part["behavior"] == "Removed")


class LineCut:
    """Encodes batches of texts; a beginning that several texts share is encoded once."""

    def encode_batch(self, texts: list[str], encode_all: EncodeAll, depth: int = 0) -> list[np.ndarray]:
        """Returns the ids of each text, int32, without special tokens.

        encode_all  encodes texts one by one
        depth       how many calls of this method this one lies in
        """
        cuts = shared_cuts(texts) if depth < MAX_DEPTH else [0] * len(texts)
        heads = {text[:cut]: None for text, cut in zip(texts, cuts, strict=True) if cut}
        # It pays only where the shared beginnings are shorter in all than what the texts save by them.
        if not heads or sum(map(len, heads)) > 0.8 * sum(cuts):
            return encode_all(texts)
        head_ids = dict(zip(heads, self.encode_batch(list(heads), encode_all, depth + 1), strict=True))
        tails = encode_all([text[cut:] for text, cut in zip(texts, cuts, strict=True)])
        return [
            np.concatenate((head_ids[text[:cut]], tail)) if cut else tail
            for text, cut, tail in zip(texts, cuts, tails, strict=True)
        ]


def shared_cuts(texts: list[str]) -> list[int]:
    """Returns for each text the place where it may be cut so that a neighbour begins with the same part; 0: nowhere."""
    cuts = [0] * len(texts)
    for i in range(len(texts) - 1):
        shared = common_prefix_length(texts[i], texts[i + 1])
        if shared >= MIN_SHARED:
            cuts[i] = max(cuts[i], last_cut(texts[i], shared))
            cuts[i + 1] = last_cut(texts[i + 1], shared)
    return cuts


def common_prefix_length(a: str, b: str) -> int:
    """Returns how many characters two texts begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def last_cut(text: str, limit: int) -> int:
    """Returns the last place <= limit where `text` may be cut; 0 when there is none."""
    newline = text.rfind("\n", 1, limit)
    while newline > 0:
        after = text[newline + 1 : newline + 2]
        if not text[newline - 1].isspace() and (not after or (after.isascii() and after.isalnum())):
            return newline + 1
        newline = text.rfind("\n", 1, newline)
    return 0
