"""Generation: continue a prompt or a conversation."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from ..errors import InputError
from ..spec.fields import checked
from ..spec.requests import Generated, Namespace, Readout, Request, Sampling, TokenLogprobs
from ..spec.task import GenerationOptions
from ..text import FilledTemplate
from ..text.chat import THINK
from ..text.detokenize import bytes_of_tokens
from ..text.media import Chat, Picture, TextWithImages, all_images, chat_of, notes_in, refuse_images, too_long
from ..text.schemas import example_of
from ..trie import MEDIA_BASE
from .base import TRUNCATE, Inputs, Task, TextBatch, Work, columns_of, cut_columns, cut_end, work_of
from .conversations import Conversations, GenerateItem, as_tools, has_images, is_cut, plain_message
from .results import Choice, Generation, Token
from .sampling import format_grammar, sampling_from
from .score import leading_ids

AUTO_MAX_TOKENS = 256  # max_tokens "auto" (less if the context is full)


class GenerateTask(Task):
    """Continuation of prompts and conversations.

    Items are GenerateItem, a mapping with its fields, a bare prompt (text or token ids), or a list of messages. The
    answer is a Generation with a Choice for each sample. An item `with_ids` gets `prompt_ids` and `tokens`. An item
    `with_reasoning` gets `thinks` and `reasoning_tokens` if the model may think.

    The tokenizer's leading special tokens (BOS) are put before a prompt, unless the prompt starts with the BOS. A chat
    template writes its own special tokens. Token ids stay as they are.
    """

    name = "generate"
    item_type = GenerateItem
    # which models may think. "auto": if their chat template says so; "think": all; "none": none
    reasoning_parser = "auto"

    def __init__(self, inputs: Inputs, options: GenerationOptions, *, context: int | None = None):
        """Raise InputError for wrong options.

        Args:
            context: Maximum tokens of prompt and output together; None: no limit.
        """
        o, self.inputs, self.context = options, inputs, context
        self.compact = o.json_space == "compact"
        self.auto_max_tokens = o.max_tokens == "auto"
        sampling = {option.name: getattr(o, option.name) for option in fields(Sampling)}
        if o.response_format is not None:
            if o.grammar is not None:
                message = "grammar and response_format exclude each other"
                raise InputError(message, field="response_format", remedy="give one of them")
            sampling["grammar"] = format_grammar(o.response_format)
        if self.auto_max_tokens:
            sampling["max_tokens"] = AUTO_MAX_TOKENS
        self.sampling = self._sampling(sampling, Sampling())
        # The same seed for every prompt would draw equal random numbers, so this is the seed of the whole list.
        self.seed, self.sampling = self.sampling.seed, replace(self.sampling, seed=None)
        settings = {option.name: getattr(o, option.name) for option in fields(Conversations)}
        self.conversations = Conversations(**settings | {"tools": as_tools(o.tools)})
        # maxima for an item's own sampling
        self.bounds = {"n": max(o.max_n, self.sampling.n), "logprobs": max(o.max_logprobs, self.sampling.logprobs or 0)}
        self.salt = o.salt
        self.priority = o.priority
        self.truncate = o.truncate
        self.readout = Readout("tokens")

    @property
    def example(self) -> Generation:
        grammar = self.sampling.grammar
        is_described = grammar is not None and grammar.kind == "json_schema"
        text = json.dumps(example_of(json.loads(grammar.text))) if is_described else ""
        output, top = None if self.inputs.tokenizer is None else text, self.sampling.logprobs
        logprobs = None if top is None else (TokenLogprobs(0.0, ((0, 0.0),) * top),)
        return self.finish({"tokens": 0}, [[Generated((0,), output, "stop", logprobs=logprobs)] * self.sampling.n])

    def _as_item(self, item: Any) -> Any:
        """Convert a bare prompt or a list of messages to a GenerateItem."""
        if isinstance(item, (list, tuple)) and item and isinstance(item[0], Mapping):
            return GenerateItem(messages=item)
        return GenerateItem(prompt=item) if isinstance(item, (str, list, tuple, np.ndarray, TextWithImages)) else item

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        if isinstance(item.prompt, TextWithImages) and item.images is None:
            item = replace(item, prompt=item.prompt.text, images=item.prompt.images)
        sampling = self._items_sampling(item.sampling) if item.sampling else self.sampling
        # Only an explicit max_tokens can make a prompt too long. A default is lowered instead.
        is_limited = not self.auto_max_tokens or "max_tokens" in (item.sampling or {})
        salt = checked(str, self.salt if item.salt is None else item.salt, "salt")
        priority = checked(int, self.priority if item.priority is None else item.priority, "priority")
        fields: dict[str, Any] = {"namespace": Namespace(salt=salt), "priority": priority}
        item = self._bounded(item)
        pictures = self._pictures(item)
        before, get, field, text = self._prompt(item, batch, pictures, salt)
        cut = partial(self._cut, item, batch, before.size, pictures, salt)
        shorten = cut if self.truncate is True else None

        def make() -> Work:
            fitting = self._fit(before, get(), field, sampling.max_tokens if is_limited else None, shorten)
            limited = sampling if is_limited else self._within_context(sampling, fitting.tokens.size)
            request = Request(fitting.tokens, sampling=limited, media=fitting.media, **fields)
            note: dict[str, Any] = {}
            if item.with_ids:
                note["ids"] = _plain_ids(request)
            if item.with_reasoning and text is not None and self._may_think(item):
                note["thinks"] = text.rstrip().endswith(THINK[0])
            return work_of([request], pictures, **note)

        return make

    def _pictures(self, item: GenerateItem) -> list[Picture]:
        """Return the images of an item.

        Raise InputError for images that cannot be read or have no place, and if the model does not see images.
        """
        if item.images is not None and not isinstance(item.images, (list, tuple)):
            message = "'images' is not a list"
            raise InputError(message, field="images", remedy="give a list of images", code="wrong_type")
        if item.messages is not None:
            chat = chat_of(item.messages)
            if chat is None and not item.images:
                return []
            images = all_images(Chat([], []) if chat is None else chat, item.images)
        else:
            images = [(image, f"images[{i}]") for i, image in enumerate(item.images or ())]
        if images and self.inputs.images is None:
            raise refuse_images(images[0][1])
        if images and item.messages is None and not isinstance(item.prompt, str):
            message = "'images' needs a prompt that is a text"
            raise InputError(message, field="images", remedy="give the prompt as a text", code="wrong_type")
        return [] if self.inputs.images is None else self.inputs.images.read(images)

    def _sampling(self, options: Mapping[str, Any], defaults: Sampling) -> Sampling:
        tokenizer, vocab_size = self.inputs.tokenizer, self.inputs.vocab_size
        sampling = sampling_from(options, vocab_size=vocab_size, tokenizer=tokenizer, defaults=defaults)
        self.inputs.check_exits(sampling.exits)
        if sampling.grammar is None or self.compact:
            return sampling
        return replace(sampling, grammar=replace(sampling.grammar, compact=False))

    def _items_sampling(self, options: Mapping[str, Any]) -> Sampling:
        """Return the sampling of an item that has its own options. Raise InputError if an option exceeds `bounds`."""
        sampling = self._sampling(options, self.sampling)
        for name, most in self.bounds.items():
            value = getattr(sampling, name)
            if value is not None and value > most:
                remedy = f"give at most {most}, or allow more with max_{name} (--max-{name})"
                raise InputError(
                    f"{name!r} is {value}, more than allowed", field=name, remedy=remedy, code="out_of_range"
                )
        return sampling

    def _prompt(
        self, item: GenerateItem, batch: TextBatch, pictures: list[Picture], salt: str
    ) -> tuple[np.ndarray, Callable[[], np.ndarray], str, str | None]:
        """Return (leading special tokens, a getter of the other tokens, their field, the conversation's text or None).

        The getter works after the batch is encoded.

        Args:
            pictures: The item's images.
        """
        nothing = np.empty(0, np.int32)
        if item.messages is not None:
            if item.prompt is not None:
                message = "the item has both a 'prompt' and 'messages'"
                raise InputError(message, field="prompt", remedy="give one of them")
            text, encode = self.conversations.render(item, self.inputs, pictures, salt)
            if encode is not None:
                return nothing, batch.add(encode(text)), "messages", text
            if self.truncate is not True:
                text = self._part(text, "messages", left=self.truncate == "left")
            return nothing, batch.add(text), "messages", text
        if item.prompt is None:
            raise InputError("'prompt' is missing", field="prompt", remedy="give it, or messages", code="missing_field")
        if pictures:
            assert self.inputs.images is not None
            ids = self.inputs.images.encode_pictured(item.prompt, pictures, "prompt", salt)
            return leading_ids(self.inputs.tokenizer, ids), batch.add(ids), "prompt", None
        text = self.inputs.content(item.prompt, "prompt", blank=True)
        return leading_ids(self.inputs.tokenizer, text), batch.add(text), "prompt", None

    def _may_think(self, item: GenerateItem) -> bool:
        tokenizer, template = self.inputs.tokenizer, item.chat_template or self.conversations.chat_template
        auto = self.reasoning_parser == "auto" and tokenizer is not None and tokenizer.chat_templates.thinks(template)
        return auto or self.reasoning_parser == "think"

    def _bounded(self, item: GenerateItem) -> GenerateItem:
        """Return the item with texts that are far too long cut (see `Inputs.bounded`)."""
        if isinstance(item.prompt, str):
            left = self.truncate != "right" and not (self.truncate is True and isinstance(item.prompt, FilledTemplate))
            prompt = self._part(item.prompt, "prompt", left=left)
            return item if prompt is item.prompt else replace(item, prompt=prompt)
        if self.truncate is not True or not isinstance(item.messages, (list, tuple)):
            return item
        messages = [m if has_images(m) else plain_message(m, i) for i, m in enumerate(item.messages)]
        messages = [{**m, "content": self._part(m["content"], "messages")} if is_cut(m) else m for m in messages]
        return replace(item, messages=messages)

    def _part(self, text: str, field: str, *, left: bool = False) -> str:
        limits = [limit for limit in (self.context, self.inputs.max_length) if limit is not None]
        return self.inputs.bounded(text, field, self.truncate, left=left, limit=min(limits, default=None))

    def _fit(
        self,
        before: np.ndarray,
        ids: np.ndarray,
        field: str,
        max_tokens: int | None,
        shorten: Callable[[int], np.ndarray | None] | None,
    ) -> Request:
        """Return the request of a prompt's tokens, cut if necessary.

        Raise InputError if the prompt and max_tokens (None: one token) exceed the limits, and the prompt cannot be cut.

        Args:
            before: The leading special tokens.
            ids: The other tokens of the prompt.
            field: The field they come from, for errors.
            max_tokens: The maximum length of the output, if it was given explicitly.
            shorten: Called with the number of tokens that fit. It returns the ids with the longest column cut, or None
                if there is no column. Then the whole prompt is cut at the side that `truncate` names (default: the
                start, because the output follows the end).
        """
        room = self.inputs.max_length
        if self.context is not None:
            room = min(self.context if room is None else room, self.context - (max_tokens or 1))
        size = before.size + ids.size
        over = 0 if room is None else size - room
        if over > 0 and room is not None:
            shorter = shorten(room) if shorten is not None and room > 0 else None
            if shorter is not None:
                ids = shorter
            elif not self.truncate or over >= ids.size or (field == "messages" and self.truncate is True):
                raise self._too_long(size, field, max_tokens, room)
            else:
                ids = cut_end(ids, over, field, left=self.truncate != "right")
        return self.inputs.request(np.concatenate((before, ids)), field)

    def _within_context(self, sampling: Sampling, size: int) -> Sampling:
        """Lower a default max_tokens to the free part of the context.

        Args:
            size: Tokens of the prompt.
        """
        if self.context is None or sampling.max_tokens is None or size + sampling.max_tokens <= self.context:
            return sampling
        room = self.context - size
        return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))

    def _cut(
        self, item: GenerateItem, batch: TextBatch, before: int, pictures: list[Picture], salt: str, room: int
    ) -> np.ndarray | None:
        """Return the ids of an item's prompt with its longest column cut to fit, or None if the item has no column.

        The columns of a conversation are the contents of all messages but system messages.

        Args:
            before: Number of leading special tokens.
            room: Maximum number of tokens of the prompt, including these.
        """
        tokenizer = self.inputs.tokenizer
        if tokenizer is None:
            return None
        if item.messages is None:
            if not (isinstance(item.prompt, FilledTemplate) or pictures):
                return None
            columns, fill = columns_of(item.prompt)
            encode_cut = partial(self._encode_pictured, item.prompt, pictures, salt) if pictures else batch.encode_now
            left = not isinstance(item.prompt, FilledTemplate)
            return cut_columns(
                tokenizer, columns, lambda values: encode_cut(fill(values)), len, room - before, left=left
            )
        messages = [m if has_images(m) else plain_message(m, i) for i, m in enumerate(item.messages)]
        parts = {i: columns_of(m["content"]) for i, m in enumerate(messages) if is_cut(m)}

        def make(values: Sequence[str]) -> np.ndarray:
            left, chat = iter(values), list(messages)
            for i, (columns, fill) in parts.items():
                chat[i] = {**chat[i], "content": fill([next(left) for _ in columns])}
            text, encode = self.conversations.render(replace(item, messages=chat), self.inputs, pictures, salt)
            return batch.encode_now(text) if encode is None else encode(text)

        every = [column for columns, _ in parts.values() for column in columns]
        return cut_columns(tokenizer, every, make, len, room) if every else None

    def _encode_pictured(self, whole: str, pictures: list[Picture], salt: str, text: str) -> np.ndarray:
        """Return the ids of a prompt with images that was cut to `text`.

        Raise InputError if the cut removed an image.
        """
        assert self.inputs.images is not None
        placeholder = self.inputs.images.processor.placeholder
        if text.count(placeholder) < whole.count(placeholder):
            raise too_long("prompt")
        return self.inputs.images.encode_pictured(text, pictures, "prompt", salt)

    def _too_long(self, size: int, field: str, max_tokens: int | None, room: int) -> InputError:
        message, remedy = f"{field!r} makes a prompt of {size} tokens; ", f"shorten it, or have it cut with {TRUNCATE}"
        if room < 1:
            remedy = "give a smaller max_tokens"
        elif max_tokens:
            remedy = f"shorten it, give a smaller max_tokens, or have it cut with {TRUNCATE}"
        if self.truncate and room >= 1:
            remedy = "shorten the text around its columns and contents, and messages with images, which are never cut"
        if room == self.inputs.max_length:
            message += f"it may have at most {room}"
        else:
            message += f"with max_tokens {max_tokens} it" if max_tokens else "with a token to generate it"
            message += f" is more than the model's context of {self.context}"
        return InputError(message, field=field, remedy=remedy, code="too_long")

    def finish(self, note: Any, results: Sequence[list[Generated]]) -> Generation:
        (samples,) = results
        return Generation(
            tuple([self._choice(sample, note) for sample in samples]),
            num_tokens=note["tokens"],
            num_generated=sum([len(sample.tokens) for sample in samples]),
            cached_tokens=samples[0].cached_tokens or 0,
            approximate_tokens=samples[0].approximate_tokens or None,
            image_notes=notes_in(note),
            prompt_ids=note.get("ids"),
            thinks=note.get("thinks"),
        )

    def _choice(self, sample: Generated, note: Mapping[str, Any]) -> Choice:
        logprobs = None
        if sample.logprobs is not None:
            pairs = zip(sample.tokens, sample.logprobs, strict=True)
            logprobs = [self.token_logprobs(token, entry) for token, entry in pairs]
        return Choice(
            text=sample.text,
            tokens=list(sample.tokens) if sample.text is None or "ids" in note else None,
            reasoning_tokens=self._reasoning_tokens(sample, note["thinks"]) if "thinks" in note else None,
            finish_reason=sample.finish_reason,
            stop=sample.stop,
            logprobs=logprobs,
        )

    def _reasoning_tokens(self, sample: Generated, opened: bool) -> int:
        """Return how many tokens of a sample are reasoning.

        Args:
            opened: The prompt ends with <think>.
        """
        (begin, end), text, ids = THINK, sample.text or "", sample.tokens
        if not opened and not text.lstrip().startswith(begin):
            return 0
        if self.inputs.tokenizer is None or end not in text:
            return len(ids)
        decode = self.inputs.tokenizer.decode
        return bisect_left(range(len(ids)), True, key=lambda n: end in decode(ids[:n]))

    def token_logprobs(self, token: int, entry: TokenLogprobs) -> Token:
        """Return the answer's entry for one token of an output."""
        return self._token(token, entry.logprob) | {"top": [self._token(*pair) for pair in entry.top]}

    def _token(self, token: int, logprob: float) -> Token:
        if self.inputs.tokenizer is None:
            return {"id": token, "logprob": logprob}
        data = self._bytes_of(token)
        # A token that is a part of a character has no valid text. All entries have bytes, so that a table column can
        # hold them.
        return {"id": token, "token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}

    @cached_property
    def _bytes_of(self) -> Callable[[int], bytes]:
        assert self.inputs.tokenizer is not None
        return cache(bytes_of_tokens(self.inputs.tokenizer))


def _plain_ids(request: Request) -> list[int]:
    """Return the ids of a prompt's tokens. Raise InputError for a prompt with images: their rows have no such ids."""
    if request.media or (request.tokens >= MEDIA_BASE).any():
        message, remedy = "the prompt has images, whose rows have no token ids", "leave it out"
        raise InputError(message, field="with_ids", remedy=remedy, code="unsupported")
    return request.tokens.tolist()
