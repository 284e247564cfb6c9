"""Daft's AI functions on a tiny random model: natively, and on a real Ray of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel
from tiny import tiny_checkpoint

pytest.importorskip("daft")
pytestmark = pytest.mark.slow

NUM = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("daft"), "llama"))


@pytest.fixture(scope="module")
def llm(model):
    from prefold import LLM

    return LLM(model, threads=1, dtype="float32")


OPTIONS = {"threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module", params=[1, 16], ids=["one file", "sixteen files"])
def frame(request, tmp_path_factory):
    """A table in several files, which Daft reads in parallel. (Its native runner has no other partitions.)"""
    import daft

    import prefold.integrations.daft  # noqa: F401

    folder = tmp_path_factory.mktemp("table")
    texts = [None if i == 7 else "no " * 400 if i == 9 else f"the question {i % 5} yes {i}" for i in range(NUM)]
    for part in range(request.param):
        rows = range(part, NUM, request.param)
        table = pa.table({"id": list(rows), "text": [texts[i] for i in rows]})
        pq.write_table(table, folder / f"{part}.parquet")
    return daft.read_parquet(str(folder / "*.parquet"))


def collected(df, *columns):
    """The columns by id; every id is there once."""
    found = df.select("id", *columns).to_pydict()
    assert sorted(found["id"]) == list(range(NUM))
    return {i: [found[name][k] for name in columns] for k, i in enumerate(found["id"])}


@pytest.fixture(scope="module")
def expected(llm):
    """What the Python face says, of every row that has an answer."""
    texts = [f"the question {i % 5} yes {i}" for i in range(NUM)]
    chats = [[{"role": "system", "content": "be kind"}, {"role": "user", "content": text}] for text in texts]
    return {
        "prompt": [g.text for g in llm.chat(chats, max_tokens=6)],
        "embed": llm.embed(texts),
        "label": [c.label for c in llm.classify(texts, ["yes", "no"])],
    }


def test_the_functions_give_what_the_model_gives(model, expected, frame):
    import daft
    from daft.functions import classify_text, embed_text, prompt

    common = {"provider": "prefold", "model": model, "on_error": "ignore", **OPTIONS}
    text = daft.col("text")
    df = frame.with_column("answer", prompt(text, system_message="be kind", max_tokens=6, **common))
    df = df.with_column("vector", embed_text(text, **common))
    df = df.with_column("label", classify_text(text, labels=["yes", "no"], **common))
    found = collected(df, "answer", "vector", "label")
    for i, (answer, vector, label) in found.items():
        if i in (7, 9):
            assert answer is vector is label is None
        else:
            assert answer == expected["prompt"][i] and label == expected["label"][i]
            assert np.abs(np.array(vector) - expected["embed"][i]).max() < 1e-5


def test_embeddings_with_nulls_are_read_back_from_parquet(model, llm, tmp_path):
    import daft
    from daft.functions import embed_text

    import prefold.integrations.daft  # noqa: F401

    texts = ["yes", None, "no", "", " \n"]
    df = daft.from_pydict({"id": list(range(5)), "text": texts})
    asked = embed_text(df["text"], provider="prefold", model=model, on_error="ignore", **OPTIONS)
    df.with_column("vector", asked).write_parquet(str(tmp_path / "out"))
    found = pq.read_table(tmp_path / "out").sort_by("id")["vector"].to_pylist()
    assert [found[i] for i in (1, 3, 4)] == [None] * 3
    assert np.abs(np.array([found[0], found[2]]) - llm.embed(["yes", "no"])).max() < 1e-5
    vector = daft.read_parquet(str(tmp_path / "out"))["vector"]
    size = len(found[0])
    back = daft.read_parquet(str(tmp_path / "out")).select(
        vector.cast(daft.DataType.embedding(daft.DataType.float32(), size))
    )
    assert [one is None for one in back.to_pydict()["vector"]].count(True) == 3


def test_an_empty_prompt_is_an_error_of_its_row(model):
    import daft
    from daft.functions import prompt

    from prefold.integrations.daft import generate

    df = daft.from_pydict({"text": ["", " ", "yes"]})
    own = generate(df["text"], model=model, max_tokens=2, **OPTIONS)
    asked = prompt(df["text"], provider="prefold", model=model, max_tokens=2, on_error="ignore", **OPTIONS)
    found = df.with_column("own", own).collect().with_column("asked", asked).to_pydict()
    assert [answer is None for answer in found["asked"]] == [True, False, False]
    assert [answer["error"] is None for answer in found["own"]] == [False, True, True]
    assert "empty" in found["own"][0]["error"]


def test_an_error_is_raised_or_is_a_value(model, frame):
    import daft
    from daft.functions import prompt

    from prefold.integrations.daft import generate, stats

    with pytest.raises(Exception, match="makes a prompt of"):
        asked = prompt(daft.col("text"), provider="prefold", model=model, max_tokens=6, **OPTIONS)
        frame.with_column("answer", asked).collect()
    df = frame.with_column("answer", generate(daft.col("text"), model=model, max_tokens=6, **OPTIONS))
    found = collected(df, "answer")
    for i, (answer,) in found.items():
        assert (answer["text"] is None) == (answer["error"] is not None) == (i in (7, 9))
        assert i in (7, 9) or (answer["num_generated"] <= 6 and answer["num_tokens"] > 5)
    assert "null" in found[7][0]["error"] and "context" in found[9][0]["error"]
    counted = stats(model, **OPTIONS)
    assert counted["rows_computed"] < counted["tokens"]


class Answer(BaseModel):
    yes: bool
    count: int


def test_answers_of_a_pydantic_model(model, frame):
    import daft
    from daft.functions import prompt

    text = daft.col("text")
    options = {"provider": "prefold", "model": model, "return_format": Answer, "on_error": "ignore", **OPTIONS}
    df = frame.with_column("answer", prompt([text, daft.lit("How many?")], max_tokens=60, **options))
    found = [answer for (answer,) in collected(df, "answer").values() if answer is not None]
    assert len(found) > NUM // 2
    assert all(isinstance(a["yes"], bool) and isinstance(a["count"], int) for a in found)


def test_what_is_asked_wrongly(model):
    from prefold.errors import InputError
    from prefold.integrations.daft import PrefoldProvider

    with pytest.raises(InputError, match="on_error"):
        PrefoldProvider().get_prompter(model, on_error="explode")
    descriptor = PrefoldProvider(threads=1).get_text_embedder(model, 8)
    with pytest.raises(InputError, match="needs Daft's Ray runner"):
        PrefoldProvider().get_prompter(model, replicas=2)
    options = descriptor.get_udf_options()
    assert (options.max_retries, options.concurrency, options.num_gpus) == (0, None, None)
    assert descriptor.get_dimensions().size == 8 and descriptor.get_provider() == "prefold"


ON_RAY = """
import json, sys
import daft
import ray
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
daft.set_runner_ray()
import prefold.integrations.daft as ours
from daft.functions import prompt, embed_text

model, partitions, num, replicas, kill = sys.argv[1], *map(int, sys.argv[2:])
texts = [None if i == 7 else "no " * 400 if i == 9 else f"the question {i % 5} yes {i}" for i in range(num)]
df = daft.from_pydict({"id": list(range(num)), "text": texts}).into_partitions(partitions)
options = {"model": model, "threads": 1, "dtype": "float32", "replicas": replicas}
if kill:
    import threading, time
    import psutil
    def replicas_of():
        own = psutil.Process().children(recursive=True)
        return [p for p in own if "ray::_Actor" in " ".join(p.cmdline() or [p.name()])]
    def shoot():
        while not replicas_of():
            time.sleep(0.1)
        while not any(ours.stats(**options).get("requests", 0) > 20 for _ in (0,)):
            time.sleep(0.05)
        replicas_of()[0].kill()
        print("killed one", file=sys.stderr, flush=True)
    threading.Thread(target=shoot, daemon=True).start()
df = df.with_column("answer", ours.generate(daft.col("text"), max_tokens=6, **options))
if partitions > 8:
    df = df.collect()  # Daft 0.7.26 stands still where two async functions of a plan run in so many tasks at once
df = df.with_column("vector", embed_text(daft.col("text"), provider="prefold", on_error="ignore", **options))
found = df.to_pydict()
found["vector"] = [None if v is None else [float(x) for x in v] for v in found["vector"]]
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "partitions, replicas, kill", [(1, 1, False), (2, 1, False), (4, 2, False), (16, 2, False), (4, 2, True)]
)
def test_on_ray_every_row_comes_once(model, llm, partitions, replicas, kill):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, model, *(str(int(n)) for n in (partitions, NUM, replicas, kill))],
        env=environment, capture_output=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert not kill or b"killed one" in done.stderr
    found = json.loads(done.stdout.decode().splitlines()[-1])
    assert sorted(found["id"]) == list(range(NUM))
    good = [k for k, i in enumerate(found["id"]) if i not in (7, 9)]
    texts = [found["text"][k] for k in good]
    answers = llm.chat([[{"role": "user", "content": text}] for text in texts], max_tokens=6)
    assert [found["answer"][k]["text"] for k in good] == [one.text for one in answers]
    vectors = np.array([found["vector"][k] for k in good])
    assert np.abs(vectors - llm.embed(texts)).max() < 1e-5
    assert all(found["answer"][k]["error"] for k, i in enumerate(found["id"]) if i in (7, 9))


def test_every_option_of_a_model_is_a_keyword():
    from prefold.integrations.shared import split_options
    from prefold.spec.model import ModelSpec

    names = {"tokenizer", *ModelSpec.__dataclass_fields__}
    assert split_options(dict.fromkeys([*names, "max_tokens"])) == (
        dict.fromkeys(names - {"seed"}),  # a seed is a task's
        {"seed": None, "max_tokens": None},
    )


@pytest.mark.parametrize("name", ["concurrency", "num_gpus"])
def test_options_of_daft_that_would_do_nothing(model, name):
    from prefold.errors import InputError
    from prefold.integrations.daft import PrefoldProvider

    with pytest.raises(InputError, match="replicas"):
        PrefoldProvider().get_prompter(model, **{name: 2})
