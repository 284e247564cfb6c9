"""The command line. It starts fast: a command is imported when it is used, and its modules when it runs."""

from __future__ import annotations

import sys
import warnings
from collections import UserDict
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click

from .. import __version__
from ..errors import PrefoldError
from ..spec.fields import near
from .process import StoppedBySignal, guarded, say

# {command: its file}, in the order of --help.
_FILES = {
    "run": "tasks", "plan": "plan",
    **dict.fromkeys(("generate", "rerank", "embed", "classify", "decide", "score"), "tasks"),
    "serve": "serve", "verify": "verify", "answers": "kept", "models": "models", "demo": "bench", "bench": "bench",
}  # fmt: skip
# {name of a command in other tools: the command here}, for an error's hint.
_OTHER_NAMES = {
    "chat": 'generate "a message"', "complete": 'generate --raw "a text"', "completion": 'generate --raw "a text"',
    "batch": "run", "predict": "run", "encode": "embed", "embeddings": "embed", "rank": "rerank", "server": "serve",
    "benchmark": "bench", "list": "models", "version": "--version",
}  # fmt: skip


class _Commands(UserDict[str, click.Command]):
    """The commands by name. A command is imported when it is first used."""

    def __missing__(self, name: str) -> click.Command:
        self.data[name] = command = getattr(import_module(f".{_FILES[name]}", __name__), name)
        return command

    def __contains__(self, name: object) -> bool:
        return name in _FILES or name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*_FILES, *self.data)))

    def __len__(self) -> int:
        return len({*_FILES, *self.data})


class _Group(click.Group):
    """The group of all commands. It prints an error as one message, and keeps the arguments for resuming."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        with guarded(ends_process=not arguments and "args" not in options), warnings.catch_warnings():
            # A warning is printed without the path and the source line.
            warnings.showwarning = lambda message, *_, **__: say(f"prefold: {message}")
            return super().main(*arguments, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["prefold.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if args[0].startswith("-"):
                raise
            other = _OTHER_NAMES.get(args[0])
            hint = f"use prefold {other}" if other else f"{near(args[0], self.commands)}see prefold --help"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # not sorted by name

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PrefoldError as error:
            say(f"prefold: {error}")
            sys.exit(1)
        except StoppedBySignal:
            say("prefold: interrupted")
            raise
        except RuntimeError as error:
            # While a class is created (during an import), Python 3.11 wraps a descriptor's exception in a RuntimeError.
            if not isinstance(error.__cause__, StoppedBySignal):
                raise
            say("prefold: interrupted")
            raise error.__cause__ from None


def _show_version(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        from ..kernels import foreseen

        kernels = foreseen()
        click.echo(f"prefold {__version__}\nCPU kernels: {kernels}\nExecutor: {_executor(kernels)}")
        context.exit()


def _executor(kernels: str) -> str:
    """Describe the executors that are available here, without importing torch."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = f"PyTorch {version('torch')}"
    except PackageNotFoundError:
        torch = ""
    install = "pip install 'prefold[torch]'"
    if kernels.startswith("PyTorch"):  # the reason why there are no kernels
        return torch or f"none: install a C++ compiler (such as g++ or the package ziglang), or PyTorch: {install}"
    return (
        f"native; {torch} for models that it lacks" if torch else f"native (PyTorch, for GPUs and training: {install})"
    )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, and the CPU kernels that are used here.",
)
def main() -> None:
    """Batch inference over causal transformers. It computes every shared prefix once.

    \b
    prefold demo                                    a demonstration, in a minute
    prefold generate "a question"                   generate text
    prefold rerank "a query" "a text" "another"     rank texts
    prefold rerank pairs.jsonl -o scores.jsonl      run a job over a file
    prefold run batch.jsonl -o out.jsonl            run a job of OpenAI batch lines

    COMMAND --help shows the common options of a command, --help-all shows all of them.

    Exit status: 0 success; 1 the command failed; 2 wrong usage; 3 the job is done, but some records failed
    (their output lines have the errors); 130 interrupted (the command that resumes is printed).
    """


main.commands = _Commands()
