"""Listwise reranking: one prompt holds the query and many documents, and one row after each document is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import InputError, UnsupportedModelError
from ..spec.requests import Readout, Request, Result
from ..spec.task import RerankOptions
from ..text import Tokenizer
from ..text.media import Picture
from ..text.valid import valid_text
from .base import TRUNCATE, Inputs, Task, Text, TextBatch, Work, cut_end, encode_alone, work_of
from .rerank import QUERY_TOO_LONG, TEMPLATES, RerankItem, RerankTask, contents_of, documents_of, note_of, ranked
from .results import Answer

# Extra tokens that a passage number of several digits may need, compared with one digit.
_NUMBER = 4


class ListReader:
    """A reader of document scores from the rows of prompts with many documents.

    Attributes:
        marks: the special tokens that are read: the one after each document, and the one after the query
        most: maximum number of documents of a prompt
        spare: a prompt with at most this many free tokens gets no further document
    """

    marks: tuple[str, str]
    most: int
    spare: int = 0

    def write(self, query: Text, documents: Sequence[Text], instruction: str | None) -> list[Text]:
        """Return the pieces of a prompt.

        Each mark is a piece: one after each document, and the last one after the query.
        """
        raise NotImplementedError

    def scores(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the score of each document of a list, float64 [documents].

        Args:
            prompts: for each prompt, the hidden states of its documents and then of its query, float32 [rows, hidden]
        """
        raise NotImplementedError


# {architecture, or name of a file beside the weights: function that makes the ListReader, or None if the file belongs
# to another reader}. Features register their readers here.
RANKERS: dict[str, Callable[[Checkpoint], ListReader | None]] = {}
# {token that only tokenizers of listwise rerankers have: the file that such a checkpoint needs}. A GGUF file may lack
# that file.
NEEDED: dict[str, str] = {}


def check_complete(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
    """Raise UnsupportedModelError if a checkpoint has the tokens of a listwise reranker, but no ListReader."""
    for token, needed in NEEDED.items():
        if tokenizer is not None and tokenizer.token_id(token) is not None:
            raise UnsupportedModelError(f"{checkpoint.name} is read at the token {token}, but lacks {needed}")


class ListTask(Task):
    """Reranking for a checkpoint that reads all documents of a query at once. Everything else is as in RerankTask.

    The score of a document depends on the documents before it, and all scores depend on the whole list. A list that is
    too long for one prompt is split into several prompts, within the limits of the reader.
    """

    name = "rerank"
    example = RerankTask.example
    item_type = RerankItem
    is_listwise = True
    _as_item = RerankTask._as_item

    def __init__(self, inputs: Inputs, options: RerankOptions, reader: ListReader):
        """Raise InputError without a tokenizer, and for options that the reader does not use."""
        if inputs.tokenizer is None:
            raise InputError("reranking needs a tokenizer", field="tokenizer", remedy="use a checkpoint that has one")
        for name in ("template", "words", "add_special_tokens"):
            if getattr(options, name) != getattr(RerankOptions, name):
                raise _own_prompt(name)
        ids = [inputs.tokenizer.token_id(mark) for mark in reader.marks]
        for mark, id in zip(reader.marks, ids, strict=True):
            if id is None:
                raise UnsupportedModelError(f"the tokenizer lacks the token {mark}, which the reranker reads")
        self.inputs, self.reader, self.truncate = inputs, reader, options.truncate
        self.instruction = None if options.instruction is None else valid_text(options.instruction, "instruction")
        self.readout = Readout("last")
        self._ids = np.array(ids, np.int32)
        limits = [limit for limit in (inputs.max_length, inputs.tokenizer.max_length) if limit is not None]
        self._limit = min(limits, default=None)
        self._around = lru_cache(maxsize=TEMPLATES)(self._measure)

    def _plan(self, item: Any, batch: TextBatch) -> Callable[[], Work]:
        if item.template is not None:
            raise _own_prompt("template")
        pictures: list[Picture] = []
        query = self.inputs.bounded(self.inputs.content(item.query, "query", pictures), "query", remedy=QUERY_TOO_LONG)
        query = self._bare(query)
        instruction = self.instruction if item.instruction is None else valid_text(item.instruction, "instruction")
        values, names = documents_of(item)
        documents = []
        for document, name in zip(contents_of(self.inputs, item, pictures), names, strict=True):
            document = self.inputs.bounded(document, name, self.truncate, left=self.truncate == "left")
            documents.append(self._bare(document))
        parts = self._split(query, documents, instruction, names)
        getters = [self._add(batch, query, documents[part], instruction) for part in parts]
        note = note_of(item, values)

        def make() -> Work:
            requests, tokens = [], 0
            for part, get in zip(parts, getters, strict=True):
                name = names[part.start] if part.stop - part.start == 1 else "documents"
                own = self._requests(get(), part.stop - part.start, name)
                requests += own
                tokens += own[-1].tokens.size
            sizes = [part.stop - part.start for part in parts]
            return work_of(requests, pictures, **(note | {"tokens": tokens, "prompts": sizes}))

        return make

    def _bare(self, text: Text) -> Text:
        """Return a text without the marks. In a prompt, only the reader may write them."""
        if not isinstance(text, str) or not any(mark in text for mark in self.reader.marks):
            return text
        for mark in self.reader.marks:
            text = text.replace(mark, "")
        return text

    def _pieces(self, query: Text, documents: Sequence[Text], instruction: str | None) -> list[Text]:
        """Return the pieces of a prompt, with marks as ids."""
        ids = dict(zip(self.reader.marks, self._ids[:, None], strict=True))
        pieces = self.reader.write(query, documents, instruction)
        return [ids.get(piece, piece) if isinstance(piece, str) else piece for piece in pieces]

    def _add(
        self, batch: TextBatch, query: Text, documents: Sequence[Text], instruction: str | None
    ) -> Callable[[], np.ndarray]:
        return batch.add_pieces(self._pieces(query, documents, instruction))

    def _encode(self, query: Text, documents: Sequence[Text], instruction: str | None) -> np.ndarray:
        return encode_alone(self.inputs.tokenizer, lambda batch: self._add(batch, query, documents, instruction))

    def _split(self, query: Text, documents: list[Text], instruction: str | None, names: Sequence[str]) -> list[slice]:
        """Return the documents of each prompt, as slices.

        With `truncate`, a document that is too long even for a prompt of its own is cut in `documents`.
        """
        count, limit, most = len(documents), self._limit, self.reader.most
        # A text never has more tokens than bytes.
        bounds = [_bytes(text) for text in (query, *documents)]
        if limit is None:
            return [slice(start, min(start + most, count)) for start in range(0, count, most)]
        head, around = self._around(instruction)
        if count <= most and head + 2 * bounds[0] + sum(bounds[1:]) + around * count + self.reader.spare < limit:
            return [slice(0, count)]
        asked, *sizes = self._sizes([query, *documents])
        room = limit - head - 2 * asked - around
        if room <= 0:
            message = f"the query leaves no room for documents within the model's limit of {limit} tokens"
            raise InputError(message, field="query", remedy=QUERY_TOO_LONG, code="too_long")
        for i, size in enumerate(sizes):
            if size > room and self.truncate:
                documents[i] = self._cut(query, documents[i], instruction, names[i])
                sizes[i] = min(size, room)
        parts, first, used = [], 0, 0
        for i, size in enumerate(sizes):
            if i > first and used + size > room:
                parts.append(slice(first, i))
                first, used = i, 0
            used += size + around
            free = limit - 2 * asked - sum(sizes[first : i + 1])
            if i + 1 - first >= most or free <= self.reader.spare:
                parts.append(slice(first, i + 1))
                first, used = i + 1, 0
        return parts if first == count else [*parts, slice(first, count)]

    def _measure(self, instruction: str | None) -> tuple[int, int]:
        """Return how many tokens of a prompt surround the texts: in total, and at most for each document."""
        one, two = (self._encode("", [""] * count, instruction).size for count in (1, 2))
        return 2 * one - two, two - one + _NUMBER

    def _sizes(self, texts: Sequence[Text]) -> list[int]:
        assert self.inputs.tokenizer is not None
        strings = [text for text in texts if isinstance(text, str)]
        sizes = iter([ids.size for ids in self.inputs.tokenizer.encode_batch(strings, special=False)])
        return [next(sizes) if isinstance(text, str) else text.size for text in texts]

    def _cut(self, query: Text, document: Text, instruction: str | None, name: str) -> Text:
        """Return the part of a document that fits into a prompt with the query."""
        assert self._limit is not None

        def make(text: Text) -> tuple[Text, np.ndarray]:
            return text, self._encode(query, [text], instruction)

        whole, left = make(document), self.truncate == "left"
        over = whole[1].size - self._limit
        if over <= 0:
            return document
        if isinstance(document, str):
            return self.inputs.cut(document, make, self._limit, whole, left=left, size=lambda made: made[1].size)[0]
        return cut_end(document, over, name, left=left) if over < document.size else document

    def _requests(self, ids: np.ndarray, count: int, name: str) -> list[Request]:
        """Return a request for each document of a prompt, and one for the query.

        A request ends at the row that is read.
        """
        places = np.flatnonzero(np.isin(ids, self._ids))
        if ids[places].tolist() != [self._ids[0]] * count + [self._ids[1]]:
            names = " or ".join(self.reader.marks)
            message = f"{name!r} or the query holds the token {names}, which the reranker reads"
            raise InputError(message, field=name, remedy="leave it out of the texts")
        last = int(places[-1]) + 1
        whole = self.inputs.request(ids[:last], name, remedy=f"shorten it, or have documents cut with {TRUNCATE}")
        return [replace(whole, tokens=whole.tokens[: place + 1]) for place in places]

    def finish(self, note: Mapping[str, Any], results: Sequence[Result]) -> Answer:
        rows = iter(results)
        prompts = [list(islice(rows, count + 1)) for count in note["prompts"]]
        scores = self.reader.scores([np.stack([result.values for result in prompt]) for prompt in prompts])
        cached = [[result.cached_tokens for result in prompt if result.cached_tokens is not None] for prompt in prompts]
        return replace(ranked(note, scores, scores), cached_tokens=sum(map(max, cached)) if all(cached) else None)


def _bytes(text: Text) -> int:
    return len(text.encode()) if isinstance(text, str) else int(text.size)


def _own_prompt(name: str) -> InputError:
    message = f"{name} has no effect: the checkpoint ranks lists of documents with its own prompt"
    return InputError(message, field=name, remedy="leave it out")
