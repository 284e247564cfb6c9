"""`prefold plan`: estimate what a job would share and cost."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..spec.job import TASKS, JobSpec
from .options import command, machine_options, number, sample_options
from .process import notice
from .specs import takes_job

if TYPE_CHECKING:
    from ..jobs import JobPlan
    from ..jobs.opening import Input
    from ..jobs.plan import LayerwisePlan

_SHOWN_SEGMENTS = 32
_COUNTS = ("records", "errors", "requests", "tokens", "rows", "rows_mlp", "longest", "saved", "outputs",
           "output_tokens")  # fmt: skip


@command(short_help="Estimate what a job would share and cost.")
@sample_options(
    number("--max-batch-rows", "Maximum number of rows in a step; sharing mlp shares within a step.", 4096),
    click.option("--gflops", type=click.FloatRange(min=0, min_open=True), metavar="X",
                 help="Estimate the time at X GFLOP/s (default: the measured speed of a step of this job)."),
    number("--replicas", "Show the segments of N equal replicas: rows, rows computed twice, seconds."),
    click.option("--report", metavar="FILE", help="Write an HTML report with the trie."),
    tasks=TASKS,
)  # fmt: skip
@machine_options
@takes_job()
def plan(spec: JobSpec, gflops: float | None, replicas: int | None, as_json: bool) -> None:
    """Estimate what a job would share and what it would cost, without computing results.

    The options for the input and the tasks are the options of `prefold run`. The whole input is tokenised, sorted
    and counted. Then one step of the job runs, to measure the machine's speed (not with --json or --gflops). The
    step has random weights, unless the model is a small GGUF file. Weights of a hub id are never downloaded.

    \b
    prefold plan pairs.jsonl --task rerank -m Qwen/Qwen3-Reranker-0.6B
    """
    from ..jobs import plan_job
    from ..jobs.opening import open_input
    from ..jobs.plan import cost_of, kv_row_bytes, place, plan_layerwise
    from ..jobs.report import open_progress
    from ..jobs.report.progress import format_seconds
    from ..model import config_from
    from ..text.prompts import readable

    rows = spec.model.max_batch_rows or 4096
    input = open_input(spec, notice, weights=False)
    started = time.perf_counter()
    job_plan = plan_job(
        input.source, input.adapter, input.tasks, limit=spec.input.limit, window=spec.input.window,
        max_batch_rows=rows, progress=open_progress(),
    )  # fmt: skip
    seconds = time.perf_counter() - started
    config = config_from(input.checkpoint.config)
    costs, row_bytes = cost_of(job_plan.shape, config), kv_row_bytes(config)
    decode = None if input.tokenizer is None else readable(input.tokenizer.decode)
    segments = place(job_plan, config, replicas) if replicas and job_plan.tokens else []
    other = _plan_other_order(input, rows) if job_plan.tokens else None
    layerwise = None
    if job_plan.tokens:
        layerwise = plan_layerwise(
            job_plan, spec.model, input.checkpoint, window=spec.input.window, measure=not as_json
        )  # fmt: skip
    if as_json:
        counts = {name: getattr(job_plan, name) for name in _COUNTS}
        counts |= {"kv_row_bytes": row_bytes, "flops": {"full": asdict(costs[0]), "off": asdict(costs[1])}}
        counts |= {"seconds": seconds} | ({} if layerwise is None else {"layerwise": asdict(layerwise)})
        if other is not None:
            flops = cost_of(other[1].shape, config)[0]
            counts |= {"other_order": {"first": other[0], "rows": other[1].rows, "flops": asdict(flops)}}
        if segments:
            counts |= {"segments": [asdict(segment) for segment in segments]}
            counts |= {"replicas": _fleet(segments, gflops and gflops * 1e9)}
        click.echo(json.dumps(counts))
    else:
        speed = _speed(input, job_plan, gflops) if job_plan.tokens else None
        lines = _lines(job_plan, costs, row_bytes, seconds, decode, speed)
        if layerwise is not None:
            at = next(number for number, line in enumerate(lines, 1) if line.startswith("at "))
            lines.insert(at, _layerwise_line(layerwise))
        if other is not None and speed is not None:
            first, swapped = other
            about = format_seconds(cost_of(swapped.shape, config)[0].total / speed.flops)
            at = next(number for number, line in enumerate(lines, 1) if line.startswith("at "))
            lines.insert(at, f"with --first {first}: {swapped.rows:,} rows, about {about}")
        click.echo("\n".join([*lines, *(_segment_lines(job_plan, segments, speed.flops) if speed else [])]))
    if spec.output.report:
        _report(job_plan, input, decode, spec.output.report)


def _plan_other_order(input: Input, rows: int) -> tuple[str, JobPlan] | None:
    """Plan decisions with the other order of state and question. Return (the part that is then first, the plan).

    Return None if the prompt is the user's template, or if the input cannot be read twice.
    """
    from ..jobs import plan_job

    spec = input.spec
    if spec.task != "decide" or not all(map(os.path.isfile, spec.input.names)):
        return None
    swapped = input.tasks["decide"].swapped()
    if swapped is None:
        return None
    return swapped.first, plan_job(
        input.source, input.adapter, {"decide": swapped}, limit=spec.input.limit, window=spec.input.window,
        max_batch_rows=rows,
    )  # fmt: skip


def _lines(job_plan: Any, costs: Any, row_bytes: int, seconds: float, decode: Any, speed: Any) -> list[str]:
    from ..jobs.plan import shared_most
    from ..jobs.report.icicle import trie_picture
    from ..jobs.report.progress import format_seconds
    from .answers import one_line

    lines = [f"{job_plan.records:,} records, {job_plan.requests:,} prompts, the longest of {job_plan.longest:,} tokens"]
    if job_plan.errors:
        failing = "1 record" if job_plan.errors == 1 else f"{job_plan.errors:,} records"
        lines.append(f"{failing} would fail, the first with:\n  {job_plan.first_errors[0]}")
    if not job_plan.tokens:
        return lines
    full, off = costs
    lines.append("")
    lines.append(f"{'sharing':<9}{'rows':>16}{'saved':>9}{'TFLOP':>12}{'about':>16}")
    for name, rows, flops in (
        ("full", job_plan.rows, full.total),
        ("mlp", job_plan.rows_mlp, full.linear * job_plan.rows_mlp / max(1, job_plan.rows) + off.attention),
        ("off", job_plan.tokens, off.total),
    ):
        saved = 1 - rows / job_plan.tokens
        lines.append(
            f"{name:<9}{rows:>16,}{saved:>9.1%}{flops / 1e12:>12,.4g}{format_seconds(flops / speed.flops):>16}"
        )
    lines.append(f"at {speed.flops / 1e9:,.0f} GFLOP/s, {speed.words}; counted in {format_seconds(seconds)}")
    if job_plan.outputs:
        lines += _generation_lines(job_plan, row_bytes)
    lines.append("\nThe trie (width: prompts, depth: tokens; darker: shared by more prompts)")
    lines += [f"  {line}" for line in trie_picture(job_plan.shape)]
    shared = shared_most(job_plan.shape, decode)
    if shared:
        lines.append(f"\n{'tokens':>8}{'prompts':>10}{'saved':>14}  shared most")
        lines += [f"{p.length:>8,}{p.prompts:>10,}{p.saved:>14,}  {one_line(p.text, 64)!r}" for p in shared]
    return lines


def _layerwise_line(layerwise: LayerwisePlan) -> str:
    from ..jobs.report.progress import format_bytes, format_seconds

    windows = "1 window" if layerwise.windows == 1 else f"{layerwise.windows:,} windows"
    line = f"layer by layer: about {windows}, each reads {format_bytes(layerwise.bytes)} of weights"
    if layerwise.windows > 1:
        line += f", {format_bytes(layerwise.total)} in all"
    if layerwise.rate is None:
        return line
    about = format_seconds(layerwise.total / layerwise.rate)
    return f"{line}; about {about} at {format_bytes(layerwise.rate)}/s, the measured speed of the file"


def _generation_lines(job_plan: Any, row_bytes: int) -> list[str]:
    from ..jobs.report.progress import format_bytes

    shared, unshared = format_bytes(job_plan.rows * row_bytes), format_bytes(job_plan.tokens * row_bytes)
    tails = format_bytes(job_plan.output_tokens * row_bytes)
    return [
        f"\nPrompts only; then {job_plan.outputs:,} outputs of up to {job_plan.output_tokens:,} tokens in all.",
        f"K/V, {format_bytes(row_bytes)} per row: {shared} for all prompts at once ({unshared} unshared), and up to "
        f"{tails} for all outputs. Only running sequences are held.",
    ]


def _fleet(segments: list[Any], rate: float | None) -> dict[str, Any]:
    """Return the rows of all replicas, the rows computed twice, and the seconds of the costliest segment.

    Args:
        rate: Operations per second of a replica; None: leave the seconds out.
    """
    rows, twice = sum(segment.rows for segment in segments), sum(segment.again for segment in segments)
    seconds = {} if rate is None else {"seconds": max(segment.flops for segment in segments) / rate}
    return {"rows": rows, "rows_twice": twice} | seconds


def _segment_lines(job_plan: Any, segments: list[Any], rate: float) -> list[str]:
    """Return a table of the segments if they are few, their balance, and the seconds of the whole fleet."""
    from ..jobs.report.progress import format_seconds

    if not segments:
        return []
    lines, fleet = [], _fleet(segments, rate)
    if len(segments) <= _SHOWN_SEGMENTS:
        lines.append(f"\n{'replica':>8}{'prompts':>12}{'rows':>16}{'again':>10}{'TFLOP':>12}{'about':>16}")
        for number, segment in enumerate(segments, 1):
            counts = f"{segment.prompts:>12,}{segment.rows:>16,}{segment.again:>10,}"
            about = format_seconds(segment.flops / rate)
            lines.append(f"{number:>8}{counts}{segment.flops / 1e12:>12,.4g}{about:>16}")
    mean = sum(segment.flops for segment in segments) / len(segments)
    worst, twice = max(segment.flops for segment in segments) / mean, fleet["rows_twice"]
    outputs = ", outputs counted at their longest" if job_plan.outputs else ""
    return [
        *lines,
        f"\n{len(segments):,} segments: the costliest {worst:.3f} times the mean{outputs};"
        f" {twice:,} rows ({twice / job_plan.rows:.2%}) computed twice",
        f"{len(segments):,} replicas like this machine: {fleet['rows']:,} rows, about "
        + format_seconds(fleet["seconds"]),
    ]


def _speed(input: Any, job_plan: Any, gflops: float | None) -> Any:
    from .speed import Speed, measure_speed

    if gflops is not None:
        return Speed(gflops * 1e9, "as given")
    return measure_speed(input, job_plan)


def _report(job_plan: Any, input: Any, decode: Any, path: str) -> None:
    from ..jobs.report import Report, write_report

    checkpoint, source = input.checkpoint, input.source
    page = Report(
        title=f"plan: {Path(source.name).name} with {checkpoint.name}",
        when=time.strftime("planned %Y-%m-%d %H:%M; nothing was computed"),
        tokens=job_plan.tokens,
        rows=job_plan.rows,
        seconds=0.0,
        cards=[
            ("records", f"{job_plan.records:,}"),
            ("tokens asked for", f"{job_plan.tokens:,}"),
            ("rows to compute", f"{job_plan.rows:,}"),
            ("of the tokens saved", f"{job_plan.saved:.1%}"),
            ("errors", f"{job_plan.errors:,}"),
        ],
        settings=[
            ("input", source.name),
            ("model", checkpoint.name),
            ("task", input.spec.task or "OpenAI batch lines"),
        ],
        shape=job_plan.shape,
        decode=decode,
    )
    write_report(page, Path(path))
    click.echo(f"\nreport: {path}", err=True)
