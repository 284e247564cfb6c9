"""The commands of the tasks, and `run`. With a file they run a job; with texts they print the answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import click

from ..spec.files import is_stream
from ..spec.job import TASKS, JobSpec
from .options import Decorator, all_of, command, job_options, json_option
from .specs import takes_job


def is_input(arguments: tuple[str, ...]) -> bool:
    """Return whether the arguments name a job's input; otherwise they are texts."""
    from ..jobs.source import holds_records

    if len(arguments) != 1:
        return all(holds_records(name) or is_stream(name) for name in arguments)
    name = arguments[0]
    return name == "-" or holds_records(name) or (len(name) < 4096 and os.path.isfile(name)) or is_stream(name)


@command(short_help="Run a job: OpenAI batch lines, or a table.")
@click.argument("input", metavar="INPUT...", nargs=-1, required=True)
@click.option("--task", type=click.Choice(TASKS), help="Task to run on a table; OpenAI batch lines name theirs.")
@job_options(*TASKS)
@takes_job()
def run(spec: JobSpec) -> None:
    """Run a job. INPUT is a file of OpenAI batch lines, or a table (.jsonl, .csv, .tsv, .parquet, also .gz).

    More than one file, patterns ('data/*.parquet') and folders are read one after the other, as one input. -
    is standard input.

    \b
    prefold run batch.jsonl -o out.jsonl -m Qwen/Qwen3-Embedding-0.6B
    prefold run reviews.csv --task classify --prompt '{title}: {body}' --labels good,bad -o out.csv

    Batch lines may request /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/score and /rerank.
    A record that cannot be processed becomes an error line, and the job continues. To resume a job that
    was killed, run the same command again. The options of one task are in the help of its command, such
    as prefold rerank --help.
    """
    from .job import run_command

    run_command(spec)


def _command(task: str, metavar: str, short_help: str, *decorators: Decorator) -> Callable[..., click.Command]:
    """Return a decorator that makes a function the command of a task, with `decorators` as additional options."""
    argument = click.argument("input", metavar=metavar, nargs=-1, required=task != "generate")
    options = all_of(argument, *decorators, job_options(task), json_option)
    return lambda function: command(short_help=short_help)(options(takes_job(task)(function)))


@_command("rerank", "INPUT | QUERY DOCUMENT...", "Score how well documents answer a query.")
def rerank(spec: JobSpec, as_json: bool) -> None:
    """Score how well documents answer a query.

    \b
    prefold rerank "why is the sky blue" "Light scatters ..." "Bread rises ..."
    prefold rerank "why is the sky blue" @documents.txt       (one document per line; -: standard input)
    prefold rerank pairs.jsonl --query question --document '{title}: {text}' -o scores.jsonl
    """
    names = spec.input.names
    if len(names) == 1 and not is_input(names):
        raise click.UsageError(f"no such file: {names[0]}; or give a query and documents")
    _start(spec, as_json)


@_command("embed", "INPUT | TEXT...", "Compute embeddings of texts.")
def embed(spec: JobSpec, as_json: bool) -> None:
    """Compute embeddings of texts.

    \b
    prefold embed "a text" "another" -m Qwen/Qwen3-Embedding-0.6B
    prefold embed articles.parquet --prompt '{title}\\n{body}' --id url -o vectors.parquet
    """
    _start(spec, as_json)


@_command("classify", "INPUT | TEXT...", "Find the best label for each text.")
def classify(spec: JobSpec, as_json: bool) -> None:
    """Find the best label for each text, by label likelihoods or by the model's classification head.

    \b
    prefold classify "what a film" --labels positive,negative --instructions "Is the review positive?"
    prefold classify reviews.csv --prompt body --labels positive,negative --examples shots.jsonl -o out.csv
    """
    _start(spec, as_json)


@_command("decide", "INPUT | STATE...", "Answer typed questions about states, with probabilities.")
def decide(spec: JobSpec, as_json: bool) -> None:
    """Answer typed questions about states, with probabilities. No text is generated.

    \b
    prefold decide "I was charged twice." --questions questions.yaml
    prefold decide tickets.csv --state '{subject}\\n{body}' --questions questions.yaml -o out.csv

    A file of questions contains NAME: {type: noul, instructions: "..."} for each question. A noul is a yes/no
    question. type: choice also has criteria {option: meaning}; type: score has criteria [lowest level, ...,
    highest level].
    """
    _start(spec, as_json)


@_command("score", "INPUT | TEXT | PROMPT CONTINUATION...", "Compute log-probabilities of continuations or texts.")
def score(spec: JobSpec, as_json: bool) -> None:
    """Compute the log-probability of continuations after a prompt, or of whole texts.

    \b
    prefold score "The capital of France is" " Paris" " Rome"
    prefold score items.jsonl --prompt '{question}' --continuation choices -o out.jsonl
    """
    _start(spec, as_json)


_PROMPT_FILE = click.option(
    "-f", "--prompt-file", metavar="FILE", multiple=True,
    help="File whose whole text is one prompt (-: standard input).",
)  # fmt: skip


@_command("generate", "INPUT | PROMPT...", "Generate text: continue prompts or answer messages.", _PROMPT_FILE)
def generate(spec: JobSpec, as_json: bool, prompt_file: tuple[str, ...]) -> None:
    """Generate text. A model with a chat template answers the prompt as a user's message; --raw continues the prompt.

    \b
    prefold generate "Why is the sky blue?"
    prefold generate "The capital of France is" --raw --max-tokens 5
    prefold generate -f prompt.txt
    prefold generate reviews.csv --prompt 'Summarise: {body}' --max-tokens 60 -o out.csv
    prefold generate chats.jsonl --messages messages --temperature 0.7 --seed 1 -o out.jsonl
    """
    names = spec.input.names
    if prompt_file and names and is_input(names):
        raise click.UsageError(f"--prompt-file is a prompt itself; for the records of {names[0]} give --prompt @FILE")
    if prompt_file:
        from .answers import answer

        return answer("generate", spec, as_json=as_json, files=prompt_file)
    if not names:
        raise click.UsageError("give an input file, a prompt, or a file with a prompt (-f FILE)")
    _start(spec, as_json)


def _start(spec: JobSpec, as_json: bool) -> None:
    """Run a job if the arguments of a task's command name an input; otherwise answer them as texts."""
    from .answers import answer, job_flags

    names, piped, task = spec.input.names, None, spec.task or ""
    if len(names) == 1 and (names[0] == "-" or is_stream(names[0])) and not job_flags(spec):
        piped, is_job = _peek(names[0])
        if not is_job:
            return answer(task, replace(spec, input=replace(spec.input, names=("-",))), as_json=as_json, piped=piped)
    if is_input(names):
        from .job import run_command

        return run_command(spec, stdin=piped)
    return answer(task, spec, as_json=as_json)


def _peek(name: str) -> tuple[Iterator[bytes], bool]:
    """Return (lines of standard input or of a pipe, whether they are JSON objects, so that this is a job)."""
    from ..jobs.source import lines_of, open_stream

    lines = lines_of(open_stream(name))
    head = next(lines, b"")
    return chain([head] if head else [], lines), not head or head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
