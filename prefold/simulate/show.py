"""Tables and plots of simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError
from .cases import Outcome
from .fleet import IDLE_CAUSES

__all__ = ["LEGEND", "as_json", "header", "line", "machine_line", "plot"]

_NAME = 48  # width of a system's name
_COLUMNS = (
    ("requests", 11), ("tokens", 15), ("replicas", 9), ("seconds", 10), ("published", 10), ("$/Mtok", 9), ("first", 7),
    ("in-step", 8), ("again", 7), ("vLLM", 7), ("published", 10), ("use", 7), *((cause, 8) for cause in IDLE_CAUSES),
)  # fmt: skip
LEGEND = """\
tokens: of prompts and outputs. $/Mtok: dollars for a million of them.
first, in-step, again: part of the prompts' tokens that is there at a request's first admission, that another request
  of the same step computes, and that is there after a preemption. vLLM: the hit rate that vLLM would print.
use: part of the replicas' time at work. Idle: load, until the model is there; input, none has come; border, waiting for
  other replicas; tail, when all is given out. docs/simulate.md says more."""


def machine_line(outcome: Outcome) -> str:
    """Returns what is simulated on what, in words."""
    machine, model = outcome.setup.machine, outcome.setup.model
    rates = f"{machine.flops / 1e12:,.3g} TFLOP/s, {machine.bandwidth / 1e9:,.4g} GB/s"
    overhead = f"{machine.overhead * 1e3:,.3g} ms beside each step"
    return f"{model.name} on {machine.name}: {rates}, {overhead}, ${machine.dollars_per_hour:g} an hour"


def _columns(published: bool) -> tuple[tuple[str, int], ...]:
    return tuple(column for column in _COLUMNS if published or column[0] != "published")


def header(*, published: bool = False) -> str:
    """Returns the head of the table. published: whether it has columns for what was published."""
    return f"{'system':<{_NAME}}" + "".join(f"{name:>{width}}" for name, width in _columns(published))


def line(outcome: Outcome, *, published: bool = False) -> str:
    """Returns one line of the table, with the columns that `header` names."""
    run = outcome.run
    rates = run.hits.rates()
    seconds, rate = outcome.expected or (None, None)
    cells = [
        f"{run.requests:,}",
        f"{run.prompt_tokens + run.output_tokens:,}",
        f"{run.replicas:,}",
        f"{run.seconds:,.1f}",
        *(["" if seconds is None else f"{seconds:,.0f}"] if published else []),
        f"{run.dollars_per_million(outcome.setup.machine.dollars_per_hour):.4f}",
        *(f"{rates[name]:.1%}" for name in ("first_admission", "in_step", "recompute", "vllm")),
        *(["" if rate is None else f"{rate:.1%}"] if published else []),
        f"{1 - run.idle_share():.1%}",
        *(f"{run.idle_share(cause):.1%}" for cause in IDLE_CAUSES),
    ]
    widths = [width for _, width in _columns(published)]
    row = f"{outcome.name:<{_NAME}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return "\n".join([row, *(f"    {what:<40}{number:>14,.6g}" for what, number in outcome.facts.items())])


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as plain values."""
    run, setup = outcome.run, outcome.setup
    waits = sorted(run.waits)
    return {
        "system": outcome.name,
        "machine": setup.machine.name,
        "model": setup.model.name,
        "replicas": run.replicas,
        "seconds": run.seconds,
        "published_seconds": None if outcome.expected is None else outcome.expected[0],
        "dollars_per_million_tokens": run.dollars_per_million(setup.machine.dollars_per_hour),
        "requests": run.requests,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "prompt_rows_computed": run.hits.computed,
        "preemptions": run.hits.preemptions,
        "steps": run.steps,
        "hits": run.hits.rates(),
        "use": 1 - run.idle_share(),
        "idle": {cause: run.idle_share(cause) for cause in IDLE_CAUSES},
        "seconds_to_answer": {f"p{p}": waits[int(p / 100 * (len(waits) - 1))] for p in (50, 95, 99)} if waits else {},
        "use_over_time": run.use,
        **outcome.facts,
    }


def plot(outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Writes a picture as the file's ending says (.svg, .png, .pdf): of each outcome the seconds, at work and idle by
    cause; the use over time, in the colours of the names; and the time by number of replicas, where there are several.
    Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "--plot") from error
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
