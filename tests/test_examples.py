"""Each script of examples/ runs as its first lines say: on a random model in place of the built-in one, and, slowly, on
that itself. Those that train looped and seeing models are tested with what they train, rag_server.py with its page."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
ELSEWHERE = {"dpo", "looped_model", "looped_router", "tiny_vision"}
# By name and arguments: packages that it needs, and what it prints on any model.
RUNS = {
    "classify_csv": ((), "computed; wrote labels.csv"),
    "search_index": ((), "3. "),
    "search_index --index faiss": (("faiss",), "3. "),
    "extract": (("llguidance", "pandas"), "Cleo wants one table."),
    "evaluate": (("lm_eval",), "on 5 questions, with 3 worked examples"),
    "daft_parquet": (("daft", "pyarrow"), "Friendly people."),
    "decide_pandas": (("pandas", "narwhals", "pyarrow"), "computed; wrote decided.csv"),
    "decide_duckdb": (("duckdb", "narwhals", "pyarrow"), "computed; wrote the table answers"),
    "sft_csv --out tuned --steps 2": ((), "step 1: loss "),
}


@pytest.fixture
def run(tmp_path, monkeypatch, argv, capsys):
    """run("name --option") -> what the example prints, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(command):
        name, *arguments = command.split()
        argv(name, *arguments)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.fixture
def tiny(tmp_path):
    """A random model in a folder with the built-in model's name, which is taken in its place."""
    folder = tiny_checkpoint(tmp_path, "llama", max_position_embeddings=1024)
    (folder / "decision.json").write_text('{"labels": {"noul": ["yes", "no"]}}')
    folder.rename(tmp_path / "smollm2-135m")


def needed(command):
    for package in RUNS[command][0]:
        pytest.importorskip(package)


def test_every_example_is_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {command.split()[0] for command in RUNS} | ELSEWHERE | {"rag_server"}


def test_every_example_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        head = path.read_text(encoding="utf-8").split('"""')[1]
        assert f"python examples/{path.name}" in head


@pytest.mark.parametrize("command", RUNS)
def test_an_example_runs(command, run, tiny):
    needed(command)
    assert RUNS[command][1] in run(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_an_example_runs_on_the_built_in_model(command, run):
    needed(command)
    assert RUNS[command][1] in run(command)


def test_files_of_ones_own_are_classified(run, tiny, tmp_path):
    (tmp_path / "in.csv").write_text('body,"Nr, old"\n"Hello, you",7\nBye,8\n', encoding="utf-8")
    run("classify_csv in.csv out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["Nr, old"] for row in rows] == ["7", "8"] and all(row["label"] for row in rows)


def test_a_file_without_the_column_is_refused(run, tiny, tmp_path):
    (tmp_path / "in.csv").write_text("text\nHello\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="a column named body"):
        run("classify_csv in.csv out.csv")
    with pytest.raises(SystemExit, match="the columns question and answer"):
        run("sft_csv --out tuned --data in.csv")


def test_questions_too_few_for_worked_examples_are_refused(run, tmp_path):
    needed("evaluate")
    (tmp_path / "in.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="has 1 questions; give more than the 3"):
        run("evaluate in.jsonl")


def test_a_client_without_a_server_says_how_to_start_one(run):
    pytest.importorskip("openai")
    with pytest.raises(SystemExit, match="prefold serve --model"):
        run("rag_server http://localhost:9/v1")
