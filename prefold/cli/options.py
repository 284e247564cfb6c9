"""Defines the options of commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from functools import reduce
from typing import Any

import click
from click.core import ParameterSource

from ..spec.fields import kind_of
from ..spec.model import POLICIES, model_fields
from ..spec.task import OPTIONS, ConversationOptions, TaskSpec

DEFAULT_MODEL = "smollm2-135m"
NUMERIC_TASKS = ("embed", "rerank", "classify", "score")  # the tasks whose results are numbers
TASKS = (*NUMERIC_TASKS, "generate")
FORMATS = ("jsonl", "csv", "tsv", "parquet")
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


def click_option(option: Field[Any], name: str, *flags: str, **settings: Any) -> Decorator:
    """Returns the command line's option for an option that is declared as in `prefold.spec.task`.

    name      of the parameter of the command; as a flag too, unless there are `flags`
    settings  of click, in place of what the declaration says
    """
    metadata, kind = option.metadata, kind_of(option)
    words = [value for value in metadata["one_of"] if isinstance(value, str)]
    bounds = metadata["least"], metadata["most"]
    bounded = {int: click.IntRange, float: click.FloatRange}.get(kind or object) if bounds != (None, None) else None
    metavar = metadata["metavar"] or {int: "N", float: "X", str: "TEXT"}.get(kind or object)
    arguments: dict[str, Any] = {"help": metadata["doc"], "metavar": None if words else metavar}
    if kind is bool:
        arguments["is_flag"] = True
    elif words:
        arguments["type"] = click.Choice(words)
    elif str(option.type) in ("tuple[str, ...]", "Collection[str]"):
        arguments["multiple"] = True
    elif option.name.endswith(("_bytes", "_memory")):
        arguments |= {"type": BYTES, "metavar": metadata["metavar"] or "BYTES"}
    else:
        arguments["type"] = kind if bounded is None else bounded(*bounds, min_open=metadata["above"])
    return click.option(
        *(flags or (f"--{name.replace('_', '-')}",)), name, **arguments | settings | _OVERRIDES.get(name, {})
    )


def all_of(*decorators: Decorator) -> Decorator:
    """Returns a decorator that adds several options, in their order."""
    return lambda function: reduce(lambda decorated, decorator: decorator(decorated), reversed(decorators), function)


def number(flag: str, help: str, default: int | None = None, *, least: int = 1, metavar: str = "N") -> Decorator:
    """Returns the command line's option for a whole number."""
    kind = click.IntRange(least)
    return click.option(flag, type=kind, default=default, show_default=default is not None, metavar=metavar, help=help)


def _plugins(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> None:
    from ..plugins import add_plugins

    add_plugins(names)


def declared(parameter: str, option: Field[Any], *flags: str) -> Decorator:
    """Returns the command line's option, with its default, for an option of a model or a server."""
    shows_default = kind_of(option) is not bool and option.default not in (None, ())
    default = {"default": option.default, "show_default": True} if shows_default else {}
    return click_option(option, parameter, *flags, **default)


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

model_options = all_of(
    click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME",
                 help="Built-in name, local folder, .gguf file, or hub id."),
    model_group("model"),
    plugin_option,
)  # fmt: skip

machine_options = model_group("machine")
engine_options = all_of(machine_options, model_group("engine"))
generation_options = model_group("text")
media_options = all_of(
    model_group("media"),
    click.option("--media-bytes", type=BYTES, metavar="BYTES", help="Size of an image's file.  [default: 20MB]"),
    number("--media-pixels", "Height times width of an image.  [default: 64000000]"),
)  # fmt: skip

fleet_options = all_of(
    click.option("--ray", metavar="[ADDRESS]", is_flag=False, flag_value="", default=None,
                 help="Run replicas of the model on a Ray cluster; without ADDRESS on that of RAY_ADDRESS, else on "
                      "this machine. Write it behind INPUT, or as --ray=ADDRESS."),
    click.option("--url", metavar="URL", multiple=True,
                 help="A server that runs the model: one with OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI. "
                      "May be repeated. PREFOLD_API_KEY in the environment is its key."),
    click.option("--tokenizer", metavar="NAME",
                 help="With --url: a folder, hub id or built-in name with the tokenizer, so that token ids are sent.  "
                      "[default: that of --model, if it is a folder; else texts are sent]"),
    click.option("--backend", metavar="NAME",
                 help="What computes, here or on the replicas of --ray: prefold, vllm, or what a package or --plugin "
                      "adds. vLLM generates text only, and runs models that prefold does not know.  "
                      "[default: prefold]"),
    click.option("--backend-option", metavar="NAME=VALUE", multiple=True,
                 help="With --backend vllm: a field of its AsyncEngineArgs, such as block_size=32. May be repeated."),
    number("--replicas", "How many, each with --threads or, on GPUs, --tensor-parallel GPUs of its own.  [default: as "
                         "many as there is room for]"),
    click.option("--patience", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True,
                 metavar="SECONDS", help="A replica that has work and makes no progress for so long is killed."),
)  # fmt: skip

limit_options = all_of(
    number("--limit", "Only the first N records."),
    number("--window", "Tokens held in memory at once; with --stream those that wait.", 1 << 20),
)  # fmt: skip

output_options = all_of(
    click.option("-o", "--output", metavar="FILE",
                 help=".jsonl, .csv, .tsv or .parquet; .gz may follow. Without it: JSON lines to standard output."),
    click.option("--keep-order", is_flag=True, help="Results in input order, instead of as they come."),
    click.option("--overwrite", is_flag=True, help="Start again, replacing the output."),
    click.option("--resume", is_flag=True,
                 help="Go on with an interrupted job, and fail if there is none. (A job whose journal is there "
                      "is resumed without it.)"),
    click.option("--grown", is_flag=True,
                 help="The input may have become longer since: go on with the records behind those that are done."),
    click.option("--report", metavar="FILE", help="Write an HTML page about the job: its trie, its batches."),
    click.option("--stream", is_flag=True,
                 help="Run records as they come, the most alike first, instead of sorting the whole input: for input "
                      "without end. Shares less."),
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
    "generate": (
        _PROMPT,
        click.option("--tools", metavar="COLUMN",
                     help="Tools that the chat template is told of: a column, or @FILE (JSON) for all records."),
    ),
}  # fmt: skip
_MESSAGES = click.option("--messages", metavar="COLUMN", help="Chat messages, written by the model's chat template.")

chat_option = click.option(
    "--chat/--raw", default=None,
    help="Put prompts into the model's chat template, or not.  [default: if it has one]",
)  # fmt: skip
# Options of the command line that the table has not, beside those of a task.
_BESIDE = {
    "classify": (
        click.option("--scores", type=click.Choice(["label", "all"]),
                     help="Which probabilities have a column of their own. label: the label's, p; all: every label's "
                          "too, p_LABEL.  [default: label for CSV and Parquet; else the objects of JSON lines]"),
    ),
    "generate": (
        chat_option,
        click.option("--recommended", is_flag=True,
                     help="Where an option is not given, sample as the checkpoint's generation_config.json says."),
        click.option("--seed", type=click.IntRange(0, 2**53 - 1), metavar="N",
                     help="Of sampling; each record's own is made of it.  [default: drawn, and kept in the journal]"),
        click.option("--json-columns", is_flag=True,
                     help="Each property of a JSON answer becomes a column of its own, beside text. Needs "
                          "--json-schema or --json-object."),
    ),
}  # fmt: skip


def _declared_by(tasks: Collection[str]) -> dict[str, Decorator]:
    """Returns {parameter: its option} of all options of these tasks. If the meaning of an option depends on the task,
    its help says so for each. Options of all tasks come last."""
    common = {entry.name for entry in fields(TaskSpec)}
    declarations: dict[str, dict[str, Field[Any]]] = {}
    for task, kind in [(task, kind) for task, kind in OPTIONS.items() if task in tasks]:
        own = {entry.name: entry for entry in fields(kind)}
        if task not in ("rerank", "generate"):  # those that read conversations, too
            own |= {entry.name: entry for entry in fields(ConversationOptions)}
        for entry in sorted(own.values(), key=lambda entry: entry.name in common):
            names = entry.metadata["cli"] or (entry.name,)
            for parameter in [name for name in names if name is not None and name != "tools"]:  # which are a column
                declarations.setdefault(parameter, {})[task] = entry
    options = {}
    for parameter, of in sorted(declarations.items(), key=lambda pair: next(iter(pair[1].values())).name in common):
        docs = {task: entry.metadata["doc"] for task, entry in of.items()}
        text = " ".join(f"{task}: {doc}" for task, doc in docs.items())
        settings: dict[str, Any] = {"help": text} if len({*docs.values()}) > 1 else {}
        first, flag = next(iter(of.values())), parameter.replace("_", "-")
        flags: tuple[str, ...] = ()
        if kind_of(first) is bool and first.default is not False:
            flags, settings["default"] = (f"--{flag}/--no-{flag}",), None
        options[parameter] = click_option(first, parameter, *flags, **settings)
    return options


def task_options(*tasks: str) -> Decorator:
    """Returns a decorator that adds the options of tasks."""
    return all_of(*(option for task in tasks for option in _BESIDE.get(task, ())), *_declared_by(tasks).values())


# What commands that compare runs need to generate text.
text_options = all_of(chat_option, *map(_declared_by(["generate"]).__getitem__, ("max_tokens", "ignore_eos")))


_IMAGES = (
    click.option("--image", metavar="COLUMN",
                 help="The record's image, or a list of them: base64, a data URL, bytes, with --media-folder a path. "
                      "Without a job: the path of an image."),
    click.option("--media-folder", metavar="FOLDER",
                 help="Images may be given as paths in this folder; nothing outside of it is read."),
)  # fmt: skip


def column_options(*tasks: str) -> Decorator:
    """Returns a decorator that adds the options which name the columns of tasks."""
    options = list(dict.fromkeys(option for task in tasks for option in _COLUMNS[task]))
    if set(tasks) != {"rerank"}:
        options.append(_MESSAGES)
    return all_of(
        *options,
        click.option("--adapter-column", metavar="COLUMN", help="The name of each record's adapter."),
        *_IMAGES,
        click.option("--id", "id_column", metavar="COLUMN", help="A column that the output repeats as id."),
        click.option("--keep", metavar="A,B,...", multiple=True,
                     help="Further columns that the output repeats, under another name as NAME=COLUMN; '*': all. "
                          "May be repeated."),
        click.option("--empty", type=click.Choice(["error", "keep"]),
                     help="What an empty cell, null or NaN in a prompt is: an error of that record, or an empty text.  "
                          "[default: error]"),
        click.option("--format", "input_format", type=click.Choice(FORMATS),
                     help="Format of the input.  [default: as its name says; standard input: jsonl]"),
        click.option("--delimiter", metavar="CHAR",
                     help="What parts the cells of CSV or TSV, such as ';' or tab.  [default: a comma; of TSV a tab]"),
        number("--max-cell-lines", "Lines that a quoted cell of CSV or TSV may have; a longer one is a broken quote. "
               "0: any number.  [default: 1000]", least=0),
    )  # fmt: skip


def options_for(task: str) -> dict[str, click.Option]:
    """Returns {parameter: option} of a task's options, and of those that name its columns."""

    def command() -> None: ...

    parameters = all_of(column_options(task), task_options(task))(command).__click_params__  # type: ignore[attr-defined]
    return {option.name: option for option in parameters}


def refuse_other_tasks_options(tasks: Collection[str], subject: str) -> None:
    """Raises UsageError if an option of the present command is for other tasks than these. subject: the tasks in words,
    for the error"""
    context = click.get_current_context()
    of_task = {task: options_for(task) for task in TASKS}
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name is None:
            continue
        # Helps tell options apart (`verify --seed` is not that of sampling); one of several tasks holds that of each.
        values = {task: options.get(option.name) for task, options in of_task.items()}
        of = [task for task, same in values.items() if same is not None and str(same.help) in str(option.help)]
        if of and not {*of} & {*tasks} and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            flags = "/".join((*option.opts, *option.secondary_opts))
            tasks_of = " and ".join(filter(None, (", ".join(of[:-1]), of[-1])))
            raise click.UsageError(f"{flags} is for {tasks_of}, and not for {subject}")


def refuse_conversation_options(o: dict[str, Any], remedy: str) -> None:
    """Raises UsageError if an option of rendering conversations is given without conversations. remedy: how to have
    some, for the error"""
    for entry in fields(ConversationOptions):
        if (name := entry.name) != "tools" and o.get(name) not in (None, False):  # these are a column
            raise click.UsageError(f"--{name.replace('_', '-')} is for conversations; {remedy}")


def job_options(*tasks: str) -> Decorator:
    """Returns a decorator that adds all the options of a job of one of these tasks."""
    return all_of(
        model_options,
        column_options(*tasks),
        task_options(*tasks),
        output_options,
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
