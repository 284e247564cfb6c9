"""The options commands have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["DEFAULT_MODEL", "column_options", "engine_options", "job_options", "limit_options", "model_options"]
__all__ += ["output_options", "task_options"]

DEFAULT_MODEL = "smollm2-135m"
FORMATS = ("jsonl", "csv", "tsv", "parquet")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _all(*decorators: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


model_options = _all(
    click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME",
                 help="Built-in name, local folder, .gguf file, or hub id."),
    click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto", show_default=True,
                 help="dummy: random weights of the model's shape, for benchmarks."),
)  # fmt: skip

engine_options = _all(
    click.option("--dtype", default="auto", show_default=True, metavar="TYPE",
                 help="auto, float32, bfloat16 or float16."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads on a CPU.  [default: its cores]"),
    click.option("--sharing", type=click.Choice(["auto", "full", "mlp", "off"]), default="auto", show_default=True,
                 help="What is computed once for a shared prefix: everything, all but attention, nothing."),
    click.option("--max-batch-rows", type=click.IntRange(1), metavar="N", help="Rows of a step."),
)  # fmt: skip

limit_options = _all(
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N records."),
    click.option("--max-length", type=click.IntRange(1), metavar="N",
                 help="Tokens a prompt may have.  [default: what the model takes]"),
    click.option("--truncate", is_flag=True,
                 help="Cut prompts that are too long (rerank: the document; score: the prompt's beginning). "
                      "Without it they are errors."),
    click.option("--window", type=click.IntRange(1), default=1 << 20, show_default=True, metavar="N",
                 help="Tokens held in memory at once."),
)  # fmt: skip

output_options = _all(
    click.option("-o", "--output", metavar="FILE",
                 help=".jsonl, .csv, .tsv or .parquet; .gz may follow. Without it: JSON lines to standard output."),
    click.option("--keep-order", is_flag=True, help="Results in input order, instead of as they come."),
    click.option("--overwrite", is_flag=True, help="Start again, replacing the output."),
    click.option("--resume", is_flag=True,
                 help="Go on with an interrupted job, and fail if there is none. (A job whose journal is there "
                      "is resumed without it.)"),
    click.option("--report", metavar="FILE", help="Write an HTML page about the job: its trie, its batches."),
    click.option("--stream", is_flag=True,
                 help="Run each window as it fills, instead of sorting the whole input first: for input without end. "
                      "Shares less."),
    click.option("--quiet", is_flag=True, help="No progress and no summary."),
)  # fmt: skip

_PROMPT = click.option("--prompt", metavar="TEMPLATE", help='The text: a column, or "...{column}...".')
_COLUMNS = {
    "embed": (_PROMPT,),
    "classify": (_PROMPT,),
    "rerank": (
        click.option("--query", metavar="TEMPLATE", help="The query: a column, or a template.  [default: query]"),
        click.option("--document", metavar="TEMPLATE",
                     help="The document: a column (a list is ranked as one), or a template."),
    ),
    "score": (
        _PROMPT,
        click.option("--continuation", metavar="TEMPLATE",
                     help="What is scored: a column (a list is scored one by one), or a template. Without it, "
                          "the prompt as a whole."),
    ),
}  # fmt: skip
_MESSAGES = click.option("--messages", metavar="COLUMN", help="Chat messages, written by the model's chat template.")

_TASKS: dict[str, tuple[Decorator, ...]] = {
    "embed": (
        click.option("--pooling", type=click.Choice(["last", "mean", "first"]),
                     help="Where the embedding is read.  [default: what the checkpoint says, else last]"),
        click.option("--normalize/--no-normalize", default=None,
                     help="Scale it to length 1.  [default: what the checkpoint says, else yes]"),
        click.option("--dimensions", type=click.IntRange(1), metavar="N", help="Keep the first N values."),
        click.option("--prompt-name", metavar="NAME", help="One of the checkpoint's own prompts, before every text."),
    ),
    "rerank": (
        click.option("--words", metavar="YES,NO", help="The two words whose logits are compared.  [default: yes,no]"),
        click.option("--raw-scores", is_flag=True, help="The difference of the logits, without the sigmoid."),
    ),
    "classify": (
        click.option("--labels", metavar="A,B,...", help="The labels."),
        click.option("--labels-file", metavar="FILE",
                     help='The labels, one a line, or as JSON ["a", ...] or {"label": "how it is written", ...}.'),
        click.option("--instructions", metavar="TEXT", help="What comes before the examples and the text."),
        click.option("--examples", metavar="FILE", help="JSONL or CSV with the columns text and label."),
        click.option("--normalization", type=click.Choice(["tokens", "bytes"]),
                     help="Divide a label's log-likelihood by its length."),
        click.option("--calibrate", is_flag=True, help="Contextual calibration (Zhao et al. 2021)."),
    ),
    "score": (),
}  # fmt: skip
_INSTRUCTION = click.option("--instruction", metavar="TEXT",
                            help="embed: what queries are for; rerank: what is wanted of a document.")  # fmt: skip
_TEMPLATE = click.option("--template", metavar="TEXT",
                         help="The task's own prompt: rerank: with {query} and {document}; classify: with {text} "
                              "and {label}.")  # fmt: skip


def task_options(*tasks: str) -> Decorator:
    """The options that tasks have of their own."""
    options = [option for task in tasks for option in _TASKS[task]]
    if {"embed", "rerank"} & set(tasks):
        options.append(_INSTRUCTION)
    if {"rerank", "classify"} & set(tasks):
        options.append(_TEMPLATE)
    return _all(*options)


def column_options(*tasks: str) -> Decorator:
    """The options that say where in a record the tasks find their texts."""
    options = list(dict.fromkeys(option for task in tasks for option in _COLUMNS[task]))
    if set(tasks) != {"rerank"}:
        options.append(_MESSAGES)
    return _all(
        *options,
        click.option("--id", "id_column", metavar="COLUMN", help="A column that the output repeats as id."),
        click.option("--keep", metavar="A,B,...",
                     help="Further columns that the output repeats, under another name as NAME=COLUMN."),
        click.option("--format", "input_format", type=click.Choice(FORMATS),
                     help="Format of the input.  [default: as its name says; standard input: jsonl]"),
    )  # fmt: skip


def job_options(*tasks: str) -> Decorator:
    """All the options of a job of one of these tasks."""
    return _all(
        model_options, column_options(*tasks), task_options(*tasks), output_options, limit_options, engine_options
    )
