"""The bodies of Hugging Face's Text Embeddings Inference (TEI)."""

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

# {status or code of an error: (TEI's status, TEI's error_type)}
_TYPES: dict[int | str, tuple[int, str]] = {
    429: (429, "Overloaded"), 500: (424, "Backend"), 503: (503, "Unhealthy"), 400: (422, "Validation"),
    "empty": (400, "Empty"), "invalid_json": (400, "Validation"), "unsupported_model": (424, "Backend"),
}  # fmt: skip
# {huggingface_hub's name: function from logits to scores}
_FUNCTIONS = {"sigmoid": sigmoid, "softmax": softmax, "none": np.asarray}
Direction = Word("Direction", {"Left": "Left", "Right": "Right"})
Function = Word("Function", {name: name for name in _FUNCTIONS})
Inputs = Annotated[Any, doc("A text, or texts.", **TEXT_OR_TEXTS)]
PromptName = Annotated[Any, doc("Name of the checkpoint's prompt that is put before the texts.", "string")]


def tei_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Return (status, body) of an error in TEI's form."""
    status, kind = _TYPES.get(code) or _TYPES.get(status, (status, "Validation"))
    return status, {"error": message, "error_type": kind}


class Truncation(Body, kw_only=True):
    """The options for cutting a text that is too long."""

    truncate: Annotated[bool, doc("Cut a text that is too long (false: an error).")] = False
    truncation_direction: Direction = Direction.Right

    @property
    def options(self) -> dict[str, Any]:
        """Return the task's options for truncation, and for the checkpoint's prompt that the body names."""
        name = getattr(self, "prompt_name", None)
        truncation = {"truncate": self.truncation_direction.lower()} if self.truncate else {}
        return truncation if name is None else truncation | {"prompt_name": name}


class Prompted(Truncation):
    prompt_name: PromptName = None


class TeiBody(Truncation, kw_only=True):
    """The body of a request whose texts may be cut."""

    model: Model = None


class TeiEmbed(TeiBody, kw_only=True):
    """Embed texts."""

    inputs: Inputs
    normalize: Annotated[bool, doc("Scale vectors to length 1.")] = True
    prompt_name: PromptName = None
    dimensions: Annotated[Any, doc("Keep only this many values of each vector.", "integer", minimum=1)] = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Return a TaskOrder for the vector of each input.

        Raise UnsupportedModelError for a model with a classification head.
        """
        options = {"normalize": self.normalize, **self.options}
        items = [{"text": self.inputs, "dimensions": self.dimensions}]
        order = TaskOrder("embed", items, lambda answers: answers[0].vectors, options, {"text": "inputs"})
        return vectors_of(order, served)


class TeiEmbedAll(TeiBody, kw_only=True):
    """Embed every token of texts."""

    inputs: Inputs
    prompt_name: PromptName = None


class TeiRerank(TeiBody, kw_only=True):
    """Score texts by how well they answer a query, the best first."""

    query: Annotated[Any, doc("The query.", "string")]
    texts: Annotated[Any, doc("The texts to score.", "array", items={"type": "string"})]
    raw_scores: Annotated[bool, doc("Return raw logits instead of probabilities.")] = False
    return_text: Annotated[bool, doc("Return the text of each result.")] = False
    top_n: Annotated[Any, doc("Maximum number of texts to return, the best ones.", "integer", minimum=1)] = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Return a TaskOrder for the score of each text, the best first.

        As in TEI, raise UnsupportedModelError for a model that embeds texts.
        """
        if isinstance(served.llm.task("rerank"), CosineTask):
            raise UnsupportedModelError("the model embeds texts and is not a reranker; use /similarity, or /v1/rerank")
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
    """Classify texts: return each label with its score."""

    inputs: Annotated[Any, doc("A text, a pair of texts, or a list of [text] and [text, text].", **TEXT_OR_TEXTS)]
    raw_scores: Annotated[bool, doc("Return raw logits instead of probabilities.")] = False
    parameters: Parameters | None = None

    def order(self, served: ServedModel) -> TaskOrder:
        """Return a TaskOrder for the scores of all labels.

        With "parameters", which huggingface_hub sends, a single text is answered as a list of one. Raise InputError for
        wrong inputs, and UnsupportedModelError for a model without a classification head.
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
    """Compare one text with others: return the cosines of their vectors."""

    inputs: Sentences
    model: Model = None
    parameters: Prompted | None = None

    remedies: ClassVar = {
        "inputs": 'give {"source_sentence": "...", "sentences": ["...", ...]}',
        "parameters": "leave it out",
    }

    def order(self, served: ServedModel) -> TaskOrder:
        """Return a TaskOrder for the cosine between a sentence and each of several sentences.

        Raise UnsupportedModelError for a model with a classification head.
        """

        def make(answers: Sequence[Embedding]) -> Any:
            vectors = np.stack([answer.embedding for answer in answers])
            return vectors[1:] @ vectors[0]

        options = {"normalize": True, **(self.parameters or Prompted()).options}
        items = [{"text": text} for text in (self.inputs.source_sentence, *self.inputs.sentences)]
        return vectors_of(TaskOrder("embed", items, make, options, {"text": "inputs"}), served)


class TeiTokenize(Body):
    """Tokenize texts: return the tokens with their positions."""

    inputs: Annotated[str | list[Any], doc("A text, or texts.")]
    model: Model = None
    add_special_tokens: bool = True
    prompt_name: PromptName = None


class TeiDecode(Body):
    """Decode token ids to text."""

    ids: Annotated[Any, doc("Token ids, or lists of them.", **IDS_OR_LISTS)]
    model: Model = None
    skip_special_tokens: bool = True


def vectors_of(order: TaskOrder, served: ServedModel) -> TaskOrder:
    """Return `order` unchanged. Raise UnsupportedModelError for a model with a classification head."""
    if served.llm.config.num_labels is not None:
        raise UnsupportedModelError("the model has a classification head and does not embed; use /predict")
    return order
