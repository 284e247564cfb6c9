"""Text to token ids and back, with the checkpoint's own files.

This wraps the `tokenizers` library; `load.py` creates a tokenizer from a checkpoint. A tokenizer never truncates and
never pads: tasks refuse or cut texts that are too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from .chat import ChatTemplates
from .linecut import encode_batch, least_tokens, line_cuts
from .valid import plain_json, valid_text

if TYPE_CHECKING:
    import tokenizers


# Special tokens in a user's text stay plain text, while those written by a chat template stay special.
#
# In a user's text, a shield character is inserted behind the first character of every special token, and also of a
# partial special token at the end of a text, because the template may write more text directly after it (`shielded`).
# The template then renders the conversation, which then has only the template's own special tokens. `encode` renames
# these tokens, removes the shields, and encodes the text with a copy of the tokenizer that has only the new names.

# Two code points that Unicode reserves for internal use by programs; they are no characters.
SHIELD, MARK = "\ufdd0", "\ufdd1"
# A template that writes an object as Python or JSON may write SHIELD in this form.
SHIELD_WRITTEN = r"\ufdd0"


class EscapingEncoder:
    """Encodes conversations so that special tokens written by users stay plain text."""

    def __init__(self, backend: tokenizers.Tokenizer, only: Collection[str] | None = None):
        """Escape the special tokens of a tokenizer; `only` limits this to some of them, None means all."""
        added = backend.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        self._ids = {content: id for content, id in special.items() if only is None or content in only}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # All proper prefixes of special tokens.
        self._begins = {content[:end] for content in self._ids for end in range(1, len(content))}
        self._longest = max(map(len, self._begins), default=0)
        self._copy = _renamed(backend, self._ids)

    def finds(self, text: str) -> bool:
        """Return True if a text contains a special token to escape."""
        return self._special.search(text) is not None

    def shielded(self, value: Any, field: str) -> Any:
        """Return a JSON value with a SHIELD in each special token and in each end of a text that may start one.

        Raise InputError for texts that contain SHIELD, for values nested too deep, and for other types.
        """
        return plain_json(value, field, self._shielded)

    def _shielded(self, text: str, field: str) -> str:
        for letters in (SHIELD, MARK, SHIELD_WRITTEN):
            if letters in text:
                message = f"{field[:80]!r} holds {letters!a}, which stands for no character"
                raise InputError(message, field=field[:80], remedy="leave it out", code="wrong_type")
        return self._ended(self._special.sub(lambda match: match[0][0] + SHIELD + match[0][1:], text))

    def _ended(self, text: str) -> str:
        """Return a text with a SHIELD in each of its ends that starts a special token.

        A single word stays unchanged: it may be a key, a role or a type, which templates compare.
        """
        if text.isidentifier():
            return text
        ends = {len(text), len(text.rstrip())}  # templates may strip the text
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
        """Return the token ids of a rendered text of shielded values, int32 [n], without added special tokens."""
        marked = self._special.sub(lambda match: _name(self._ids[match[0]]), text)
        bare = marked.replace(SHIELD, "").replace(SHIELD_WRITTEN, "")
        return np.asarray(self._copy.encode(bare, add_special_tokens=False).ids, dtype=np.int32)


def _name(id: int) -> str:
    return f"{MARK}{id}{MARK}"


def _renamed(backend: tokenizers.Tokenizer, ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer with new names for special tokens.

    The names change in its vocabulary too, so that no text is read as one of them.
    """
    import tokenizers

    names = {content: _name(id) for content, id in ids.items()}
    settings = json.loads(backend.to_str())
    settings["post_processor"] = None  # the post-processor adds special tokens by name
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


PART_CHARACTERS = 4096


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        prefix_ids: The ids that `special=True` puts before every text, int32 (Llama 3: BOS).
        suffix_ids: The ids that `special=True` puts after every text, int32 (Qwen3-Embedding: <|endoftext|>).
        special_tokens: {"bos_token": "<s>", ...}, as chat templates see them.
        bos_id: Id of the BOS token; None if the checkpoint names none. The same for `eos_id` and `pad_id`.
        vocab_size: One more than the largest id.
        max_length: Limit on the tokens of a text in the tokenizer's files; None: no limit.
        truncation_side: "right" or "left": the end at which a text is cut, if the caller asks for a cut.
        chat_templates: The checkpoint's chat templates.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        special_ids: Mapping[str, int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        max_length: int | None = None,
        truncation_side: str = "right",
    ):
        """Wrap `backend`. `special_ids` ({"bos_token": 1, ...}) has ids of tokens missing from `special_tokens`."""
        # The files may set the padding and truncation used in training. Both must be off here.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        ids = {name: backend.token_to_id(token) for name, token in self.special_tokens.items()}
        ids |= {name: token_id for name, token_id in (special_ids or {}).items() if ids.get(name) is None}
        self.bos_id: int | None = ids.get("bos_token")
        self.eos_id: int | None = ids.get("eos_token")
        self.pad_id: int | None = ids.get("pad_token")
        self.max_length = max_length
        self.truncation_side = truncation_side
        self._escapings: dict[frozenset[str], EscapingEncoder] = {}
        self.chat_templates = ChatTemplates(chat_templates or {}, self.special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self._least_tokens = least_tokens(backend, vocab)
        self.prefix_ids, self.suffix_ids = _added_ids(backend)
        self._line_cuts = line_cuts(backend, vocab)

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """Return the token ids of a text, int32 [n].

        Args:
            text: The text.
            special: Add `prefix_ids` and `suffix_ids`. Special tokens inside the text are recognised in any case.

        Raises:
            InputError: The text is not valid Unicode.
        """
        return self._finish(self.backend.encode(valid_text(text), add_special_tokens=False).ids, special)

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[np.ndarray]:
        """Return the token ids of each text like `encode`, computed on all cores.

        A common prefix of neighbouring texts is encoded once.

        Raises:
            InputError: A text is not valid Unicode; its field is "texts[i]".
        """
        for i, text in enumerate(texts):
            valid_text(text, f"texts[{i}]")
        places = self._line_cuts
        ids = encode_batch(list(texts), self._encode_all, places) if places else self._encode_all(list(texts))
        return [self._finish(row, special) for row in ids]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of token ids. Ids outside the vocabulary are skipped."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def decode_batch(self, lists: Sequence[Sequence[int]], skip_special: bool = False) -> list[str]:
        """Return the text of each list of token ids. The interpreter lock is released meanwhile."""
        texts: list[str] = self.backend.decode_batch(lists, skip_special_tokens=skip_special)
        return texts

    def cut_at(self, text: str, start: int) -> int:
        """Return the allowed cut directly before or after the newline above `start`; 0 if no cut is allowed.

        The ids of the two parts, joined, are the ids of the text.
        """
        return self._line_cuts.at(text, start) if self._line_cuts else 0

    def is_longer(self, text: str, tokens: int) -> bool:
        """Return True if a text certainly has more than `tokens` tokens, without encoding it."""
        least = self._least_tokens
        return least is not None and len(text) > tokens * least.longest and least.of(text) > tokens

    def part(self, text: str, tokens: int, *, left: bool = False) -> str:
        """Return the start of a text (left: its end) with more than its first (last) `tokens` tokens.

        Return the whole text unless `is_longer` is True for it.
        """
        if self.is_longer(text, tokens):
            assert self._least_tokens is not None
            # With enough text after it, a token is encoded as in the whole text.
            size = (tokens + 1) * self._least_tokens.longest + PART_CHARACTERS
            part = text[-size:] if left else text[:size]
            if self.is_longer(part, tokens):
                return part
        return text

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of each token in a text, in characters, without special tokens."""
        spans: list[tuple[int, int]] = self.backend.encode(text, add_special_tokens=False).offsets
        return spans

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return (the token ids of a text, their `spans`), without special tokens. Releases the interpreter lock."""
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)  # `encode` would hold the lock
        return encoding.ids, encoding.offsets

    def pair_ids(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the special tokens that the checkpoint puts before, between and after two texts, int32 [n] each."""
        probe = self.backend.encode("a", "a", add_special_tokens=True)
        body = self.backend.encode("a", add_special_tokens=False).ids
        special = np.array(probe.special_tokens_mask, dtype=bool)
        ids = np.array(probe.ids, dtype=np.int32)
        first = int(np.argmin(special))
        second = first + len(body) + int(np.argmin(special[first + len(body) :]))
        return ids[:first], ids[first + len(body) : second], ids[second + len(body) :]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name in the vocabulary ("<|im_end|>", "Ġthe"), or None."""
        return self.backend.token_to_id(token)

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Return the exact name of each token in the vocabulary ("Ġthe"); "" for an unknown id."""
        return [self.backend.id_to_token(id) or "" for id in ids]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens of the vocabulary, with their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def render_chat(self, messages: Sequence[Mapping[str, object]], /, **options: object) -> str:
        """Return the text of a conversation from `ChatTemplates.render`.

        Encode it with special=False, because it contains its special tokens.
        """
        return self.chat_templates.render(messages, **options)  # type: ignore[arg-type]

    @cached_property
    def escaping(self) -> EscapingEncoder:
        """The EscapingEncoder of all special tokens, created at the first use."""
        return EscapingEncoder(self.backend)

    def escaping_only(self, tokens: Collection[str]) -> EscapingEncoder:
        """Return the EscapingEncoder of these special tokens, cached because it copies the tokenizer."""
        key = frozenset(tokens)
        if key not in self._escapings:
            self._escapings[key] = EscapingEncoder(self.backend, key)
        return self._escapings[key]

    def _encode_all(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _finish(self, ids: Sequence[int] | np.ndarray, special: bool) -> np.ndarray:
        ids = np.asarray(ids, dtype=np.int32)
        if special and (self.prefix_ids.size or self.suffix_ids.size):
            return np.concatenate((self.prefix_ids, ids, self.suffix_ids))
        return ids


def _added_ids(backend: tokenizers.Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the special tokens that the post-processor puts before and after every text, int32 [n] each."""
    probe = backend.encode("a", add_special_tokens=True)
    body = len(backend.encode("a", add_special_tokens=False).ids)
    before = 0
    while before < len(probe.ids) - body and probe.special_tokens_mask[before]:
        before += 1
    ids = np.array(probe.ids, dtype=np.int32)
    return ids[:before].copy(), ids[before + body :].copy()
