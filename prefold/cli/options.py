"""The options of the commands, made from the specs, and their --help."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field
from functools import partial, reduce
from typing import Any

import click

from ..spec.fields import HELP_GROUPS, flags_of, kind_of, with_notes
from ..spec.job import BESIDE, NUMERIC_TASKS, TASKS, column_parameters, declarations, job_parameters
from ..spec.model import POLICIES, model_fields

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
# For click's messages: "7 is not a valid whole number". Its own names are "integer range" and "float range".
click.IntRange.name, click.FloatRange.name = "whole number", "number"


class Option(click.Option):
    """An option with its group in --help. `common` options are in --help, all are in --help-all.

    Attributes:
        details: Further sentences, for the reference pages.
        stated: The default to show; click's own default may be None, to tell whether the option was given.
    """

    def __init__(
        self,
        *args: Any,
        group: str = "",
        common: bool = True,
        details: str = "",
        stated: object = None,
        **settings: Any,
    ):
        super().__init__(*args, **settings)
        self.group, self.common, self.details, self.stated = group, common, details, stated


def help_line(option: click.Option) -> str:
    """Return the help text of an option, with its default and whether it may be repeated."""
    text, value = option.help or "", getattr(option, "stated", None)
    if value is None and option.show_default:
        value = option.default
    default = ""
    if value is not None and "default" not in text:
        shown = _shown(value, is_size=option.metavar == "BYTES")
        explained = f"({shown}: "  # such as (0: off)
        default = "" if explained in text else f"default: {shown}"
        text = text.replace(explained, f"(default {explained[1:]}")
    repeatable = option.multiple and option.name != "keep"  # --keep takes several names at once
    return with_notes(text, default, "repeatable" if repeatable else "")


def _shown(value: object, *, is_size: bool) -> str:
    if is_size and isinstance(value, int):
        exponent = max(exponent for exponent in range(4) if value % 1024**exponent == 0)
        return f"{value // 1024**exponent}{('B', 'KiB', 'MiB', 'GiB')[exponent]}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _print_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_ALL = "prefold.help_all"
_COLUMN = 26  # width of the column of flags
_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all, help="Show all options."
)


class Command(click.Command):
    """A command whose --help shows the common options by group; --help-all shows all options.

    Options that no group is declared for are the command's own, and come first.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *([_HELP_ALL] if self._rare() else [])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = ctx.meta.get(_ALL, False)
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("", *HELP_GROUPS)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None and (shows_all or getattr(option, "common", True)):
                groups[getattr(option, "group", "")].append((record[0], help_line(option)))  # type: ignore[arg-type]
        # Equal widths of the first column align the help texts of all groups.
        width = min(_COLUMN, max((len(flags) for rows in groups.values() for flags, _ in rows), default=0))
        for name, rows in groups.items():
            if rows:
                with formatter.section(name or "Options"):
                    formatter.write_dl([(flags.ljust(width), text) for flags, text in rows], col_max=_COLUMN)
        if self._rare() and not shows_all:
            formatter.write_paragraph()
            formatter.write_text(f"{len(self._rare())} more options: {ctx.command_path} --help-all")

    def _rare(self) -> list[click.Parameter]:
        return [option for option in self.params if not getattr(option, "common", True)]


command = partial(click.command, cls=Command)


def _written(read: Callable[[Any], Any], expected: str) -> Callable[[Any], Any]:
    """Return the click type of a value with its own syntax.

    Args:
        read: Returns the value, or raises ValueError.
        expected: The end of the error message "... is", with how to write the value.
    """

    def convert(value: Any) -> Any:
        try:
            return read(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is {expected}") from None

    return convert


def _matched(pattern: str, value: object) -> re.Match[str]:
    match = re.fullmatch(pattern, str(value).strip())
    if match is None:
        raise ValueError
    return match


def _bytes(value: object) -> int:
    number, unit, binary = _matched(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(value).lower()).groups()
    if not float(number):
        raise ValueError
    return int(float(number) * (1024 if binary else 1000) ** (1 + "kmgt".index(unit) if unit else 0))


def _blocks(value: object) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return tuple(int(block) for block in _matched(r"\d+(\s*,\s*\d+)*", value)[0].split(","))


BYTES = _written(_bytes, "not a number of bytes; write 512MiB, or 4GiB")
# Names as in torch. Whether the machine has the device is checked later, because that needs torch.
_DEVICE = _written(lambda value: _matched(r"auto|cpu|cuda(:\d+)?", value)[0],
    "not a device; write auto, cpu, cuda, or cuda:1 for the second GPU",
)  # fmt: skip
_BLOCKS = _written(_blocks, "not a route; write the numbers of blocks: 0,1,0")


class _WordOrFlag(click.Choice[str]):
    """A word. For options that used to be flags, a TOML file may also have true or false."""

    def __init__(self, words: list[str], true: str):
        super().__init__(words)
        self._flags = {True: true, False: words[0]}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(self._flags[value] if isinstance(value, bool) else value, param, ctx)


# Settings of click that replace the declaration's, for parameters with their own syntax or meaning on the command line.
# "default": None means that the spec applies the default, and the command line only says whether the option was given.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "device": {"type": _DEVICE},
    "cache": {"type": click.Choice(["off", *POLICIES]), "metavar": None, "default": None},
    **{name: {"default": None} for name in ("max_running", "media_memory", "allow_media_host")},
    "ray": {"is_flag": False, "flag_value": ""},
    "truncate": {"is_flag": True, "type": None, "help": "Cut a prompt that is too long instead of failing.",
                 "details": "Cuts the longest column of a template, the longest content of a conversation, or the "
                            "document of a rerank pair. The text around it stays."},
    "truncate_side": {"help": "Cut this end of the whole prompt if it is too long.", "details": "", "common": False},
    "access_log": {"is_flag": False, "flag_value": "text", "type": _WordOrFlag(["off", "text", "json"], "text")},
    "route": {"type": _BLOCKS, "metavar": "0,1,..."},
    "adapter": {"metavar": "NAME=FOLDER", "multiple": True, "help": "LoRA adapter (PEFT) to run with.",
                "details": "A single adapter is used for all records. With more than one, --adapter-column or the "
                           "model of a batch line selects the adapter."},
    "prompt_name": {"metavar": "NAME"},
    "words": {"metavar": "YES,NO"},
    "labels": {"metavar": "A,B,...", "help": "Labels to choose from (default: the labels of the classification head).",
               "details": ""},
    "labels_file": {"metavar": "FILE", "help": "File with the labels, one per line, or a JSON list or object.",
                    "details": 'JSON is ["a", ...], {"a": "how the prompt writes it", ...}, or {"a": {"description": '
                               '"what it means"}, ...}. Descriptions appear once in the prompt.'},
    "questions": {"metavar": "FILE", "help": "YAML or JSON file with the questions to answer about each state."},
    "examples": {"metavar": "FILE", "help": "Examples for the prompt: JSONL or CSV with the columns text and label."},
    "chat_template_kwargs": {"metavar": "JSON", "help": "Chat template variables, such as "
                                                         '{"enable_thinking": false}.'},
    "max_tokens": {"type": click.IntRange(0), "metavar": "N"},
    "temperature": {"help": "Divide logits by this before sampling (0: greedy; default: 0, batch lines: 1)."},
    "logit_bias": {"metavar": "ID=X", "multiple": True, "help": "Add X to the logit of a token."},
    "stop": {"metavar": "TEXT", "multiple": True, "help": "Text that ends the answer, which does not include it."},
    "stop_id": {"type": click.IntRange(0), "metavar": "ID", "multiple": True, "help": "Token id that ends the answer."},
    "json_schema": {"metavar": "FILE|JSON", "help": "Constrain answers to JSON of this schema.", "details": ""},
    "json_object": {"is_flag": True, "help": "Constrain answers to JSON objects.", "details": ""},
    "regex": {"metavar": "REGEX", "help": "Constrain answers to this regular expression.", "details": "",
              "common": False},
    "choice": {"metavar": "TEXT", "multiple": True, "help": "Constrain answers to one of these texts.", "details": ""},
    "grammar": {"metavar": "TEXT", "help": "Constrain answers to this Lark grammar; @FILE reads a file.", "details": "",
                "common": False},
}  # fmt: skip


def click_option(option: Field[Any], name: str, **settings: Any) -> Decorator:
    """Return the command-line option for a field of a spec.

    Args:
        option: The field.
        name: The parameter of the command.
        settings: Settings of click that replace the declaration's; `_OVERRIDES` in turn replace these.
    """
    metadata, kind = option.metadata, kind_of(option)
    words = [value for value in metadata["one_of"] if isinstance(value, str)]
    bounds = metadata["least"], metadata["most"]
    bounded = {int: click.IntRange, float: click.FloatRange}.get(kind or object) if bounds != (None, None) else None
    metavar = metadata["metavar"] or {int: "N", float: "X", str: "TEXT"}.get(kind or object)
    arguments: dict[str, Any] = {"help": metadata["doc"], "metavar": None if words else metavar}
    arguments |= {"cls": Option, **{key: metadata[key] for key in ("group", "common", "details")}}
    if option.default is not False and option.default not in (None, (), ""):
        arguments["stated"] = option.default
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
    """Return a decorator that adds options in this order."""
    return lambda function: reduce(lambda decorated, decorator: decorator(decorated), reversed(decorators), function)


def number(flag: str, help: str, default: int | None = None, *, least: int = 1, metavar: str = "N") -> Decorator:
    """Return a command-line option for a whole number."""
    kind = click.IntRange(least)
    return click.option(flag, type=kind, default=default, show_default=default is not None, metavar=metavar, help=help)


def _plugins(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> None:
    from ..spec.plugins import add_plugins

    add_plugins(names)


def declared(parameter: str, option: Field[Any]) -> Decorator:
    """Return the command-line option, with its default, for an option of a model, a job or a server."""
    shows_default = kind_of(option) is not bool and option.default not in (None, ())
    default = {"default": option.default, "show_default": True} if shows_default else {}
    return click_option(option, parameter, **default)


def job_group(*parameters: str) -> Decorator:
    """Return a decorator that adds these options of a job."""
    return all_of(*(declared(name, job_parameters()[name]) for name in parameters))


def model_group(*groups: str) -> Decorator:
    """Return a decorator that adds the model options of these groups of commands; see `on` of `option`."""
    on = {name: entry for name, entry in model_fields().items() if entry.metadata["on"] in groups}
    return all_of(*(declared(name, entry) for name, entry in on.items()))


plugin_option = click.option(
    "--plugin",
    cls=Option,
    group="Advanced",
    common=False,
    metavar="MODULE",
    multiple=True,
    expose_value=False,
    callback=_plugins,
    help="Module or .py file to import in every process that loads the model.",
    details="It may register a model family of your own, for example.",
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
    """Return {parameter: its option} of all options of these tasks.

    If an option differs between tasks, its help lists its meaning in each. With several tasks only the options that all
    of them have are common.
    """
    options = {}
    for parameter, of in declarations(tasks).items():
        docs = {task: entry.metadata["doc"] for task, entry in of.items()}
        text = " ".join(f"{task}: {doc}" for task, doc in docs.items())
        settings: dict[str, Any] = {"help": text, "details": ""} if len({*docs.values()}) > 1 else {}
        if len(of) < len(tasks):
            settings["common"] = False
        options[parameter] = click_option(next(iter(of.values())), parameter, **settings)
    return options


def task_options(*tasks: str) -> Decorator:
    """Return a decorator that adds the options of tasks."""
    beside = dict.fromkeys(name for task in tasks for name in BESIDE.get(task, ()))
    return all_of(job_group(*beside), *_declared_by(tasks).values())


adapter_option = _declared_by(["generate"])["adapter"]
# The options of generation in commands that compare runs.
text_options = all_of(job_group("chat"), *map(_declared_by(["generate"]).__getitem__, ("max_tokens", "ignore_eos")))


def column_options(*tasks: str) -> Decorator:
    """Return a decorator that adds the options for reading the table of tasks."""
    return job_group(*column_parameters(*tasks))


def job_options(*tasks: str) -> Decorator:
    """Return a decorator that adds all options of a job that runs one of these tasks."""
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


json_option = click.option(
    "--json", "as_json", cls=Option, group="Output", is_flag=True, help="Print the results as JSON."
)


def sample_options(*decorators: Decorator, tasks: Sequence[str] = NUMERIC_TASKS, needs_input: bool = True) -> Decorator:
    """Return a decorator that adds the options of commands that inspect a job, or run a part of it.

    Args:
        decorators: Further options.
        tasks: The tasks whose options are added in full. Without "generate", only the options of generation that
            comparisons of runs need are added.
        needs_input: Whether INPUT is required.
    """
    metavar = "INPUT..." if needs_input else "[INPUT]..."
    return all_of(
        click.argument("input", metavar=metavar, nargs=-1, required=needs_input),
        click.option("--task", type=click.Choice(TASKS), help="Task of a table, as for `prefold run`."),
        *decorators,
        model_options,
        column_options(*TASKS),
        task_options(*tasks),
        *([] if "generate" in tasks else [text_options]),
        limit_options,
        media_options,
        json_option,
    )
