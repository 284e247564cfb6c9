"""Turn tokens into text as they arrive, up to the first stop text.

A stream returns exactly the text of the tokenizer's `decode(ids, skip_special)`, in parts. It returns each part as soon
as no later token can change it. Two kinds of tokenizers are common in language models: tokens of byte-level tokenizers
are bytes, and tokens of SentencePiece tokenizers are texts and single bytes (<0xE6>). In both, a token alone determines
its text, so the work per token does not grow with the text. For other tokenizers, each new token makes the last few
tokens be decoded again. `tokenizers.decoders.DecodeStream` is not used: it raises for invalid UTF-8, which models do
generate.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Number of tokens that `_ByWindow` decodes again; also the most tokens it holds back for an incomplete character.
WINDOW = 8


class Detokenizer:
    """Creates a TextStream per sample. All streams share a table of the tokens' texts."""

    def __init__(self, tokenizer: Tokenizer):
        self._pieces = cache(partial(_pieces, tokenizer))

    def stream(self, stop: Sequence[str] = (), min_tokens: int = 0, *, skip_special: bool = True) -> TextStream:
        """Return the stream of a new sample.

        Args:
            stop: The stop texts.
            min_tokens: Ignore a stop text that is complete within the first `min_tokens` tokens.
            skip_special: Leave the text of special tokens out.
        """
        return TextStream(self._pieces(skip_special)(), stop, min_tokens)


class TextStream:
    """The text of one sample, up to the first stop text."""

    def __init__(self, pieces: Pieces, stop: Sequence[str], min_tokens: int):
        self._pieces = pieces
        self._finder = StopFinder(stop)
        self._min_tokens = min_tokens
        self._starts: list[int] = []  # for each token, the number of characters before its first character
        self._letters = 0
        self._num_given = 0
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The text returned so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> str | None:
        """The stop text that ended the sample; None before that."""
        return self._finder.stop

    @property
    def num_tokens(self) -> int:
        """The number of tokens that produced the text, which ends before a stop text.

        A token that starts before the stop counts, even if the stop starts within the token. Without a stop, all tokens
        count.
        """
        return len(self._starts) if self._finder.start is None else bisect_left(self._starts, self._finder.start)

    @property
    def num_given(self) -> int:
        """The number of tokens with at least one character returned already. A later stop text cannot remove them."""
        return bisect_left(self._starts, self._num_given)

    def add(self, token: int) -> str:
        """Add a token and return the text that is now certain. Must not be called once `stopped` is set."""
        more = self._pieces.add(token)
        self._starts.append(self._letters + self._pieces.start)
        self._letters += len(more)
        search = len(self._starts) > self._min_tokens
        return self._give(self._finder.add(more, self._pieces.likely_text, search=search))

    def finish(self) -> str:
        """End the sample and return the rest of the text; "" if a stop text was found."""
        if self.stopped is not None:
            return ""
        search = len(self._starts) > self._min_tokens
        text = self._finder.add(self._pieces.finish(), search=search)
        return self._give(text if self.stopped is not None else text + self._finder.finish())

    def _give(self, text: str) -> str:
        if text:
            self._parts.append(text)
            self._num_given += len(text)
        return text


class StopFinder:
    """Searches for stop texts in a text that arrives in parts, and passes on text that cannot belong to a stop text.

    The earliest-ending stop text wins; among stops with the same end, the longest. The result does not depend on how
    the text is divided into parts.

    Attributes:
        stop: The stop text that was found, or None.
        start: Number of characters of the whole text before this stop text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.stop: str | None = None
        self.start: int | None = None
        self._tail = ""  # end of the text, held back because it may be the start of a stop
        self._num_passed = 0  # number of characters before `_tail`
        self._free = 0  # ignore stops that end within the first `_free` characters

    def add(self, text: str, likely_text: str = "", *, search: bool = True) -> str:
        """Add text, and return the text that certainly precedes any stop. If a stop is found, return the text up to it.

        Args:
            text: The new text.
            likely_text: Text that likely follows. It is searched too. Its part before a stop is returned with `text`.
            search: If False, ignore a stop that is complete within this text.
        """
        if not self.stops:
            return text
        self._tail += text
        if not search:
            self._free = self._num_passed + len(self._tail) + len(likely_text)
        elif self._find(self._tail + likely_text):
            self._tail += likely_text
            return self._pass(self.start - self._num_passed)
        return self._pass(len(self._tail) - self._beginning(self._tail))

    def finish(self) -> str:
        """End the text and return the text that was held back."""
        return self._pass(len(self._tail))

    def _pass(self, count: int) -> str:
        text, self._tail = self._tail[:count], self._tail[count:]
        self._num_passed += count
        return text

    def _find(self, text: str) -> bool:
        best: tuple[int, int] | None = None
        for stop in self.stops:
            # Search from the first start at which the stop ends after the first `_free` characters.
            start = text.find(stop, max(0, self._free - self._num_passed - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best, self.stop = (start + len(stop), start), stop
        if best is None:
            return False
        self.start = self._num_passed + best[1]
        return True

    def _beginning(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the start of a stop."""
        best = 0
        for stop in self.stops:
            start = max(0, len(text) - len(stop) + 1)
            while (start := text.find(stop[0], start)) >= 0 and len(text) - start > best:
                if stop.startswith(text[start:]):
                    best = len(text) - start
                start += 1
        return best


class Pieces(Protocol):
    """Decoder of the tokens of one sample, one token after the other."""

    likely_text: str  # complete characters that a later token may still change
    start: int  # place of the last token's first character, counted from the end of the text that was certain before it

    def add(self, token: int) -> str:
        """Add a token and return the text that is now certain."""

    def finish(self) -> str:
        """Return the rest of the text. No token follows."""


def bytes_of_tokens(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes within a text. The bytes of a special token are its text in UTF-8."""
    kind, steps = _decoding(tokenizer)
    name_of = tokenizer.backend.id_to_token
    if kind == "bytes":
        return lambda token: _bytes(name_of(token))
    if kind == "texts":
        replaced = _replacements(steps)

        def bytes_of(token: int) -> bytes:
            piece = _replaced(name_of(token), replaced)
            return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

        return bytes_of
    return lambda token: tokenizer.decode([token]).encode()


def _pieces(tokenizer: Tokenizer, skip_special: bool) -> Callable[[], Pieces]:
    backend = tokenizer.backend
    kind, steps = _decoding(tokenizer)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special and skip_special}
    names = _Table(lambda token: None if token in special else backend.id_to_token(token))
    if kind == "bytes":
        table = _Table(lambda token: _bytes(names[token]))
        return lambda: _ByteLevel(table)
    if kind == "texts":
        replaced = _replacements(steps)
        strips = [(step["content"], step["start"]) for step in steps if step["type"] == "Strip"]
        texts = _Table(lambda token: _replaced(names[token], replaced))
        return lambda: _ByteFallback(texts, strips)
    return lambda: _ByWindow(tokenizer, names)


def _decoding(tokenizer: Tokenizer) -> tuple[Literal["bytes", "texts", "other"], list[dict[str, Any]]]:
    """Return the kind of a tokenizer's tokens, and the steps of its decoder."""
    state = tokenizer.backend.decoder
    decoder = {"type": None} if state is None else json.loads(state.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = " ".join(_kind(step) for step in steps)
    if kinds == "ByteLevel":
        return "bytes", steps
    return "texts" if re.fullmatch("(Replace )*ByteFallback Fuse( Strip)*", kinds) else "other", steps


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]


def _kind(step: dict) -> str:
    """Return the type of a decoder, or "unknown" if this module cannot handle its settings."""
    kind = step["type"]
    is_handled = (kind != "Replace" or "String" in step["pattern"]) and (kind != "Strip" or not step["stop"])
    return str(kind) if is_handled else "unknown"


class _Table(dict):
    """Cache of `make(token)` per token; `make` is called at the first lookup."""

    def __init__(self, make: Callable[[int], Any]):
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> Any:
        value = self[token] = self._make(token)
        return value


def _byte_letters() -> dict[str, int]:
    """Return {character: byte} for the names of byte-level tokens.

    A printable byte has the character with the same code. The other bytes have characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _bytes(name: str | None) -> bytes:
    if name is None:
        return b""
    codes = [_BYTES.get(letter) for letter in name]
    # An added token with other characters in its name is its own text.
    return name.encode() if None in codes else bytes(codes)


class _ByteLevel:
    """Decodes tokens that are bytes, as UTF-8. Invalid bytes become U+FFFD."""

    likely_text = ""

    def __init__(self, table: _Table):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.start = 0

    def add(self, token: int) -> str:
        data = self._table[token]
        # A token that does not continue an incomplete character first yields one U+FFFD for it. This token's text then
        # starts at 1.
        breaks_off = bool(data) and not 0x80 <= data[0] < 0xC0
        self.start = 1 if breaks_off and self._decoder.getstate()[0] else 0
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _replaced(name: str | None, pairs: list[tuple[str, str]]) -> str | int | None:
    """Return a token's text, its byte as an int, or None for a token without text."""
    if name is None:
        return None
    for old, new in pairs:
        name = name.replace(old, new)
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            pass
    return name


class _ByteFallback:
    """Decodes tokens that are texts or single bytes.

    A run of bytes is decoded as UTF-8; if it is invalid, each of its bytes becomes U+FFFD. So the text of a run is
    certain only when the run has ended.
    """

    def __init__(self, table: _Table, strips: Sequence[tuple[str, int]]):
        """Start a text. `strips`: (character, maximum number of these to remove at the start of the text)."""
        self._table = table
        self._strips = list(strips)
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._size = 0  # number of bytes of the current run
        self._run: str | None = ""  # complete characters of the current run; None if the run is not valid UTF-8
        self.likely_text = ""
        self.start = 0

    def add(self, token: int) -> str:
        piece = self._table[token]
        self.start = self._size if self._run is None else len(self.likely_text)
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._add_byte(piece)
            return ""
        before = self.finish()
        self.start = len(before)
        return before + self._strip(piece)

    def _add_byte(self, byte: int) -> None:
        self._size += 1
        if self._run is not None:
            try:
                self._run += self._decoder.decode(bytes([byte]))
            except UnicodeDecodeError:
                self._run = None
        self.likely_text = _stripped(self._run or "", self._strips)[0]

    def finish(self) -> str:
        if not self._size:
            return ""
        is_utf8 = self._run is not None and not self._decoder.getstate()[0]
        text = self._strip(self._run if is_utf8 else "\ufffd" * self._size)
        self._size, self._run, self.likely_text = 0, "", ""
        self._decoder.reset()
        return text

    def _strip(self, text: str) -> str:
        if text and self._strips:
            text, self._strips = _stripped(text, self._strips)
        return text


def _stripped(text: str, strips: list[tuple[str, int]]) -> tuple[str, list[tuple[str, int]]]:
    """Remove the characters of `strips` from the start of a text.

    Return the remaining text, and the strips that still apply to the text after it.
    """
    remain = []
    for letter, count in strips:
        size = len(text)
        text = text[:count].lstrip(letter) + text[count:]
        if not text and size < count:
            remain.append((letter, count - size))
    return text, remain


class _ByWindow:
    """Decodes the last tokens with and without the newest token. The difference is the newest token's text.

    Works with any decoder if a token's text depends only on the last few tokens before it.
    """

    likely_text = ""
    start = 0

    def __init__(self, tokenizer: Tokenizer, names: _Table):
        self._decode = tokenizer.decode
        self._names = names
        self._ids: list[int] = []
        self._num_settled = 0  # number of leading ids with text that was returned already

    def add(self, token: int) -> str:
        if self._names[token] is None:  # a special token without text
            return ""
        self._ids.append(token)
        text = self.finish()
        if text.endswith("\ufffd") and len(self._ids) - self._num_settled < WINDOW:
            return ""
        self._ids = self._ids[-WINDOW:]
        self._num_settled = len(self._ids)
        return text

    def finish(self) -> str:
        before = self._decode(self._ids[: self._num_settled])
        return self._decode(self._ids)[len(before) :]
