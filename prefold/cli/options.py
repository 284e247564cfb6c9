"""Defines the options of commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field
from functools import reduce
from typing import Any

import click

from ..spec.fields import flags_of, kind_of
from ..spec.job import BESIDE, NUMERIC_TASKS, TASKS, column_parameters, declarations, job_parameters
from ..spec.model import POLICIES, model_fields

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
# What click's messages say that a wrong value is not: by default "a valid integer range".
click.IntRange.name, click.FloatRange.name = "whole number", "number"


def _written(read: Callable[[Any], Any], expected: str) -> Callable[[Any], Any]:
    """Returns the click type of a value with a syntax of its own. read: returns the value, or raises ValueError;
    expected: what a wrong value is not, and how to write it"""

    def convert(value: Any) -> Any:
        try:
            return read(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is {expected}") from None

    return convert


def _matched(pattern: str, value: Any) -> re.Match[str]:
    match = re.fullmatch(pattern, str(value).strip())
    if match is None:
        raise ValueError
    return match


def _bytes(value: Any) -> int:
    number, unit, binary = _matched(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(value).lower()).groups()
    if not float(number):
        raise ValueError
    return int(float(number) * (1024 if binary else 1000) ** (1 + "kmgt".index(unit) if unit else 0))


def _blocks(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return tuple(int(block) for block in _matched(r"\d+(\s*,\s*\d+)*", value)[0].split(","))


BYTES = _written(_bytes, "not a number of bytes; write 512MiB, or 4GiB")
# Named as torch does. Whether the machine has it is not checked here, as that takes torch.
_DEVICE = _written(lambda value: _matched(r"auto|cpu|cuda(:\d+)?", value)[0],
    "not a device; write auto, cpu, cuda, or cuda:1 for the second GPU",
)  # fmt: skip
_BLOCKS = _written(_blocks, "not a route; write the numbers of blocks: 0,1,0")


class _WordOrFlag(click.Choice[str]):
    """A word, or in a TOML file also true or false: for an option that was a flag."""

    def __init__(self, words: list[str], true: str):
        super().__init__(words)
        self._flags = {True: true, False: words[0]}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(self._flags[value] if isinstance(value, bool) else value, param, ctx)


# Parameters that the command line reads in a way of its own: settings of click in place of what is declared. Where a
# default is None, the command line says only whether the option was given.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "device": {"type": _DEVICE},
    "cache": {"type": click.Choice(["off", *POLICIES]), "metavar": None, "default": None},
    **{name: {"default": None} for name in ("max_running", "media_memory", "allow_media_host")},
    "ray": {"is_flag": False, "flag_value": ""},
    "truncate": {"is_flag": True, "type": None,
                 "help": "Cut what is too long instead of failing: the longest column of a template, the longest "
                         "content of a conversation, of rerank the document. What is around it stays."},
    "truncate_side": {"help": "Cut the prompt as a whole, at this end."},
    "access_log": {"is_flag": False, "flag_value": "text", "type": _WordOrFlag(["off", "text", "json"], "text")},
    "route": {"type": _BLOCKS, "metavar": "0,1,..."},
    "adapter": {"metavar": "NAME=FOLDER", "multiple": True,
                "help": "A LoRA adapter (PEFT). One is used for all records; of several, --adapter-column or the model "
                        "of a batch line chooses."},
    "prompt_name": {"metavar": "NAME"},
    "words": {"metavar": "YES,NO"},
    "labels": {"metavar": "A,B,...", "help": "The labels."},
    "labels_file": {"metavar": "FILE",
                    "help": 'The labels, one a line, or JSON: ["a", ...], {"a": "how the prompt writes it", ...}, or '
                            '{"a": {"description": "what it means"}, ...}. Descriptions stand once in the prompt.'},
    "examples": {"metavar": "FILE", "help": "JSONL or CSV with the columns text and label."},
    "chat_template_kwargs": {"metavar": "JSON", "help": 'Variables of the chat template: {"enable_thinking": false}.'},
    "max_tokens": {"type": click.IntRange(0), "metavar": "N"},
    "temperature": {"help": "0: always the most likely token.  [default: 0; batch lines: 1]"},
    "logit_bias": {"metavar": "ID=X", "multiple": True, "help": "Added to a token's logit. May be repeated."},
    "stop": {"metavar": "TEXT", "multiple": True, "help": "A text that ends the answer. May be repeated."},
    "stop_id": {"type": click.IntRange(0), "metavar": "ID", "multiple": True,
                "help": "A token id that ends the answer. May be repeated."},
    "json_schema": {"metavar": "FILE|JSON", "help": "Answers are JSON of this schema."},
    "json_object": {"is_flag": True, "help": "Answers are a JSON object."},
    "regex": {"metavar": "REGEX", "help": "Answers match this regular expression."},
    "choice": {"metavar": "TEXT", "multiple": True, "help": "Answers are one of these texts. Repeated for each text."},
    "grammar": {"metavar": "TEXT", "help": "Answers follow a grammar in Lark's syntax; @FILE reads it."},
}  # fmt: skip


def click_option(option: Field[Any], name: str, **settings: Any) -> Decorator:
    """Returns the command line's option for a field of a spec.

    name      of the parameter of the command
    settings  of click, in place of what the declaration says
    """
    metadata, kind = option.metadata, kind_of(option)
    words = [value for value in metadata["one_of"] if isinstance(value, str)]
    bounds = metadata["least"], metadata["most"]
    bounded = {int: click.IntRange, float: click.FloatRange}.get(kind or object) if bounds != (None, None) else None
    metavar = metadata["metavar"] or {int: "N", float: "X", str: "TEXT"}.get(kind or object)
    arguments: dict[str, Any] = {"help": metadata["doc"], "metavar": None if words else metavar}
    if kind is bool:
        arguments |= {"is_flag": True} | ({} if option.default is False else {"default": None})
    elif words:
        arguments["type"] = click.Choice(words)
    elif str(option.type) in ("tuple[str, ...]", "Collection[str]"):
        arguments["multiple"] = True
    elif option.name.endswith(("_bytes", "_memory")):
        arguments |= {"type": BYTES, "metavar": metadata["metavar"] or "BYTES"}
    else:
        arguments["type"] = kind if bounded is None else bounded(*bounds, min_open=metadata["above"])
    return click.option(*flags_of(option, name), name, **arguments | settings | _OVERRIDES.get(name, {}))


def all_of(*decorators: Decorator) -> Decorator:
    """Returns a decorator that adds several options, in their order."""
    return lambda function: reduce(lambda decorated, decorator: decorator(decorated), reversed(decorators), function)


def number(flag: str, help: str, default: int | None = None, *, least: int = 1, metavar: str = "N") -> Decorator:
    """Returns the command line's option for a whole number."""
    kind = click.IntRange(least)
    return click.option(flag, type=kind, default=default, show_default=default is not None, metavar=metavar, help=help)


def _plugins(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> None:
    from ..spec.plugins import add_plugins

    add_plugins(names)


def declared(parameter: str, option: Field[Any]) -> Decorator:
    """Returns the command line's option, with its default, for an option of a model, a job or a server."""
    shows_default = kind_of(option) is not bool and option.default not in (None, ())
    default = {"default": option.default, "show_default": True} if shows_default else {}
    return click_option(option, parameter, **default)


def job_group(*parameters: str) -> Decorator:
    """Return a decorator that adds a job's options for input, output and fleet."""
    return all_of(*(declared(name, job_parameters()[name]) for name in parameters))


def model_group(*groups: str) -> Decorator:
    """Returns a decorator that adds the options of a model that belong to these groups of commands."""
    on = {name: entry for name, entry in model_fields().items() if entry.metadata["on"] in groups}
    return all_of(*(declared(name, entry) for name, entry in on.items()))


plugin_option = click.option(
    "--plugin",
    metavar="MODULE",
    multiple=True,
    expose_value=False,
    callback=_plugins,
    help="A .py file or a module to import in every process that loads the model, such as one with a model family of"
    " your own. May be repeated.",
)

model_options = all_of(job_group("model"), model_group("model"), plugin_option)
machine_options = model_group("machine")
engine_options = all_of(machine_options, model_group("engine"))
generation_options = model_group("text")
media_options = all_of(model_group("media"), job_group("media_bytes", "media_pixels"))
fleet_options = job_group("ray", "url", "tokenizer", "backend", "backend_option", "replicas", "patience")
limit_options = job_group("limit", "window")
answers_options = model_group("answers")
output_options = job_group("output", "keep_order", "overwrite", "resume", "grown", "report", "stream", "quiet")


def _declared_by(tasks: Collection[str]) -> dict[str, Decorator]:
    """Returns {parameter: its option} of all options of these tasks. If the meaning of an option depends on the task,
    its help says so for each."""
    options = {}
    for parameter, of in declarations(tasks).items():
        docs = {task: entry.metadata["doc"] for task, entry in of.items()}
        text = " ".join(f"{task}: {doc}" for task, doc in docs.items())
        settings: dict[str, Any] = {"help": text} if len({*docs.values()}) > 1 else {}
        options[parameter] = click_option(next(iter(of.values())), parameter, **settings)
    return options


def task_options(*tasks: str) -> Decorator:
    """Returns a decorator that adds the options of tasks."""
    beside = dict.fromkeys(name for task in tasks for name in BESIDE.get(task, ()))
    return all_of(job_group(*beside), *_declared_by(tasks).values())


adapter_option = _declared_by(["generate"])["adapter"]
# What commands that compare runs need to generate text.
text_options = all_of(job_group("chat"), *map(_declared_by(["generate"]).__getitem__, ("max_tokens", "ignore_eos")))


def column_options(*tasks: str) -> Decorator:
    """Returns a decorator that adds the options which say how the table of tasks is read."""
    return job_group(*column_parameters(*tasks))


def job_options(*tasks: str) -> Decorator:
    """Returns a decorator that adds all the options of a job of one of these tasks."""
    return all_of(
        model_options,
        column_options(*tasks),
        task_options(*tasks),
        output_options,
        answers_options,
        limit_options,
        engine_options,
        fleet_options,
        media_options,
        *([generation_options] if "generate" in tasks else []),
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Answers, or numbers, as JSON.")


def sample_options(*decorators: Decorator, tasks: Sequence[str] = NUMERIC_TASKS, needs_input: bool = True) -> Decorator:
    """Returns a decorator that adds the options of commands that inspect a job, or run a part of it. decorators: of
    further options; tasks: those whose options it has in full. Of generation the other commands have only options that
    comparisons of runs need."""
    metavar = "INPUT..." if needs_input else "[INPUT]..."
    return all_of(
        click.argument("input", metavar=metavar, nargs=-1, required=needs_input),
        click.option("--task", type=click.Choice(TASKS), help="As for `prefold run`."),
        *decorators,
        model_options,
        column_options(*TASKS),
        task_options(*tasks),
        *([] if "generate" in tasks else [text_options]),
        limit_options,
        media_options,
        json_option,
    )
