"""Files, modules and classes that pages name exist. The site builds, and lists every public name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prefold"


def is_there(name: str) -> bool:
    """Return whether a name in backticks exists, if it has the form of a file, a folder, a module or a class."""
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


@pytest.mark.parametrize("module", ["prefold", "prefold.train", "prefold.extend"])
def test_the_reference_has_every_public_name(module):
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page, flags=re.M)
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    (public,) = re.findall(r"^__all__ = (\[.*?\])", source, flags=re.M | re.S)
    modules = {"train", "extend"} if module == "prefold" else set()
    assert sorted(listed) == sorted({*ast.literal_eval(public), *modules} - {"__version__"})


def test_names_that_are_not_there_are_noticed():
    wrong = ("engine/none.py", "nowhere/", "engine.loop.find_nothing", "engine.none", "StepNothing")
    assert [name for name in wrong if is_there(name)] == []


def test_the_site_builds_and_asks_no_other_host_for_anything(tmp_path):
    """Broken links, and pages that the site does not list, are errors (`strict` in mkdocs.yml)."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="pip install 'prefold[docs]'")
    environment = os.environ | {"PYTHON": sys.executable, "SITE": str(tmp_path)}
    done = subprocess.run([ROOT / "scripts" / "site"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 25
    for page in pages:
        loaded = r"<(?:script|img|link|source)[^>]* (?:src|href|srcset)=\"?https?:"
        assert not re.search(loaded, page.read_text(encoding="utf-8")), page
