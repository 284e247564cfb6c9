"""What pages say of the code is there: files, modules and classes. The site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_site_builds_and_asks_no_other_host_for_anything(tmp_path):
    """Links that lead nowhere, and pages that the site does not list, are errors (`strict` in mkdocs.yml)."""
    for package in ("mkdocs", "material"):
        pytest.importorskip(package, reason="pip install 'prefold[docs]'")
    environment = os.environ | {"PYTHON": sys.executable, "SITE": str(tmp_path)}
    done = subprocess.run([ROOT / "scripts" / "site"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 25
    for page in pages:
        loaded = r"<(?:script|img|link|source)[^>]* (?:src|href|srcset)=\"?https?:"
        assert not re.search(loaded, page.read_text(encoding="utf-8")), page
