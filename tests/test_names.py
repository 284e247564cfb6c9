"""Names in backticks in docstrings, comments and pages exist in the code."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import prefold

PACKAGE = Path(prefold.__file__).parent
ROOT = PACKAGE.parent
SOURCES = (".cpp", ".h", ".html", ".js")
TICKED = re.compile(r"`+([^`]+)`+")
WORD = re.compile(r"[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
# Names of other programs, and of files outside the package.
FOREIGN = {
    "__class__",
    "map_batches",
    "memcmp",
    "setup.py",
    "tokenizers.decoders.DecodeStream",
    "triple32",
}
# Folders with the names that pages may use, and the pages.
FOLDERS = ("prefold", "scripts", "benchmarks", "examples")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").glob("**/*.md"))
# Names on pages that belong to other programs, or that a reader chooses.
FOREIGN_ON_PAGES = """
    bert bloom ctrl diffllama doge is_llama_config jetmoe laguna llama4_text mpt my_families.py roberta unsloth_version
    xglm citations process_resident_memory_bytes web_search_20250305 cosine_distance array_cosine_similarity ClientV2
    InferenceClient OpenAIEmbeddings Origin chat_completion feature_extraction get_endpoint_info health_check
    host.docker.internal input_items.list proxy_read_timeout sentence_similarity text_classification text_generation
    zero_shot_classification p_complaint p_praise urgency_confidence OpenAIDecisions client.system_one
    experimental_decide prompt_cache_breakpoint
"""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value


def words_of(tree: ast.Module) -> set[str]:
    """The identifiers of a file, and the words of its texts, docstrings left out."""
    documentation = set(docstrings(tree))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in documentation:
            continue
        for field in ("id", "attr", "arg", "name", "module", "value"):
            if isinstance(value := getattr(node, field, None), str):
                found.update(WORD.findall(value))
    return found


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def unknown_names(source: str, known: set[str]) -> list[tuple[int, str]]:
    """Return (line, name) of each name in backticks that has a part not in `known`."""
    texts = [(text.lineno, text.value) for text in docstrings(ast.parse(source))]
    ticked = [(line, name) for line, text in [*texts, *comments(source)] for name in TICKED.findall(str(text))]
    names = [(line, name) for line, name in ticked if NAME.fullmatch(name) and name not in FOREIGN]
    return [(line, name) for line, name in names if not known.issuperset(WORD.findall(name))]


@cache
def names_of(folder: Path) -> set[str]:
    """The identifiers, files and folders of a folder, and the words of its texts."""
    found: set[str] = set()
    for path in folder.rglob("*"):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        found.update(part for name in path.relative_to(ROOT).parts for part in name.split("."))
        source = path.read_text(encoding="utf-8") if path.suffix in (*SOURCES, ".py", "") else ""
        if path.suffix in SOURCES:
            found.update(WORD.findall(source))
        elif path.suffix == ".py" or "python3" in source.partition("\n")[0]:
            found |= words_of(ast.parse(source))
    return found


def unknown_on_page(text: str, known: set[str]) -> list[str]:
    """Return the names in backticks that have a part not in `known`, and are in no block of code of the page."""
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    own = {word for block in blocks for word in WORD.findall(block)}
    prose = re.sub(r"^```.*?^```|<!-- figure.*?<!-- end -->", "", text, flags=re.M | re.S)
    names = {name for name in re.findall(r"`([^`\n]+)`", prose) if NAME.fullmatch(name)}
    # Words of capitals in a name stand for a name that a reader chooses, such as NAME_gold.
    names -= {name for name in names if re.search(r"(^|_)(NAME|OPTION)(_|$)", name)}
    return sorted(name for name in names if not (known | own).issuperset(WORD.findall(name)))


def test_names_in_backticks_exist():
    sources = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    known = set(dir(builtins)) | names_of(PACKAGE)
    wrong = [f"{path}:{line} `{name}`" for path, text in sources.items() for line, name in unknown_names(text, known)]
    assert not wrong, "names that no code has: " + ", ".join(wrong)


@pytest.fixture(scope="module")
def names_for_pages() -> set[str]:
    known = set(dir(builtins)).union(*(names_of(ROOT / folder) for folder in FOLDERS), FOREIGN_ON_PAGES.split())
    known.update(part for name in FOREIGN_ON_PAGES.split() for part in WORD.findall(name))
    known.update(*(WORD.findall(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")))
    return known.union(WORD.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8")), {"pyproject", "toml"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_in_backticks_on_pages_exist(page, names_for_pages):
    unknown = unknown_on_page(page.read_text(encoding="utf-8"), names_for_pages)
    assert not unknown, "names that no code has (add names of other programs to FOREIGN_ON_PAGES)"


def test_a_name_on_a_page_that_is_gone_is_found():
    page = "`here` and `gone.here`, `NAME_x`, `of_block`, `two words`\n```py\nof_block = `lost`\n```\n"
    assert unknown_on_page(page, {"here"}) == ["gone.here"]


def test_a_name_that_is_gone_is_found():
    source = '"""Uses `gone` and `here.gone()`, `here` and `not a name`."""\nx = 1  # see `lost`\n'
    assert unknown_names(source, {"here", "x"}) == [(1, "gone"), (1, "here.gone()"), (2, "lost")]
