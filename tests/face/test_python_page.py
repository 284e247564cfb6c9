"""docs/python.md: its examples run, its tables are those of the options, and it names all there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

import prefold
from prefold.options import OPTIONS, TaskOptions, cli_names, doc_of

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
COMMON = [one.name for one in fields(TaskOptions)]


def option_tables() -> str:
    """The tables of the options, as the page has them."""

    def row(task: str, name: str) -> str:
        default = next(one.default for one in fields(OPTIONS[task]) if one.name == name)
        return f"| `{name}` | `{default!r}` | {doc_of(task, name).replace('|', chr(92) + '|')} |"

    tables = [["| all methods | default | |", "|---|---|---|", *(row("embed", name) for name in COMMON)]]
    for task in OPTIONS:
        own = [row(task, name) for name in cli_names(task) if name not in COMMON]
        title = "`generate`, `chat`, `stream`, `agenerate`, `astream`" if task == "generate" else f"`{task}`"
        tables.append([f"| {title} | default | |", "|---|---|---|", *own])
    return "\n\n".join("\n".join(table) for table in tables)


def test_the_tables_are_those_of_the_options():
    tables = option_tables()
    assert tables in PAGE.read_text(encoding="utf-8"), f"docs/python.md should have these tables:\n{tables}"


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
