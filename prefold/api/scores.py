"""/rerank and /v1/score, as Cohere and vLLM have them: requests become items of the task "rerank", results
responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from .asked import flag
from .checks import check_names, required

__all__ = ["RERANK_NAMES", "SCORE_NAMES", "read_rerank", "read_score", "rerank_body", "score_body"]

RERANK_NAMES = {"query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "instruction"}
_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
SCORE_NAMES = {*_FIRST, *_SECOND, "instruction"}


def read_rerank(body: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns one item, and what the response needs. Raises InputError.

    defaults: of sampling; they are not used, since nothing is sampled here.
    """
    check_names(body, RERANK_NAMES)
    item = {name: body[name] for name in RERANK_NAMES & set(body)}
    item |= {"query": required(body, "query"), "documents": required(body, "documents")}
    item["return_documents"] = flag(body, "return_documents", True)
    if isinstance(item["query"], list):
        raise InputError("'query' is a list", field="query", remedy="give one text", code="wrong_type")
    return [item], {}


def rerank_body(meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the response without model and usage: the documents that were asked for, the best first."""
    result = results[0]
    entries: list[dict[str, Any]] = [{"index": i, "relevance_score": result["scores"][i]} for i in result["order"]]
    for entry, document in zip(entries, result.get("documents", []), strict=False):
        entry["document"] = {"text": document}
    return {"results": entries}


def read_score(body: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns items, and what the response needs: one text against one or many, or as many against as many.

    defaults: of sampling; they are not used, since nothing is sampled here. Raises InputError.
    """
    check_names(body, SCORE_NAMES)
    first, second = required(body, *_FIRST), required(body, *_SECOND)
    for texts, name in ((first, "text_1"), (second, "text_2")):
        if texts == []:
            raise InputError(f"{name!r} is empty", field=name, remedy="give at least one text", code="empty")
    first = first if isinstance(first, list) else [first]
    second = second if isinstance(second, list) else [second]
    fixed = {"instruction": body.get("instruction")}
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
