"""The report: one self-contained HTML page about a job, with its trie (or a cache's radix trie) drawn as an icicle."""

from __future__ import annotations

import json
import platform
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.cache.listing import Part, TreePath
from ...spec.container import usable_cores
from ...spec.files import replacing, writing
from .icicle import DrawnNode, StreamShape, icicle, to_data, walk

TEXT_TOKENS = 32


class TreeShape:
    """The paths of a radix tree, depth-first: one for each leaf and for each running sequence.

    Attributes:
        owners: for each path, the owner of its root's namespace
        is_whole: all paths of the tree are here
        num_rows: rows of all paths, each row counted once
    """

    def __init__(self, paths: Sequence[TreePath], owner_of: Callable[[Hashable], str], *, most: int):
        """Keep at most `most` of the paths.

        Args:
            owner_of: returns the owner of a namespace
        """
        self.is_whole, paths = len(paths) <= most, paths[:most]
        self._ends = [path.end for path in paths]
        self._running = [path.is_running for path in paths]
        self.owners = [owner_of(path.namespace) for path in paths]
        self._lengths = np.array([end.start + len(end.tokens) for end in self._ends], np.int32)
        self._shared = np.array([path.shared for path in paths], np.int32)
        self.num_rows = int((self._lengths - self._shared).sum())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (lengths, shared) of the paths, each int32 [paths]; see `StreamShape.arrays`."""
        return self._lengths, self._shared

    def tokens_of(self, node: DrawnNode, limit: int = TEXT_TOKENS) -> np.ndarray:
        """Return the first tokens of a node."""
        return self._between(node.first, node.start, node.start + min(limit, node.length))

    def _between(self, path: int, start: int, stop: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        part: Part | None = self._ends[path]
        while part is not None and part.start + len(part.tokens) > start:
            if part.start < stop:
                pieces.append(np.asarray(part.tokens[max(0, start - part.start) : stop - part.start], np.int32))
            part = part.above
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def data(self, decode: Callable[[np.ndarray], str] | None, *, max_nodes: int = 2000) -> dict[str, Any]:
        """Return the data of a drawing: its nodes, and the places where most paths diverge.

        "nodes" is as in the result of `to_data`; each node also has the running sequences below it and its owner.
        "parting" is a list of [owner, end of the shared text, its tokens, branches, paths].
        """
        if not self.owners:
            return {"nodes": [], "parting": []}
        root = icicle(self, max_nodes=max_nodes)  # type: ignore[arg-type]
        running = np.concatenate(([0], np.cumsum(self._running)))
        nodes = to_data(self, root, decode)  # type: ignore[arg-type]
        parting: list[tuple[str, str, int, int, int]] = []
        for row, (node, _) in zip(nodes, walk(root), strict=True):
            first, stop = node.first, node.first + node.prompts
            row += [int(running[stop] - running[first]), self.owners[first] if node.length else ""]
            branches = len(node.kids) + (node.rest.branches if node.rest else 0) + bool(node.ending)
            if node.length and branches > 1:
                end = node.start + node.length
                text = "" if decode is None else decode(self._between(first, max(0, end - TEXT_TOKENS), end))
                parting.append((self.owners[first], text, end, branches, node.prompts))
        return {"nodes": nodes, "parting": sorted(parting, key=lambda part: -part[4])[:10]}


_MAX_STEPS = 4096
_MAX_BINS = 320


class StepLog:
    """The steps of a run over time. Adjacent steps are merged if there are very many.

    An entry has: start (s), seconds computed, number of steps, rows, path rows, running sequences.
    """

    def __init__(self, limit: int = _MAX_STEPS) -> None:
        self._limit = limit
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values) // 6

    def add(self, started: float, seconds: float, rows: int, path_rows: int, running: int = 0) -> None:
        self._values.extend((started, seconds, 1, rows, path_rows, running))
        if len(self) > self._limit:
            self._values = array("d", merged(self.bins(), self._limit // 2).ravel())

    def bins(self) -> np.ndarray:
        """Return the entries, float64 [entries, 6]."""
        return np.array(self._values).reshape(-1, 6)


def merged(entries: np.ndarray, most: int) -> np.ndarray:
    """Return the entries, with neighbours merged until there are at most `most`."""
    size = -(-len(entries) // max(1, most))
    if size <= 1:
        return entries
    starts = np.arange(0, len(entries), size)
    merged = np.add.reduceat(entries, starts)
    merged[:, 0] = entries[starts, 0]
    return merged


@dataclass
class Report:
    """The content of the page."""

    title: str
    when: str
    tokens: int  # tokens of the whole run
    rows: int  # rows of the whole run
    seconds: float  # time in the model
    cards: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    machine: list[tuple[str, str]] = field(default_factory=lambda: machine())
    shape: StreamShape | None = None
    trie_note: str = ""
    steps: StepLog | None = None
    generation: list[tuple[str, str]] = field(default_factory=list)
    calibration: list[dict[str, object]] = field(default_factory=list)
    decode: Callable[[np.ndarray], str] | None = None

    def data(self) -> dict[str, Any]:
        """Return the page's data, as JSON values."""
        steps = merged(self.steps.bins(), _MAX_BINS) if self.steps is not None else np.empty((0, 6))
        nodes = None
        if self.shape is not None and self.shape.num_requests:
            nodes = to_data(self.shape, icicle(self.shape), self.decode)
        return {
            "title": self.title,
            "when": self.when,
            "cards": self.cards,
            "totals": {"tokens": self.tokens, "rows": self.rows},
            "barText": self._bar_text(),
            "generation": self.generation,
            "calibration": self.calibration,
            "settings": self.settings,
            "machine": self.machine,
            "nodes": nodes,
            "trieNote": self.trie_note,
            "steps": [[float(f"{v:.6g}") for v in entry] for entry in steps.tolist()],
            "stepsText": self._steps_text(steps),
        }

    def _bar_text(self) -> str:
        if not self.tokens:
            return ""
        saved = self.tokens - self.rows
        texts = "Prompts and outputs" if self.generation else "The prompts"
        text = f"{texts} hold {self.tokens:,} tokens; {self.rows:,} rows were computed"
        text += f" ({saved / self.tokens:.1%} saved)."
        if self.seconds > 0 and self.rows and saved > 0:
            text += (
                f" At this run's {self.rows / self.seconds:,.0f} rows a second, the {saved:,} others "
                f"would have taken about {self.seconds * saved / self.rows:,.1f} s more."
            )
        return text

    def _steps_text(self, bins: np.ndarray) -> str:
        if not len(bins):
            return ""
        num, seconds = int(bins[:, 2].sum()), bins[:, 1].sum()
        text = f"{num:,} step{'' if num == 1 else 's'}, {seconds:,.1f} s in the model."
        return text + (" Bars are averages over neighbouring steps." if num > len(bins) else "")


def with_drawing(page: str) -> str:
    """Return a page with the drawing's style and functions inserted at their placeholders."""
    for name, file in (("/*STYLE*/", "drawing.css"), ("/*DRAWING*/", "drawing.js")):
        page = page.replace(name, resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))
    return page


def write_report(report: Report, path: Path) -> None:
    """Write the page. It appears under its name only when it is complete. Raise JobError if it cannot be written."""
    page = with_drawing(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    # "</script>" inside the data would end the script element, so escape "<".
    data = json.dumps(report.data(), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    with writing(f"the report {path}"), replacing(path) as temporary:
        temporary.write_text(page.replace("/*DATA*/", data), encoding="utf-8", errors="replace")


def machine() -> list[tuple[str, str]]:
    """Return a description of the machine as (name, value) pairs, with versions of the loaded packages."""
    import sys

    out = [("processor", _processor()), ("cores", str(usable_cores()))]
    try:
        import psutil

        out.append(("memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"))
    except ImportError:
        pass
    out.append(("system", platform.platform(terse=True)))
    out.append(("Python", platform.python_version()))
    for name in ("prefold", "torch", "numpy", "tokenizers"):
        module = sys.modules.get(name)
        if module is not None:
            out.append((name, str(getattr(module, "__version__", "?"))))
    return out


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
