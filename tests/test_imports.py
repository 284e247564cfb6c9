"""The shape of the code: who may import whom, and who never imports torch."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prefold
from prefold.engine import Engine
from prefold.spec.plugins import FEATURES

PACKAGE = Path(prefold.__file__).parent
BENCHMARKS = PACKAGE.parent / "benchmarks"
# A module imports only from its own layer and from those above it.
LAYERS = [
    "errors", "spec", "trie", "checkpoint", "text", "engine", "kernels", "model", "worker", "tasks", "api", "llm",
    "wire", "train", "cluster", "jobs", "integrations", "serve", "cli", "extend",
]  # fmt: skip
WITHOUT_TORCH = [
    "spec", "trie", "checkpoint", "text", "engine", "engine.cache", "engine.schedule", "kernels", "tasks", "wire",
    "cluster", "jobs", "jobs.report", "serve", "cli", "model", *(f"features.{name}" for name in FEATURES),
]  # fmt: skip


@functools.cache
def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Attribute]:
    """Imports and attributes, anywhere in a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    """Layers of prefold that a file imports, anywhere in it."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("prefold"):
            found |= {(node.module + ".").split(".")[1]} - {""}
    return found


def test_imports_only_from_above():
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE and path.name.startswith("__"):
            continue
        layer = layer_of(path)
        assert layer in (*LAYERS, "features"), f"{layer} has no place in the order"
        is_feature = layer == "features"  # the core imports no feature
        allowed = {*LAYERS, layer} - {"serve", "cli"} if is_feature else {*LAYERS[: LAYERS.index(layer) + 1]}
        if more := imported_layers(path) - allowed - {"__version__"}:
            wrong[str(path.relative_to(PACKAGE))] = more
    assert not wrong


def test_variables_of_prefold_are_read_in_one_file():
    """Variables of other programs are named where these programs are asked."""
    read = re.compile(r"""(environ|getenv)\b[^\n]*["']PREFOLD_""")
    found = {path.name for path in PACKAGE.rglob("*.py") if read.search(path.read_text(encoding="utf-8"))}
    assert found == {"environment.py"}


def imported_files(path: Path) -> set[Path]:
    """The files of prefold and of benchmarks/ that a file imports, anywhere in it, also for its types only."""
    files = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
        else:
            continue
        roots = [path.parents[node.level - 1]] if getattr(node, "level", 0) else [PACKAGE.parent, BENCHMARKS]
        for root, name in itertools.product(roots, names):
            files.add(file_of(root, name))
    return files - {path}


@functools.cache
def file_of(root: Path, name: str) -> Path:
    """The file of a module, or of the module that has what is named."""
    base = root.joinpath(*name.split("."))
    places = (base.with_suffix(".py"), base / "__init__.py", base.parent.with_suffix(".py"))
    return next((place for place in places if place.is_file()), base.parent / "__init__.py")


def circles(graph: dict[Path, set[Path]]) -> list[list[Path]]:
    """Groups of files that import each other, directly or by way of others: strongly connected (Tarjan 1972)."""
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found = []

    def visit(path: Path) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in graph.get(path, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[path] = min(low[path], low[other])
        if low[path] == index[path]:
            group = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(group) > 1:
                found.append(group)

    for path in graph:
        if path not in index:
            visit(path)
    return found


def test_no_files_import_each_other_in_a_circle():
    files = [*PACKAGE.rglob("*.py"), *BENCHMARKS.rglob("*.py")]
    found = circles({path: imported_files(path) for path in files})
    assert not found, [[str(path.relative_to(PACKAGE.parent)) for path in group] for group in found]


# Files with engines of other systems.
OTHER_ENGINES = ("integrations/vllm.py",)


def test_nobody_uses_of_an_engine_what_is_not_in_its_protocol():
    door = {name for name in vars(Engine) if not name.startswith("_")} | {*Engine.__annotations__}
    reaches = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        if layer_of(path) != "engine" and str(path.relative_to(PACKAGE)) not in OTHER_ENGINES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr not in door and is_engine(node.value)
    }
    assert not reaches
    assert door == {
        "cache", "cancel", "close", "count", "facts", "reset_stats", "run", "snapshot", "stats", "submit", "watching"
    }  # fmt: skip


def is_engine(node: ast.expr) -> bool:
    """Whether an expression is called an engine: `engine`, `self._engine`, `llm.engine`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "engine"


def test_files_that_import_torch():
    """The executor with tensors, training, and features; a replica says its version. All others know it by its types
    at most."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        typed = {inner for node in types for inner in ast.walk(node)}
        for node in set(ast.walk(tree)) - typed:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if "torch" in {name.split(".")[0] for name in names}:
                found.add(path.relative_to(PACKAGE).as_posix())
    allowed = ("worker/torch/", "train/", "features/")
    assert {path for path in found if not path.startswith(allowed)} == {"cluster/native_host.py"}


def test_layers_that_never_import_torch():
    """Each is imported first in a process of its own."""
    code = f"""
import importlib, os, sys
for layer in {WITHOUT_TORCH}:
    if not (child := os.fork()):
        importlib.import_module("prefold." + layer)
        sys.exit("torch" in sys.modules)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(layer)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not done.stdout, done.stdout + done.stderr


def test_public_names():
    """What a user names is at the root; this list is a promise."""
    assert prefold.__all__ == [
        "LLM", "CacheOptions", "Calibration", "Checkpoint", "CheckpointError", "Classification", "Decision",
        "FilledTemplate", "FleetError", "ForkedError", "Generated", "GenerationStats", "Grammar", "InputError",
        "JobError", "MissingExtraError", "OutOfMemoryError", "Piece", "PrefoldError", "RankError", "Ranking",
        "Sampling", "Score", "Stats", "TextWithImages", "TokenLogprobs", "UnsupportedModelError", "__version__",
    ]  # fmt: skip
    assert dir(prefold) == sorted(prefold.__all__)
    for name in prefold.__all__:
        assert getattr(prefold, name).__name__ == name if name != "__version__" else prefold.__version__
    assert {name for name in vars(prefold.errors) if name[0].isupper()} <= set(prefold.__all__)
    with pytest.raises(AttributeError):
        prefold.nothing  # noqa: B018


def test_the_root_imports_nothing_that_is_not_asked_for():
    code = "import sys, prefold; sys.exit(bool({'torch', 'numpy', 'tqdm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = (
        "import sys; from prefold import Sampling, Ranking, InputError, CacheOptions; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_public_name_is_one_class():
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found[name] for name in prefold.__all__ if len(found.get(name, [])) > 1} == {}
