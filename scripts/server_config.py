"""Make the text of deploy/prefold.toml: every option of `prefold serve` with its help and default.

`scripts/generate` runs it.
"""

from __future__ import annotations

import json
import textwrap

import click

from prefold.cli import main as main_command
from prefold.spec.model import model_fields
from prefold.spec.server import ServerSpec

HEAD = """# Options of `prefold serve --config FILE`. Remove the # before an option to set it. The value is the default;
# a word in capitals stands for a value of your own. PREFOLD_SERVE_* variables override this file, such as
# PREFOLD_SERVE_MAX_BODY_BYTES for max-body-bytes, and the command line overrides both.
# `scripts/generate` writes this file.
"""
SECTIONS = {
    "model": "The model",
    "server": "The server",
    "machine": "How the machine runs the model",
    "text": "Generation and the KV cache",
    "media": "Images",
    "answers": "Stored answers",
}
# Groups of a model's options that share a section with another group, and options that no spec of a model declares.
_GROUPS = {"engine": "machine", "serve": "text", "plugin": "model", "adapter": "model"}


def server_config() -> str:
    """Return the text of deploy/prefold.toml."""
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    for option in main_command.commands["serve"].params:
        if isinstance(option, click.Option) and option.name not in ("config", "help"):
            sections[_section(str(option.name))].append(_entry(option))
    parts = [[f"# ---------- {title}", *sections[name]] for name, title in SECTIONS.items()]
    return "\n\n".join([HEAD.rstrip("\n"), *(text for part in parts for text in part)]) + "\n"


def _section(parameter: str) -> str:
    if parameter in ServerSpec.__dataclass_fields__:
        return "server"
    declared = model_fields().get(parameter)
    group = parameter if declared is None else declared.metadata["on"]
    return "media" if parameter.startswith("media_") else _GROUPS.get(group, group)


def _entry(option: click.Option) -> str:
    """Return an option as comments: its help, and a line of TOML with its default or a placeholder."""
    text = (option.help or "").replace("May be repeated.", "A list.")
    if isinstance(option.type, click.Choice):
        text += f" One of: {', '.join(option.type.choices)}."
    lines = textwrap.wrap(" ".join(text.split()), 116, break_on_hyphens=False, break_long_words=False)
    name = max((flag for flag in option.opts if flag.startswith("--")), key=len).removeprefix("--")
    return "\n".join([*(f"# {line}" for line in lines), f"#{name} = {_value(option)}"])


def _value(option: click.Option) -> str:
    default = option.default
    if option.is_flag:
        return "false"
    if option.multiple:
        return f'["{option.metavar}"]'
    if isinstance(default, int | float | str) and not isinstance(default, bool):
        return json.dumps(_with_unit(default) if option.metavar == "BYTES" and isinstance(default, int) else default)
    word = option.metavar or str(option.name).upper()
    return word if isinstance(option.type, click.IntRange | click.FloatRange) else f'"{word}"'


def _with_unit(value: int) -> str | int:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return value
