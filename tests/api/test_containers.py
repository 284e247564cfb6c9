"""Every method of LLM with every kind of container: columns are texts, and some tables are refused by name."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM, InputError

TEXTS = ["yes", "no the"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
SHORT = {"max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("containers"), "llama", max_position_embeddings=1024)
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))
    return LLM(str(folder), dtype="float32", device="cpu")


class Series:
    """A stand-in for a column of a data frame."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)


class Frame:
    """A stand-in for a DataFrame: it iterates over the names of its columns."""

    columns = ("id", "body")

    def __iter__(self):
        return iter(self.columns)


class Relation:
    """A stand-in for a relation of DuckDB."""

    columns = ("id", "body")

    def fetchnumpy(self): ...


def objects(values):
    out = np.empty(len(values), object)
    out[:] = values
    return out


def real_columns():
    """Columns of pandas, Polars and PyArrow, of those that can be imported."""
    kinds = {}
    try:
        import pandas as pd

        kinds["pandas"] = pd.Series
    except ImportError:
        pass
    try:
        import polars as pl

        kinds["polars"] = lambda values: pl.Series(values, dtype=None if isinstance(values[0], str) else pl.Object)
    except ImportError:
        pass
    try:
        import pyarrow as pa

        kinds["arrow"] = pa.array
        kinds["chunks"] = lambda values: pa.chunked_array([values])
    except ImportError:
        pass
    return kinds


def tables():
    rows = {"id": [1, 2], "body": TEXTS}
    kinds = {"frame": Frame(), "relation": Relation(), "records": np.zeros(2, [("id", int), ("body", "U3")])}
    try:
        import pandas as pd

        kinds["pandas"] = pd.DataFrame(rows)
    except ImportError:
        pass
    try:
        import polars as pl

        kinds |= {"polars": pl.DataFrame(rows), "lazy": pl.LazyFrame(rows)}
    except ImportError:
        pass
    try:
        import pyarrow as pa

        kinds |= {"arrow": pa.table(rows), "batch": pa.RecordBatch.from_pydict(rows)}
    except ImportError:
        pass
    return kinds


COLUMNS = {"tuple": tuple, "array": objects, "series": Series, "generator": lambda v: (x for x in v), **real_columns()}
TABLES = tables()

# {method: a call of it with a container of texts, or of conversations}
CALLS = {
    "embed": lambda llm, texts: llm.embed(texts).tolist(),
    "rerank": lambda llm, texts: llm.rerank("the", texts, words=("yes", "no")).scores.tolist(),
    "classify": lambda llm, texts: [c.probabilities for c in llm.classify(texts, ["yes", "no"])],
    "labels": lambda llm, labels: llm.classify("the", labels).probabilities,
    "score": lambda llm, texts: [s.logprob for s in llm.score(texts)],
    "continuations": lambda llm, texts: [s.logprob for s in llm.score("the", texts)],
    "generate": lambda llm, texts: [g.tokens for g in llm.generate(texts, **SHORT)],
    "decide": lambda llm, texts: [d["a"].probabilities for d in llm.decide(texts, {"a": {"type": "noul"}})],
}
CALLS["run"] = lambda llm, items: [line["num_tokens"] for line in llm.run(llm.task("embed"), items)]
CHAT_CALLS = {"chat": lambda llm, chats: [g.tokens for g in llm.chat(chats, **SHORT)]}


async def all_pieces(pieces):
    return [piece async for piece in pieces]


# Methods of one prompt, which a table is not.
SINGLE = {
    "query": lambda llm, prompt: llm.rerank(prompt, TEXTS),
    "stream": lambda llm, prompt: list(llm.stream(prompt, **SHORT)),
    "agenerate": lambda llm, prompt: asyncio.run(llm.agenerate(prompt, **SHORT)),
    "astream": lambda llm, prompt: asyncio.run(all_pieces(llm.astream(prompt, **SHORT))),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("method", [*CALLS, *CHAT_CALLS])
def test_a_column_is_a_list(llm, method, kind):
    call, values = (CALLS[method], TEXTS) if method in CALLS else (CHAT_CALLS[method], CHATS)
    assert call(llm, COLUMNS[kind](values)) == call(llm, list(values))


# Methods that take no table; test_tables_in.py has the others.
NEVER = ("labels", "continuations", "run", *SINGLE)
REFUSED = [
    (method, kind)
    for method in (*CALLS, *CHAT_CALLS, *SINGLE)
    for kind in TABLES
    if method in NEVER or kind not in ("pandas", "polars", "arrow", "batch")
]


@pytest.mark.parametrize(("method", "kind"), REFUSED)
def test_a_table_is_refused_by_name(llm, method, kind):
    with pytest.raises(InputError, match=r"is a table, of type \w+, with the columns id, body") as caught:
        (CALLS | CHAT_CALLS | SINGLE)[method](llm, TABLES[kind])
    assert "give a column: df" in caught.value.remedy and "['body']" in caught.value.remedy
    assert {"relation": ".fetchnumpy()", "lazy": ".collect()"}.get(kind, "df[") in caught.value.remedy


@pytest.mark.parametrize(
    "method", [name for name in (*CALLS, *CHAT_CALLS, *SINGLE) if name not in ("labels", "decide")]
)
def test_a_mapping_is_refused(llm, method):
    """But {label: text}, a state, and the fields of an item of generation."""
    with pytest.raises(InputError) as caught:
        (CALLS | CHAT_CALLS | SINGLE)[method](llm, {"id": [1, 2], "body": TEXTS})
    assert "mapping" in caught.value.message or "'id'" in caught.value.message


@pytest.mark.parametrize("method", [*CALLS, *CHAT_CALLS])
def test_a_set_has_no_order(llm, method):
    with pytest.raises(InputError, match="is a set, which has no order; give a list"):
        (CALLS | CHAT_CALLS)[method](llm, set(TEXTS))


def test_a_text_is_no_list_of_items(llm):
    with pytest.raises(InputError, match=r"items is 'yes'.*; give a list of items"):
        llm.run(llm.task("embed"), "yes")


def test_a_conversation_may_be_an_array(llm):
    """As a Parquet file that pandas has read gives it."""
    want = [g.tokens for g in llm.chat(CHATS, **SHORT)]
    assert [g.tokens for g in llm.chat(objects([objects(chat) for chat in CHATS]), **SHORT)] == want
    assert llm.chat(objects(CHATS[0]), **SHORT).tokens == want[0]


def test_labels_of_another_type_are_not_printed(llm):
    with pytest.raises(InputError, match="labels is of type Relation"):
        llm.classify("the", type("Relation", (), {})())
