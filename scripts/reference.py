"""Make the pages of docs/reference/: options from the specs, commands from click, HTTP from routes and bodies.

`scripts/generate` runs it. mkdocstrings makes the page about Python from docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any

import click

from prefold.cli import main as main_command
from prefold.cli.options import TASKS, help_line
from prefold.serve.app import DIALECTS, SERVER, describe
from prefold.spec.fields import HELP_GROUPS, explained
from prefold.spec.model import GROUPS, CacheOptions, ModelSpec, SlotOptions, StepOptions
from prefold.spec.task import OPTIONS, TaskSpec, cli_names, http_names, option_of

WRITTEN = "`scripts/generate` writes this page; a test compares the two.\n"


def cell(text: str) -> str:
    """Return a text on one line, escaped for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", chr(92) + "|").replace("<", "&lt;")


# Options


def options() -> str:
    """Return the page of all options."""
    later = {entry.name for kind in (StepOptions, SlotOptions) for entry in fields(kind)}
    model = sorted(fields(ModelSpec), key=lambda entry: entry.name in later)
    common = [entry.name for entry in fields(TaskSpec)]
    text = f"""# Options

An option means the same in Python, on the command line and in an HTTP request. An empty cell, or a missing column,
means that the option cannot be set there. Options are listed by the groups of `--help-all`; `--help` shows only the
options in **bold**. {WRITTEN}
## Options of the model

Python: `LLM(name, ...)`. Command line: all commands that load a model, `prefold serve` included.

{_table(model)}
"""
    for name, kind in GROUPS.items():
        text += f"\n## LLM({name}={{...}})\n\n{_table(fields(kind))}\n"
    text += f"\n## LLM(cache=CacheOptions(...))\n\n{_table(fields(CacheOptions))}\n"
    text += f"\n## Options of all tasks\n\n{_table([option_of('embed', name) for name in common], 'embed')}\n"
    for task in OPTIONS:
        own = [option_of(task, name) for name in cli_names(task) if name not in common]
        title = "`generate`, `chat`, `stream`, `agenerate`, `astream`" if task == "generate" else f"`{task}`"
        text += f"\n## Options of {title.replace('`, `', ', ').replace('`', '')}\n\n{_table(own, task)}\n"
    return text


def _table(declared: Iterable[Field[Any]], task: str = "") -> str:
    """Return the table of options, by help group and without empty columns."""
    bodies: dict[str, list[str]] = {}
    for parameter, name in http_names().items() if task == "generate" else ():
        bodies.setdefault(name, []).append(f"`{parameter}`")
    rows = [["option", "group", "default", "command line", "request", "meaning"]]
    for entry in sorted(declared, key=_place):
        value = "" if entry.name in GROUPS else f"`{entry.default!r}`"
        default = ", ".join(part for part in (value, _bounds(entry)) if part)
        flags, sent = ", ".join(_flags(entry, task)), ", ".join(bodies.get(entry.name, ()))
        name = f"**`{entry.name}`**" if entry.metadata["common"] and flags else f"`{entry.name}`"
        group = entry.metadata["group"]
        rows.append([name, group, default, flags, sent, cell(explained(entry))])
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*kept, strict=True)]
    return "\n".join([lines[0], "|---" * len(kept) + "|", *lines[1:]])


def _place(entry: Field[Any]) -> tuple[int, bool]:
    return HELP_GROUPS.index(entry.metadata["group"]), not entry.metadata["common"]


def _bounds(entry: Field[Any]) -> str:
    least, most = entry.metadata["least"], entry.metadata["most"]
    parts = [] if least is None else [f"{'above' if entry.metadata['above'] else 'from'} {least:,}"]
    return " ".join(parts if most is None else [*parts, f"to {most:,}"])


def _flags(entry: Field[Any], task: str) -> list[str]:
    if not task and entry.metadata["on"] is None:
        return []
    names = cli_names(task)[entry.name] if task else entry.metadata["cli"] or (entry.name,)
    commands = [main_command.commands[command] for command in ([task] if task else ["run", "serve"])]
    found: dict[str, click.Parameter] = {}
    for command in commands:
        found = {str(one.name): one for one in command.params if isinstance(one, click.Option)} | found
    return [f"`{found[name].opts[-1]}`" for name in names if name in found]


# Commands

JOINT = ("run", "plan", "verify", "bench")  # commands with options of more than one task
Row = tuple[str, str]  # cells of a table: the flags and the meaning of an option


def commands() -> str:
    """Return the page of all commands: the options that they share, then each command with its own options."""
    options = {command: _options_of(command) for command in main_command.commands}
    every = [row for command in (*TASKS, "serve", "answers") for row in options[command]]
    shared = {row: entry for task in TASKS for row, entry in options[task].items() if every.count(row) > 1}
    of_tasks = {task: {row for row in options[task] if row not in shared} for task in TASKS}
    text = f"""# Commands

`prefold COMMAND --help` shows the options in **bold**. `prefold COMMAND --help-all` shows all options of a command.
[Command line](../cli.md) is the guide. {WRITTEN}
## Shared options

An option means the same in every command that has it. These options belong to more than one command:
"""
    for name in HELP_GROUPS:
        if rows := {row: entry for row, entry in shared.items() if _group(entry) == name}:
            text += f"\n### {name}\n\n{_rows(rows)}\n"
    is_joint = re.compile(rf"({'|'.join(TASKS)}): ")  # such a help text lists the meanings of an option in each task
    inherited = set().union(*of_tasks.values())
    flags = {task: {row[0] for row in rows if _group(options[task][row])} for task, rows in of_tasks.items()}
    for command, found in options.items():
        own = {row: entry for row, entry in found.items() if row not in shared}
        if command in JOINT:
            own = {row: entry for row, entry in own.items() if row not in inherited and not is_joint.match(row[1])}
        text += f"\n## `prefold {command}`\n\n{_help(command)}\n"
        text += f"\n{_rows(own)}\n" if own else ""
        if command in JOINT:
            text += f"\n{_inherited({row[0] for row, entry in found.items() if _group(entry)}, flags)}\n"
    return text


def _options_of(command: str) -> dict[Row, click.Option]:
    found = {}
    for entry in main_command.commands[command].params:
        if isinstance(entry, click.Option):
            flags = ", ".join(f"`{flag}`" for flag in (*entry.opts, *entry.secondary_opts))
            text = f"{help_line(entry)} {getattr(entry, 'details', '')}".rstrip()
            text = re.sub(r"\s*\[default: (.*)\]$", r" (default: \1)", text)  # of a feature's options
            found[flags, cell(text)] = entry
    return found


def _group(entry: click.Option) -> str:
    """Return the help group of an option. An option that one command declares for itself has none ("")."""
    return getattr(entry, "group", "")


def _rows(rows: dict[Row, click.Option]) -> str:
    lines = ["| option | meaning |", "|---|---|"]
    for (flags, text), entry in rows.items():
        lines.append(f"| {f'**{flags}**' if getattr(entry, 'common', True) else flags} | {text} |")
    return "\n".join(lines)


def _help(command: str) -> str:
    """Return the usage and the help text of a command as Markdown. Its examples become blocks of code."""
    entry = main_command.commands[command]
    usage = " ".join(entry.collect_usage_pieces(click.Context(entry)))
    parts = [f"    prefold {command} {usage}"]
    for part in inspect.cleandoc(entry.help or "").split("\n\n"):
        is_code, lines = part.startswith("\b\n"), part.removeprefix("\b\n").split("\n")
        parts.append("\n".join(f"    {line}" for line in lines) if is_code else "\n".join(lines).replace("<", "&lt;"))
    return "\n\n".join(parts)


def _inherited(flags: set[str], of_tasks: dict[str, set[str]]) -> str:
    """Return a sentence about the options of tasks that a command also has."""
    whole = [f"`prefold {task}`" for task, own in of_tasks.items() if own <= flags]
    parts = [f"the options of {', '.join(whole)}"]
    for task, own in of_tasks.items():
        if not own <= flags and own & flags:
            parts.append(f"{', '.join(sorted(own & flags))} of `prefold {task}`")
    return f"Also {' and '.join(parts)}."


# HTTP

APIS = {"openai": "OpenAI", "anthropic": "Anthropic", "cohere": "Cohere", "tei": "TEI", "server": "prefold"}


def routes() -> str:
    """Return the table of routes."""
    rows = ["| request | API | body | |", "|---|---|---|---|"]
    for path, operations in _description()["paths"].items():
        for method, operation in operations.items():
            bodies = ", ".join(f"[{name}](#{name.lower()})" for name in _bodies(operation))
            query = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            about = operation["summary"] + (f" Query: {', '.join(f'`{name}`' for name in query)}." if query else "")
            about += " For admins." if "description" in operation else ""
            rows.append(f"| `{method.upper()} {path}` | {APIS[operation['tags'][0]]} | {bodies} | {cell(about)} |")
    return "\n".join(rows)


def bodies() -> str:
    """Return a section for each kind of body: its fields with their types, defaults and bounds."""
    schemas = _description()["components"]["schemas"]
    parts = []
    for name, schema in schemas.items():
        if "properties" not in schema:
            continue
        head = ["| field | type | default | |", "|---|---|---|---|"]
        required = schema.get("required", ())
        for field, value in schema["properties"].items():
            one, about = _plain(value, schemas), _said(value)
            default = "required" if field in required else _default(value.get("default"))
            head.append(f"| `{field}` | {cell(one)} | {default} | {cell(about)} |")
        parts.append(f"### {name}\n\n{schema.get('description', '')}\n\n" + "\n".join(head))
    return "\n\n".join(parts)


def _description() -> dict[str, Any]:
    return describe([*SERVER, *(entry for dialect in DIALECTS for entry in dialect.ENTRIES)], [])


def _bodies(operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    return [one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema]) if "$ref" in one]


def _default(value: object) -> str:
    return (
        ""
        if value is None or value == {} or value == []
        else f"`{value!r}`".replace("True", "true").replace("False", "false")
    )


def _said(schema: dict[str, Any]) -> str:
    inner = next((one["description"] for one in schema.get("anyOf", ()) if "description" in one), "")
    return str(schema.get("description", inner))


def _plain(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the type and bounds of a value, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        values = schemas[name].get("enum")
        return ", ".join(f"`{value}`" for value in values) if values else f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        found = [_plain(one, schemas) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(found))
    kind = schema.get("type", "any")
    kind = " or ".join(one for one in kind if one != "null") if isinstance(kind, list) else kind
    if kind == "array" and (items := _plain(schema.get("items", {}), schemas)) != "any":
        kind = f"array of {items}"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "maxLength": "length at most"}
    said = [f"{words} {schema[key]:,}" for key, words in bounds.items() if key in schema]
    return ", ".join([kind, *said])
