"""Make the pages of docs/reference/: options from the specs, HTTP from routes and bodies, Python from docstrings.

`scripts/generate` runs it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from functools import cached_property
from types import FunctionType
from typing import Any

import click

import prefold
import prefold.train
from prefold.cli import main as main_command
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


# Python


def python() -> str:
    """Return the page of the public names."""
    own = [name for name in prefold.__all__ if name != "__version__"]
    errors = [name for name in own if inspect.isclass(kind := getattr(prefold, name)) and issubclass(kind, Exception)]
    parts = [
        f"# Python reference\n\nThe public names of `prefold` and `prefold.train`, with their docstrings."
        f" [Python](../python.md) is the guide; [options](options.md) has the keywords. {WRITTEN}"
    ]
    parts += [_class("LLM", prefold.LLM, "prefold")]
    parts += [_class(name, getattr(prefold, name), "prefold") for name in own if name not in {"LLM", *errors}]
    parts.append("## Errors\n\nAn error is a class below `PrefoldError`.")
    for name in errors:
        base = getattr(prefold, name).__mro__[1].__name__
        parts.append(f"### {name}\n\nA subclass of `{base}`.\n\n{_prose(inspect.getdoc(getattr(prefold, name)) or '')}")
    parts.append("## prefold.train\n\n" + _prose(inspect.getdoc(prefold.train) or ""))
    for name in prefold.train.__all__:
        value = getattr(prefold.train, name)
        made = _class(name, value, "prefold.train") if inspect.isclass(value) else _function(name, value)
        parts.append(re.sub(r"^(#+) ", r"\1# ", made, flags=re.M) if inspect.isclass(value) else made)
    return "\n\n".join(parts) + "\n"


def _class(name: str, kind: type, module: str) -> str:
    doc = (inspect.getdoc(kind) or "").partition("\n\nOptions:\n")[0]
    parts = [f"## {name}", f"`from {module} import {name}`", _code(name, kind), _prose(doc)]
    for member, value in _members(kind):
        if isinstance(value, property | cached_property):
            parts.append(f"### {name}.{member}\n\nA property. {_prose(inspect.getdoc(value) or '')}")
        else:
            parts.append(_function(f"{name}.{member}", value))
    return "\n\n".join(part for part in parts if part)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that prefold defines for a class, base classes last."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("prefold"):
            continue
        for name, value in vars(base).items():
            inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if name.startswith("_") or name in seen or not isinstance(inner, FunctionType | property | cached_property):
                continue
            seen.add(name)
            if inspect.getdoc(inner):
                yield name, inner


def _function(name: str, function: Any) -> str:
    return f"### {name}\n\n{_code(name, function)}\n\n{_prose(inspect.getdoc(function) or '')}"


def _code(name: str, value: Any) -> str:
    """Return the signature; a long one has one parameter per line."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown = []
    star = False
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            shown, star = [*shown, "*"], True
        star = star or one.kind is one.VAR_POSITIONAL
        text = re.sub(r": '(.*?)'( = |$)", r": \1\2", str(one))
        shown.append(re.sub(r": \"(.*?)\"( = |$)", r": \1\2", text).replace("<factory>", "..."))
    back = signature.return_annotation
    back = "" if inspect.isclass(value) or back is signature.empty else f" -> {str(back).strip(chr(39))}"
    line = f"{name}({', '.join(shown)}){back}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){back}"
    return f"```py\n{line}\n```"


_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):\n")


def _prose(doc: str) -> str:
    """Return a docstring as Markdown. Sections of names become lists, and so do lines of "name  text"."""
    parts = []
    title = ""  # of the section that an indented paragraph continues
    for part in doc.split("\n\n"):
        if (section := _SECTION.match(part)) or (title and part.startswith("    ")):
            title = section[1] if section else title
            head = f"**{title}**\n\n" if section else ""
            parts.append(head + _section(title, part[section.end() :] if section else part))
            continue
        title = ""
        lines = part.split("\n")
        entries = [re.match(r"(\w[\w, ]*?)  +(\S.*)", line) for line in lines]
        if entries[0] and all(entry or line.startswith(" ") for entry, line in zip(entries, lines, strict=True)):
            found = re.sub(r"\n\s+", " ", part)
            part = "\n".join(re.sub(r"^(\w[\w, ]*?)  +", r"- `\1`: ", line) for line in found.split("\n"))
        parts.append(textwrap.dedent(part).replace("<", "&lt;"))
    return "\n\n".join(parts)


def _section(title: str, text: str) -> str:
    """Return the text of a section in Google's form as Markdown."""
    text = textwrap.dedent(text)
    if title == "Example":
        return f"```py\n{text}\n```"
    text = text.replace("<", "&lt;")
    if title in ("Returns", "Yields"):
        return text
    entries = re.sub(r"\n {4,}", " ", text).split("\n")
    return "\n".join(re.sub(r"^(\S+?): ", r"- `\1`: ", entry) for entry in entries)
