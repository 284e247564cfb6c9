"""Defines what the tasks have in common: items in, requests out, and each error kept to the item that it belongs to.

A prompt that is too long is cut in its longest column, and what stands around that column stays.

A task turns items (one record each) into requests for the engine, and the engine's results into a
dict. Between the two calls it keeps nothing but a small JSON-able note, so a job may put the
requests on disk and run them in any order.

    works = task.prepare(items)                    # a Work, or an InputError, for each item
    results = [... of task.readout, for each work.requests ...]
    line = task.finish(work.note, results)         # results in the order of work.requests
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..errors import InputError, record_error
from ..model.config import ModelConfig, refuse_exits
from ..options import Truncate
from ..prefix import MEDIA_BASE
from ..text import Filled, Tokenizer
from ..text.media import ImageIds, Picture, Pictured, check_cut, notes_of, refuse_images
from ..text.valid import check_said, valid_text
from ..types import Exits, Medium, Readout, Request

T = TypeVar("T")
TRUNCATE = "truncate=True (--truncate)"
Text = str | np.ndarray


@dataclass(frozen=True)
class Work:
    """A Work holds the requests of one item, at least one, and what `finish` must know about the item (JSON-able, or
    None)."""

    requests: list[Request]
    note: Any = None


def attempt(make: Callable[..., T], *args: Any) -> T | InputError:
    """Calls make(*args) and returns its value, or the InputError that stands for the exception it raised (see
    `record_error`)."""
    try:
        return make(*args)
    except Exception as error:
        return record_error(error)


class TextBatch:
    """A TextBatch encodes many texts together, without special tokens. Token ids in place of a text are taken as
    they are."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[str, int] = {}
        self._ids: list[np.ndarray | InputError] = []

    def add(self, text: Text) -> Callable[[], np.ndarray]:
        """Returns a function that gives the text's ids, int32 [n], once `encode` was called. That function raises
        InputError for a text that cannot be encoded, and this one where there is no tokenizer."""
        if isinstance(text, np.ndarray):
            return lambda: text
        if self._tokenizer is None:
            raise InputError("the model has no tokenizer", remedy="give token ids instead of text", code="no_tokenizer")
        # A text that is added again is encoded once: all labels of a text have the same prompt.
        place = self._texts.setdefault(text, len(self._texts))
        return partial(self._get, place)

    def _get(self, place: int) -> np.ndarray:
        ids = self._ids[place]
        if isinstance(ids, InputError):
            raise ids
        return ids

    def add_pieces(self, pieces: Sequence[Text]) -> Callable[[], np.ndarray]:
        """Returns a function that gives the ids of one prompt made of pieces, as `add` does for one text.

        Neighbouring texts are joined and encoded as one; token ids among the pieces are taken as they are.
        """
        joined: list[Text] = []
        for piece in pieces:
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined[-1] += piece
            elif not isinstance(piece, str) or piece:
                joined.append(piece)
        getters = [self.add(piece) for piece in joined]
        if len(getters) == 1:
            return getters[0]
        return lambda: np.concatenate([np.empty(0, np.int32), *(get() for get in getters)])

    def now(self, text: str) -> np.ndarray:
        """Returns the ids of one text, int32 [n], without waiting for `encode`."""
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, special=False)

    def encode(self) -> None:
        if not self._texts or self._tokenizer is None:
            return
        texts = list(self._texts)
        try:
            self._ids = list(self._tokenizer.encode_batch(texts, special=False))
        except Exception:
            # The error does not say which text is at fault. Encoded one by one, each text has an error of its own.
            self._ids = [attempt(self._tokenizer.encode, text, False) for text in texts]


Plan = Callable[[Any, TextBatch], Callable[[], Work]]


@dataclass(frozen=True)
class Inputs:
    """An Inputs checks the inputs of all tasks, and makes requests of them.

    max_length  rows that one request may have, None for any number
    vocab_size  the size of the model's vocabulary, None when unknown
    adapter     the LoRA adapter of items that name none
    adapters    the names of the LoRA adapters that are loaded
    config      the model's; None when unknown
    images      what reads images (`ImageInputs`); None: the model takes text alone
    """

    tokenizer: Tokenizer | None
    max_length: int | None = None
    vocab_size: int | None = None
    adapter: str | None = None
    adapters: Collection[str] = ()
    config: ModelConfig | None = None
    images: Any = None

    def __post_init__(self) -> None:
        self.check_adapter(self.adapter)

    def check_adapter(self, name: Any) -> str | None:
        """Returns `name`: that of a loaded adapter, or None. Raises InputError for any other value."""
        if name is not None and not isinstance(name, str):
            message = f"adapter is of type {type(name).__name__}, not a text"
            raise InputError(message, field="adapter", remedy="give the name of an adapter", code="wrong_type")
        if name is not None and name not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            remedy = f"the adapters that are loaded: {known}"
            raise InputError(f"there is no adapter {name!r}", field="adapter", remedy=remedy, code="unknown_adapter")
        return name

    def check_exits(self, exits: Exits | None) -> None:
        """Raises InputError for exits that rows of the model cannot have."""
        if exits is not None and self.config is not None:
            self.config.check_exits(exits)
        elif exits is not None:
            refuse_exits(exits)

    def prepare(self, items: Sequence[Any], plan: Plan) -> list[Work | InputError]:
        """Returns a Work, or an InputError, for each item, whose requests run with the adapter that the item names. All
        texts of all items are encoded in one batch.

        plan  plan(item, batch) checks an item, adds its texts to the batch and returns a function that makes the Work
              once the batch is encoded. What either of them raises is the error of that item alone
        """
        batch = TextBatch(self.tokenizer)
        makers = [attempt(plan, item, batch) for item in items]
        batch.encode()
        return [
            maker if isinstance(maker, InputError) else attempt(self._adapted, item, maker)
            for item, maker in zip(items, makers, strict=True)
        ]

    def _adapted(self, item: Any, make: Callable[[], Work]) -> Work:
        name = item.get("adapter") if isinstance(item, Mapping) else getattr(item, "adapter", None)
        name = self.adapter if name is None else self.check_adapter(name)
        work = make()
        if name is None:
            return work
        return replace(work, requests=[replace(request, adapter=name) for request in work.requests])

    def text(self, value: Any, field: str, seen: list[Picture] | None = None) -> Text:
        """Returns a text as it is, or token ids as int32 [n]; of a text with images the ids of both. Raises InputError
        for any other value, and for no token ids. seen: gets the images."""
        if isinstance(value, Pictured):
            return self._pictured(value, field, [] if seen is None else seen)
        if isinstance(value, str) or value is None or isinstance(value, (bytes, Mapping)):
            return valid_text(value, field)
        return self._ids(value, field)

    def said(self, value: Any, field: str, seen: list[Picture] | None = None, *, blank: bool = False) -> Text:
        """Returns the text or ids as `text` does. Raises InputError also for a text that says nothing (see
        `check_said`)."""
        text = self.text(value, field, seen)
        if isinstance(text, str):
            check_said(text, field, blank=blank)
        return text

    def _pictured(self, value: Pictured, field: str, seen: list[Picture]) -> np.ndarray:
        """Returns the ids of a text with images, int32 [n]."""
        if self.images is None:
            raise refuse_images(field)
        if not isinstance(value.text, str):
            message = f"{field!r} has images beside what is no text"
            raise InputError(message, field=field, remedy="give a text beside them", code="wrong_type")
        images = [(image, f"images[{i}]") for i, image in enumerate(value.images)]
        pictures = self.images.read(images)
        seen += pictures
        return self.images.encode_pictured(value.text, pictures, field)

    def bounded(
        self,
        text: Any,
        field: str,
        truncate: Truncate = False,
        *,
        left: bool = False,
        limit: int | None = None,
        remedy: str = "",
    ) -> Any:
        """Returns a text that is to be encoded, so that a text of any size takes little memory.

        A text of which it is known unencoded that it has too many tokens is refused, or with `truncate` only what may
        be kept of it is returned: of a text that was made of a template, with truncate=True, of each column.

        left   whether the end is kept, and not the beginning
        limit  the tokens that may be kept, by default the model's
        remedy what to do where it is refused

        Anything else is returned as it is. Raises InputError for a text that is refused.
        """
        tokenizer, limit = self.tokenizer, self.max_length if limit is None else limit
        if not isinstance(text, str) or tokenizer is None or limit is None or not tokenizer.is_longer(text, limit):
            return text
        if not truncate:
            raise InputError(
                f"{field!r} has {len(text):,} characters, which make more than the {limit} tokens that the model takes",
                field=field,
                remedy=remedy or f"shorten it, or have it cut with {TRUNCATE}",
                code="too_long",
            )
        if truncate is True and isinstance(text, Filled):
            return Filled((tokenizer.part(p, limit, left=left) if cut else p, cut) for p, cut in text.parts)
        return tokenizer.part(text, limit, left=left)

    def _ids(self, value: Any, field: str) -> np.ndarray:
        remedy = "give a text, or a list of token ids"
        try:
            ids = np.asarray(value)
        except ValueError:  # a ragged list
            ids = np.empty(0, object)
        if ids.ndim == 1 and ids.size == 0 and isinstance(value, (list, tuple, np.ndarray)) and len(value) == 0:
            raise InputError(f"{field!r} has no tokens", field=field, remedy=remedy, code="empty")
        # NumPy takes [True, 5] for whole numbers.
        has_bool = isinstance(value, (list, tuple)) and any(type(v) is bool for v in value)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or has_bool:
            message = f"{field!r} is of type {type(value).__name__}, neither a text nor a list of whole numbers"
            raise InputError(message, field=field, remedy=remedy, code="wrong_type")
        self.check_ids(ids, field)
        return ids.astype(np.int32)

    def check_ids(self, ids: np.ndarray, field: str) -> None:
        """Raises InputError for a token id that is not one of the model's vocabulary."""
        limit = self.vocab_size if self.vocab_size is not None else MEDIA_BASE
        if ids.size and (ids.min() < 0 or ids.max() >= limit):
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InputError(
                f"{field!r} holds the token id {worst}, outside the model's vocabulary of {limit}",
                field=field,
                remedy="use the model's own tokenizer",
                code="token_out_of_range",
            )

    def plan_whole(
        self,
        value: Any,
        field: str,
        batch: TextBatch,
        seen: list[Picture],
        *,
        truncate: Truncate = False,
        change: Callable[[str], str] = str,
    ) -> Callable[[], Request]:
        """Returns a function that makes the request of a whole text, once the batch is encoded.

        seen      gets the text's images
        change    applied to the text before it is encoded; the tokenizer's special tokens are put around it
        truncate  whether to cut a text that is too long; the special tokens are kept. True: the longest column of a
                  text that was made of a template, else the end that the tokenizer's files say. "left", "right": that
                  end

        Token ids are taken as they are. Of a text with images an end is cut, too, and never an image.
        """
        left = self.tokenizer is not None and self.tokenizer.truncation_side == "left"
        left = left if truncate is True else truncate == "left"
        if isinstance(value, Pictured) and isinstance(value.text, str):
            value = replace(value, text=change(value.text))  # once it is encoded, it is too late
        whole = text = self.bounded(self.said(value, field, seen), field, truncate, left=left)
        nothing = np.empty(0, np.int32)
        before = after = nothing
        if isinstance(text, (str, ImageIds)):
            text = change(text) if isinstance(text, str) else text
            if self.tokenizer is not None:
                before, after = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        get = batch.add(text)
        # Where the beginning is cut, it must be that of the text, and not of what `change` puts before the text.
        by_column = isinstance(whole, Filled) or (isinstance(whole, str) and left and whole != text)

        def make() -> Request:
            ids = get()
            around = before.size + after.size
            over = self.over(around + ids.size)
            if over and truncate is True and by_column:
                ids = self.cut(whole, lambda cut: batch.now(change(cut)), self.max_length - around, ids, left=left)
            elif over and truncate and over < ids.size:
                ids = cut_end(ids, over, field, left=left)
            return self.request(np.concatenate((before, ids, after)), field)

        return make

    def cut(
        self,
        text: str,
        make: Callable[[str], T],
        room: int,
        ids: T,
        *,
        left: bool = False,
        size: Callable[[T], int] = np.size,
    ) -> T:
        """Returns the ids, at most `room`, that `make` gives for the text with its longest column cut; `ids` where
        nothing of that column would be left. size: counts what `make` gives."""
        assert self.tokenizer is not None
        columns, filled = columns_of(text)
        cut = cut_columns(self.tokenizer, columns, lambda values: make(filled(values)), size, room, left=left)
        return ids if cut is None else cut

    def over(self, num_tokens: int) -> int:
        """Returns by how many tokens a request of `num_tokens` rows is too long."""
        return 0 if self.max_length is None else max(0, num_tokens - self.max_length)

    def request(self, tokens: np.ndarray, field: str, targets: np.ndarray | None = None, remedy: str = "") -> Request:
        """Returns the Request. Raises InputError for one that is empty, too long, or has ids outside of the
        vocabulary."""
        if tokens.size == 0:
            remedy = "give a text that is not empty"
            raise InputError(f"{field!r} has no tokens", field=field, remedy=remedy, code="empty")
        if self.over(tokens.size):
            raise InputError(
                f"{field!r} makes a prompt of {tokens.size} tokens; the model takes {self.max_length}",
                field=field,
                remedy=remedy or f"shorten it, or have it cut with {TRUNCATE}",
                code="too_long",
            )
        media: tuple[Medium, ...] = ()
        if self.images is not None and tokens.max() >= MEDIA_BASE:
            tokens = tokens.view(np.ndarray)
            media = self.images.media_of(tokens, field)
            self.check_ids(tokens[tokens < MEDIA_BASE], field)
        else:
            self.check_ids(tokens, field)
        if targets is not None:
            self.check_ids(targets, field)
        return Request(tokens, targets, media=media)


class Task:
    """A Task prepares the requests of items and makes answers of their results.

    name       the word for the task: "embed", "rerank", "classify", "score", "generate"
    inputs     checks the texts of items
    readout    what the engine reads for every request
    item_type  the dataclass of an item; `prepare` also takes mappings with its fields
    example    an answer to an item of one text: the names that all answers have, with values of their types
    """

    name: str
    inputs: Inputs
    readout: Readout
    item_type: type
    example: Mapping[str, Any]

    def prepare(self, items: Sequence[Any]) -> list[Work | InputError]:
        """Returns a Work for each item, or the InputError of an item that is wrong."""
        return self.inputs.prepare(
            items, lambda item, batch: self._plan(as_item(self.item_type, self._named(item)), batch)
        )

    def _named(self, item: Any) -> Any:
        """Returns an item that is given without names as one with them: a text stands for the first field."""
        return item if isinstance(item, (self.item_type, Mapping)) else self.item_type(item)

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        """Checks an item of `item_type` and adds its texts to a batch; returns a function that makes its Work once the
        batch is encoded."""
        raise NotImplementedError

    def finish(self, note: Any, results: Sequence[Any]) -> dict[str, Any]:
        """Returns the answer to an item, by the note of its Work and the results of its requests, in their order."""
        raise NotImplementedError

    def calibration_items(self) -> list[Any]:
        """Returns the items that are to run first, with whose answers the task is then calibrated; mostly none."""
        return []


def work_of(requests: list[Request], seen: Sequence[Picture] = (), **note: Any) -> Work:
    """Returns the Work of these requests; its note has their tokens, and notes on the images that were seen."""
    return Work(requests, {"tokens": sum(request.tokens.size for request in requests), **note} | notes_of(seen))


def as_item(kind: type[T], value: Any) -> T:
    """Returns `value`, an item of the dataclass `kind` or a mapping with its fields, as such an item. Raises
    InputError."""
    if isinstance(value, kind):
        return value
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(value, Mapping):
        raise InputError(
            f"the item is of type {type(value).__name__}",
            remedy=f"give an object with the fields {', '.join(known)}",
            code="wrong_type",
        )
    for name in value:
        if name not in known:
            remedy = f"the fields are {', '.join(known)}"
            raise InputError(f"unknown field {name!r}", field=str(name), remedy=remedy, code="unknown_field")
    for name, field in known.items():
        if name not in value and field.default is MISSING:
            raise InputError(f"{name!r} is missing", field=name, remedy="give it", code="missing_field")
    return kind(**value)


def encoded(tokenizer: Tokenizer | None, add: Callable[[TextBatch], Callable[[], T]]) -> T:
    """Returns the ids of texts that are encoded by themselves. add: adds them to a batch, and returns a function that
    gives the ids once the batch is encoded."""
    batch = TextBatch(tokenizer)
    get = add(batch)
    batch.encode()
    return get()


def cut_end(ids: np.ndarray, over: int, field: str, *, left: bool = False) -> np.ndarray:
    """Returns ids without their last `over` ids, or with `left` without their first. Raises InputError where that would
    cut an image."""
    kept = ids[over:] if left else ids[: ids.size - over]
    check_cut(ids, kept, field)
    return kept


def sigmoid(x: Any) -> Any:
    """Returns 1 / (1 + exp(-x)) of a number or each number of an array, without overflow."""
    z = np.exp(-np.abs(x))
    return np.where(np.asarray(x) >= 0, 1.0, z) / (1.0 + z)


TRIES = 16


def columns_of(text: str) -> tuple[list[str], Callable[[Sequence[str]], str]]:
    """Returns the columns of a text, and a function that makes the text of other columns. A text that was not made
    of a template is one column."""
    if isinstance(text, Filled) and any(text.columns):
        return text.columns, text.refilled
    return [text], lambda columns: columns[0]


def cut_columns(
    tokenizer: Tokenizer,
    columns: Sequence[str],
    make: Callable[[Sequence[str]], T],
    size: Callable[[T], int],
    room: int,
    *,
    left: bool = False,
) -> T | None:
    """Returns make(columns) with the longest columns cut, so that its size is at most `room` and one token more is too
    much.

    make  makes a prompt of columns
    size  gives the tokens of what `make` returned
    room  tokens that the prompt may have
    left  whether each column keeps its end instead of its beginning

    All columns that are longer than some length are cut to that length. Returns None where nothing would be left of
    them. The prompt is encoded as a whole, so that its size need not be the sum of the sizes of its parts: the number
    of tokens to keep is searched for, beginning with the one that those sizes suggest.
    """
    spans = [tokenizer.spans(column) for column in columns]
    total = sum(len(tokens) for tokens in spans)

    def cut(keep: int) -> T:
        counts = level([len(tokens) for tokens in spans], keep)
        return make([part_of(*column, left) for column in zip(columns, spans, counts, strict=True)])

    best: T | None = None
    low, high = 0, total  # `low` tokens are known to fit (or low is 0), and `high` tokens are known not to
    keep = total - (size(make(columns)) - room)
    for _ in range(TRIES):
        keep = min(max(keep, low + 1), high - 1)
        if keep <= low:
            break
        made = cut(keep)
        over = size(made) - room
        if over <= 0:
            best, low = made, keep
            if not over:
                break
        else:
            high = keep
        keep -= over
    return best


def level(sizes: Sequence[int], keep: int) -> list[int]:
    """Returns how many tokens to keep of each column, `keep` in all, so that the largest columns are cut to one
    size."""
    low, high = 0, max(sizes)
    while low < high:  # searches for the largest cap that leaves at most `keep` tokens
        cap = (low + high + 1) // 2
        low, high = (cap, high) if sum(min(size, cap) for size in sizes) <= keep else (low, cap - 1)
    counts = [min(size, low) for size in sizes]
    spare = keep - sum(counts)
    for i, size in enumerate(sizes):
        if spare > 0 and counts[i] < size:
            counts[i], spare = counts[i] + 1, spare - 1
    return counts


def part_of(text: str, spans: Sequence[tuple[int, int]], count: int, left: bool) -> str:
    """Returns the first `count` tokens of a text, or with `left` the last ones. spans: where each token begins and
    ends."""
    if count >= len(spans):
        return text
    if not count:
        return ""
    return text[spans[-count][0] :] if left else text[: spans[count - 1][1]]
