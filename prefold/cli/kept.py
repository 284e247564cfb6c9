"""`prefold answers`: list, prune and verify the answers that --answers keeps."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import JobError
from ..spec.job import JobSpec
from .options import (
    BYTES,
    adapter_option,
    command,
    engine_options,
    generation_options,
    json_option,
    model_options,
    number,
)
from .process import notice
from .specs import takes_job

if TYPE_CHECKING:
    from ..jobs.verify import Recomputed
    from ..tasks.kept_file import AnswersFile


@command(short_help="List, prune and verify kept answers (--answers DIR).")
@click.argument("folder", metavar="DIR")
@click.option(
    "--keep-bytes",
    type=BYTES,
    metavar="BYTES",
    help="Delete the least recently used answers until the rest has this size.",
)
@number("--unused-days", "Delete answers that were not used for N days.")
@number("--verify", "Check the whole file, and recompute N answers with --model.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    metavar="X",
    help="With --verify: fail (status 1) if a value differs by more, or any text.",
)
@model_options
@engine_options
@generation_options
@adapter_option
@json_option
@takes_job()
def answers(
    spec: JobSpec,
    folder: str,
    keep_bytes: int | None,
    unused_days: int | None,
    verify: int | None,
    tolerance: float,
    as_json: bool,
) -> None:
    """List the answers that jobs have kept in a folder, by model; delete answers; or recompute a sample.

    --verify needs the model and the options of the job. One answer in 16 is kept with its prompt, and can be
    recomputed, except answers about images.

    \b
    prefold answers kept
    prefold answers kept --keep-bytes 1GB
    prefold answers kept --verify 50 --model smollm2-135m --dtype float32
    """
    from ..tasks.kept_file import NAME, AnswersFile

    if not (Path(folder) / NAME).is_file():
        raise JobError(f"{folder} contains no answers; give the folder of a job's --answers")
    file = AnswersFile(Path(folder), 1 << 62, notice)
    if verify is not None:
        from ..jobs.verify import recompute

        found = recompute(file, spec, verify, notice)
        click.echo(json.dumps(asdict(found)) if as_json else "\n".join(_verified(found)))
        if found.wrong or not found.difference <= tolerance or found.texts_changed:
            sys.exit(1)
        return
    if keep_bytes is not None or unused_days is not None:
        since = None if unused_days is None else int(time.time()) - 86_400 * unused_days
        deleted = file.prune(most_bytes=keep_bytes, unused_since=since)
        if not as_json:
            click.echo(f"{deleted:,} answers deleted")
    _list(file, as_json=as_json)


def _list(file: AnswersFile, *, as_json: bool) -> None:
    from ..jobs.report.progress import format_bytes

    rows = file.models()
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows]))
        return
    total = sum(row.answers for row in rows)
    click.echo(f"{total:,} answers, {format_bytes(file.num_bytes)}, in {file.path}")
    for row in rows:
        identity: dict[str, Any] = dict(row.identity)
        options = ", ".join(f"{name} {value}" for name, value in identity["options"].items())
        used = time.strftime("%Y-%m-%d", time.localtime(row.used))
        click.echo(
            f"  {identity['model']['name']}, {identity['dtype']}, {options}; {identity['computes']}; prefold"
            f" {identity['prefold']}: {row.answers:,} answers, {format_bytes(row.bytes)}, last used {used}"
        )


def _verified(found: Recomputed) -> list[str]:
    lines = [f"the file: {line}" for line in found.wrong] or ["the file is intact"]
    changed = f"; {found.texts_changed:,} texts differ" if found.texts_changed else ""
    again = f"{found.computed:,} answers recomputed: values differ by at most {found.difference:.3g}"
    return [*lines, again + changed]
