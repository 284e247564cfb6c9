"""The report of benchmarks/looped.py: tables in Markdown, and the same with plots as one page of HTML."""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import median, spread, table

Cells = dict[str, dict[str, Any]]
# The seed's figures, beside which ours are shown.
SEED_GAINS = {"plan": 1.20, "template": 1.41}


def read(folder: Path) -> Cells:
    """Returns the cells of a folder by name; a file that is no JSON is none."""
    found: Cells = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
    return found


def of(cells: Cells, kind: str) -> list[tuple[list[str], dict[str, Any]]]:
    """Returns the cells whose names begin so: the rest of the name in parts, and what is in them."""
    some = [(name.split("-")[1:], one) for name, one in cells.items() if name.split("-")[0] == kind]
    return sorted(some, key=lambda pair: [(0, int(part)) if part.isdigit() else (1, part) for part in pair[0]])


def missing(one: dict[str, Any]) -> str | None:
    """Returns why a cell has no figures."""
    return one.get("failed") or (f"not there: {one['not there']}" if "not there" in one else None)


def ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ({spread([1e3 * one for one in seconds])})"


def plus_minus(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}"


def accuracy(cells: Cells) -> str:
    lines: list[list[Any]] = []
    some = of(cells, "accuracy")
    for nodes in sorted({parts[0] for parts, _ in some}, key=int):
        done = [one["result"] for parts, one in some if parts[0] == nodes and "result" in one]
        key = "training processor seconds"
        took = [one[key] for parts, one in some if parts[0] == nodes and key in one]
        lines += [[nodes, f"seed {parts[1]}: {missing(one)}"] + [""] * 4 for parts, one in some if missing(one)]
        if not done:
            continue
        for way in [name for name in done[0] if isinstance(done[0][name], dict) and "seen" in done[0][name]]:
            shown = [plus_minus([one[way][key] for one in done]) for key in ("seen", "one more", "all", "visits")]
            lines.append([nodes, way, *shown])
        lines.append([nodes, "an end by guessing", *[f"{done[0]['guess']:.3f}"] * 3, ""])
        if took:
            span = f"{min(took):.0f}-{max(took):.0f}"
            lines.append([nodes, f"training of {len(took)} seeds, processor s", span, "", "", ""])
    return table(["nodes", "way", "hops of training", "one hop more", "all", "visits of a query's row"], lines)


def replay(cells: Cells) -> str:
    lines = []
    names = ("soft", "generic hard", "plan replay", "template replay", "one template, generic", "one template")
    for parts, one in of(cells, "replay"):
        if missing(one):
            lines.append([*parts, missing(one)] + [""] * 14)
            continue
        equal = ", ".join(name for name, is_equal in one["equal to the bit"].items() if is_equal)
        figures = [f"{one[name]:.2f}" for name in ("gain of plans", "gain of templates", "bound of the gain")]
        over = ("generic over its blocks and router", "generic over its groups and router", "template over its blocks")
        more = [f"{one[name]:.2f}" for name in over]
        times = [ms(one["seconds"][name]) for name in names]
        lines.append([*parts, one["routes"], f"{one['visits']:.1f}", *times, *figures, *more, equal])
    headers = ["visits", "batch", "prompt", "routes", "visits made", *(f"{name}, ms" for name in names)]
    headers += [f"plans over generic (seed: {SEED_GAINS['plan']:.2f})"]
    headers += [f"templates over generic (seed: {SEED_GAINS['template']:.2f})", "its bound"]
    headers += [
        "generic over blocks + router",
        "generic over groups + router",
        "one template over its blocks",
        "equal to the bit",
    ]
    found = table(headers, lines)
    lines = []
    for parts, one in of(cells, "queue"):
        if missing(one):
            lines.append([parts[0], missing(one), "", "", "", ""])
            continue
        p95 = [f"{1e3 * one['p95 ttft'][name]:.0f}" for name in ("generic", "template")]
        times = [ms(one["seconds"][name]) for name in ("generic", "template")]
        lines.append([parts[0], *times, f"{one['gain']:.2f}", *p95])
    headers = [
        "templates",
        "generic, ms",
        "by template, ms",
        "gain",
        "p95 TTFT generic, ms",
        "p95 TTFT by template, ms",
    ]
    return f"{found}\n\nA queue of requests:\n\n{table(headers, lines)}"


def kv(cells: Cells) -> str:
    lines = []
    for parts, one in of(cells, "kv"):
        if missing(one):
            lines.append([*parts, missing(one), "", "", "", ""])
            continue
        times = [ms(one["seconds"][name]) for name in ("without", "with")]
        ratio = f"{median(one['seconds']['without']) / median(one['seconds']['with']):.2f}"
        lines.append([*parts, *times, ratio, f"{one['kv bytes'] / 1e6:.1f}", one["equal tokens"]])
    headers = ["visits", "batch", "prompt", "out", "ms without K/V", "ms with", "ratio", "MB of K/V", "equal tokens"]
    return table(headers, lines)


def decode(cells: Cells) -> str:
    lines = []
    for parts, one in of(cells, "decode"):
        name = "-".join(parts)
        if missing(one):
            lines.append([name, missing(one)] + [""] * 8)
            continue
        for path in [key for key in one if isinstance(one[key], dict) and "ttft" in one[key]]:
            row, fixed = one[path], one["fixed"]
            calls = {"fixed": "block calls", "+ exits": "block calls with exits"}.get(path)
            over = median(fixed["seconds"]) / median(row["seconds"])
            right = f"{row['first right']:.3f} / {row['right']:.3f}" if "right" in row else ""
            first = [name, path, f"{1e3 * row['ttft']:.1f}", f"{1e3 * row['tpot']:.2f}", ms(row["seconds"])]
            last = [f"{row['tokens/s']:.0f}", f"{over:.2f}", one["counts"][calls] if calls else "", right]
            lines.append([*first, *last, f"{row['as fixed']:.2f}"])
    headers = ["cell", "path", "TTFT, ms", "TPOT, ms", "end to end, ms", "tokens/s", "over fixed", "block calls"]
    return table([*headers, "right: first / all tokens", "outputs as fixed"], lines)


PLANNER = ("whole routes", "visits", "by the most frequent route")
PLANNER += ("whole routes where decided", "visits where decided", "decided routes", "decided visits")


def entropy(counts: Sequence[int]) -> float:
    shares = np.array(counts) / sum(counts)
    return max(0.0, float(-(shares * np.log2(shares)).sum()))


def routes(cells: Cells) -> str:
    lines, planners = [], []
    for parts, one in of(cells, "routes"):
        if missing(one):
            lines.append([*parts, missing(one)] + [""] * 8)
            continue
        for way in [key for key in one if isinstance(one[key], dict) and "by hops" in one[key]]:
            row = one[way]
            counts = list(row.get("routes", {}).values())
            top = [f"{sum(sorted(counts)[-k:]) / sum(counts):.2f}" if counts else "" for k in (8, 16)]
            by_hops = ", ".join(f"{share:.2f}" for share in row["by hops"].values())
            visits = f"{np.mean(list(row['visits'].values())):.2f}"
            graph = f"{row['graph visits']:.2f}" if "graph visits" in row else ""
            spread_of = [len(counts) or "", f"{entropy(counts):.2f}" if counts else "", *top]
            lines.append([*parts, way, f"{row['right']:.3f}", by_hops, visits, graph, *spread_of])
        if "planner" in one:
            planners.append([*parts[1:], *(f"{one['planner'].get(name, np.nan):.3f}" for name in PLANNER)])
    headers = ["reads", "nodes", "seed", "way", "right", "by hops", "visits", "of a graph's row"]
    found = table([*headers, "routes", "entropy, bits", "top 8", "top 16"], lines)
    found += "\n\nHow often the planner foretells a route, from the embeddings of the prompt:\n\n"
    found += table(["nodes", "seed", *PLANNER], planners)
    drawn = []
    for count in (1, 4, 16, 64):
        rng = np.random.default_rng(count)
        counts = np.bincount(rng.integers(0, count, 256), minlength=count)
        top = [f"{np.sort(counts)[-k:].sum() / 256:.2f}" for k in (8, 16)]
        drawn.append([count, f"{entropy(counts[counts > 0].tolist()):.2f}", *top])
    return f"{found}\n\nDrawn policies, 256 requests:\n\n" + table(
        ["templates", "entropy, bits", "top 8", "top 16"], drawn
    )


def once(cells: Cells) -> str:
    one = cells.get("once", {"not there": "not run"})
    if missing(one):
        return missing(one) or ""
    rows = [[name, row["block calls"], row["pairs"]] for name, row in one.items() if "pairs" in row]
    return table(["16 queries of a graph, by", "block calls", "distinct (row, route, visit)"], rows)


def headline(cells: Cells) -> str:
    """Returns what may be claimed: "faster" only where the last path beats all visits in a cell on a GPU."""
    for parts, one in of(cells, "decode"):
        if (
            one.get("options", {}).get("device") == "cuda"
            and "+ exits" in one
            and one["+ exits"]["tokens/s"] > one["fixed"]["tokens/s"]
        ):
            return f"Routed looped models are faster than all visits on a GPU ({'-'.join(parts)})."
    return "Looped models with routes need serving that knows routes. No GPU cell shows them faster than all visits."


# Paths as rows of the seed's table, in its order.
ROWS = {
    "fixed": "fixed loop",
    "no cache": "fixed loop, no K/V",
    "soft": "soft router, no K/V",
    "hard": "hard router",
    "template": "hard + template + K/V",
    "exits": "fixed loop + exits",
    "template exits": "hard + template + K/V + exits",
}


def publishable(cells: Cells) -> str:
    """Returns the seed's table with exits added: a row a path and task, means and deviations over seeds, of the largest
    batch that was measured."""
    some = [(parts, one) for parts, one in of(cells, "paths") if parts[0] == "trained" and "paths" in one]
    if not some:
        return "Not measured: the section `paths` has no trained model."
    batch = max(int(parts[3]) for parts, _ in some)
    lines = []
    for nodes in sorted({parts[1] for parts, _ in some}, key=int):
        chosen = [one for parts, one in some if parts[1] == nodes and int(parts[3]) == batch]
        for path, name in ROWS.items():
            of_seeds = [one["paths"][path] for one in chosen]
            means = {key: float(np.mean([one[key] for one in of_seeds])) for key in of_seeds[0] if key != "seconds"}
            shown = [plus_minus([one[key] for one in of_seeds]) for key in ("right", "seen", "one more")]
            shown += [f"{1e3 * means['ttft']:.1f}", f"{1e3 * means['tpot']:.2f}", f"{means['tokens/s']:.0f}"]
            kv_of = f"{means['kv bytes'] / 1e6:.2f}" if means["kv bytes"] else ""
            lines.append([nodes, name, *shown, kv_of, f"{means['block calls']:.2f}", len(of_seeds)])
    headers = ["nodes", "Model", "Accuracy", "hops of training", "one hop more", "TTFT, ms", "TPOT, ms", "tokens/s"]
    headers += ["K/V, MB", "Block calls", "seeds"]
    return f"{batch} queries at once.\n\n{table(headers, lines)}"


def paths(cells: Cells) -> str:
    """Returns every path of every cell, and how fast each is beside "fixed" by each size of the grid."""
    lines: list[list[Any]] = []
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for parts, one in of(cells, "paths"):
        name = "-".join(parts)
        if missing(one):
            lines.append([name, missing(one)] + [""] * 9)
            continue
        fixed = one["paths"]["fixed"]
        for path in ROWS:
            row = one["paths"][path]
            right = f"{row['right']:.3f} / {row['right tokens']:.3f}" if "right" in row else ""
            first = [name, ROWS[path], f"{1e3 * row['ttft']:.1f}", f"{1e3 * row['tpot']:.2f}", ms(row["seconds"])]
            last = [f"{row['tokens/s']:.0f}", f"{row['tokens/s'] / fixed['tokens/s']:.2f}"]
            last += [f"{row['kv bytes'] / 1e6:.2f}", f"{row['block calls']:.2f}", right]
            lines.append([*first, *last, f"{row['drift']:.1e}" if "drift" in row else ""])
            if parts[0] == "random":
                sizes = zip(("visits", "batch", "prompt", "out"), parts[1:], strict=True)
                for size, value in sizes:
                    ratios.setdefault((size, value, path), []).append(row["tokens/s"] / fixed["tokens/s"])
    headers = ["cell", "path", "TTFT, ms", "TPOT, ms", "end to end, ms", "tokens/s", "over fixed", "K/V, MB"]
    found = table([*headers, "block calls a row", "right: first / all tokens", "largest logprob difference"], lines)
    keys = sorted({key[:2] for key in ratios}, key=lambda key: (key[0], int(key[1])))
    summary = []
    for size, value in keys:
        of_paths = [ratios[size, value, path] for path in ROWS]
        summary.append([f"{size} {value}", len(of_paths[0]), *(f"{np.median(some):.2f}" for some in of_paths)])
    names = [f"{ROWS[path]}" for path in ROWS]
    return f"Tokens/s over the fixed loop, medians:\n\n{table(['size', 'cells', *names], summary)}\n\n{found}"


TABLES: dict[str, tuple[str, Callable[[Cells], str]]] = {
    "accuracy": ("Right answers and exits", accuracy),
    "replay": ("Ways through a routed model", replay),
    "kv": ("K/V beside none", kv),
    "decode": ("Generating", decode),
    "routes": ("Routers", routes),
    "paths": ("Every path", paths),
    "once": ("Each row once", once),
}


def plots(cells: Cells) -> list[tuple[str, bytes]]:
    """Returns pictures as (what it shows, PNG); none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = []

    def draw(title: str, across: str, up: str, lines: dict[str, tuple[list[float], list[float]]], mark: str) -> None:
        if not lines:
            return
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for name, (x, y) in lines.items():
            axes.plot(x, y, mark, label=name)
        axes.set(title=title, xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110)
        pyplot.close(figure)
        found.append((title, out.getvalue()))

    lines: dict[str, tuple[list[float], list[float]]] = {}
    for parts, one in of(cells, "accuracy"):
        if "result" in one:
            ways = [row for row in one["result"].values() if isinstance(row, dict) and "seen" in row]
            ways.sort(key=lambda row: row["visits"])
            lines[f"{parts[0]} nodes, seed {parts[1]}"] = ([r["visits"] for r in ways], [r["all"] for r in ways])
    draw("Right answers by visits: the gate's thresholds", "visits of a query's row", "right", lines, ".-")
    lines = {}
    for parts, one in of(cells, "kv"):
        if "ratio" in one:
            key = f"{parts[0]} visits, batch {parts[1]}, {parts[3]} out"
            x, y = lines.setdefault(key, ([], []))
            x.append(int(parts[2]))
            y.append(one["ratio"])
    draw("K/V over none", "tokens of a prompt", "times as fast", lines, ".-")
    lines = {}
    for parts, one in of(cells, "decode"):
        for path in ("template + KV", "+ exits"):
            if path in one:
                at = [int(part) for part in parts[1:] if part.isdigit()]
                x, y = lines.setdefault(f"{parts[0]} {at[0]}: {path}", ([], []))
                x.append(at[1])
                y.append(median(one["fixed"]["seconds"]) / median(one[path]["seconds"]))
    draw("Generating, over all visits", "requests at once", "times as fast", lines, ".")
    return found


def write(folder: Path, sections: Sequence[str]) -> str:
    """Writes report.md and report.html of the cells in a folder, and returns the tables of these sections."""
    cells = read(folder)
    machines = sorted({json.dumps(one["machine"]) for one in cells.values() if "machine" in one})
    parts = [f"# Looped models\n\n{headline(cells)}\n"]
    parts += ["Measured on: " + ", ".join(f"{k} {v}" for k, v in json.loads(one).items()) for one in machines]
    parts.append(f"\n## One table\n\n{publishable(cells)}\n")
    shown = []
    for name, (title, make) in TABLES.items():
        text = f"## {title}\n\n{make(cells)}\n"
        parts.append(text)
        if name in sections:
            shown.append(text)
    _write(folder / "report.md", "\n".join(parts))
    body = "\n".join(_html_of(part) for part in parts)
    for title, picture in plots(cells):
        code = base64.b64encode(picture).decode()
        body += f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{code}"></figure>\n'
    style = (
        "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:3px}"
    )
    _write(
        folder / "report.html",
        f'<!doctype html><meta charset="utf-8"><title>Looped models</title><style>{style}</style>\n{body}',
    )
    return "\n".join(shown)


def _html_of(text: str) -> str:
    """Returns HTML of headings, paragraphs and Markdown tables."""
    made: list[str] = []
    for block in text.split("\n\n"):
        block = block.strip()
        if block.startswith("|"):
            rows = [[html.escape(cell.strip()) for cell in line.strip("|").split("|")] for line in block.splitlines()]
            head, *lines = [row for number, row in enumerate(rows) if number != 1]
            made.append("<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>")
            made += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines]
            made.append("</table>")
        elif block.startswith("#"):
            level = len(block) - len(block.lstrip("#"))
            made.append(f"<h{level}>{html.escape(block.lstrip('# '))}</h{level}>")
        elif block:
            made.append(f"<p>{html.escape(block)}</p>")
    return "\n".join(made)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(path.suffix + f".{os.getpid()}.part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)
