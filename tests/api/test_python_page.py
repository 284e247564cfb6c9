"""docs/python.md: its examples run, and it names all there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

import prefold

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_all_that_is_public_is_named():
    text = PAGE.read_text(encoding="utf-8")
    left_out = {"Checkpoint", "Grammar", "GenerationStats", "Stats", "JobError", "__version__"}
    assert {name for name in prefold.__all__ if name not in text} <= left_out


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("llguidance")
    pytest.importorskip("pydantic")
    folder = tiny_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    tiny = prefold.LLM(str(folder), dtype="float32", device="cpu", kv_memory=1 << 24)
    monkeypatch.setattr(prefold, "LLM", lambda name: tiny)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(names["vectors"]) == 2 and names["kept"] > 50
    assert names["mood"].text in (" good", " bad")
    assert names["good"] and isinstance(names["found"][1], prefold.InputError)
    assert "Summarise" not in names["summary"].text and "rows computed" in str(tiny.stats)
    assert capsys.readouterr().out
