"""Scoring: the log-probability of a continuation, or of a whole text, as in EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import InputError
from ..spec.fields import checked
from ..spec.requests import Readout, Request, Result
from ..spec.task import ScoreOptions
from ..text import FilledTemplate, Tokenizer
from ..text.media import ImageIds, Picture, check_cut, notes_in, notes_of
from ..text.tokenizer import PART_CHARACTERS
from .base import Inputs, Task, Text, TextBatch, Work, encode_alone
from .results import Answer, Score, TextScore

CONTINUATION_TOO_LONG = "shorten it, since truncation cuts the prompt only"
PairOfIds = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ScoreItem:
    """A continuation with its prompt, or a whole text."""

    prompt: Any = None  # a text or token ids
    continuation: Any = None  # a text or token ids, scored after the prompt
    text: Any = None  # instead of both: a text or token ids, scored as a whole (rolling)
    adapter: str | None = None  # LoRA adapter; None: the task's


class ScoreTask(Task):
    """Log-probabilities of continuations and of whole texts.

    Items are ScoreItem, a mapping with its fields, a pair (prompt, continuation), or a bare text (rolling). The answer
    is a Score, or a TextScore for a rolling text.

    Prompt and continuation are encoded together and split after the length of the prompt's own encoding. White space at
    the end of the prompt moves to the continuation. The tokenizer's leading special tokens (BOS) are put before the
    prompt, unless the text starts with the BOS. The prefix token (BOS, or EOS if there is no BOS) replaces an empty
    prompt. Token ids stay as they are.

    A rolling text is scored in stretches of max_length rows, every token exactly once. The first stretch starts with
    the prefix token. A later stretch starts with the token before its first target. The last stretch starts as early as
    the model allows.
    """

    name = "score"
    example: Answer = Score(0.0, np.zeros(1, np.float32), True)
    item_type = ScoreItem

    def __init__(self, inputs: Inputs, options: ScoreOptions):
        """Choose the prefix token. Raise InputError if the option `prefix_token` is not a token id."""
        self.inputs = inputs
        self.truncate = options.truncate
        prefix_token = options.prefix_token
        self.prefix_token = None if prefix_token is None else checked(int, prefix_token, "prefix_token", least=0)
        if prefix_token is None and inputs.tokenizer is not None:
            self.prefix_token = inputs.tokenizer.eos_id if inputs.tokenizer.bos_id is None else inputs.tokenizer.bos_id
        self.readout = Readout("logprobs")

    def _as_item(self, item: Any) -> Any:
        """Convert a pair or a bare text to a ScoreItem. A list of numbers is a text in token ids."""
        if isinstance(item, (str, np.ndarray)):
            return ScoreItem(text=item)
        if isinstance(item, (list, tuple)) and len(item) == 2 and not isinstance(item[0], (int, np.integer)):
            return ScoreItem(prompt=item[0], continuation=item[1])
        if isinstance(item, (list, tuple)):
            return ScoreItem(text=item)
        return item

    def _plan(self, item: Any, batch: TextBatch) -> Any:
        pictures: list[Picture] = []
        if item.text is not None:
            if item.prompt is not None or item.continuation is not None:
                message = "the item has both a 'text' and a 'prompt' or 'continuation'"
                raise InputError(message, field="text", remedy="give text alone, or prompt and continuation")
            text = self.inputs.text(item.text, "text", pictures)
            _refuse_rows(text, "text")
            num_bytes = len(text.encode()) if isinstance(text, str) else None
            return partial(self._rolling, batch.add(text), num_bytes)
        for name in ("prompt", "continuation"):
            if getattr(item, name) is None:
                raise InputError(f"{name!r} is missing", field=name, remedy="give it", code="missing_field")
        prompt = item.prompt
        # An empty list of token ids counts as an empty text.
        empty = isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt) == 0
        prompt = "" if empty else self.inputs.text(prompt, "prompt", pictures)
        left = self.truncate != "right" and not (self.truncate is True and isinstance(prompt, FilledTemplate))
        whole, prompt = prompt, self.inputs.bounded(prompt, "prompt", self.truncate, left=left)
        if self.truncate == "right" and len(prompt) < len(whole):
            prompt += whole[-PART_CHARACTERS:]  # the continuation must be encoded together with the prompt's end
        continuation = self.inputs.text(item.continuation, "continuation", pictures)
        _refuse_rows(continuation, "continuation")
        continuation = self.inputs.bounded(continuation, "continuation", remedy=CONTINUATION_TOO_LONG)
        pair = add_pair(batch, self.inputs, prompt, continuation)
        if self.truncate is not True or not isinstance(prompt, FilledTemplate) or not isinstance(continuation, str):
            return lambda: Work([self._pair(*pair())], notes_of(pictures) or None)
        return lambda: Work([self._pair(*self._cut(prompt, continuation, pair()))], notes_of(pictures) or None)

    def _cut(
        self, prompt: FilledTemplate, continuation: str, ids: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (the prompt's ids, the continuation's ids), with the prompt's longest column cut if necessary."""

        def size(pair: tuple[np.ndarray, np.ndarray]) -> int:
            return pair[0].size + pair[1].size - 1

        def make(text: str) -> tuple[np.ndarray, np.ndarray]:
            return encode_alone(self.inputs.tokenizer, lambda batch: add_pair(batch, self.inputs, text, continuation))

        over = self.inputs.over(size(ids))
        return self.inputs.cut(prompt, make, size(ids) - over, ids, size=size) if over else ids

    def _pair(self, prompt: np.ndarray, continuation: np.ndarray) -> Request:
        if continuation.size == 0:
            raise InputError(
                "'continuation' has no tokens of its own",
                field="continuation",
                remedy="give a text that is not empty, and whose letters are not part of the prompt's last token",
                code="empty",
            )
        if prompt.size == 0:
            prefix = self._prefix("prompt")
            # If the continuation starts with the prefix token, that token becomes the prompt.
            begins = continuation.size > 1 and continuation[0] == prefix[0]
            prompt, continuation = (prefix, continuation[1:]) if begins else (prefix, continuation)
        tokens = np.concatenate((prompt, continuation[:-1]))
        over = self.inputs.over(tokens.size)
        if over and self.truncate:
            if self.inputs.over(continuation.size):
                raise InputError(
                    f"'continuation' has {continuation.size} tokens; the model's limit is {self.inputs.max_length}",
                    field="continuation",
                    remedy=CONTINUATION_TOO_LONG,
                    code="too_long",
                )
            whole, most = tokens, tokens.size - over
            tokens = (
                np.concatenate((prompt[: prompt.size - over], continuation[:-1]))
                if self.truncate == "right" and prompt.size > over
                else tokens[-most:]
            )
            check_cut(whole, tokens, "prompt")
        return self.inputs.request(tokens, "prompt", continuation)

    def _prefix(self, field: str) -> np.ndarray:
        if self.prefix_token is None:
            has = (
                "the model has no tokenizer, and so neither"
                if self.inputs.tokenizer is None
                else "the tokenizer has neither"
            )
            message = f"{has} a BOS nor an EOS token to replace an empty prompt"
            raise InputError(message, field=field, remedy="give prefix_token, or a prompt", code="empty")
        return np.array([self.prefix_token], dtype=np.int32)

    def _rolling(self, get: Any, num_bytes: int | None) -> Work:
        ids = get()
        if ids.size == 0:
            raise InputError("'text' has no tokens", field="text", remedy="give a text that is not empty", code="empty")
        stretches = rolling_stretches(ids, self._prefix("text"), self.inputs.max_length)
        requests = [self.inputs.request(tokens, "text", targets) for tokens, targets in stretches]
        return Work(requests, {"bytes": num_bytes})

    def finish(self, note: Any, results: Sequence[Result]) -> Score:
        logprobs = np.concatenate([result.values for result in results])
        logprob = float(logprobs.astype(np.float64).sum())
        greedy = all(bool(np.all(result.greedy)) for result in results)
        note = note or {}
        if "bytes" in note:
            return TextScore(logprob, logprobs, greedy, logprobs.size, num_bytes=note["bytes"])
        return Score(logprob, logprobs, greedy, logprobs.size, notes_in(note))


def _refuse_rows(text: Text, field: str) -> None:
    """Raise InputError for a scored text with images."""
    if isinstance(text, ImageIds):
        message = f"{field!r} has images, whose rows have no probabilities"
        remedy = "give the images in the prompt, and the text after them as its continuation"
        raise InputError(message, field=field, remedy=remedy, code="unsupported")


def add_pair(batch: TextBatch, inputs: Inputs, prompt: Text, continuation: Text) -> PairOfIds:
    """Add a prompt and its continuation to a batch. Return a getter of the ids of both, for use after `encode`.

    Special tokens are put before the prompt as ScoreTask says. An empty prompt has no ids.
    """
    pair = add_joint(batch, prompt, continuation)
    if isinstance(prompt, str) and isinstance(continuation, str):
        prompt = prompt.rstrip()  # the prefix token replaces an empty prompt
    before = leading_ids(inputs.tokenizer, prompt)
    if not before.size:
        return pair

    def make() -> tuple[np.ndarray, np.ndarray]:
        first, second = pair()
        return np.concatenate((before, first)), second

    return make


def add_joint(batch: TextBatch, prompt: Text, continuation: Text) -> PairOfIds:
    """Add two texts to a batch, without special tokens. Return a getter of the ids of both, for use after `encode`.

    The texts are encoded together and split after the length of the prompt's own ids. White space at the end of the
    prompt moves to the continuation. If one of the two is token ids, the other is encoded separately.
    """
    if isinstance(prompt, str) and isinstance(continuation, str):
        prefix = prompt.rstrip()
        first, whole = batch.add(prefix), batch.add(prompt + continuation)
        return lambda: (first(), whole()[first().size :])
    first, second = batch.add(prompt), batch.add(continuation)
    return lambda: (first(), second())


def leading_ids(tokenizer: Tokenizer | None, prompt: Text) -> np.ndarray:
    """Return the special tokens to put before a prompt, int32 [n].

    There are none before an empty text, before a text that starts with the BOS, and before token ids (unless they are a
    text with images).
    """
    if isinstance(prompt, ImageIds) and tokenizer is not None:
        return tokenizer.prefix_ids
    if tokenizer is None or not isinstance(prompt, str) or not prompt:
        return np.empty(0, np.int32)
    bos = tokenizer.special_tokens.get("bos_token")
    return np.empty(0, np.int32) if bos is not None and prompt.startswith(bos) else tokenizer.prefix_ids


def rolling_stretches(
    ids: np.ndarray, prefix: np.ndarray, max_length: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (tokens, targets) that score every id exactly once, with at most max_length tokens each.

    The first pair starts with `prefix` (one token). Later pairs are as long as the model allows: the last one starts
    with ids that are scored already, as context.
    """
    size = ids.size if max_length is None else min(max_length, ids.size)
    yield np.concatenate((prefix, ids[: size - 1])), ids[:size]
    num_done = size
    while num_done < ids.size:
        stop = min(num_done + size, ids.size)
        yield ids[stop - size - 1 : stop - 1], ids[num_done:stop]
        num_done = stop
