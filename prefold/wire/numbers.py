"""Requests for embeddings and scores become items of tasks, and the answers become responses.

The APIs are OpenAI's embeddings, /rerank and /v1/score of Cohere and vLLM, and vLLM's /classify and /pooling.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from ..errors import InputError, UnsupportedModelError
from ..tasks.embed import is_list_of_texts
from ..tasks.results import Answer, Classification, Embedding, EmbeddingList, Ranking, Relevance
from .body import (
    IDS_OR_LISTS,
    TEXT_OR_TEXTS,
    Batchable,
    Body,
    Ignored,
    Model,
    ServedModel,
    Settings,
    TaskOrder,
    Word,
    doc,
)

Result = dict[str, Any]
SEARCH_UNIT = 100  # Cohere counts this many documents of a query as one unit
Encoding = Word("Encoding", {"float": "float", "base64": "base64"})
_TEXTS_OR_IDS: Any = [*TEXT_OR_TEXTS["anyOf"], *IDS_OR_LISTS["anyOf"]]
Prompts = Annotated[Any, doc("A text, texts, token ids, or lists of token ids.", anyOf=_TEXTS_OR_IDS)]
DIMENSIONS = doc("Keep only this many values of each vector, scaled to length 1.", "integer", minimum=1)


class Embeddings(Batchable):
    """Embed texts."""

    input: Prompts
    dimensions: Annotated[Any, DIMENSIONS] = None
    encoding_format: Encoding = Encoding.float

    task, fields = "embed", {"text": "input"}
    missing = ("{!r} is missing", "give {}")
    may_be_empty = True
    remedies: ClassVar = Settings.remedies | {"encoding_format": 'use "float" or "base64"'}

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [{"text": self.input, "dimensions": self.dimensions}], {"encoding": self.encoding_format.value}

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Embedding | EmbeddingList]) -> Result:
        vectors: Any = answers[0].vectors
        vectors = in_base64(vectors) if meta["encoding"] == "base64" else vectors
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return {"object": "list", "data": data}


def in_base64(vectors: Any) -> list[str]:
    """Return vectors as base64 of their float32 values."""
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


# ---------------------------------------------------------------------------------------------------------------- pairs


Texts = Annotated[Any, doc("A text, or texts.", **TEXT_OR_TEXTS)]
Instruction = Annotated[Any, doc("The instruction to the reranker.", "string")]
Template = Annotated[Any, doc("The prompt, with {query} and {document} in any order.", "string")]


class Pairs(Batchable, kw_only=True):
    """The body of a request for scores of pairs of texts."""

    instruction: Instruction = None
    template: Template = None

    task = "rerank"

    @classmethod
    def usage(cls, answers: Sequence[Relevance | Ranking]) -> Result:
        usage = Batchable.usage(answers)
        cached_tokens = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(cached_tokens)}} if cached_tokens else usage


class Rerank(Pairs):
    """Score documents by how well they answer a query, the best first."""

    query: Annotated[Any, doc("The query.", "string")]
    documents: Annotated[Any, doc('Texts, or objects {"text": ...}.', "array", items={"type": ["string", "object"]})]
    top_n: Annotated[Any, doc("Maximum number of documents to return, the best ones.", "integer", minimum=1)] = None
    return_documents: Annotated[bool, doc("Return the document of each result.")] = True
    max_tokens_per_doc: Annotated[Any, doc("Read at most this many tokens of each document.", "integer", minimum=1)] = (
        None
    )

    prefix = "rerank-"
    missing = ("{!r} is missing", "give {}")
    may_be_empty = True

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        if isinstance(self.query, list):
            raise InputError("'query' is a list", field="query", remedy="give one text", code="wrong_type")
        names = ("query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruction", "template")
        return [{name: value for name in names if (value := getattr(self, name)) is not None}], {}

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Ranking]) -> Result:
        (ranking,) = answers
        entries: list[Result] = [{"index": i, "relevance_score": score} for i, score in ranking]
        for entry, document in zip(entries, ranking.documents or [], strict=False):
            entry["document"] = {"text": document}
        units = {"search_units": -(-len(ranking.scores) // SEARCH_UNIT)}
        return {"results": entries, "meta": {"api_version": {"version": "2"}, "billed_units": units}}


class Scoring(Pairs):
    """Score pairs of texts: `text_1` with `text_2`. The other fields are aliases of these two."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    prefix = "score-"
    fields: ClassVar = {"query": "text_1", "document": "text_2", "documents": "text_2"}

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return one item for one text with one or many others, or an item for each pair.

        Raise InputError for wrong texts.
        """
        sides = []
        for name, aliases in (("text_1", ("queries", "data_1")), ("text_2", ("documents", "items", "data_2"))):
            texts = next((value for alias in (name, *aliases) if (value := getattr(self, alias)) is not None), None)
            if texts is None:
                raise InputError(f"{name!r} is missing", field=name, remedy=f"give {name}", code="missing_field")
            if texts == []:
                raise InputError(f"{name!r} is empty", field=name, remedy="give at least one text", code="empty")
            sides.append(texts if isinstance(texts, list) else [texts])
        (first, second), fixed = sides, {"instruction": self.instruction}
        if self.template is not None:
            fixed["template"] = self.template
        if len(first) == 1:
            return [{"query": first[0], "documents": second, **fixed}], {}
        if len(first) != len(second):
            message = f"'text_1' has {len(first)} texts and 'text_2' {len(second)}, which do not form pairs"
            remedy = "give one text, or the same number as in text_2"
            raise InputError(message, field="text_1", remedy=remedy, code="wrong_type")
        return [{"query": a, "document": b, **fixed} for a, b in zip(first, second, strict=True)], {}

    @classmethod
    def body(cls, meta: Mapping[str, Any], answers: Sequence[Relevance | Ranking]) -> Result:
        scores: list[float] = []
        for answer in answers:
            scores += answer.scores.tolist() if isinstance(answer, Ranking) else [answer.score]
        return {"object": "list", "data": [{"object": "score", "index": i, "score": s} for i, s in enumerate(scores)]}


# -------------------------------------------------------------------------------------------------------------- pooling


class Classify(Settings):
    """Classify texts with the classification head: return a label and the scores of all labels."""

    input: Prompts
    use_activation: Annotated[bool | None, doc("false: return logits, or vectors that are not normalised.")] = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Return a TaskOrder for the label of each text.

        Raise UnsupportedModelError for a model without a classification head.
        """
        return labels_of(self._labels(served, f"classify-{served.id}"), served)

    def _labels(self, served: ServedModel, id: str) -> TaskOrder:

        def entry(answer: Classification) -> Result:
            values = answer.logits if self.use_activation is False else answer.probabilities
            return self._entry(answer, np.array([*(values or {}).values()]))

        return self._ordered(served, id, "classify", entry, {})

    def _entry(self, answer: Any, values: np.ndarray) -> Result:
        return {"label": answer.label, "probs": values, "num_classes": len(values)}

    def _ordered(
        self,
        served: ServedModel,
        id: str,
        task: str,
        entry: Callable[[Any], Result],
        options: Mapping[str, Any],
        **more: Any,
    ) -> TaskOrder:
        """Return a TaskOrder with one item for each text.

        Args:
            served: The served model and the settings of the server.
            id: The id of the response.
            task: The name of the task.
            entry: entry(answer to an item) -> its part of the response.
            options: Options of the task.
            more: Further fields of each item.
        """

        def make(answers: Sequence[Answer]) -> Result:
            head = {"id": id, "object": "list", "created": int(time.time()), "model": served.model}
            data = [{"index": index} | entry(answer) for index, answer in enumerate(answers)]
            return head | {"data": data, "usage": Batchable.usage(answers)}

        texts = self.input if is_list_of_texts(self.input) else [self.input]
        items, options = [{"text": text, **more} for text in texts], {**options, **self.options(task)}
        return TaskOrder(task, items, make, options, {"text": "input"}, self.cache_prompt)


class Pooling(Classify, kw_only=True):
    """Return embeddings, or the values of the classification head if the model has one."""

    task: Annotated[Any, doc("embed, or classify if the model has a classification head.", "string")] = None
    dimensions: Annotated[Any, DIMENSIONS] = None
    encoding_format: Encoding = Encoding.float

    def order(self, served: ServedModel) -> TaskOrder:
        """Return a TaskOrder for vectors, or for the values of the model's classification head.

        Raise InputError for wrong fields.
        """
        task, id = "embed" if served.llm.config.num_labels is None else "classify", f"pool-{served.id}"
        if self.task is not None and str(self.task).lower() != task:
            message, remedy = f"'task' is {self.task!r:.100}", f"give one of {task}"
            raise InputError(message, field="task", remedy=remedy, code="wrong_type")
        if task == "embed":
            options = {} if self.use_activation is None else {"normalize": self.use_activation}

            def entry(answer: Embedding) -> Result:
                return self._entry(answer, answer.embedding)

            return self._ordered(served, id, task, entry, options, dimensions=self.dimensions)
        if self.dimensions is not None:
            message, remedy = "'dimensions' is for embeddings, but the model classifies", "leave it out"
            raise InputError(message, field="dimensions", remedy=remedy, code="unsupported")
        return self._labels(served, id)

    def _entry(self, answer: Any, values: np.ndarray) -> Result:
        return {"object": "pooling", "data": in_base64([values])[0] if self.encoding_format == "base64" else values}


def labels_of(order: TaskOrder, served: ServedModel) -> TaskOrder:
    """Return `order` unchanged. Raise UnsupportedModelError for a model without a classification head."""
    if served.llm.config.num_labels is None:
        message = "the model has no classification head; serve a model ...ForSequenceClassification"
        raise UnsupportedModelError(message)
    return order


def _ubinary(vectors: np.ndarray) -> Any:
    return np.packbits(vectors > 0, axis=1)


_FORMS: dict[str, Any] = {
    "float": lambda vectors: vectors,
    "base64": in_base64,
    "ubinary": _ubinary,
    "binary": lambda vectors: (_ubinary(vectors).astype(np.int16) - 128).astype(np.int8),
}
# {input_type: name of the checkpoint's prompt for texts of this type, if it has one}
_INPUTS = {
    "search_query": "query", "search_document": "document", "classification": "classification",
    "clustering": "clustering",
}  # fmt: skip
InputType = Word("InputType", {name: name for name in _INPUTS})
Truncate = Word("Truncate", {name: name for name in ("NONE", "START", "END")})


class CohereEmbed(Body, kw_only=True):
    """Embed texts."""

    model: Model = None
    texts: list[str]
    input_type: InputType = InputType.search_document
    embedding_types: Annotated[list[str] | None, doc(f"Formats of the vectors: {', '.join(_FORMS)}.")] = None
    output_dimension: Annotated[Any, DIMENSIONS] = None
    truncate: Truncate = Truncate.END
    priority: Ignored = None

    remedies: ClassVar = {"texts": "give a list of texts", "embedding_types": f"give some of {', '.join(_FORMS)}"}

    def order(self, served: ServedModel, default: Sequence[str] | None = None) -> TaskOrder:
        """Return a TaskOrder for the vector of each text, in one or more formats.

        Raise InputError for unknown formats. int8 and uint8 are unknown here, because their scale is only defined by
        models trained for them.

        Args:
            served: The served model and the settings of the server.
            default: embedding_types of a body without them; None: return a bare list of vectors, as /v1/embed does.
        """
        types = default if self.embedding_types is None else self.embedding_types
        for kind in types or ():
            if kind not in _FORMS:
                message, remedy = f"the embedding type {kind!r:.100} is not supported", f"use {', '.join(_FORMS)}"
                raise InputError(message, field="embedding_types", remedy=remedy, code="unsupported")
        options: dict[str, Any] = {}
        if self.truncate != "NONE":
            options["truncate"] = "left" if self.truncate == "START" else "right"
        prompt = _INPUTS[self.input_type.value]
        if prompt in served.llm.task("embed").settings.prompts:
            options["prompt_name"] = prompt

        def make(answers: Sequence[EmbeddingList]) -> Result:
            (answer,) = answers
            meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": answer.num_tokens}}
            head, vectors = {"id": served.id, "texts": self.texts, "meta": meta}, answer.embeddings
            if types is None:
                return head | {"response_type": "embeddings_floats", "embeddings": vectors}
            forms = {kind: _FORMS[kind](vectors) for kind in types}
            return head | {"response_type": "embeddings_by_type", "embeddings": forms}

        items = [{"text": self.texts, "dimensions": self.output_dimension}]
        return TaskOrder("embed", items, make, options, {"text": "texts", "dimensions": "output_dimension"})


def cohere_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Return (status, body) of an error in Cohere's form."""
    return status, {"message": message}
