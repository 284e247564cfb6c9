"""Ray Data's map_batches on a tiny random model: on the class alone, and on a real Ray of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold.errors import InputError
from prefold.integrations.ray_data import PrefoldBatches

OPTIONS = {"threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("ray"), "llama"))


@pytest.fixture(scope="module")
def llm(model):
    from prefold import LLM

    return LLM(model, **OPTIONS)


TEXTS = [None if i == 3 else "no " * 400 if i == 5 else f"the question {i % 4} yes {i}" for i in range(40)]
GOOD = [i for i in range(40) if i not in (3, 5)]


def run(task, model, *batches, **options):
    """The batches as one actor gives them, all under way at the same time."""
    made = PrefoldBatches(task, "text", model=model, **OPTIONS, **options)

    async def one(batch):
        return [out async for out in made(batch)]

    async def both():
        return await asyncio.gather(*map(one, batches))

    parts = [out for outs in asyncio.run(both()) for out in outs]
    assert all(str(part["error"].type) == "string" for part in parts)  # of a half without an error, too
    return {name: [value for part in parts for value in _values(part[name])] for name in parts[0]}


def _values(column):
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


LEVELS = [{"label": "low"}, {"label": "high"}]


def halves():
    return [{"id": np.arange(a, a + 20), "text": np.array(TEXTS[a : a + 20], object)} for a in (0, 20)]


def test_generated_text(model, llm):
    found = run("generate", model, *halves(), max_tokens=5, chat=False)
    assert found["id"] == list(range(40))
    expected = llm.generate([TEXTS[i] for i in GOOD], max_tokens=5)
    assert found["error"][3] == "'text' is null; give it a value, or drop the row"
    assert [found["generated_text"][i] for i in GOOD] == [one.text for one in expected]
    assert "context" in found["error"][5] and found["generated_text"][5] is None
    assert all(found["error"][i] is None for i in GOOD)


def test_vectors_and_labels(model, llm):
    found = run("embed", model, *halves())
    vectors = np.array([found["embedding"][i] for i in GOOD])
    assert np.abs(vectors - llm.embed([TEXTS[i] for i in GOOD])).max() < 1e-5
    assert found["embedding"][3] is None and found["error"][5]
    found = run("classify", model, *halves(), labels=["yes", "no"], prefix="found_")
    expected = llm.classify([TEXTS[i] for i in GOOD], ["yes", "no"])
    assert [found["found_label"][i] for i in GOOD] == [one.label for one in expected]


def test_answers_and_scores_of_whole_texts(model, llm):
    asked = {
        "yes": {"type": "choice", "criteria": {"a": None, "b": None}},
        "level": {"type": "score", "levels": LEVELS},
    }
    found = run("decide", model, *halves(), questions=asked, scores="all")
    expected = llm.decide([TEXTS[i] for i in GOOD], asked)
    assert [found["yes"][i] for i in GOOD] == [one["yes"].value for one in expected]
    wanted = [one["yes"].probabilities["b"] for one in expected]
    assert np.abs(np.array([found["yes_p_b"][i] for i in GOOD], float) - wanted).max() < 1e-5
    assert found["level"][3] is None and "context" not in found["error"][3] and found["error"][5]
    found = run("score", model, *halves())
    expected = llm.score([TEXTS[i] for i in GOOD])
    assert np.abs(np.array([found["logprob"][i] for i in GOOD], float) - [one.logprob for one in expected]).max() < 1e-4


def test_what_is_asked_wrongly(model):
    with pytest.raises(InputError, match="task is 'rank'"):
        PrefoldBatches("rank", "text", model=model)
    with pytest.raises(InputError, match="no column 'text'"):
        run("embed", model, {"id": np.arange(2)})
    with pytest.raises(InputError, match="has a column 'error'"):
        run("embed", model, {"text": np.array(["a"], object), "error": np.arange(1)})


ON_RAY = """
import json, sys
import ray
from prefold.integrations.ray_data import PrefoldBatches
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
rows = [{"id": i, "text": None if i == 7 else f"the question {i % 5} yes {i}"} for i in range(int(sys.argv[2]))]
out = ray.data.from_items(rows).repartition(6).map_batches(
    PrefoldBatches,
    fn_constructor_kwargs={"task": "embed", "column": "text", "model": sys.argv[1], "threads": 1, "dtype": "float32"},
    compute=ray.data.ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=4),
    batch_size=16,
)
print(json.dumps([{"id": r["id"], "error": r["error"], "has": r["embedding"] is not None} for r in out.take_all()]))
"""


@pytest.mark.slow
def test_on_ray_every_row_comes_once(model):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, model, "100"], env=environment, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = json.loads(done.stdout.decode().splitlines()[-1])
    assert sorted(row["id"] for row in found) == list(range(100))
    assert [row["id"] for row in found if row["error"]] == [7]
    assert [row["id"] for row in found if not row["has"]] == [7]


RESUMED = """
import os, sys, threading, time
from glob import glob
import ray
from ray.data.checkpoint import CheckpointConfig
from prefold.integrations.ray_data import PrefoldBatches

folder, model, kill = sys.argv[1:]
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False
context.target_max_block_size = 2000  # many small files, so that some are there when the driver is killed
context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=f"{folder}/checkpoint")
if kill == "kill":
    def shoot():
        while len(glob(f"{folder}/out/*.parquet")) < 3:
            time.sleep(0.02)
        os._exit(9)
    threading.Thread(target=shoot, daemon=True).start()
ray.data.read_parquet(f"{folder}/in", override_num_blocks=12).map_batches(
    PrefoldBatches,
    fn_constructor_kwargs={
        "task": "generate", "column": "text", "model": model, "chat": False, "max_tokens": 100, "ignore_eos": True,
        "threads": 1, "dtype": "float32",
    },
    compute=ray.data.ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=2, max_concurrent_calls_per_actor=2),
    batch_size=16,
).write_parquet(f"{folder}/out")
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_is_resumed_by_ray_data(model, llm, tmp_path):
    """The recipe of docs/scale.md: what was written is not computed again, and every row is there once."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in").mkdir()
    texts = [None if i == 7 else f"the question {i % 5} yes {i}" for i in range(192)]
    for part in range(12):
        rows = list(range(part * 16, part * 16 + 16))
        pq.write_table(pa.table({"id": rows, "text": [texts[i] for i in rows]}), tmp_path / "in" / f"{part}.parquet")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false"}

    def run(mode):
        command = [sys.executable, "-c", RESUMED, str(tmp_path), model, mode]
        return subprocess.run(command, env=environment, capture_output=True, timeout=400)

    killed = run("kill")
    assert killed.returncode == 9, killed.stderr.decode()[-3000:]
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")}
    assert before
    done = run("whole")
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    kept = [path for path, data in before.items() if path.exists() and path.read_bytes() == data]
    assert kept, "nothing of what was there is left"
    assert {str(pq.read_schema(path).field("error").type) for path in (tmp_path / "out").glob("*.parquet")} == {
        "string"
    }
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["id"] for row in found) == list(range(192))
    assert [row["id"] for row in found if row["error"]] == [7]
    some = [row for row in found if row["id"] % 16 == 3]
    expected = llm.generate([row["text"] for row in some], max_tokens=100, ignore_eos=True)
    assert [row["generated_text"] for row in some] == [one.text for one in expected]
