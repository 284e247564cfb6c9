"""Reads and writes the bodies of Hugging Face's Text Embeddings Inference (TEI)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from ..errors import InputError
from ..tasks.classify import sigmoid, softmax
from .body import IDS_OR_LISTS, TEXT_OR_TEXTS, Body, TaskOrder, Word, doc

Sent = Mapping[str, Any]
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
    def cut(self) -> dict[str, Any]:
        """Returns the task's option for it."""
        return {"truncate": self.truncation_direction.lower()} if self.truncate else {}


class Prompted(Truncation):
    prompt_name: PromptName = None


class TeiEmbed(Truncation):
    """Returns the vectors of texts."""

    inputs: Inputs
    normalize: Annotated[bool, doc("Whether vectors are scaled to length 1.")] = True
    prompt_name: PromptName = None
    dimensions: Annotated[Any, doc("The vectors' first so many numbers.", "integer", minimum=1)] = None


class TeiEmbedAll(Truncation):
    """Returns the vectors of all tokens of texts."""

    inputs: Inputs
    prompt_name: PromptName = None


class TeiRerank(Truncation):
    """Scores texts by how well they answer a query, the best first."""

    query: Annotated[Any, doc("What the texts are to answer.", "string")]
    texts: Annotated[Any, doc("The texts.", "array", items={"type": "string"})]
    raw_scores: Annotated[bool, doc("Scores before they are made probabilities.")] = False
    return_text: Annotated[bool, doc("Whether each result holds its text.")] = False
    top_n: Annotated[Any, doc("How many of the best texts are answered.", "integer", minimum=1)] = None


class Parameters(Body):
    top_k: Annotated[int, Meta(ge=1)] | None = None
    function_to_apply: Function | None = None


class TeiPredict(Truncation):
    """Returns the labels of texts, with their scores."""

    inputs: Annotated[Any, doc("A text, a pair of texts, or a list of lists of one text or two.", **TEXT_OR_TEXTS)]
    raw_scores: Annotated[bool, doc("Scores before they are made probabilities.")] = False
    parameters: Parameters | None = None


class Sentences(Body):
    source_sentence: Annotated[Any, doc("The text.", "string")]
    sentences: list[Any]


class TeiSimilarity(Body):
    """Returns the cosines of one text and others."""

    inputs: Sentences
    parameters: Prompted | None = None

    remedies: ClassVar = {
        "inputs": 'give {"source_sentence": "...", "sentences": ["...", ...]}',
        "parameters": "leave it out",
    }


class TeiTokenize(Body):
    """Returns the tokens of texts, with their places."""

    inputs: Annotated[str | list[Any], doc("A text, or texts.")]
    add_special_tokens: bool = True
    prompt_name: PromptName = None


class TeiDecode(Body):
    """Returns the text of token ids."""

    ids: Annotated[Any, doc("Token ids, or lists of them.", **IDS_OR_LISTS)]
    skip_special_tokens: bool = True


def read_embed(sent: Sent) -> TaskOrder:
    """Returns what /embed asks: a vector of each input. Raises InputError."""
    body = TeiEmbed.of(sent)
    options = {"normalize": body.normalize, **body.cut}
    if body.prompt_name is not None:
        options["prompt_name"] = body.prompt_name

    def make(results: list[dict[str, Any]]) -> Any:
        (result,) = results
        return result["embeddings"] if "embeddings" in result else [result["embedding"]]

    return TaskOrder("embed", [{"text": body.inputs, "dimensions": body.dimensions}], make, options, {"text": "inputs"})


def read_texts_rerank(sent: Sent) -> TaskOrder:
    """Returns what /rerank asks: a score of each text, the best first. Raises InputError."""
    body = TeiRerank.of(sent)
    options: dict[str, Any] = {"raw_scores": body.raw_scores}
    if body.truncate:
        options["truncate"] = "left" if body.truncation_direction == "Left" else True

    def make(results: list[dict[str, Any]]) -> Any:
        (result,) = results
        entries = [{"index": i, "score": result["scores"][i]} for i in result["order"]]
        return [one | {"text": body.texts[one["index"]]} for one in entries] if body.return_text else entries

    item = {"query": body.query, "documents": body.texts, "top_n": body.top_n}
    return TaskOrder("rerank", [item], make, options, {"documents": "texts"})


def read_predict(sent: Sent) -> TaskOrder:
    """Returns what /predict asks: how likely the labels of the classification head are. Raises InputError.

    Inputs are a text, a pair of texts, or a list of lists of one text or two each. With "parameters", as
    huggingface_hub sends it, a text is answered as a list of one.
    """
    body = TeiPredict.of(sent)
    inputs, parameters = body.inputs, body.parameters or Parameters()
    many = isinstance(inputs, list) and all(isinstance(one, list) for one in inputs)
    texts: list[Any] = []
    for i, one in enumerate(inputs if many else [inputs]):
        pair = [one] if isinstance(one, str) else one
        if not isinstance(pair, list) or len(pair) not in (1, 2) or not all(isinstance(text, str) for text in pair):
            name = f"inputs[{i}]" if many else "inputs"
            message = f"{name!r} is neither a text nor a pair of texts"
            remedy = "give a text, [text, text], or a list of [text] and [text, text]"
            raise InputError(message, field=name, remedy=remedy, code="wrong_type")
        texts.append(pair[0] if len(pair) == 1 else tuple(pair))
    function = parameters.function_to_apply or (Function.none if body.raw_scores else None)
    if body.raw_scores and function != "none":
        message, remedy = "'raw_scores' and 'function_to_apply' exclude each other", "give one of them"
        raise InputError(message, field="function_to_apply", remedy=remedy)

    def make(results: list[dict[str, Any]]) -> Any:
        found = []
        for result in results:
            scores = result["probabilities"]
            if function:
                values = _FUNCTIONS[function.value](np.array([*result["logits"].values()]))
                scores = dict(zip(scores, values.tolist(), strict=True))
            best = sorted(scores.items(), key=lambda pair: -pair[1])[: parameters.top_k]
            found.append([{"score": value, "label": label} for label, value in best])
        return found if many or body.parameters is not None else found[0]

    return TaskOrder("classify", [{"text": text} for text in texts], make, body.cut, {"text": "inputs"})


def read_similarity(sent: Sent) -> TaskOrder:
    """Returns what /similarity asks: the cosine of the angle between a sentence and each of several. Raises
    InputError."""
    body = TeiSimilarity.of(sent)
    parameters = body.parameters or Prompted()
    options = {"normalize": True, **parameters.cut}
    if parameters.prompt_name is not None:
        options["prompt_name"] = parameters.prompt_name

    def make(results: list[dict[str, Any]]) -> Any:
        vectors = np.stack([result["embedding"] for result in results])
        return vectors[1:] @ vectors[0]

    items = [{"text": text} for text in (body.inputs.source_sentence, *body.inputs.sentences)]
    return TaskOrder("embed", items, make, options, {"text": "inputs"})
