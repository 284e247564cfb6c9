"""What pages say of the code is there: files, modules and classes, and the server's paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefold.serve.app import DIALECTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prefold"


def is_there(name: str) -> bool:
    """Returns whether a name in back quotes is that of a file, a folder, a module, a class or a constant, or of nothing
    that this test knows the form of."""
    if re.fullmatch(r"[\w./*-]+(/|\.(py|cpp|h|md))", name):
        return any(
            any(base.glob(name.rstrip("/"))) for base in (ROOT, PACKAGE, *PACKAGE.iterdir(), PACKAGE / "kernels/src")
        )
    if re.fullmatch(r"[a-z_]+(\.\w+)+", name):
        *folders, last = name.removeprefix("prefold.").split(".")
        place = PACKAGE.joinpath(*folders)
        if (place / last).is_dir() or (place / f"{last}.py").exists():
            return True
        files = [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()]
        return any(re.search(rf"\b{last}\b", path.read_text(encoding="utf-8")) for path in files)
    if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
        texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
        return any(re.search(rf"^class {name}\b", text, re.M) for text in texts)
    return True


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_what_a_page_names_is_there(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    names = set(re.findall(r"`([^`\n]+)`", text)) - {"ranks.sum"}  # a variable's method
    assert len(names) > 20
    assert sorted(name for name in names if not is_there(name)) == []


def test_names_that_are_not_there_are_noticed():
    wrong = ("engine/none.py", "nowhere/", "engine.loop.find_nothing", "engine.none", "StepNothing")
    assert [name for name in wrong if is_there(name)] == []


def test_the_page_of_the_server_has_all_paths():
    """But those below another one, such as a file's content, which the text names."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    paths = {entry.path.split("/{")[0] for dialect in DIALECTS for entry in dialect.ENTRIES}
    missing = sorted(path for path in paths if not re.search(rf"[` ]{re.escape(path)}[`/]", page))
    assert missing == [], "the tables of docs/serving.md are written by hand"
