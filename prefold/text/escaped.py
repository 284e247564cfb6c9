"""Keeps special tokens that stand in what a user wrote as text, while those that a chat template writes stay special.

In a user's texts a character is put behind the first letter of whatever would be read as a special token, and of what
one begins with at a text's end, since the template may write another text right behind it (`shielded`).
The template writes the conversation, in which the only special tokens are then its own. `encode` gives these other
names, takes the characters away, and encodes the text with a copy of the tokenizer that knows the special tokens by
these names only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from .valid import plain_json

if TYPE_CHECKING:
    import tokenizers

# Two of the code points that Unicode keeps for use inside of programs, and that are no characters.
SHIELD, MARK = "\ufdd0", "\ufdd1"
# A template that writes an object as Python or JSON would may write its SHIELDs in these letters.
SHIELD_WRITTEN = r"\ufdd0"


class Escaping:
    """Encodes conversations whose texts hold no special tokens, whatever is written in them."""

    def __init__(self, backend: tokenizers.Tokenizer, only: Collection[str] | None = None):
        """Escapes the special tokens of a tokenizer. only: no others than these; None: all."""
        added = backend.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        self._ids = {content: id for content, id in special.items() if only is None or content in only}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Whatever a special token begins with, from one letter to all but the last.
        self._begins = {content[:end] for content in self._ids for end in range(1, len(content))}
        self._longest = max(map(len, self._begins), default=0)
        self._copy = _renamed(backend, self._ids)

    def finds(self, text: str) -> bool:
        """Returns whether a text has a special token to escape."""
        return self._special.search(text) is not None

    def shielded(self, value: Any, field: str) -> Any:
        """Returns a JSON value with a SHIELD in each special token of its texts, and in what may become one with the
        text behind it. Raises InputError for a text that holds what escaping needs for itself, for values nested too
        deep, and for what is no JSON."""
        return plain_json(value, field, self._shielded)

    def _shielded(self, text: str, field: str) -> str:
        for letters in (SHIELD, MARK, SHIELD_WRITTEN):
            if letters in text:
                message = f"{field[:80]!r} holds {letters!a}, which stands for no character"
                raise InputError(message, field=field[:80], remedy="leave it out", code="wrong_type")
        return self._ended(self._special.sub(lambda match: match[0][0] + SHIELD + match[0][1:], text))

    def _ended(self, text: str) -> str:
        """Returns a text with a SHIELD in each end of it with which a special token begins. A single word is left as it
        is: it may be a key, a role or a type, which templates compare."""
        if text.isidentifier():
            return text
        ends = {len(text), len(text.rstrip())}  # templates may strip it
        starts = {
            start
            for end in ends
            for start in range(max(0, end - self._longest), end)
            if text[start:end] in self._begins
        }
        for start in sorted(starts, reverse=True):
            text = text[: start + 1] + SHIELD + text[start + 1 :]
        return text

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text that a template wrote of shielded values, int32 [n]; nothing is added."""
        marked = self._special.sub(lambda match: _name(self._ids[match[0]]), text)
        bare = marked.replace(SHIELD, "").replace(SHIELD_WRITTEN, "")
        return np.asarray(self._copy.encode(bare, add_special_tokens=False).ids, dtype=np.int32)


def _name(id: int) -> str:
    return f"{MARK}{id}{MARK}"


def _renamed(backend: tokenizers.Tokenizer, ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """Returns a copy of a tokenizer in which special tokens have other names, also in its vocabulary, so that no text
    is read as one of them."""
    import tokenizers

    names = {content: _name(id) for content, id in ids.items()}
    settings = json.loads(backend.to_str())
    settings["post_processor"] = None  # it adds special tokens, by their names
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = settings["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(content, content): id for content, id in model["vocab"].items()}
    else:  # Unigram: [[content, score], ...]
        model["vocab"] = [[names.get(content, content), score] for content, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    copy = tokenizers.Tokenizer.from_str(json.dumps(settings))
    assert all(copy.token_to_id(names[content]) == id for content, id in ids.items())
    return copy
