"""Reranking: score how well documents answer a query, by logits at the end of a prompt or by embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..errors import InputError
from ..spec.fields import checked
from ..spec.requests import Readout, Request, Result
from ..spec.task import RerankOptions
from ..text import RERANK_INSTRUCTION, FilledTemplate, RerankPrompt, Tokenizer, rerank_prompt
from ..text.media import Picture, check_cut, notes_in
from ..text.prompts import fields_of, fill
from ..text.valid import valid_text, wrong_type
from .base import TRUNCATE, Inputs, Task, Text, TextBatch, Work, cut_end, encode_alone, part_of, sigmoid, work_of
from .embed import EmbedTask, is_list_of_texts
from .results import Answer, Ranking, Relevance
from .score import leading_ids
from .sentence import PairSettings

# {class of torch.nn: function from the logits of a one-label head to scores}. The softmax over one label is 1.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Sigmoid": sigmoid,
    "Identity": np.array,
    "Tanh": np.tanh,
    "Softmax": np.ones_like,
}
TEMPLATES = 16  # size of the cache of prepared templates
QUERY_TOO_LONG = "shorten the query, since truncation cuts the document only"


@dataclass(frozen=True)
class RerankItem:
    """A query with one document to score, or with a list of documents to rank.

    Attributes:
        query: a text or token ids
        document: one text or token ids; give it or `documents`
        documents: a list of texts or token ids; {"text": ...} counts as a text
        instruction: how to judge a document; None: the task's
        top_n: maximum number of ranked documents
        return_documents: return the documents in the result
        max_tokens_per_doc: read only the first tokens of each document, at most this many; None: all
        template: overrides the task's prompt
        adapter: the LoRA adapter; None: the task's
    """

    query: Any
    document: Any = None
    documents: Any = None
    instruction: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    max_tokens_per_doc: int | None = None
    template: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class _Form:
    """The form of a pair's prompt: the ids before, between and after its two texts.

    Attributes:
        body: a text with the fields {query} and {document}; None: the two texts are encoded separately, as a
            tokenizer's pair
    """

    prefix: np.ndarray
    suffix: np.ndarray
    body: str | None = None
    between: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @classmethod
    def of_pair(cls, tokenizer: Tokenizer) -> _Form:
        before, between, after = tokenizer.pair_ids()
        return cls(before, after, between=between)

    @classmethod
    def of_prompt(cls, prompt: RerankPrompt, tokenizer: Tokenizer) -> _Form:
        prefix, suffix = (tokenizer.encode(text, special=False) for text in (prompt.prefix, prompt.suffix))
        if prompt.special is not False:
            before = tokenizer.prefix_ids if prompt.special else leading_ids(tokenizer, prompt.prefix + prompt.body)
            prefix = np.concatenate((before, prefix))
        return cls(prefix, suffix, prompt.body)

    @classmethod
    def of_settings(cls, settings: PairSettings, tokenizer: Tokenizer) -> tuple[_Form, _Form | None]:
        """Return (the form without an instruction, the form with one).

        The second form is None if the checkpoint does not define it.
        """
        if settings.prompt is None:
            return cls.of_pair(tokenizer), None
        form = cls.of_prompt(settings.prompt, tokenizer)
        if settings.instructed is not None:
            return form, cls.of_prompt(settings.instructed, tokenizer)
        return form, form if "instruction" in fields_of(settings.prompt.body) else None

    @property
    def ends_with_document(self) -> bool:
        """Return whether cutting the end of the body cuts only the document."""
        return self.body is None or self.body.endswith("{document}")

    def add(self, batch: TextBatch, fields: Mapping[str, Text]) -> Callable[[], np.ndarray]:
        """Add the body of a prompt to the batch. Return a getter of its ids."""
        if self.body is not None:
            return batch.add_pieces(_pieces(self.body, fields))
        query, document = batch.add(fields["query"]), batch.add(fields["document"])
        return lambda: np.concatenate((query(), self.between, document()))


class RerankTask(Task):
    """Scores of documents. Items are RerankItem, a mapping with its fields, or a pair (query, document or documents).

    The answer is a Relevance for one document, and a Ranking for a list. Equal scores keep the order of the documents.
    The prompt is Qwen3-Reranker's, a template, or the bare pair.

    The score is made from logits at the prompt's last token:

    - by default sigmoid(logit of "yes" - logit of "no")
    - with LogitScore of sentence-transformers in the checkpoint: the tokens that the files name, one or two
    - with a classification head of one label: its logit

    The last two use the checkpoint's activation (default: sigmoid). `raw_scores` omits the activation.
    """

    name = "rerank"
    example: Answer = Relevance(0.0)
    item_type = RerankItem

    def __init__(self, inputs: Inputs, options: RerankOptions, settings: PairSettings | None = None):
        """Raise InputError for a wrong template or wrong words, and if there is no tokenizer.

        Args:
            settings: the settings for pairs in the checkpoint's files; None: compare the logits of the words
        """
        if inputs.tokenizer is None:
            raise InputError("reranking needs a tokenizer", field="tokenizer", remedy="use a checkpoint that has one")
        self.inputs = inputs
        self.strips = settings is not None and settings.strips and options.template is None
        self.add_special_tokens = options.add_special_tokens
        self._form_of = lru_cache(maxsize=TEMPLATES)(self._form_of_template)
        self.instruction = RERANK_INSTRUCTION
        self.before = ""  # text before the query of a plain pair
        self.instructed: _Form | None
        if options.template is not None:
            self.form = self.instructed = self._form_of(options.template)
        elif settings is None:
            self.form = self.instructed = _Form.of_prompt(rerank_prompt(inputs.tokenizer), inputs.tokenizer)
        else:
            self.form, self.instructed = _Form.of_settings(settings, inputs.tokenizer)
            if settings.prompt is None:
                self.before = settings.instruction or ""
            elif settings.instruction is not None:
                self.instruction, self.form = settings.instruction, self._instructed()
        if options.instruction is not None:
            self.instruction, self.form = valid_text(options.instruction, "instruction"), self._instructed()
        activation = "Sigmoid" if settings is None else settings.activation
        self.activation = ACTIVATIONS["Identity" if options.raw_scores else activation]
        self.truncate = options.truncate
        if settings is not None and settings.ids and tuple(options.words) == RerankOptions.words:
            inputs.check_ids(np.array(settings.ids), "true_token_id, false_token_id")
            self.readout = Readout("logits", settings.ids)
        elif settings is None or settings.ids:
            self.readout = Readout("logits", word_ids(inputs, options.words))
        else:
            self.readout = Readout("head")

    def _instructed(self) -> _Form:
        """Return the form of prompts with an instruction. Raise InputError if the checkpoint has no such form."""
        if self.instructed is None:
            plain = self.form.body is None
            does = "reads query and document as they are" if plain else "has a chat template with no place for one"
            message = f"the checkpoint {does}, without an instruction"
            raise InputError(message, field="instruction", remedy="leave it out, or give a template with {instruction}")
        return self.instructed

    def _form_of_template(self, template: str) -> _Form:
        assert self.inputs.tokenizer is not None
        prompt = RerankPrompt.from_template(valid_text(template, "template"), self.add_special_tokens)
        return _Form.of_prompt(prompt, self.inputs.tokenizer)

    def _as_item(self, item: Any) -> Any:
        """Convert a pair to a RerankItem."""
        if isinstance(item, (tuple, list)) and len(item) == 2:
            query, value = item
            several = is_list_of_texts(value) or (isinstance(value, (list, tuple)) and len(value) == 0)
            return RerankItem(query, documents=value) if several else RerankItem(query, document=value)
        return item

    def _plan(self, item: Any, batch: TextBatch) -> Any:
        pictures: list[Picture] = []
        query = self.inputs.bounded(self.inputs.content(item.query, "query", pictures), "query", remedy=QUERY_TOO_LONG)
        instruction = self.instruction if item.instruction is None else item.instruction
        instruction = self.inputs.text(instruction, "instruction", pictures)
        if item.template is not None:
            form = self._form_of(checked(str, item.template, "template"))
        else:
            form = self.form if item.instruction is None else self._instructed()
            query = self.before + query if isinstance(query, str) else query
        documents, names = documents_of(item)
        makers = []
        for document, name in zip(contents_of(self.inputs, item, pictures), names, strict=True):
            document = self.inputs.bounded(document, name, self.truncate, left=self.truncate == "left")
            fields = {"instruction": instruction, "query": query, "document": document}
            if self.strips and item.template is None:
                fields = {key: value.strip() if isinstance(value, str) else value for key, value in fields.items()}
            makers.append(partial(self._request, form, form.add(batch, fields), fields, name))

        def make() -> Work:
            return work_of([maker() for maker in makers], pictures, **note)

        note = note_of(item, documents)
        return make

    def gather(self, works: Sequence[Work], top_n: int | None = None) -> Work:
        """Join Works with the same query and one document each into one Work, which ranks the documents together."""
        top_n = None if top_n is None else checked(int, top_n, "top_n", least=1)
        return work_of([request for work in works for request in work.requests], list=True, top_n=top_n)

    def _request(self, form: _Form, get: Callable[[], np.ndarray], fields: Mapping[str, Text], name: str) -> Request:
        body = get()
        over = self.inputs.over(form.prefix.size + body.size + form.suffix.size)
        if over and self.truncate:
            self._check_room_for_document(form, fields, name)
            whole, body = body, self._cut(form, fields, body, over, name)
            check_cut(whole, body, name)
        tokens = np.concatenate((form.prefix, body, form.suffix))
        return self.inputs.request(tokens, name, remedy=f"shorten it, or have documents cut with {TRUNCATE}")

    def _cut(self, form: _Form, fields: Mapping[str, Text], body: np.ndarray, over: int, name: str) -> np.ndarray:
        """Cut the document in a body, so that the body has at least `over` ids less.

        Return the body unchanged if the document is too short.
        """
        document, left, room = fields["document"], self.truncate == "left", body.size - over
        shortest = body[:room] if form.ends_with_document else body
        if form.ends_with_document and not left and not isinstance(document, FilledTemplate):
            return shortest
        if isinstance(document, str):
            text = document if self.truncate is True else str.__str__(document)
            return self.inputs.cut(
                text, lambda cut: self._encode(form, {**fields, "document": cut}), room, shortest, left=left
            )
        if over >= document.size:
            return body
        return self._encode(form, {**fields, "document": cut_end(document, over, name, left=left)})

    def _encode(self, form: _Form, fields: Mapping[str, Text]) -> np.ndarray:
        return encode_alone(self.inputs.tokenizer, lambda batch: form.add(batch, fields))

    def _check_room_for_document(self, form: _Form, fields: Mapping[str, Text], name: str) -> None:
        """Raise InputError if the prompt is too long even without the document."""
        before = self._encode(form, {**fields, "document": ""})
        if self.inputs.over(form.prefix.size + before.size + 1 + form.suffix.size):
            raise InputError(
                f"the prompt leaves no room for {name!r} within the model's limit of {self.inputs.max_length} tokens",
                field="query",
                remedy=QUERY_TOO_LONG,
                code="too_long",
            )

    def finish(self, note: Any, results: Sequence[Result]) -> Answer:
        margins = np.array([self._margin(result) for result in results])
        # Rank by the margin: far from zero, the sigmoid rounds different margins to equal scores.
        return ranked(note, margins, self.activation(margins))

    def _margin(self, result: Result) -> float:
        values = result.values
        return float(values[0]) - (float(values[1]) if len(self.readout.ids) == 2 else 0.0)


class CosineTask(EmbedTask):
    """Reranking with an embedding model: the score is the cosine of the vectors of query and document.

    Both texts are embedded as in the task embed, with the checkpoint's default prompt if it has one. Everything else is
    as in RerankTask.
    """

    name = "rerank"
    example = RerankTask.example
    item_type = RerankItem
    _as_item = RerankTask._as_item

    def _plan(self, item: Any, batch: TextBatch) -> Any:
        into_query = "leave it out, or write it into the query"
        for name, what, remedy in (
            ("instruction", "an instruction", into_query),
            ("template", "a template", "leave it out"),
        ):
            if getattr(item, name) is not None:
                message = f"the checkpoint embeds query and document unchanged, without {what}"
                raise InputError(message, field=name, remedy=remedy)
        pictures: list[Picture] = []
        documents, names = documents_of(item)
        plan = self._plan_text if self.settings.chat is None else self._plan_message
        makers = [plan(item.query, "query", batch, pictures)]
        for document, name in zip(contents_of(self.inputs, item, pictures), names, strict=True):
            makers.append(plan(document, name, batch, pictures))
        note = note_of(item, documents)
        return lambda: work_of([maker() for maker in makers], pictures, **note)

    def gather(self, works: Sequence[Work], top_n: int | None = None) -> Work:
        """Join Works with the same query and one document each into one Work, which ranks the documents together."""
        top_n = None if top_n is None else checked(int, top_n, "top_n", least=1)
        return work_of([request for work in works for request in work.requests], list=True, top_n=top_n, in_pairs=True)

    def finish(self, note: Any, results: Sequence[Result]) -> Answer:
        results = [results[0], *results[1::2]] if note.get("in_pairs") else results  # drop repeated queries
        vectors = np.ascontiguousarray(self._vectors(None, results))
        lengths = np.maximum(np.linalg.norm(vectors, axis=1), np.float32(1e-12))
        scores = (vectors[1:] @ vectors[0] / (lengths[1:] * lengths[0])).astype(np.float64)
        return ranked(note, scores, scores)


def word_id(tokenizer: Tokenizer, word: str) -> int:
    """Return the id of a word that is one token. Raise InputError for any other word."""
    ids = tokenizer.encode(word, special=False)
    if ids.size != 1:
        message = f"the word {word!r} is {ids.size} tokens in this model's vocabulary, not one"
        raise InputError(message, field="words", remedy="give two words that are one token each")
    return int(ids[0])


def word_ids(inputs: Inputs, words: Sequence[str]) -> tuple[int, int]:
    if isinstance(words, str) or len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise InputError(
            f"words (--words) is {words!r}, not two words", field="words", remedy='give two words, like ("yes", "no")'
        )
    assert inputs.tokenizer is not None
    yes, no = (word_id(inputs.tokenizer, word) for word in words)
    if yes == no:
        message = f"the words {words[0]!r} and {words[1]!r} are the same token"
        raise InputError(message, field="words", remedy="give two different ones")
    inputs.check_ids(np.array((yes, no)), "words")
    return yes, no


def documents_of(item: RerankItem) -> tuple[list[Any], list[str]]:
    """Return (the documents of an item, the field of each in errors). Raise InputError if there are none."""
    if (item.document is None) == (item.documents is None):
        both = "both" if item.document is not None else "neither"
        message = f"the item has {both} of the fields 'document' and 'documents'"
        raise InputError(message, field="documents", remedy="give one of them", code="missing_field")
    if item.documents is None:
        return [item.document], ["document"]
    if not isinstance(item.documents, (list, tuple, np.ndarray)):
        raise wrong_type(item.documents, "documents", "a list", "give a list of texts")
    if len(item.documents) == 0:
        raise InputError("'documents' is empty", field="documents", remedy="give at least one", code="empty")
    return list(item.documents), [f"documents[{i}]" for i in range(len(item.documents))]


def contents_of(inputs: Inputs, item: RerankItem, pictures: list[Picture]) -> Iterator[Text]:
    """Yield the documents of an item as texts or token ids, cut to `max_tokens_per_doc`."""
    most = item.max_tokens_per_doc
    most = None if most is None else checked(int, most, "max_tokens_per_doc", least=1)
    for value, name in zip(*documents_of(item), strict=True):
        document = inputs.content(_text_of(value), name, pictures)
        yield document if most is None else _first(inputs, document, most, name)


def _first(inputs: Inputs, document: Text, most: int, name: str) -> Text:
    """Return the first `most` tokens of a document, as text or ids."""
    if not isinstance(document, str):
        check_cut(document, document[:most], name)
        return document[:most]
    tokenizer = inputs.tokenizer
    assert tokenizer is not None
    document = tokenizer.part(document, most)
    return part_of(document, tokenizer.spans(document), most, False)


def note_of(item: RerankItem, documents: Sequence[Any]) -> dict[str, Any]:
    """Return the note of an item, for `ranked`."""
    top_n = None if item.top_n is None else checked(int, item.top_n, "top_n", least=1)
    note: dict[str, Any] = {} if item.documents is None else {"list": True, "top_n": top_n}
    if item.documents is not None and item.return_documents:
        texts = map(_text_of, documents)
        note["documents"] = [text if isinstance(text, str) else [int(i) for i in text] for text in texts]
    return note


def ranked(note: Mapping[str, Any], keys: np.ndarray, scores: np.ndarray) -> Relevance | Ranking:
    """Return the answer to an item.

    Args:
        keys: the sort keys of the documents, the largest comes first
    """
    if not note.get("list"):
        return Relevance(float(scores[0]), note["tokens"], notes_in(note))
    order = np.argsort(-keys, kind="stable")
    order = order[np.isfinite(scores[order])][: note["top_n"]].tolist()
    documents = [note["documents"][i] for i in order] if "documents" in note else None
    return Ranking(scores, order, num_tokens=note["tokens"], documents=documents, image_notes=notes_in(note))


def _text_of(document: Any) -> Any:
    return document["text"] if isinstance(document, Mapping) and "text" in document else document


def _pieces(template: str, values: Mapping[str, Text]) -> list[Text]:
    """Return a filled template as one text, or as pieces if the value of a field is token ids."""
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    pieces: list[Text] = []
    rest = template
    for name in fields_of(template):
        if name in values and name not in texts:
            before, _, rest = rest.partition("{" + name + "}")
            pieces += [fill(before, texts), values[name]]
    return [*pieces, fill(rest, texts)]
