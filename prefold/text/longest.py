"""Says how many tokens a text has at least, without encoding it.

That is known of a tokenizer which joins nothing but what its vocabulary lists, and drops nothing but single characters
that its vocabulary lacks: each other character of a text lies in a token, and no token has more characters than its
entry in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .linecut import keeps_all, settings_of

if TYPE_CHECKING:
    import tokenizers

# NFC writes up to four characters as one (an alpha and three marks), and no other step makes a text shorter.
NFC_CHARACTERS = 4


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """Counts the tokens that a text has at least.

    longest  characters of a text that a token stands for at most
    dropped  characters that may give no token
    """

    longest: int
    dropped: tuple[str, ...]

    def of(self, text: str) -> int:
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // self.longest)


def least_tokens(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> LeastTokens | None:
    """Returns the LeastTokens of a tokenizer with this vocabulary; None where it is not known what a token may hold."""
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
    """Returns how many characters a normalizer makes one of at most; None where that is not known."""
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
    """Returns whether a pre-tokenizer leaves nothing of a text out."""
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_text(part) for part in pre_tokenizer["pretokenizers"])
    if kind == "Split":
        return pre_tokenizer["behavior"] != "Removed" or keeps_all(pre_tokenizer)
    return kind in ("ByteLevel", "Digits", "Metaspace")


def _dropped(backend: Any, pre_tokenizer: dict[str, Any] | None, vocab: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the characters that may give no token; None where that could be any that the vocabulary lacks."""
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
