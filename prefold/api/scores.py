"""/rerank and /v1/score, as Cohere and vLLM have them: requests become items of the task "rerank", results
responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from ..errors import InputError
from .body import TEXT_OR_TEXTS, Settings, doc

Texts = Annotated[Any, doc("A text, or texts.", **TEXT_OR_TEXTS)]
Instruction = Annotated[Any, doc("What the reranker is told to look for.", "string")]


class Rerank(Settings):
    """Scores documents by how well they answer a query, the best first."""

    query: Annotated[Any, doc("What the documents are to answer.", "string")]
    documents: Annotated[Any, doc("Texts, or objects with a text.", "array", items={"type": ["string", "object"]})]
    top_n: Annotated[Any, doc("How many of the best documents are answered.", "integer", minimum=1)] = None
    return_documents: Annotated[bool, doc("Whether each result holds its document.")] = True
    max_tokens_per_doc: Annotated[
        Any, doc("How many tokens are read of each document, its first.", "integer", minimum=1)
    ] = None
    instruction: Instruction = None

    missing = ("{!r} is missing", "give {}")
    may_be_empty = True


class Scoring(Settings):
    """Scores pairs of texts: of `text_1` and `text_2`, for which there are other names."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    instruction: Instruction = None


def read_rerank(body: Rerank, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns one item, and what the response needs. Raises InputError. defaults: of sampling, which there is none
    of."""
    if isinstance(body.query, list):
        raise InputError("'query' is a list", field="query", remedy="give one text", code="wrong_type")
    names = ("query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruction")
    found = {name: getattr(body, name) for name in names}
    return [{name: value for name, value in found.items() if value is not None}], {}


def rerank_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: the documents that were asked for, the best first."""
    result = results[0]
    entries: list[dict[str, Any]] = [{"index": i, "relevance_score": result["scores"][i]} for i in result["order"]]
    for entry, document in zip(entries, result.get("documents", []), strict=False):
        entry["document"] = {"text": document}
    return {"results": entries}


def read_score(body: Scoring, defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns items, and what the response needs: one text against one or many, or as many against as many. Raises
    InputError. defaults: of sampling, which there is none of."""
    found = []
    for name, others in (("text_1", ("queries", "data_1")), ("text_2", ("documents", "items", "data_2"))):
        texts = next((value for one in (name, *others) if (value := getattr(body, one)) is not None), None)
        if texts is None:
            raise InputError(f"{name!r} is missing", field=name, remedy=f"give {name}", code="missing_field")
        if texts == []:
            raise InputError(f"{name!r} is empty", field=name, remedy="give at least one text", code="empty")
        found.append(texts if isinstance(texts, list) else [texts])
    (first, second), fixed = found, {"instruction": body.instruction}
    if len(first) == 1:
        return [{"query": first[0], "documents": second, **fixed}], {}
    if len(first) != len(second):
        message = f"'text_1' holds {len(first)} texts and 'text_2' {len(second)}, which are not pairs"
        raise InputError(message, field="text_1", remedy="give one text, or as many as in text_2", code="wrong_type")
    return [{"query": a, "document": b, **fixed} for a, b in zip(first, second, strict=True)], {}


def score_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: a score for each pair, in order."""
    scores = [score for result in results for score in result.get("scores", [result.get("score")])]
    return {"object": "list", "data": [{"object": "score", "index": i, "score": s} for i, s in enumerate(scores)]}
