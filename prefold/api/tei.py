"""Reads and writes the bodies of Hugging Face's Text Embeddings Inference (TEI)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..tasks.classify import sigmoids, softmax
from .asked import Asked, checked, choice, flag, need

__all__ = ["TEI_NAMES", "read_embed", "read_predict", "read_rerank", "read_similarity", "tei_error"]

Body = Mapping[str, Any]
_TRUNCATION = ("truncate", "truncation_direction")
# {kind of request: its fields}
TEI_NAMES = {
    "embed": ("inputs", "normalize", "prompt_name", "dimensions", *_TRUNCATION),
    "embed_all": ("inputs", "prompt_name", *_TRUNCATION),
    "rerank": ("query", "texts", "raw_scores", "return_text", "top_n", *_TRUNCATION),
    "predict": ("inputs", "raw_scores", "parameters", *_TRUNCATION),
    "similarity": ("inputs", "parameters"),
    "tokenize": ("inputs", "add_special_tokens", "prompt_name"),
    "decode": ("ids", "skip_special_tokens"),
}
# What TEI answers with: {status, or code, of a refusal: (status, error_type)}
_TYPES: dict[int | str, tuple[int, str]] = {
    429: (429, "Overloaded"), 500: (424, "Backend"), 503: (503, "Unhealthy"), 400: (422, "Validation"),
    "empty": (400, "Empty"), "invalid_json": (400, "Validation"), "unsupported_model": (424, "Backend"),
}  # fmt: skip
# What huggingface_hub calls the functions that make scores of logits.
_FUNCTIONS = {"sigmoid": sigmoids, "softmax": softmax, "none": np.asarray}


def tei_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Returns (status, body) of an error in TEI's form."""
    status, kind = _TYPES.get(code) or _TYPES.get(status, (status, "Validation"))
    return status, {"error": message, "error_type": kind}


def _truncation(body: Body) -> dict[str, Any]:
    side = choice(body, "truncation_direction", ("Left", "Right"), "Right").lower()
    return {"truncate": side} if flag(body, "truncate") else {}


def read_embed(body: Body) -> Asked:
    """Returns what /embed asks: a vector of each input. Raises InputError."""
    checked(body, *TEI_NAMES["embed"])
    inputs = need(body, "inputs")
    options = {"normalize": flag(body, "normalize", True), **_truncation(body)}
    if body.get("prompt_name") is not None:
        options["prompt_name"] = body["prompt_name"]

    def make(results: list[dict[str, Any]]) -> Any:
        (result,) = results
        return result["embeddings"] if "embeddings" in result else [result["embedding"]]

    return Asked("embed", [{"text": inputs, "dimensions": body.get("dimensions")}], make, options, {"text": "inputs"})


def read_rerank(body: Body) -> Asked:
    """Returns what /rerank asks: a score of each text, the best first. Raises InputError."""
    checked(body, *TEI_NAMES["rerank"])
    texts = need(body, "texts")
    options: dict[str, Any] = {"raw_scores": flag(body, "raw_scores")}
    if flag(body, "truncate"):
        left = choice(body, "truncation_direction", ("Left", "Right"), "Right") == "Left"
        options["truncate"] = "left" if left else True
    with_text = flag(body, "return_text")

    def make(results: list[dict[str, Any]]) -> Any:
        (result,) = results
        entries = [{"index": i, "score": result["scores"][i]} for i in result["order"]]
        return [entry | {"text": texts[entry["index"]]} for entry in entries] if with_text else entries

    item = {"query": need(body, "query"), "documents": texts, "top_n": body.get("top_n")}
    return Asked("rerank", [item], make, options, {"documents": "texts"})


def read_predict(body: Body) -> Asked:
    """Returns what /predict asks: how likely the labels of the classification head are. Raises InputError.

    Inputs are a text, a pair of texts, or a list of lists of one text or two each. With "parameters", as
    huggingface_hub sends it, a text is answered as a list of one.
    """
    checked(body, *TEI_NAMES["predict"])
    inputs = need(body, "inputs")
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
    raw, parameters = flag(body, "raw_scores"), body.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        remedy = 'give an object, such as {"top_k": 3}'
        raise InputError("'parameters' is not an object", field="parameters", remedy=remedy, code="wrong_type")
    # huggingface_hub sends null for what its user did not give.
    settings = {name: one for name, one in (parameters or {}).items() if one is not None}
    top = checked(settings, "top_k", "function_to_apply").get("top_k")
    function = choice(settings, "function_to_apply", tuple(_FUNCTIONS), "none" if raw else "")
    if raw and function != "none":
        message, remedy = "'raw_scores' and 'function_to_apply' exclude each other", "give one of them"
        raise InputError(message, field="function_to_apply", remedy=remedy)
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 1):
        raise InputError(f"'top_k' is {top!r:.100}", field="top_k", remedy="give 1 or more", code="wrong_type")

    def make(results: list[dict[str, Any]]) -> Any:
        found = []
        for result in results:
            scores = result["probabilities"]
            if function:
                values = _FUNCTIONS[function](np.array([*result["logits"].values()]))
                scores = dict(zip(scores, values.tolist(), strict=True))
            best = sorted(scores.items(), key=lambda pair: -pair[1])[:top]
            found.append([{"score": value, "label": label} for label, value in best])
        return found if many or parameters is not None else found[0]

    return Asked("classify", [{"text": text} for text in texts], make, _truncation(body), {"text": "inputs"})


def read_similarity(body: Body) -> Asked:
    """Returns what /similarity asks: the cosine of the angle between a sentence and each of several. Raises
    InputError."""
    checked(body, *TEI_NAMES["similarity"])
    inputs, parameters = need(body, "inputs"), body.get("parameters") or {}
    for value, name in ((inputs, "inputs"), (parameters, "parameters")):
        if not isinstance(value, dict):
            remedy = (
                'give {"source_sentence": "...", "sentences": ["...", ...]}' if name == "inputs" else "leave it out"
            )
            raise InputError(f"{name!r} is not an object", field=name, remedy=remedy, code="wrong_type")
    checked(inputs, "source_sentence", "sentences")
    checked(parameters, "prompt_name", *_TRUNCATION)
    sentences = need(inputs, "sentences")
    if not isinstance(sentences, list):
        raise InputError("'sentences' is not a list", field="sentences", remedy="give a list", code="wrong_type")
    options = {"normalize": True, **_truncation(parameters)}
    if parameters.get("prompt_name") is not None:
        options["prompt_name"] = parameters["prompt_name"]

    def make(results: list[dict[str, Any]]) -> Any:
        vectors = np.stack([result["embedding"] for result in results])
        return vectors[1:] @ vectors[0]

    items = [{"text": text} for text in (need(inputs, "source_sentence"), *sentences)]
    return Asked("embed", items, make, options, {"text": "inputs"})
