"""Run a task on the texts of a command line, and print the results to read, or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, JobError
from ..spec.fields import SpecError
from ..spec.files import as_utf8, is_stream, read_text, text_of
from ..spec.job import JobSpec
from .process import notice

if TYPE_CHECKING:
    from ..tasks.results import Classification, Decision, Embedding, Ranking, Score

_JOB_ONLY = ("output", "report", "resume", "overwrite", "grown", "keep_order", "stream", "limit", "id_column", "keep",
             "prompt", "state", "messages", "query", "document", "continuation", "adapter_column", "input_format",
             "delimiter", "max_cell_lines", "empty", "media_folder", "json_columns", "scores", "ray", "url", "replicas",
             "tokenizer", "backend", "backend_option", "answers", "answers_bytes",
             "gold", "gold_file", "review", "precision", "save_calibration")  # fmt: skip


_CUT = click.style("(ended by --max-tokens, or by the model's context length)", dim=True)


def job_flags(spec: JobSpec) -> list[str]:
    """Return the flags of the given options that are only for jobs."""
    names = [name for name in _JOB_ONLY if name in spec.given]
    return [f"--{name.removesuffix('_column').removeprefix('input_').replace('_', '-')}" for name in names]


def answer(
    task: str, spec: JobSpec, *, as_json: bool, files: Iterable[str] = (), piped: Iterable[bytes] | None = None
) -> None:
    """Run a task on the texts of the arguments, and print the results.

    Args:
        as_json: Whether to print JSON.
        files: Names of files whose whole text is one more text.
        piped: The lines of standard input, if they are already read.
    """
    from ..cluster.backends import backend_for

    for option in job_flags(spec)[:1]:
        if option == "--tokenizer":
            backend_for(spec)  # raises an error that names the kinds of jobs
        raise SpecError(f"{option} is for jobs; give an input file, or leave it out")
    if task != "generate":
        spec.check_conversations("give a file of them with --messages COLUMN, or leave it out")
    from ..jobs.models import LazyTasks, check_tokenizer, load_llm, open_model, uses_chat
    from ..jobs.record import dumps
    from ..tasks.run import calibrated, checked, finish_items, run_works

    if spec.input.tools:
        raise SpecError("--tools COLUMN is for jobs; give @FILE", field="tools")
    texts = [text for argument in spec.input.names for text in expand(argument, piped)]
    # Editors add a line end to the last line of a file.
    texts += [_read(name).removesuffix("\n") for name in files]
    # An empty prompt is allowed before continuations: these then start a text.
    if not texts or not all(texts[1:] if task == "score" and len(texts) > 1 else texts):
        raise JobError("a text is empty; give a text" if texts else "there is no text; give one")
    checkpoint, tokenizer = open_model(spec, backend_for(spec), notice)
    check_tokenizer(checkpoint, tokenizer, "texts")
    items, shown = make_items(task, texts, chat=task == "generate" and uses_chat(spec, tokenizer))
    tasks = LazyTasks((task,), spec, checkpoint, tokenizer, paths=True)
    task_object = tasks[task]
    items = [with_image(task, item, spec.input.image) for item in items] if spec.input.image else items
    (works,) = checked([task_object.prepare(items)])  # before the weights are loaded
    engine = load_llm(spec.model, checkpoint, tokenizer, media=tasks.media, is_job=False).engine
    task_object = calibrated(engine, task_object)
    if task == "generate" and not as_json:
        _show_live(texts, engine, task_object, works, spec.seed)
        return _summary(engine, spec)
    (results,) = checked([finish_items(task_object, works, run_works(engine, task_object, works, seed=spec.seed))])
    if as_json or (task == "embed" and len(texts) == 1):
        for text, result in zip(shown, results, strict=True):
            click.echo(dumps({**text, **result.line()}).encode())  # as UTF-8 in every locale
        return
    _SHOW[task](texts, results)
    _summary(engine, spec)


def with_image(task: str, item: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an item with an image before its text. Raise SpecError for tasks without images."""
    from ..text.media import TextWithImages

    if task == "decide":
        return {**item, "images": [path]}
    if task == "generate":
        chat = item.get("messages")
        parts = None if chat is None else [{"type": "image"}, {"type": "text", "text": chat[0]["content"]}]
        return {**item, "images": [path]} | (
            {} if parts is None else {"messages": [{"role": "user", "content": parts}]}
        )
    name = next((name for name in ("text", "prompt") if isinstance(item.get(name), str)), None)
    if name is None:
        raise SpecError("--image is for embed, classify, decide, score and generate", field="image")
    return {**item, name: TextWithImages(item[name], [path])}


def _summary(engine: Any, spec: JobSpec) -> None:
    if spec.output.quiet:
        return
    stats = engine.stats
    rows = f"{stats.tokens:,} tokens, {stats.rows_computed:,} rows computed ({max(0.0, stats.saved):.0%} saved)"
    if stats.generation is not None:
        rows += f", {stats.generation.generated_tokens:,} tokens generated"
    click.echo(click.style(f"{rows}, {spec.model_name}", dim=True), err=True)


def expand(argument: str, piped: Iterable[bytes] | None = None) -> list[str]:
    """Return the texts of an argument: the lines of a file (@FILE), of standard input (-) or of a pipe, else itself.

    Args:
        piped: The lines of standard input, if they are already read.
    """
    if argument != "-" and not argument.startswith("@") and not is_stream(argument):
        return [as_utf8(argument)]
    # Not str.splitlines, which also splits at form feeds and U+2028.
    return [line for line in _read(argument.removeprefix("@"), piped).split("\n") if line.strip()]


def _read(name: str, piped: Iterable[bytes] | None = None) -> str:
    """Return the text of a file, or of standard input (`-`). Raise JobError."""
    from ..jobs.source import open_stream

    if name != "-":
        return read_text(name)
    return text_of(b"".join(open_stream("-") if piped is None else piped), "standard input")


def make_items(task: str, texts: list[str], *, chat: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (items of the task, fields to add to the JSON output of each).

    Args:
        chat: Whether each text is a user's message.
    """
    if task == "generate":
        prompts = [{"prompt": text} for text in texts]
        return [{"messages": [{"role": "user", "content": text}]} for text in texts] if chat else prompts, prompts
    if task == "rerank":
        if len(texts) < 2:
            raise click.UsageError("give a query and at least one document")
        item: dict[str, Any] = {"query": texts[0], "documents": texts[1:]}
        return [item], [{"query": texts[0]}]
    if task == "score" and len(texts) > 1:
        items = [{"prompt": texts[0], "continuation": text} for text in texts[1:]]
        return items, items
    items = [{"state" if task == "decide" else "text": text} for text in texts]
    return items, items


def _show_rerank(texts: list[str], answers: list[Ranking]) -> None:
    for place, (index, number) in enumerate(answers[0], 1):
        score = click.style(f"{number:.4f}", bold=True)
        click.echo(f"{place:>3}  {score}  {one_line(texts[1 + index])}")


def _show_embed(texts: list[str], answers: list[Embedding]) -> None:
    import numpy as np

    vectors = np.stack([answer.embedding for answer in answers]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    click.echo(f"{len(texts)} vectors of {vectors.shape[1]} values (--json prints them). Cosine similarity:")
    for i, row in enumerate(vectors @ vectors.T):
        click.echo(f"{i + 1:>3}  {' '.join(f'{x:5.2f}' for x in row[:12])}  {one_line(texts[i], 50)}")


def _show_decide(texts: list[str], answers: list[Decision]) -> None:
    for text, answer in zip(texts, answers, strict=True):
        click.echo(one_line(text))
        for name, one in answer.answers.items():
            shown = (
                f"{one.value:.2f}"
                if one.type == "score"
                else str(one.value).lower()
                if one.type == "noul"
                else one.value
            )
            best = sorted(one.probabilities.items(), key=lambda pair: -pair[1])[:3]
            rest = ", ".join(f"{option} {p:.1%}" for option, p in best)
            doubt = click.style("  doubtful", fg="yellow") if one.review else ""
            click.echo(f"  {name}: {click.style(str(shown), bold=True)}  ({rest}){doubt}")
        for name, error in answer.errors.items():
            click.echo(f"  {name}: {click.style(str(error), fg='red')}")


def _show_classify(texts: list[str], answers: list[Classification]) -> None:
    for text, answer in zip(texts, answers, strict=True):
        best = sorted(answer.probabilities.items(), key=lambda pair: -pair[1])[:3]
        label = click.style(answer.label, bold=True)
        rest = ", ".join(f"{name} {p:.1%}" for name, p in best)
        click.echo(f"{label}  ({rest})  {one_line(text, 60)}")


def _show_score(texts: list[str], answers: list[Score]) -> None:
    named = texts[1:] if len(texts) > 1 else texts
    for text, answer in zip(named, answers, strict=True):
        logprob = click.style(f"{answer.logprob:10.4f}", bold=True)
        greedy = "  greedy" if answer.greedy else ""
        click.echo(f"{logprob}  {answer.num_tokens:>4} tokens{greedy}  {one_line(text)}")


def _show_live(texts: list[str], engine: Any, task: Any, works: list[Any], seed: int | None) -> None:
    """Generate texts, and print them as they come, in the order of the prompts. Raise the first error at the end."""
    samples = [work.requests[0].sampling.n for work in works]
    first = [sum(samples[:number]) for number in range(len(works))]
    prompts = [text for text, count in zip(texts, samples, strict=True) for _ in range(count)]

    def events() -> Iterator[tuple[int, Any]]:
        for number, event in generate_live(engine, task, works, seed):
            if isinstance(event, tuple):
                yield first[number] + event.sample, event.text
                continue
            for sample in range(samples[number]):
                yield first[number] + sample, event if isinstance(event, InputError) else event[sample]

    shown, errors = None, []
    for place, event in in_order(events(), len(prompts)):
        if place != shown and len(prompts) > 1:
            click.echo(("\n" if place else "") + click.style(one_line(prompts[place]), bold=True))
        shown = place
        if isinstance(event, str):
            click.echo(event, nl=False)
            continue
        click.echo()
        if isinstance(event, InputError):
            errors.append(event)
        elif event.finish_reason == "length":
            click.echo(_CUT, err=True)
    if errors:
        raise errors[0]


def in_order(events: Iterable[tuple[int, Any]], count: int) -> Iterator[tuple[int, Any]]:
    """Yield the events of `count` concurrent answers in the order of the answers.

    The events of the first unfinished answer are yielded at once. The events of later answers wait for their turn.

    Args:
        events: (index of an answer, a piece of its text); at its end (index, its result).
    """
    waiting: list[list[Any]] = [[] for _ in range(count)]
    turn = 0
    for place, event in events:
        waiting[place].append(event)
        while turn < count and waiting[turn]:
            event = waiting[turn].pop(0)
            yield turn, event
            turn += not isinstance(event, str)


def generate_live(engine: Any, task: Any, works: Sequence[Any], seed: int | None) -> Iterator[tuple[int, Any]]:
    """Yield (index of a work, TextPiece) as pieces come, and (index, answer) at its end.

    An answer is a list of Generated, or an InputError. Seeds and texts are the same as with `run_works`. Closing the
    generator early cancels the remaining requests.
    """
    from ..engine.calls import stream
    from ..tasks.run import draw_seed, with_seed

    seed = draw_seed() if seed is None else seed
    requests = [with_seed(work.requests[0], seed, number, 0) for number, work in enumerate(works)]
    return stream(engine, requests, task.inputs.tokenizer)


def one_line(text: str, width: int = 90) -> str:
    """Return a text on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


_SHOW: dict[str, Callable[[list[str], list[Any]], None]] = {
    "rerank": _show_rerank, "embed": _show_embed, "classify": _show_classify, "decide": _show_decide,
    "score": _show_score,
}  # fmt: skip
