"""Defines the interface of tasks, and how they check, encode and cut texts.

A task turns items (one record each) into requests for the engine, and the engine's results into an `Answer`. Between
the two calls it keeps only a small JSON-able note, so a job may put the requests on disk and run them in any order. An
error belongs to one item. A prompt that is too long is cut in its longest column, and the text around that column
stays.

    works = task.prepare(items)                    # a Work, or an InputError, for each item
    results = [... of task.readout, for each work.requests ...]
    answer = task.finish(work.note, results)       # results in the order of work.requests
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ..errors import InputError, record_error
from ..model.config import ModelConfig
from ..spec.requests import Exits, Medium, Readout, Request, refuse_exits
from ..spec.task import Truncate
from ..text import FilledTemplate, Tokenizer
from ..text.media import ImageIds, Picture, TextWithImages, check_cut, notes_of, refuse_images
from ..text.valid import check_said, valid_text
from ..trie import MEDIA_BASE
from .results import Answer

T = TypeVar("T")
TRUNCATE = "truncate=True (--truncate)"
Text = str | np.ndarray


@dataclass(frozen=True)
class Work:
    """A Work holds the requests of one item, at least one, and a note about the item for `finish` (JSON-able, or
    None)."""

    requests: list[Request]
    note: Any = None


def attempt(make: Callable[..., T], *args: Any) -> T | InputError:
    """Returns make(*args), or the InputError that `record_error` makes of the exception it raised."""
    try:
        return make(*args)
    except Exception as error:
        return record_error(error)


class TextBatch:
    """A TextBatch encodes many texts together, without special tokens. Token ids stay as they are."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[str, int] = {}
        self._ids: list[np.ndarray | InputError] = []

    def add(self, text: Text, lines: Sequence[int] = ()) -> Callable[[], np.ndarray]:
        """Returns a function that returns the text's ids, int32 [n], after `encode`, or raises the InputError of a text
        that cannot be encoded. Raises InputError where there is no tokenizer.

        lines  where lines begin at which texts share parts, in ascending order. Each part is encoded once for all texts
               that have it, if the tokenizer splits there. The ids are the same as for the whole text in any case
        """
        if isinstance(text, np.ndarray):
            return lambda: text
        if self._tokenizer is None:
            raise InputError("the model has no tokenizer", remedy="give token ids instead of text", code="no_tokenizer")
        # A text that is added again is encoded once: all labels of a text have the same prompt.
        found = [0, *(self._tokenizer.cut_at(text, line) for line in lines), len(text)]
        parts = [text[start:stop] for start, stop in pairwise(sorted(set(found)))] or [text]
        places = [self._texts.setdefault(part, len(self._texts)) for part in parts]
        return partial(self._get, places[0]) if len(places) == 1 else partial(self._joined, places)

    def _get(self, place: int) -> np.ndarray:
        ids = self._ids[place]
        if isinstance(ids, InputError):
            raise ids
        return ids

    def _joined(self, places: Sequence[int]) -> np.ndarray:
        return np.concatenate([self._get(place) for place in places])

    def add_pieces(self, pieces: Sequence[Text]) -> Callable[[], np.ndarray]:
        """Returns a function that returns the ids of a prompt made of pieces, after `encode`. Neighbouring texts are
        joined and encoded as one; token ids among the pieces stay as they are."""
        texts: list[Text] = []
        for piece in pieces:
            if isinstance(piece, str) and texts and isinstance(texts[-1], str):
                texts[-1] += piece
            elif not isinstance(piece, str) or piece:
                texts.append(piece)
        getters = [self.add(piece) for piece in texts]
        if len(getters) == 1:
            return getters[0]
        return lambda: np.concatenate([np.empty(0, np.int32), *(get() for get in getters)])

    def encode_now(self, text: str) -> np.ndarray:
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
            # The error does not name the text. Encoded one by one, each text gets an error of its own.
            self._ids = [attempt(self._tokenizer.encode, text, False) for text in texts]


Plan = Callable[[Any, TextBatch], Callable[[], Work]]


@dataclass(frozen=True)
class Inputs:
    """An Inputs checks the inputs of all tasks, and makes requests from them.

    max_length  rows that one request may have, None for any number
    vocab_size  the size of the model's vocabulary, None when unknown
    adapter     the LoRA adapter of items that name none
    adapters    the names of the LoRA adapters that are loaded
    config      the model's; None when unknown
    unread      the token id whose rows at the end of a text are not read (padding, with a head); None: all are read
    images      what reads images (`ImageInputs`); None: the model takes text alone
    """

    tokenizer: Tokenizer | None
    max_length: int | None = None
    vocab_size: int | None = None
    adapter: str | None = None
    adapters: Collection[str] = ()
    config: ModelConfig | None = None
    images: Any = None
    unread: int | None = None

    def __post_init__(self) -> None:
        self.check_adapter(self.adapter)

    def check_adapter(self, name: Any) -> str | None:
        """Returns the name of an adapter, or None. Raises InputError unless it is the name of a loaded one, or None."""
        if name is not None and not isinstance(name, str):
            message = f"adapter is of type {type(name).__name__}, not a text"
            raise InputError(message, field="adapter", remedy="give the name of an adapter", code="wrong_type")
        if name is not None and name not in self.adapters:
            names = ", ".join(sorted(self.adapters)) or "none"
            remedy = f"the adapters that are loaded: {names}"
            raise InputError(f"there is no adapter {name!r}", field="adapter", remedy=remedy, code="unknown_adapter")
        return name

    def check_exits(self, exits: Exits | None) -> None:
        """Raises InputError for exits that the model does not have."""
        if exits is not None and self.config is not None:
            self.config.check_exits(exits)
        elif exits is not None:
            refuse_exits(exits)

    def prepare(self, items: Sequence[Any], plan: Plan) -> list[Work | InputError]:
        """Returns a Work, or an InputError, for each item. All texts of all items are encoded in one batch; an item's
        requests run with the adapter that it names.

        plan  plan(item, batch) checks an item, adds its texts to the batch and returns a function that makes the Work
              once the batch is encoded. An exception of either is the error of that item alone
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
        requests = [replace(request, namespace=request.namespace._replace(adapter=name)) for request in work.requests]
        return replace(work, requests=requests)

    def text(self, value: Any, field: str, pictures: list[Picture] | None = None) -> Text:
        """Returns a text as it is, token ids as int32 [n], or the ids of a text with images. Raises InputError for any
        other value, and for no token ids. pictures: a list to which the images are added"""
        if isinstance(value, TextWithImages):
            return self._encode_pictured(value, field, [] if pictures is None else pictures)
        if isinstance(value, str) or value is None or isinstance(value, (bytes, Mapping)):
            return valid_text(value, field)
        return self._ids(value, field)

    def content(self, value: Any, field: str, pictures: list[Picture] | None = None, *, blank: bool = False) -> Text:
        """Returns the text or ids of a value, like `text`. Raises InputError also for an empty text (see
        `check_said`)."""
        text = self.text(value, field, pictures)
        if isinstance(text, str):
            check_said(text, field, blank=blank)
        return text

    def _encode_pictured(self, value: TextWithImages, field: str, pictures: list[Picture]) -> np.ndarray:
        """Returns the ids of a text with images, int32 [n]."""
        if self.images is None:
            raise refuse_images(field)
        if not isinstance(value.text, str):
            message = f"{field!r} has images beside a value that is no text"
            raise InputError(message, field=field, remedy="give a text beside them", code="wrong_type")
        images = [(image, f"images[{i}]") for i, image in enumerate(value.images)]
        own = self.images.read(images)
        pictures += own
        return self.images.encode_pictured(value.text, own, field)

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
        """Returns a text, cut before it is encoded if its length alone shows that it has too many tokens, so that a
        text of any size takes little memory. With truncate=True a text made of a template is cut in each column. Other
        values are returned as they are. Raises InputError for a text that is too long without `truncate`.

        left    whether the end is kept, and not the beginning
        limit   the tokens that may be kept, by default the model's
        remedy  the error's remedy
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
        if truncate is True and isinstance(text, FilledTemplate):
            return FilledTemplate((tokenizer.part(p, limit, left=left) if cut else p, cut) for p, cut in text.parts)
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
        """Raises InputError for a token id outside the model's vocabulary."""
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
        pictures: list[Picture],
        *,
        truncate: Truncate = False,
        change: Callable[[str], str] = str,
    ) -> Callable[[], Request]:
        """Returns a function that makes the request of a whole text, once the batch is encoded. Token ids stay as they
        are. An image is never cut.

        pictures  a list to which the text's images are added
        change    applied to the text before it is encoded; the tokenizer's special tokens are put around it
        truncate  where to cut a text that is too long. True: in the longest column of a text made of a template, else
                  at the end that the tokenizer's files say. "left", "right": at that end. The special tokens stay
        """
        left = self.tokenizer is not None and self.tokenizer.truncation_side == "left"
        left = left if truncate is True else truncate == "left"
        if isinstance(value, TextWithImages) and isinstance(value.text, str):
            value = replace(value, text=change(value.text))  # before it is encoded
        whole = text = self.bounded(self.content(value, field, pictures), field, truncate, left=left)
        nothing = np.empty(0, np.int32)
        before = after = nothing
        if isinstance(text, (str, ImageIds)):
            text = change(text) if isinstance(text, str) else text
            if self.tokenizer is not None:
                before, after = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        get = batch.add(text)
        # A cut at the beginning must cut the text, and not what `change` puts before it.
        by_column = isinstance(whole, FilledTemplate) or (isinstance(whole, str) and left and whole != text)

        def make() -> Request:
            ids = get()
            around = before.size + after.size
            over = self.over(around + ids.size)
            if over and truncate is True and by_column:
                ids = self.cut(
                    whole, lambda cut: batch.encode_now(change(cut)), self.max_length - around, ids, left=left
                )
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
        """Returns what `make` returns for the text with its longest column cut, at most `room` tokens; `ids` if nothing
        of that column would be left. size: counts the tokens of what `make` returns"""
        assert self.tokenizer is not None
        columns, fill = columns_of(text)
        cut = cut_columns(self.tokenizer, columns, lambda values: make(fill(values)), size, room, left=left)
        return ids if cut is None else cut

    def over(self, num_tokens: int) -> int:
        """Returns by how many tokens a request of `num_tokens` rows is too long."""
        return 0 if self.max_length is None else max(0, num_tokens - self.max_length)

    def request(self, tokens: np.ndarray, field: str, targets: np.ndarray | None = None, remedy: str = "") -> Request:
        """Returns the Request of some tokens. Raises InputError if there are none or too many, or if ids lie outside
        the vocabulary."""
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
        if self.unread is not None:
            # The last row that is left is read. If all rows are padding, the first row is read, as in
            # transformers.
            read = np.flatnonzero(tokens != self.unread)
            tokens = tokens[: read[-1] + 1 if read.size else 1]
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
    """A Task prepares the requests of items and makes answers from their results.

    name       a key of `tasks.make.TASKS`
    inputs     checks the texts of items
    readout    what the engine reads for every request
    item_type  the dataclass of an item; `prepare` also takes mappings with its fields
    is_listwise   whether the documents of a query have to be in one item, since they are read in one prompt
    """

    name: str
    inputs: Inputs
    readout: Readout
    item_type: type
    is_listwise: bool = False

    @property
    def example(self) -> Answer:
        """Return an answer to an item of one text, for the names and types of its fields."""
        raise NotImplementedError

    def prepare(self, items: Sequence[Any]) -> list[Work | InputError]:
        """Returns a Work for each item, or the InputError of an item that is wrong."""
        return self.inputs.prepare(
            items, lambda item, batch: self._plan(as_item(self.item_type, self._as_item(item)), batch)
        )

    def _as_item(self, item: Any) -> Any:
        """Returns a value as an item: a bare text becomes the item's first field."""
        return item if isinstance(item, (self.item_type, Mapping)) else self.item_type(item)

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        """Checks an item and adds its texts to a batch. Returns a function that makes its Work once the batch is
        encoded."""
        raise NotImplementedError

    def finish(self, note: Any, results: Sequence[Any]) -> Answer:
        """Returns the answer to an item. note, results: of its Work; results of its requests, in order"""
        raise NotImplementedError

    def calibration_items(self) -> list[Any]:
        """Returns the items whose answers calibrate the task; they run first. By default there are none."""
        return []


def work_of(requests: list[Request], pictures: Sequence[Picture] = (), **note: Any) -> Work:
    """Returns the Work of these requests; its note counts their tokens and describes the images."""
    return Work(requests, {"tokens": sum(request.tokens.size for request in requests), **note} | notes_of(pictures))


def as_item(kind: type[T], value: Any) -> T:
    """Returns an item of the dataclass `kind` for such an item, or for a mapping with its fields. Raises InputError for
    other values."""
    if isinstance(value, kind):
        return value
    entries = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(value, Mapping):
        raise InputError(
            f"the item is of type {type(value).__name__}",
            remedy=f"give an object with the fields {', '.join(entries)}",
            code="wrong_type",
        )
    for name in value:
        if name not in entries:
            remedy = f"the fields are {', '.join(entries)}"
            raise InputError(f"unknown field {name!r}", field=str(name), remedy=remedy, code="unknown_field")
    for name, field in entries.items():
        if name not in value and field.default is MISSING:
            raise InputError(f"{name!r} is missing", field=name, remedy="give it", code="missing_field")
    return kind(**value)


def encode_alone(tokenizer: Tokenizer | None, add: Callable[[TextBatch], Callable[[], T]]) -> T:
    """Returns the ids of texts, encoded in a batch of their own. add: adds the texts to a batch, and returns a function
    that returns their ids"""
    batch = TextBatch(tokenizer)
    get = add(batch)
    batch.encode()
    return get()


def cut_end(ids: np.ndarray, over: int, field: str, *, left: bool = False) -> np.ndarray:
    """Returns ids without their last `over` ids, or with `left` without their first. Raises InputError where that would
    cut an image."""
    rest = ids[over:] if left else ids[: ids.size - over]
    check_cut(ids, rest, field)
    return rest


def sigmoid(x: Any) -> Any:
    """Returns 1 / (1 + exp(-x)) of a number or each number of an array, without overflow."""
    z = np.exp(-np.abs(x))
    return np.where(np.asarray(x) >= 0, 1.0, z) / (1.0 + z)


TRIES = 16


def columns_of(text: str) -> tuple[list[str], Callable[[Sequence[str]], str]]:
    """Returns the columns of a text, and a function that makes a text from other columns. A text that was not made from
    a template is one column."""
    if isinstance(text, FilledTemplate) and any(text.columns):
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
    """Returns the prompt of columns whose longest ones are cut to one length, the greatest at which the prompt fits
    into `room` tokens; None if nothing would be left of them.

    make  makes a prompt from columns
    size  counts the tokens of a prompt
    left  whether each column keeps its end instead of its beginning

    The prompt is encoded as a whole, so its size is not the sum of the sizes of its parts: the number of tokens to keep
    is searched for, beginning with the one that those sizes suggest.
    """
    spans = [tokenizer.spans(column) for column in columns]
    total = sum(len(tokens) for tokens in spans)

    def cut(keep: int) -> T:
        counts = level([len(tokens) for tokens in spans], keep)
        return make([part_of(*column, left) for column in zip(columns, spans, counts, strict=True)])

    best: T | None = None
    low, high = 0, total  # `low` tokens fit (or low is 0), and `high` tokens do not
    keep = total - (size(make(columns)) - room)
    for _ in range(TRIES):
        keep = min(max(keep, low + 1), high - 1)
        if keep <= low:
            break
        prompt = cut(keep)
        over = size(prompt) - room
        if over <= 0:
            best, low = prompt, keep
            if not over:
                break
        else:
            high = keep
        keep -= over
    return best


def level(sizes: Sequence[int], keep: int) -> list[int]:
    """Returns how many tokens to keep of each column, `keep` in all: the largest columns are cut to one size."""
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
    """Returns the text of the first `count` tokens, or with `left` of the last. spans: (begin, end) of each token"""
    if count >= len(spans):
        return text
    if not count:
        return ""
    return text[spans[-count][0] :] if left else text[: spans[count - 1][1]]
