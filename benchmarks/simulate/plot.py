"""A picture of simulated runs; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefold.simulate.cases import Outcome
from prefold.simulate.fleet import IDLE_CAUSES

__all__ = ["plot"]


def plot(outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Writes a picture as the file's ending says (.svg, .png, .pdf).

    It shows the seconds of each outcome, at work and idle by cause; the use over time, in the colours of the names; and
    the time by number of replicas, where there are several.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    by_name: dict[str, list[tuple[int, float]]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.name, []).append((outcome.run.replicas, outcome.run.seconds))
    scales = {name: sorted(points) for name, points in by_name.items() if len(points) > 1}
    figure = Figure(figsize=(15 if scales else 11, max(4.2, 1.6 + 0.24 * len(outcomes))), layout="constrained")
    bars, over_time, *rest = figure.subplots(1, 3 if scales else 2)
    colours = colormaps["turbo"]([(i + 0.5) / len(outcomes) for i in range(len(outcomes))])
    _draw_parts(bars, outcomes, colours)
    for outcome, colour in zip(outcomes, colours, strict=True):
        run = outcome.run
        seconds = [run.seconds * (i + 0.5) / len(run.use) for i in range(len(run.use))]
        over_time.plot(seconds, [100 * use for use in run.use], color=colour, linewidth=1.2)
    over_time.set(xlabel="seconds", ylabel="replicas at work, %", ylim=(0, 105), title="colours as those of the names")
    for scaling in rest:
        for name, points in scales.items():
            scaling.plot(*zip(*points, strict=True), marker="o", label=name)
        scaling.set(xlabel="replicas", ylabel="seconds", xscale="log", yscale="log")
        counts = sorted({count for points in scales.values() for count, _ in points})
        scaling.set_xticks(counts, [str(count) for count in counts])
        scaling.minorticks_off()
        scaling.legend(fontsize=7)
    figure.savefig(path)


def _draw_parts(axes: Any, outcomes: Sequence[Outcome], colours: Sequence[Any]) -> None:
    """Draws a bar of each outcome's seconds; its parts are the replicas' shares of work and of idle causes."""
    runs = [outcome.run for outcome in outcomes]
    places, ends = range(len(runs)), [0.0] * len(runs)
    for part, colour in zip(
        ("work", *IDLE_CAUSES), ("#4878a8", "#b0b0b0", "#e8c060", "#d88048", "#a04848"), strict=True
    ):
        shares = [1 - run.idle_share() if part == "work" else run.idle_share(part) for run in runs]
        widths = [run.seconds * share for run, share in zip(runs, shares, strict=True)]
        axes.barh(places, widths, left=ends, color=colour, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(places, [f"{outcome.name}, {outcome.run.replicas}" for outcome in outcomes], fontsize=8)
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_color(colour)
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.legend(fontsize=7, loc="lower right")
