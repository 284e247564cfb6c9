"""Search texts in two stages: an index of embeddings finds candidates, and a reranker sorts them.

    python examples/search_index.py ["what causes tides"] [--index numpy|faiss]

The script prints the three best candidates, each with its score, the best first. Both indexes are exact and find the
same texts. NumPy multiplies the query with every vector, which is fast enough for a few hundred thousand texts. FAISS
(`pip install faiss-cpu`) has approximate indexes for more.

One small model does both stages here, and finds little. For real searches use an embedding model and a reranker from
docs/models.md.
"""

from __future__ import annotations

import argparse

import numpy as np

from prefold import LLM

TEXTS = [
    "The moon pulls on the ocean and causes the tides.",
    "Bread is best fresh.",
    "Rivers carry water from mountains to the sea.",
    "The sun's pull makes spring tides higher.",
    "A cat sleeps most of the day.",
]


def nearest_numpy(vectors: np.ndarray, query: np.ndarray, count: int) -> list[int]:
    """Return the indices of the `count` vectors [n, dim] that are nearest to the query [dim], the nearest first."""
    return np.argsort(-(vectors @ query))[:count].tolist()


def nearest_faiss(vectors: np.ndarray, query: np.ndarray, count: int) -> list[int]:
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index.search(query[None], count)[1][0].tolist()


INDEXES = {"numpy": nearest_numpy, "faiss": nearest_faiss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", nargs="?", default="what causes tides")
    parser.add_argument("--index", choices=INDEXES, default="numpy")
    options = parser.parse_args()

    llm = LLM("smollm2-135m")
    vectors = llm.embed([*TEXTS, options.query])  # of length 1, so a dot product is a cosine
    candidates = [TEXTS[number] for number in INDEXES[options.index](vectors[:-1], vectors[-1], 3)]
    ranking = llm.rerank(options.query, candidates)
    for place, (number, score) in enumerate(ranking, 1):
        print(f"{place}. {score:.3f} {candidates[number]}")


if __name__ == "__main__":
    main()
