"""Published figures are those of the files in benchmarks/results/, and nothing else."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = runpy.run_path(str(ROOT / "scripts" / "figures.py"))
NAMES = sorted(path.stem for path in FIGURES["RESULTS"].glob("*.json"))


def test_the_page_and_the_plots_are_what_the_files_make():
    command = [sys.executable, str(ROOT / "scripts" / "figures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_where_its_figures_come_from(name):
    file = FIGURES["read"](name)
    assert file["machine"] and file["commit"] and file["command"].startswith("python ")
    assert {"date", "cpu", "threads", "python", "torch"} <= set(file["machine"])
    if file["benchmark"] in FIGURES["TABLES"]:
        assert len(FIGURES["TABLES"][file["benchmark"]](file)) > 2
    else:
        assert all(panel.rounds for panel in FIGURES["panels"](name))
    assert "/" not in re.sub(r"benchmarks/[\w/]+\.(py|json)|/v1/\w+", "", file["command"]), "no path of the machine"


def test_figures_stand_on_the_page_between_the_marks_alone():
    """Tables outside the marks could hold figures without a file."""
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    outside = re.sub(r"<!-- figure (\S+) -->.*?<!-- end -->", "", page, flags=re.S)
    assert "|---" not in outside and "<svg" not in outside


MEASURED = re.compile(
    r"\d (times as (fast|long|many)|tokens (a|per) second|GB/s|[TG]FLOP/s|ms a )|\d ?tokens/s|\d ?x faster"
)


def test_no_other_page_tells_a_figure_that_has_no_file():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "start").glob("*.md")]
    assert MEASURED.search("prompts run 2.2 to 3.7 times as fast") and MEASURED.search("it reads 25 GB/s")
    for page in pages:
        text = re.sub(r"<!-- figure (.*?) -->.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.S)
        assert not MEASURED.search(" ".join(text.split())), page


def test_a_plot_has_a_bar_for_each_system_and_a_line_at_the_limit():
    panel = FIGURES["Panel"]("a job", {"prefold": [1.0, 2.0, 3.0], "other": [4.0]}, limit=1.0)
    drawn = FIGURES["plot"]([panel], "light")
    assert drawn.count("<rect ") == 2 and ">limit<" in drawn and ">2 s<" in drawn
    rows = panel.table()
    assert rows[2].split(" | ")[1:6] == ["2", "1 to 3", "3", "1.00", "50% |"], rows
