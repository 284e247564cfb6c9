"""Searches texts in two stages: an index of embeddings finds candidates, and a reranker sorts them.

    pip install faiss-cpu
    python examples/search_index.py "what causes tides"

The index is one of FAISS, by inner product of vectors of length 1. One model does both stages here; for real
searches take an embedding model and a reranker of docs/models.md.
"""

from __future__ import annotations

import sys

import faiss

from prefold import LLM

TEXTS = [
    "The moon pulls on the ocean and causes the tides.",
    "Bread is best fresh.",
    "Rivers carry water from mountains to the sea.",
    "The sun's pull makes spring tides higher.",
    "A cat sleeps most of the day.",
]


def main() -> None:
    query = sys.argv[1] if len(sys.argv) > 1 else "what causes tides"
    llm = LLM("smollm2-135m")
    vectors = llm.embed(TEXTS)
    faiss.normalize_L2(vectors)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    asked = llm.embed([query])
    faiss.normalize_L2(asked)
    candidates = [TEXTS[number] for number in index.search(asked, 3)[1][0]]
    ranking = llm.rerank(query, candidates)
    for place, number in enumerate(ranking.order, 1):
        print(f"{place}. {ranking.scores[number]:.3f} {candidates[number]}")


if __name__ == "__main__":
    main()
