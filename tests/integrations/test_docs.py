"""The Python examples of docs/scale.md, as they are written there, on a tiny model and a real Ray and Daft."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), re.M | re.S)
NEEDED = {"daft": ("daft",), "ray.data": ("ray", "pyarrow")}


def test_these_are_the_examples():
    first = [block.splitlines()[0] for block in BLOCKS]
    assert first == ["import daft", "import ray", "from ray.data.checkpoint import CheckpointConfig"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["daft", "ray.data"])
def test_an_example_runs_as_it_is_written(name, tmp_path):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = str(tiny_checkpoint(tmp_path, "llama"))
    (tmp_path / "reviews").mkdir()
    for part in range(2):
        rows = range(part * 20, part * 20 + 20)
        table = pa.table({"id": list(rows), "body": [f"the review {i % 3} of {i}" for i in rows]})
        pq.write_table(table, tmp_path / "reviews" / f"{part}.parquet")
    if name == "daft":
        code = BLOCKS[0] + "\nfound = df.to_pydict()\nassert len(found['summary']) == 40\n"
        code += "assert all(vector is not None for vector in found['vector'])\n"
    else:
        code = "import ray\nray.init(num_cpus=4, include_dashboard=False)\n" + BLOCKS[2] + BLOCKS[1]
        code = code.replace("/shared/checkpoint", str(tmp_path / "checkpoint"))
        code += "\nfound = ray.data.read_parquet('summaries/').take_all()\nassert len(found) == 40, len(found)\n"
    # Of the models that the page names, the tiny one stands for all.
    code = re.sub(r'"(Qwen/Qwen3-Embedding-0.6B|smollm2-135m)"', repr(model), code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
