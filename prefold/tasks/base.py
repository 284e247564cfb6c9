"""The interface of tasks, and how tasks check, encode and truncate texts.

A task turns items into requests for the engine, and the engine's results into an `Answer`. One record of a job makes
one or more items. Between the two calls the task keeps only a small note that JSON can hold. So a job may spool the
requests to disk and run them in any order. An error belongs to one item.

A prompt that is too long is cut in its longest column. The text around the column stays.

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
    """The requests of one item (at least one) and the item's note for `finish`."""

    requests: list[Request]
    note: Any = None  # values that JSON can hold, or None


def attempt(make: Callable[..., T], *args: Any) -> T | InputError:
    """Return make(*args). If it raises, return the InputError that `record_error` makes of the exception."""
    try:
        return make(*args)
    except Exception as error:
        return record_error(error)


class TextBatch:
    """Texts that are encoded together, without special tokens. Token ids are passed through unchanged."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[str, int] = {}
        self._ids: list[np.ndarray | InputError] = []

    def add(self, text: Text, lines: Sequence[int] = ()) -> Callable[[], np.ndarray]:
        """Return a getter of the text's ids, int32 [n]. Call the getter after `encode`.

        The getter raises the InputError of a text that cannot be encoded. `add` raises InputError if there is no
        tokenizer.

        Args:
            text: A text, or token ids.
            lines: Starts of lines, ascending, at which the text may be split into parts that other texts also have.
                Each part is encoded once, if the tokenizer splits at that place. The ids always equal the ids of the
                whole text.
        """
        if isinstance(text, np.ndarray):
            return lambda: text
        if self._tokenizer is None:
            raise InputError("the model has no tokenizer", remedy="give token ids instead of text", code="no_tokenizer")
        # Equal texts are encoded once: for example, all labels of a text have the same prompt.
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
        """Return a getter of the ids of a prompt made of pieces. Call the getter after `encode`.

        Neighbouring texts are joined and encoded as one text. Token ids among the pieces stay as they are.
        """
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
        """Return the ids of one text, int32 [n], at once and outside the batch."""
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, special=False)

    def encode(self) -> None:
        if not self._texts or self._tokenizer is None:
            return
        texts = list(self._texts)
        try:
            self._ids = list(self._tokenizer.encode_batch(texts, special=False))
        except Exception:
            # The error does not name its text. Encode the texts one by one, so that only the bad ones get errors.
            self._ids = [attempt(self._tokenizer.encode, text, False) for text in texts]


Plan = Callable[[Any, TextBatch], Callable[[], Work]]


@dataclass(frozen=True)
class Inputs:
    """The checks that all tasks apply to their inputs, and the requests made from them."""

    tokenizer: Tokenizer | None
    max_length: int | None = None  # maximum rows of a request; None: no limit
    vocab_size: int | None = None  # size of the model's vocabulary; None: unknown
    adapter: str | None = None  # the LoRA adapter for items that name none
    adapters: Collection[str] = ()  # names of the loaded LoRA adapters
    config: ModelConfig | None = None  # the model's config; None: unknown
    images: Any = None  # the `ImageInputs`; None: text only
    # padding token of a model with a head: trailing rows with this id are dropped; None: keep all
    unread: int | None = None

    def __post_init__(self) -> None:
        self.check_adapter(self.adapter)

    def check_adapter(self, name: Any) -> str | None:
        """Return the name of an adapter, or None. Raise InputError if no such adapter is loaded."""
        if name is not None and not isinstance(name, str):
            message = f"adapter is of type {type(name).__name__}, not a text"
            raise InputError(message, field="adapter", remedy="give the name of an adapter", code="wrong_type")
        if name is not None and name not in self.adapters:
            names = ", ".join(sorted(self.adapters)) or "none"
            remedy = f"the adapters that are loaded: {names}"
            raise InputError(f"there is no adapter {name!r}", field="adapter", remedy=remedy, code="unknown_adapter")
        return name

    def check_exits(self, exits: Exits | None) -> None:
        """Raise InputError for exits that the model does not have."""
        if exits is not None and self.config is not None:
            self.config.check_exits(exits)
        elif exits is not None:
            refuse_exits(exits)

    def prepare(self, items: Sequence[Any], plan: Plan) -> list[Work | InputError]:
        """Return a Work, or an InputError, for each item. All texts of all items are encoded in one batch.

        The requests of an item run with the adapter that the item names.

        Args:
            items: The items, in the form that `plan` takes.
            plan: `plan(item, batch)` checks an item, adds its texts to the batch, and returns a function that makes the
                Work after the batch is encoded. If either raises, the error belongs to that item alone.
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
        """Return a text unchanged, token ids as int32 [n], or the ids of a text with images.

        Raise InputError for any other value, and for an empty list of ids. The images are appended to `pictures`.
        """
        if isinstance(value, TextWithImages):
            return self._encode_pictured(value, field, [] if pictures is None else pictures)
        if isinstance(value, str) or value is None or isinstance(value, (bytes, Mapping)):
            return valid_text(value, field)
        return self._ids(value, field)

    def content(self, value: Any, field: str, pictures: list[Picture] | None = None, *, blank: bool = False) -> Text:
        """Do as `text` does, and also raise InputError for an empty text (see `check_said`)."""
        text = self.text(value, field, pictures)
        if isinstance(text, str):
            check_said(text, field, blank=blank)
        return text

    def _encode_pictured(self, value: TextWithImages, field: str, pictures: list[Picture]) -> np.ndarray:
        if self.images is None:
            raise refuse_images(field)
        if not isinstance(value.text, str):
            message = f"{field!r} has images, but its text is not a string"
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
        """Cut a text before it is encoded, if its length alone shows that it has too many tokens.

        So a text of any size needs little memory. With truncate=True, a text made from a template is cut in each
        column. Values that are no text are returned unchanged. Raise InputError for a text that is too long if
        `truncate` is off.

        Args:
            text: A text, or any other value.
            field: The name of the input, for errors.
            truncate: The task's option.
            left: Keep the end of the text, not the beginning.
            limit: Maximum number of tokens (default: the model's).
            remedy: The remedy in the error (default: shorten it or truncate).
        """
        tokenizer, limit = self.tokenizer, self.max_length if limit is None else limit
        if not isinstance(text, str) or tokenizer is None or limit is None or not tokenizer.is_longer(text, limit):
            return text
        if not truncate:
            raise InputError(
                f"{field!r} has {len(text):,} characters, which exceeds the model's limit of {limit} tokens",
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
        # NumPy converts [True, 5] to integers without an error.
        has_bool = isinstance(value, (list, tuple)) and any(type(v) is bool for v in value)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or has_bool:
            message = f"{field!r} is of type {type(value).__name__}, neither a text nor a list of whole numbers"
            raise InputError(message, field=field, remedy=remedy, code="wrong_type")
        self.check_ids(ids, field)
        return ids.astype(np.int32)

    def check_ids(self, ids: np.ndarray, field: str) -> None:
        """Raise InputError for a token id outside the model's vocabulary."""
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
        """Return a function that makes the request of a whole text. Call the function after the batch is encoded.

        Token ids stay as they are. An image is never cut.

        Args:
            value: A text, token ids, or a TextWithImages.
            field: The name of the input, for errors.
            batch: The batch that encodes the text.
            pictures: The text's images are appended to this list.
            truncate: Where to cut a text that is too long. True: in the longest column of a text made from a template,
                else at the side that the tokenizer's files name. "left", "right": at that side. The special tokens
                around the text are kept.
            change: Applied to the text before it is encoded. The tokenizer's special tokens go around the result.
        """
        left = self.tokenizer is not None and self.tokenizer.truncation_side == "left"
        left = left if truncate is True else truncate == "left"
        if isinstance(value, TextWithImages) and isinstance(value.text, str):
            value = replace(value, text=change(value.text))  # `content` below encodes it
        whole = text = self.bounded(self.content(value, field, pictures), field, truncate, left=left)
        nothing = np.empty(0, np.int32)
        before = after = nothing
        if isinstance(text, (str, ImageIds)):
            text = change(text) if isinstance(text, str) else text
            if self.tokenizer is not None:
                before, after = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        get = batch.add(text)
        # Cutting on the left must cut the text itself, not the prefix that `change` adds.
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
        """Return `make(text)` with the text's longest column cut, so that it has at most `room` tokens.

        Return `ids` if nothing of that column would be left. `size` counts the tokens of a result of `make`.
        """
        assert self.tokenizer is not None
        columns, fill = columns_of(text)
        cut = cut_columns(self.tokenizer, columns, lambda values: make(fill(values)), size, room, left=left)
        return ids if cut is None else cut

    def over(self, num_tokens: int) -> int:
        """Return by how many tokens a request of `num_tokens` rows is too long."""
        return 0 if self.max_length is None else max(0, num_tokens - self.max_length)

    def request(self, tokens: np.ndarray, field: str, targets: np.ndarray | None = None, remedy: str = "") -> Request:
        """Return the Request of these tokens.

        Raise InputError if there are no tokens or too many, or if an id is outside the vocabulary.
        """
        if tokens.size == 0:
            remedy = "give a text that is not empty"
            raise InputError(f"{field!r} has no tokens", field=field, remedy=remedy, code="empty")
        if self.over(tokens.size):
            raise InputError(
                f"{field!r} makes a prompt of {tokens.size} tokens; the model's limit is {self.max_length}",
                field=field,
                remedy=remedy or f"shorten it, or have it cut with {TRUNCATE}",
                code="too_long",
            )
        if self.unread is not None:
            # As in transformers: read the last row that is not padding, or the first row if all are padding.
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
    """A task: it prepares the requests of items, and makes answers from their results."""

    name: str  # key in `tasks.make.TASKS`
    inputs: Inputs
    readout: Readout  # the Readout of every request
    item_type: type  # dataclass of an item; `prepare` also accepts mappings with its fields
    is_listwise: bool = False  # all documents of a query must be in one item, because one prompt ranks them

    @property
    def example(self) -> Answer:
        """Return an answer to an item of one text. It shows the names and types of the fields."""
        raise NotImplementedError

    def prepare(self, items: Sequence[Any]) -> list[Work | InputError]:
        """Return a Work for each item, or the InputError of an item that is wrong."""
        return self.inputs.prepare(
            items, lambda item, batch: self._plan(as_item(self.item_type, self._as_item(item)), batch)
        )

    def _as_item(self, item: Any) -> Any:
        """Convert a value to an item: a bare text becomes the item's first field."""
        return item if isinstance(item, (self.item_type, Mapping)) else self.item_type(item)

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        """Check an item and add its texts to a batch.

        Return a function that makes the Work after the batch is encoded.
        """
        raise NotImplementedError

    def finish(self, note: Any, results: Sequence[Any]) -> Answer:
        """Return the answer to an item.

        `note` and `results` are the Work's note and the results of its requests, in order.
        """
        raise NotImplementedError

    def calibration_items(self) -> list[Any]:
        """Return the items that must run first, because their answers calibrate the task (default: none)."""
        return []


def work_of(requests: list[Request], pictures: Sequence[Picture] = (), **note: Any) -> Work:
    """Return a Work whose note counts the tokens of the requests and describes the images."""
    return Work(requests, {"tokens": sum(request.tokens.size for request in requests), **note} | notes_of(pictures))


def as_item(kind: type[T], value: Any) -> T:
    """Return an item of the dataclass `kind`, from an instance or from a mapping with its fields.

    Raise InputError for any other value.
    """
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
    """Return the ids of texts that are encoded in a batch of their own.

    `add` adds the texts to a batch and returns the getter of their ids.
    """
    batch = TextBatch(tokenizer)
    get = add(batch)
    batch.encode()
    return get()


def cut_end(ids: np.ndarray, over: int, field: str, *, left: bool = False) -> np.ndarray:
    """Return ids without the last `over` ids, or with `left` without the first.

    Raise InputError if that cuts an image.
    """
    rest = ids[over:] if left else ids[: ids.size - over]
    check_cut(ids, rest, field)
    return rest


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) for a number or an array, without overflow."""
    z = np.exp(-np.abs(x))
    return np.where(np.asarray(x) >= 0, 1.0, z) / (1.0 + z)


TRIES = 16


def columns_of(text: str) -> tuple[list[str], Callable[[Sequence[str]], str]]:
    """Return (the columns of a text, a function that rebuilds the text from new columns).

    A text that was not made from a template is one column.
    """
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
    """Cut the longest columns to one common length, the largest that lets the prompt fit into `room` tokens.

    Return None if nothing of the columns would be left. The prompt is encoded as a whole, so its size is not the sum of
    the sizes of its parts. The number of tokens to keep is therefore searched for, starting from the estimate by those
    sizes.

    Args:
        tokenizer: It finds the tokens of each column.
        columns: The texts that may be cut.
        make: Makes a prompt from columns.
        size: Counts the tokens of a prompt.
        room: Maximum number of tokens of the prompt.
        left: Each column keeps its end, not its beginning.
    """
    spans = [tokenizer.spans(column) for column in columns]
    total = sum(len(tokens) for tokens in spans)

    def cut(keep: int) -> T:
        counts = level([len(tokens) for tokens in spans], keep)
        return make([part_of(*column, left) for column in zip(columns, spans, counts, strict=True)])

    best: T | None = None
    low, high = 0, total  # `low` tokens fit (or low is 0); `high` tokens do not
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
    """Return how many tokens of each column to keep, `keep` in total. The largest columns get one common size."""
    low, high = 0, max(sizes)
    while low < high:  # find the largest cap that keeps at most `keep` tokens
        cap = (low + high + 1) // 2
        low, high = (cap, high) if sum(min(size, cap) for size in sizes) <= keep else (low, cap - 1)
    counts = [min(size, low) for size in sizes]
    spare = keep - sum(counts)
    for i, size in enumerate(sizes):
        if spare > 0 and counts[i] < size:
            counts[i], spare = counts[i] + 1, spare - 1
    return counts


def part_of(text: str, spans: Sequence[tuple[int, int]], count: int, left: bool) -> str:
    """Return the text of the first `count` tokens, or with `left` of the last ones.

    Args:
        spans: (begin, end) of each token.
    """
    if count >= len(spans):
        return text
    if not count:
        return ""
    return text[spans[-count][0] :] if left else text[: spans[count - 1][1]]
