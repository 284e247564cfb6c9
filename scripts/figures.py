#!/usr/bin/env python3
"""Write every published figure: the tables and plots of pages in docs/ (PAGES), and the README's plot.

    python scripts/figures.py [--check]

All figures come from the files in `benchmarks/results/`, which the benchmarks write (`--json FILE`). With --check
nothing is written, and the exit status is 1 if a page or plot would change.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOTS = ROOT / "benchmarks/results", ROOT / "docs/plots"
PAGES = ROOT / "docs/figures.md", ROOT / "docs/batching.md", ROOT / "docs/cpus.md", ROOT / "docs/simulate.md"
OURS = "prefold"
# Colours of text, lines, bars of prefold, bars of its other modes, bars of other systems, and the limit.
THEMES = {
    "light": ("#1f2328", "#d0d7de", "#0969da", "#80b8f0", "#9aa4af", "#cf222e"),
    "dark": ("#e6edf3", "#444c56", "#4493f8", "#2c5b94", "#6e7681", "#ff7b72"),
}


@dataclass
class Panel:
    """The measurements of one job, for a table and a plot."""

    title: str
    rounds: dict[str, list[float]]  # {system: its times in `unit`}
    limit: float | None = None  # the least time of the machine; None: not measured
    unit: str = "s"
    notes: dict[str, str] = field(default_factory=dict)  # {system: text of an additional column}
    note_title: str = ""  # heading of that column
    all_ours: bool = False  # whether all systems are modes of prefold

    def table(self) -> list[str]:
        """Return the table: median, minimum and maximum, and the ratio to the first system."""
        own = median(next(iter(self.rounds.values())))
        head = ["system", f"median, {self.unit}", "least to most", "rounds", f"time, {next(iter(self.rounds))} = 1"]
        head += ["of the limit"] * (self.limit is not None) + [self.note_title] * bool(self.notes)
        lines = [_row(head), "|" + "---|" * len(head)]
        for system, taken in self.rounds.items():
            middle = median(taken)
            row = [system, _number(middle), f"{_number(min(taken))} to {_number(max(taken))}", str(len(taken))]
            row.append(f"{middle / own:.2f}")
            row += [f"{self.limit / middle:.0%}"] if self.limit is not None else []
            row += [self.notes.get(system, "")] if self.notes else []
            lines.append(_row(row))
        if self.limit is not None:
            limit = ["limit of the machine", _number(self.limit), "", "", f"{self.limit / own:.2f}", "100%"]
            lines.append(_row(limit + [""] * bool(self.notes)))
        return lines


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _short(system: str) -> str:
    """Return the name and version of a system, without its dtype and the name of its package."""
    system = re.sub(r" (bfloat16|float32)$", "", system)
    system = re.sub(r" \((?:transformers|vllm|llama-cpp-python) ([\d.]+)\)$", r" \1", system)
    return re.sub(r"^(vLLM|transformers|llama\.cpp)(?:'s|,)? ?(.*?) ?([\d.]+\.[\d.]+)$", _version_first, system)


def _version_first(match: re.Match[str]) -> str:
    name, about, version = match.groups()
    return f"{name} {version}" + (f", {about}" if about else "")


def rerank(file: dict) -> Iterator[Panel]:
    title = (
        f"Rerank: {file['pairs']} query-passage pairs of MS MARCO, {file['tokens']:,} tokens, {file['rows']:,} unique"
    )
    limit = median(one["seconds"] for one in file["limits"])
    yield Panel(title, {_short(name): taken for name, taken in file["seconds"].items()}, limit)


def classify(file: dict) -> Iterator[Panel]:
    names = {"sst2": "SST-2, 16 examples in the prompt", "mmlu": "MMLU, 5 examples in the prompt"}
    for task in dict.fromkeys(run["task"] for run in file["runs"]):
        runs = [run for run in file["runs"] if run["task"] == task]
        notes = {_short(run["system"]): f"{run['accuracy']:.3f}, {run['unlike']}" for run in runs}
        rounds = {_short(run["system"]): run["seconds"] for run in runs}
        title = f"Classify: {runs[0]['items']} items of {names.get(task, task)}"
        yield Panel(title, rounds, notes=notes, note_title="accuracy, labels unlike the first row's")


def decide(file: dict) -> Iterator[Panel]:
    for case in file["cases"]:
        asked = f"{case['states']:,} states x {case['questions']} question{'s' * (case['questions'] > 1)}"
        tokens = f"{case['tokens']:,} tokens, {case['rows'][-1]:,} unique, the longest prompt {case['longest']}"
        notes = {_short(name): f"{value:.2g}" for name, value in case["differences"].items()}
        rounds = {_short(name): taken for name, taken in case["seconds"].items()}
        if few := case.get("transformers_states"):
            ran = next((name for name in rounds if name.startswith("transformers")), "")
            notes |= {ran: f"{few} states, times {case['states'] / few:g}"} if ran and few < case["states"] else {}
        title = f"Decide: {asked} with a random {case['shape']} model, {tokens}"
        yield Panel(title, rounds, notes=notes, note_title="largest difference of a probability")


def generate(file: dict) -> Iterator[Panel]:
    for case in file["cases"]:
        limit = median(one["seconds"] for one in case["limits"])
        rounds = {_short(name): taken for name, taken in case["seconds"].items()}
        yield Panel(f"Generate: {case['about']}", rounds, limit)


def cpu(file: dict) -> Iterator[Panel]:
    """Yield a panel of decode steps for each number of sequences, and a panel for each prompt, in milliseconds."""
    seconds = file["seconds"]
    for case in seconds[OURS]:
        kind, count = case.split()
        if kind == "first":
            continue
        rounds = {}
        for system, by in seconds.items():
            taken = by[case]
            if kind == "decode":
                firsts = by[f"first {count}"]
                taken = [(a - b) / (file["tokens"] - 1) for a, b in zip(taken, firsts, strict=True)]
            rounds[_short(system)] = [1e3 * one for one in taken]
        many = f"{count} sequence{'s' * (count != '1')}"
        title = f"Decode: one step of {many}" if kind == "decode" else f"Prefill: a prompt of {count} tokens"
        # Decode steps get no limit: the weights may fit in the last-level cache, which is faster than memory.
        limit = file["limit_seconds"][case] if kind == "prompt" else None
        yield Panel(title, rounds, None if limit is None else 1e3 * limit, "ms")


def formats(file: dict) -> Iterator[Panel]:
    """Yield a panel for each kernel variant and number of rows, in milliseconds per product."""
    groups: dict[tuple[str, int], list[dict]] = {}
    for run in file["runs"]:
        groups.setdefault((run["variant"], run["rows"]), []).append(run)
    for (variant, rows), runs in groups.items():
        rounds = {run["format"]: [1e3 * one for one in run["seconds"]] for run in runs}
        notes = {run["format"]: f"{run['bytes']:.2f}" for run in runs}
        title = f"{variant}: {rows} row{'s' * (rows > 1)} times {file['outputs']} x {file['inputs']}"
        yield Panel(title, rounds, None, "ms", notes, "bytes a weight", all_ours=True)


PANELS = {
    "rerank": rerank,
    "classify": classify,
    "decide": decide,
    "generate": generate,
    "cpu": cpu,
    "formats": formats,
    "batching": lambda file: (),
}


def drift(file: dict) -> list[str]:
    """Return a table with a row for each case. Each data set has a column: points, and change from the first case."""
    runs = {(run["case"], run["task"]): run for run in file["runs"]}
    cases, tasks = (list(dict.fromkeys(names)) for names in zip(*runs, strict=True))
    head = [f"{task}, {runs[cases[0], task]['records']} records" for task in tasks]
    lines = [_row(["weights and arithmetic", *head]), "|" + "---|" * (len(tasks) + 1)]
    for case in cases:
        cells = []
        for task in tasks:
            run, first = runs[case, task], runs[cases[0], task]
            changed = "" if run["changed"] is None else f"{run['changed']:.1f} % changed; "
            beside = f" ({run['points'] - first['points']:+.2f}; {changed}{run['difference']:.2g})"
            cells.append(f"{run['points']:.2f}" + (beside if case != cases[0] else ""))
        lines.append(_row([case, *cells]))
    return lines


def written(file: dict) -> list[str]:
    """Return the tables of a benchmark that writes its tables itself."""
    return "\n\n".join(file["tables"].values()).splitlines()


def shapes(file: dict) -> list[str]:
    """Return a table with a row for each shape: the median times of a decode step and of a prompt, and their limits."""
    head = ["shape", "layers", "decode step, ms", "limit, ms", "of the limit"]
    head += [f"prompt of {file['prompt']} tokens, ms", "limit, ms", "of the limit"]
    lines = [_row(head), "|" + "---|" * len(head)]
    for case in file["cases"]:
        cells = [case["shape"], str(case["layers"])]
        for part in ("step", "prompt"):
            own, limit = (1e3 * median(one[key] for one in case["rounds"]) for key in (part, f"{part}_limit"))
            cells += [_number(own), _number(limit), f"{case['shares'][part]:.0%}"]
        lines.append(_row(cells))
    systems = next((list(case["beside"][0]) for case in file["cases"] if "beside" in case), [])
    if systems:
        head = [
            "shape, one GGUF file",
            *(f"{part}, ms: {_short(name)}" for part in ("step", "prompt") for name in systems),
        ]
        lines += ["", _row(head), "|" + "---|" * len(head)]
    for case in file["cases"]:
        if rounds := case.get("beside"):
            cells = [median(one[name][part] for one in rounds) for part in ("step", "prompt") for name in systems]
            lines.append(_row([case["shape"], *(_number(1e3 * one) for one in cells)]))
    return lines


def latent(file: dict) -> list[str]:
    """Return a table of decode steps, latent and expanded, and a table of prompts, over slots and in a stream."""
    lines = [_row(["sequences", "context", "latent, ms", "expanded, ms", "latent / expanded"]), "|" + "---|" * 5]
    for case in file["cases"]:
        if case["case"] == "decode":
            own, other = (1e3 * median(case["seconds"][name]) for name in ("latent", "expanded"))
            context = "one for all" if case["shared"] else "each its own"
            cells = [f"{case['sequences']}", context, _number(own), _number(other), f"{own / other:.2f}"]
            lines.append(_row(cells))
    head = ["rows of a prompt", "over slots, ms", "in a stream, ms", "slots / stream"]
    lines += ["", _row(head), "|" + "---|" * 4]
    for case in file["cases"]:
        if case["case"] == "prompt":
            slots, stream = (1e3 * median(case["seconds"][name]) for name in ("over slots", "in a stream"))
            lines.append(_row([str(case["rows"]), _number(slots), _number(stream), f"{slots / stream:.2f}"]))
    return lines


TABLES = {"drift": drift, "shapes": shapes, "latent": latent} | dict.fromkeys(
    ("serve", "lmeval", "simulate", "memory", "weights", "layerwise"), written
)


def panels(name: str) -> list[Panel]:
    """Return the panels of a file in `benchmarks/results/`."""
    file = read(name)
    return list(PANELS[file["benchmark"]](file))


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def section(name: str, part: str = "") -> str:
    """Return the text between the marks of a figure.

    Without a part, it has the machine, the command, the plots and the tables of the file. With a part, it is that one
    table of a benchmark that writes its tables itself.
    """
    file = read(name)
    if part:
        return file["tables"][part]
    machine = file["machine"]
    where = f"{machine['date']}; {machine['cpu']}, {machine['threads']} threads; Python {machine['python']}, "
    where += f"torch {machine['torch']}; commit `{file['commit']}`; all rounds: `benchmarks/results/{name}.json`."
    if file["benchmark"] in TABLES:
        return "\n".join([where, "", *_command(file), "", *TABLES[file["benchmark"]](file)])
    lines = [where, "", *_command(file), ""]
    shown = panels(name)
    lines += [picture(name, "plots/", file["benchmark"]), ""] * bool(shown)
    for panel in shown:
        lines += [f"**{panel.title}**", "", *panel.table(), ""]
    return "\n".join(lines).rstrip()


def _command(file: dict) -> list[str]:
    """Return the command of a file as a block of code, wrapped to the width of the page."""
    lines = textwrap.wrap(file["command"], 88, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(" \\\n  ".join(lines), "    ").split("\n")


def picture(name: str, folder: str, about: str) -> str:
    """Return the HTML of a plot, which follows the reader's theme."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}{name}-dark.svg">'
    return f'<picture>{dark}<img alt="{about}: time of each system" src="{folder}{name}-light.svg"></picture>'


def plot(shown: list[Panel], theme: str) -> str:
    """Return an SVG: for each panel a bar per system, the spread of its rounds, and a line at the limit."""
    text, line, own, modes, others, limit = THEMES[theme]
    width, left, right = 800, 250, 120
    parts, y = [], 8
    for panel in shown:
        scale = (width - left - right) / max(max(taken) for taken in panel.rounds.values())
        parts.append(f'<text x="0" y="{y + 14}" font-weight="600">{escape(panel.title)}</text>')
        y += 26
        top = y
        for number, (system, taken) in enumerate(panel.rounds.items()):
            middle = median(taken)
            colour = own if number == 0 else modes if panel.all_ours or system.startswith(OURS) else others
            least, most = left + scale * min(taken), left + scale * max(taken)
            parts += [
                f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(system)}</text>',
                f'<rect x="{left}" y="{y + 2}" width="{scale * middle:.1f}" height="14" rx="2" fill="{colour}"/>',
                f'<path d="M{least:.1f} {y + 9}H{most:.1f}" stroke="{text}" stroke-width="1.5"/>',
                f'<text x="{most + 8:.1f}" y="{y + 13}">{_number(middle)} {panel.unit}</text>',
            ]
            y += 20
        if panel.limit is not None:
            at = left + scale * panel.limit
            parts.append(f'<path d="M{at:.1f} {top}V{y}" stroke="{limit}" stroke-width="1.5" stroke-dasharray="4 3"/>')
            parts.append(
                f'<text x="{at:.1f}" y="{y + 11}" fill="{limit}" text-anchor="middle" font-size="11">limit</text>'
            )
            y += 12
        parts.append(f'<path d="M{left} {top}V{y}" stroke="{line}"/>')
        y += 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
    return (
        f'{head}font-family="system-ui, sans-serif" font-size="13" fill="{text}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def overview() -> list[Panel]:
    """Return the panels of the README's plot: prefold and other systems on rerank, classify and generate."""
    shown = []
    for name in ("rerank", "classify", "generate-groups"):
        if (RESULTS / f"{name}.json").exists():
            shown += panels(name)[:1]
    for panel in shown:
        first, *later = panel.rounds
        panel.rounds = {OURS: panel.rounds[first]} | {
            system: panel.rounds[system] for system in later if not system.startswith(OURS)
        }
    return shown


def made() -> dict[Path, str]:
    """Return {path: text} of every file that this script writes."""
    texts = {}
    for path in sorted(RESULTS.glob("*.json")):
        if read(path.stem).get("benchmark") in PANELS and panels(path.stem):
            for theme in THEMES:
                texts[PLOTS / f"{path.stem}-{theme}.svg"] = plot(panels(path.stem), theme)
    for theme in THEMES:
        texts[PLOTS / f"overview-{theme}.svg"] = plot(overview(), theme)
    used = set()
    for page in PAGES:
        mark = re.compile(r"(<!-- figure (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.S)
        text = page.read_text(encoding="utf-8")
        used |= {found[2] for found in mark.finditer(text)}
        texts[page] = mark.sub(lambda found: f"{found[1]}\n{section(found[2], found[3] or '')}\n\n{found[4]}", text)
    if unused := {path.stem for path in RESULTS.glob("*.json")} - used:
        raise SystemExit(f"no page shows the results {sorted(unused)}; add a mark <!-- figure NAME --> to a page")
    return texts


def main() -> int:
    """Write or check the files. Return the exit status."""
    texts = made()
    stale = [path for path in PLOTS.glob("*.svg") if path not in texts]
    wrong = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in wrong + stale:
            print(f"{path.relative_to(ROOT)} is out of date; run scripts/figures.py")
        return 1 if wrong + stale else 0
    for path in stale:
        path.unlink()
    for path in wrong:
        path.write_text(texts[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
