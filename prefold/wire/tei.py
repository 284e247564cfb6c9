"""Reads and writes the bodies of Hugging Face's Text Embeddings Inference (TEI)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from ..errors import InputError, UnsupportedModelError
from ..tasks.classify import sigmoid, softmax
from ..tasks.rerank import CosineTask
from ..tasks.results import Classification, Embedding, Ranking
from .body import IDS_OR_LISTS, TEXT_OR_TEXTS, Body, Model, ServedModel, TaskOrder, Word, doc
from .numbers import labels_of

# What TEI answers with: {status, or code, of a refusal: (status, error_type)}
_TYPES: dict[int | str, tuple[int, str]] = {
    429: (429, "Overloaded"), 500: (424, "Backend"), 503: (503, "Unhealthy"), 400: (422, "Validation"),
    "empty": (400, "Empty"), "invalid_json": (400, "Validation"), "unsupported_model": (424, "Backend"),
}  # fmt: skip
# What huggingface_hub calls the functions that make scores of logits.
_FUNCTIONS = {"sigmoid": sigmoid, "softmax": softmax, "none": np.asarray}
Direction = Word("Direction", {"Left": "Left", "Right": "Right"})
Function = Word("Function", {name: name for name in _FUNCTIONS})
Inputs = Annotated[Any, doc("A text, or texts.", **TEXT_OR_TEXTS)]
PromptName = Annotated[Any, doc("The checkpoint's prompt that is put before the texts.", "string")]


def tei_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Returns (status, body) of an error in TEI's form."""
    status, kind = _TYPES.get(code) or _TYPES.get(status, (status, "Validation"))
    return status, {"error": message, "error_type": kind}


class Truncation(Body, kw_only=True):
    """Truncation says whether a text that is too long is cut."""

    truncate: Annotated[bool, doc("Cut what is too long; else it is an error.")] = False
    truncation_direction: Direction = Direction.Right

    @property
    def options(self) -> dict[str, Any]:
        """Returns the task's options for truncation, and for the checkpoint's prompt that the body names."""
        name = getattr(self, "prompt_name", None)
        truncation = {"truncate": self.truncation_direction.lower()} if self.truncate else {}
        return truncation if name is None else truncation | {"prompt_name": name}


class Prompted(Truncation):
    prompt_name: PromptName = None


class TeiBody(Truncation, kw_only=True):
    """A TeiBody is the body of a request whose texts may be cut."""

    model: Model = None


class TeiEmbed(TeiBody, kw_only=True):
    """Returns the vectors of texts."""

    inputs: Inputs
    normalize: Annotated[bool, doc("Whether vectors are scaled to length 1.")] = True
    prompt_name: PromptName = None
    dimensions: Annotated[Any, doc("The vectors' first so many numbers.", "integer", minimum=1)] = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Returns the order for a vector of each input. Raises UnsupportedModelError."""
        options = {"normalize": self.normalize, **self.options}
        items = [{"text": self.inputs, "dimensions": self.dimensions}]
        order = TaskOrder("embed", items, lambda answers: answers[0].vectors, options, {"text": "inputs"})
        return vectors_of(order, served)


class TeiEmbedAll(TeiBody, kw_only=True):
    """Returns the vectors of all tokens of texts."""

    inputs: Inputs
    prompt_name: PromptName = None


class TeiRerank(TeiBody, kw_only=True):
    """Scores texts by how well they answer a query, the best first."""

    query: Annotated[Any, doc("What the texts are to answer.", "string")]
    texts: Annotated[Any, doc("The texts.", "array", items={"type": "string"})]
    raw_scores: Annotated[bool, doc("Scores before they are made probabilities.")] = False
    return_text: Annotated[bool, doc("Whether each result holds its text.")] = False
    top_n: Annotated[Any, doc("How many of the best texts are answered.", "integer", minimum=1)] = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Returns the order for a score of each text, the best first. Raises UnsupportedModelError for a model that
        embeds texts, as TEI does."""
        if isinstance(served.llm.task("rerank"), CosineTask):
            raise UnsupportedModelError("the model embeds texts and is no reranker; use /similarity, or /v1/rerank")
        options: dict[str, Any] = {"raw_scores": self.raw_scores}
        if self.truncate:
            options["truncate"] = "left" if self.truncation_direction == "Left" else True

        def make(answers: Sequence[Ranking]) -> Any:
            entries: list[dict[str, Any]] = [{"index": i, "score": score} for i, score in answers[0]]
            return [entry | {"text": self.texts[entry["index"]]} for entry in entries] if self.return_text else entries

        item = {"query": self.query, "documents": self.texts, "top_n": self.top_n}
        return TaskOrder("rerank", [item], make, options, {"documents": "texts"})


class Parameters(Body):
    top_k: Annotated[int, Meta(ge=1)] | None = None
    function_to_apply: Function | None = None


class TeiPredict(TeiBody, kw_only=True):
    """Returns the labels of texts, with their scores."""

    inputs: Annotated[Any, doc("A text, a pair of texts, or a list of lists of one text or two.", **TEXT_OR_TEXTS)]
    raw_scores: Annotated[bool, doc("Scores before they are made probabilities.")] = False
    parameters: Parameters | None = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Returns the order for the scores of the labels of the classification head. Raises InputError,
        UnsupportedModelError.

        With "parameters", as huggingface_hub sends it, a text is answered as a list of one.
        """
        inputs, parameters = self.inputs, self.parameters or Parameters()
        is_list = isinstance(inputs, list) and all(isinstance(item, list) for item in inputs)
        texts: list[Any] = []
        for i, item in enumerate(inputs if is_list else [inputs]):
            pair = [item] if isinstance(item, str) else item
            if not isinstance(pair, list) or len(pair) not in (1, 2) or not all(isinstance(text, str) for text in pair):
                name = f"inputs[{i}]" if is_list else "inputs"
                message = f"{name!r} is neither a text nor a pair of texts"
                remedy = "give a text, [text, text], or a list of [text] and [text, text]"
                raise InputError(message, field=name, remedy=remedy, code="wrong_type")
            texts.append(pair[0] if len(pair) == 1 else tuple(pair))
        function = parameters.function_to_apply or (Function.none if self.raw_scores else None)
        if self.raw_scores and function != "none":
            message, remedy = "'raw_scores' and 'function_to_apply' exclude each other", "give one of them"
            raise InputError(message, field="function_to_apply", remedy=remedy)

        def labels(answer: Classification) -> Any:
            scores = answer.probabilities
            if function:
                values = _FUNCTIONS[function.value](np.array([*(answer.logits or {}).values()]))
                scores = dict(zip(scores, values.tolist(), strict=True))
            best = sorted(scores.items(), key=lambda pair: -pair[1])[: parameters.top_k]
            return [{"score": value, "label": label} for label, value in best]

        def make(answers: Sequence[Classification]) -> Any:
            lists = [labels(answer) for answer in answers]
            return lists if is_list or self.parameters is not None else lists[0]

        items = [{"text": text} for text in texts]
        return labels_of(TaskOrder("classify", items, make, self.options, {"text": "inputs"}), served)


class Sentences(Body):
    source_sentence: Annotated[Any, doc("The text.", "string")]
    sentences: list[Any]


class TeiSimilarity(Body):
    """Returns the cosines of one text and others."""

    inputs: Sentences
    model: Model = None
    parameters: Prompted | None = None

    remedies: ClassVar = {
        "inputs": 'give {"source_sentence": "...", "sentences": ["...", ...]}',
        "parameters": "leave it out",
    }

    def order(self, served: ServedModel) -> TaskOrder:
        """Returns the order for the cosine of the angle between a sentence and each of several. Raises
        UnsupportedModelError."""

        def make(answers: Sequence[Embedding]) -> Any:
            vectors = np.stack([answer.embedding for answer in answers])
            return vectors[1:] @ vectors[0]

        options = {"normalize": True, **(self.parameters or Prompted()).options}
        items = [{"text": text} for text in (self.inputs.source_sentence, *self.inputs.sentences)]
        return vectors_of(TaskOrder("embed", items, make, options, {"text": "inputs"}), served)


class TeiTokenize(Body):
    """Returns the tokens of texts, with their places."""

    inputs: Annotated[str | list[Any], doc("A text, or texts.")]
    model: Model = None
    add_special_tokens: bool = True
    prompt_name: PromptName = None


class TeiDecode(Body):
    """Returns the text of token ids."""

    ids: Annotated[Any, doc("Token ids, or lists of them.", **IDS_OR_LISTS)]
    model: Model = None
    skip_special_tokens: bool = True


def vectors_of(order: TaskOrder, served: ServedModel) -> TaskOrder:
    """Returns an order for vectors. Raises UnsupportedModelError for a model with a classification head."""
    if served.llm.config.num_labels is not None:
        raise UnsupportedModelError("the model has a classification head and is no embedding model; use /predict")
    return order
