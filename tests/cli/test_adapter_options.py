"""--adapter and --adapter-column of the tasks whose answers are numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from adapters import write_adapter

from prefold import LLM


def test_each_record_with_its_adapter(prefold, model, lines, tmp_path):
    folders = {name: write_adapter(tmp_path / name, Path(model), seed=i) for i, name in enumerate(("fr", "de"))}
    given = [word for name, folder in folders.items() for word in ("--adapter", f"{name}={folder}")]
    records = [{"text": "yes no", "who": who} for who in ("fr", None, "de", "xx")]
    Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    llm = LLM(model, device="cpu", adapters={name: str(folder) for name, folder in folders.items()})
    job = ("embed", "in.jsonl", "-o", "out.jsonl", "--adapter-column", "who", *given)
    assert prefold(*job).exit_code == 3
    found = {line["record"]: line for line in lines("out.jsonl")}
    assert found[4]["error"]["code"] == "unknown_adapter" and found[4]["error"]["field"] == "who"
    for number, name in enumerate(("fr", None, "de"), 1):
        np.testing.assert_allclose(found[number]["embedding"], llm.embed("yes no", adapter=name), atol=1e-5)
    assert "--adapter-column" in prefold("embed", "in.jsonl", "-o", "two.jsonl", *given).output
    one = prefold("score", "yes", " no", *given[:2])
    assert one.exit_code == 0
    assert f"{llm.score('yes', ' no', adapter='fr').logprob:.3f}"[:6] in one.output
