"""Embedding: a vector for each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError, UnsupportedModelError
from ..spec.fields import checked
from ..spec.requests import Readout, Request, Result
from ..spec.task import EmbedOptions
from ..text import FilledTemplate, Tokenizer, instructed_query
from ..text.media import Picture, TextWithImages, notes_in
from ..text.valid import valid_text
from ..trie import SPAN_BASE
from .base import Inputs, Task, TextBatch, Work, work_of
from .results import Answer, Embedding, EmbeddingList
from .sentence import POOLING_MODES, ChatSettings, EmbedSettings


@dataclass(frozen=True)
class EmbedItem:
    """One text to embed, or a list of texts. Token ids get no prompt and no special tokens."""

    text: Any  # a text, token ids, or a list of either
    dimensions: int | None = None  # length of the vector; None: the task's
    adapter: str | None = None  # LoRA adapter; None: the task's


class EmbedTask(Task):
    """Embedding of texts. Items are EmbedItem, a mapping with its fields, or a bare text.

    The answer is an Embedding for one text, and an EmbeddingList for a list of texts.
    """

    name = "embed"
    example: Answer = Embedding(np.zeros(1, np.float32))
    item_type: type = EmbedItem

    def __init__(self, inputs: Inputs, options: EmbedOptions | None = None, settings: EmbedSettings | None = None):
        """Choose the prompt. Raise InputError for options that conflict, or that the checkpoint lacks.

        Args:
            settings: The checkpoint's settings; `options` override them.
        """
        self.inputs, options = inputs, options or EmbedOptions()
        self.settings = settings = settings or EmbedSettings()
        if settings.pooling not in POOLING_MODES.values():
            modes = ", ".join(POOLING_MODES.values())
            raise InputError(f"pooling is {settings.pooling!r}", field="pooling", remedy=f"give one of {modes}")
        # The first row of a causal model sees only itself, so it equals the last row of a one-token prompt.
        self.readout = Readout("last" if settings.pooling == "first" else settings.pooling)
        self.dimensions = None if options.dimensions is None else self._dimensions(options.dimensions)
        self.truncate = options.truncate
        self.before, self.instruction = self._prompt(options.prompt, options.prompt_name, options.instruction)
        if settings.chat is not None and self.instruction:
            message = "the checkpoint embeds chat messages, which take no instruction in Qwen3-Embedding's format"
            raise InputError(
                message, field="instruction", remedy="give prompt instead, which becomes the system message"
            )
        left_out = not settings.pool_prompt and settings.chat is None and settings.pooling != "last"
        if (self.before or self.instruction) and left_out:
            raise UnsupportedModelError(
                f"the checkpoint leaves its prompt out of {settings.pooling} pooling (include_prompt is false),"
                " which is not supported; embed without a prompt"
            )

    def _prompt(self, prompt: str | None, name: str | None, instruction: str | None) -> tuple[str, str]:
        """Return (the text before every input, the instruction). At most one of them is not empty."""
        options = {"prompt": prompt, "prompt_name": name, "instruction": instruction}
        options = {key: valid_text(value, key) for key, value in options.items() if value is not None}
        if len(options) > 1:
            raise InputError(
                f"{' and '.join(options)} exclude each other", field=next(iter(options)), remedy="give one of them"
            )
        if prompt is not None or instruction is not None:
            return prompt or "", instruction or ""
        prompts, name = self.settings.prompts, name or self.settings.default_prompt_name
        if name is not None and name not in prompts:
            names = ", ".join(prompts) or "none"
            message = f"prompt_name: the checkpoint has no prompt {name!r}"
            raise InputError(
                message, field="prompt_name", remedy=f"name one that it has ({names}), or give prompt or instruction"
            )
        return ("" if name is None else prompts[name]), ""

    def _dimensions(self, value: Any) -> int:
        value = checked(int, value, "dimensions", least=1)
        config = self.inputs.config
        if config is not None and value > config.hidden:
            message = f"'dimensions' is {value}; the model's vectors have {config.hidden}"
            remedy = f"give a number up to {config.hidden}"
            raise InputError(message, field="dimensions", remedy=remedy, code="out_of_range")
        return value

    def _plan(self, item: Any, batch: TextBatch) -> Any:
        dimensions = None if item.dimensions is None else self._dimensions(item.dimensions)
        is_list = is_list_of_texts(item.text)
        texts = list(item.text) if is_list else [item.text]
        names = [f"text[{i}]" for i in range(len(texts))] if is_list else ["text"]
        plan = self._plan_text if self.settings.chat is None else self._plan_message
        pictures: list[Picture] = []
        makers = [plan(text, name, batch, pictures) for text, name in zip(texts, names, strict=True)]

        def make() -> Work:
            work = work_of([maker() for maker in makers], pictures, many=is_list, dimensions=dimensions)
            if self.settings.pooling == "first":
                work = replace(work, requests=[first_token(request) for request in work.requests])
            return work

        return make

    def _plan_text(self, text: Any, field: str, batch: TextBatch, pictures: list[Picture]) -> Callable[[], Request]:
        return self.inputs.plan_whole(text, field, batch, pictures, truncate=self.truncate, change=self._prompted)

    def _plan_message(self, text: Any, field: str, batch: TextBatch, pictures: list[Picture]) -> Callable[[], Request]:
        """Return a function that makes the request of a text in the chat template, as sentence-transformers does.

        Token ids stay as they are.
        """
        if isinstance(text, TextWithImages):
            message = f"{field!r} has images, but the chat messages that the checkpoint embeds may hold text only here"
            raise InputError(message, field=field, remedy="leave the images out", code="unsupported")
        chat, tokenizer, text = self.settings.chat, self.inputs.tokenizer, self.inputs.content(text, field, pictures)
        if not isinstance(text, str) or tokenizer is None or chat is None:
            return self._plan_text(text, field, batch, pictures)
        side = tokenizer.truncation_side if self.truncate is True else self.truncate
        text = self.inputs.bounded(text, field, self.truncate, left=side == "left")
        get = batch.add(self._in_template(text, chat, tokenizer))

        def make() -> Request:
            ids = get()
            over = self.inputs.over(ids.size)
            if over and self.truncate is True and isinstance(text, FilledTemplate):
                ids = self.inputs.cut(
                    text, lambda cut: batch.encode_now(self._in_template(cut, chat, tokenizer)), ids.size - over, ids
                )
            elif over and self.truncate:
                ids = ids[over:] if side == "left" else ids[: ids.size - over]
            if ids.size == self.inputs.max_length and chat.restore_suffix:
                suffix = self._suffix[-ids.size :]
                ids = np.concatenate((ids[: ids.size - suffix.size], suffix))
            return self.inputs.request(ids, field)

        return make

    def _in_template(self, text: str, chat: ChatSettings, tokenizer: Tokenizer) -> str:
        messages = [("system", self.before), ("user", text)] if self.before else [("user", text)]
        contents = ([{"type": "text", "text": part}] if chat.parts else part for _, part in messages)
        conversation = [{"role": role, "content": c} for (role, _), c in zip(messages, contents, strict=True)]
        return tokenizer.render_chat(conversation, **chat.options)

    @cached_property
    def _suffix(self) -> np.ndarray:
        """Return the token ids that the chat template writes after every text, int32 [n]."""
        chat, tokenizer = self.settings.chat, self.inputs.tokenizer
        assert chat is not None and tokenizer is not None
        texts = [self._in_template(text, chat, tokenizer) for text in ("0", "1 2 3 4")]
        short, long = (tokenizer.encode(text, special=False) for text in texts)
        shorter = min(short.size, long.size)
        same = short[short.size - shorter :] == long[long.size - shorter :]
        count = shorter if same.all() else int(np.argmin(same[::-1]))
        return short[short.size - count :] if count < shorter else short[:0]

    def _prompted(self, text: str) -> str:
        text = instructed_query(self.instruction, text) if self.instruction else self.before + text
        # Tokenizers lower-case one character at a time, without the special case of a sigma at the end of a word.
        return "".join(map(str.lower, text)) if self.settings.lower_case else text

    def finish(self, note: Any, results: Sequence[Result]) -> Answer:
        vectors = self._vectors(note["dimensions"], results)
        kind, value = (EmbeddingList, vectors) if note["many"] else (Embedding, vectors[0])
        return kind(np.ascontiguousarray(value), note["tokens"], notes_in(note))

    def _vectors(self, dimensions: int | None, results: Sequence[Result]) -> np.ndarray:
        """Return the vectors of results, float32 [results, dimensions].

        Args:
            dimensions: The number of dimensions that the item asks for.
        """
        vectors = np.stack([np.asarray(result.values, dtype=np.float32) for result in results])
        dimensions = dimensions or self.dimensions
        if dimensions is not None:
            vectors = vectors[:, :dimensions]
        if self.settings.normalize:
            # The lower bound leaves a vector of zeros unchanged.
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
        if dimensions is None and self.settings.truncate_dim is not None:
            vectors = vectors[:, : self.settings.truncate_dim]
        return vectors


def first_token(request: Request) -> Request:
    """Return the request of a prompt's first token alone.

    Raise InputError if that token belongs to an image, because its row sees the whole image.
    """
    if request.tokens[0] >= SPAN_BASE:
        message = "the prompt starts with an image, but pooling reads the first token"
        raise InputError(message, field="pooling", remedy='use pooling "last" or "mean", or begin with text')
    return replace(request, tokens=request.tokens[:1], media=())


def is_list_of_texts(value: Any) -> bool:
    """Return whether a value is a list of texts (or of lists of token ids), not a single text."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2 or value.dtype.kind in "OU"
    return isinstance(value, (list, tuple)) and len(value) > 0 and not isinstance(value[0], (int, np.integer, float))
