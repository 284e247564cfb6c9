"""The options of reuse at other positions, in Python and of `prefold verify`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import InputError


@dataclass(frozen=True, slots=True)
class ShiftedReuse:
    """The choice of chunks of text that are reused at positions other than their original ones.

    Raise InputError for values out of range.

    Attributes:
        min_tokens: minimum tokens of a chunk; a chunk always has more than `recompute`
        recompute: number of first rows of each chunk that are recomputed; 0: none
        max_matches: maximum chunks of a prompt
        min_share: chunks are reused only if they cover at least this share (0 to 1) of the prompt after its exact
            prefix
        window: chunks are searched among this many tokens after the exact prefix
        trial: only for measuring: no bound of `prefold verify` has to be met
    """

    min_tokens: int = 64
    recompute: int = 64
    max_matches: int = 64
    min_share: float = 0.25
    window: int = 8192
    trial: bool = False

    def __post_init__(self) -> None:
        for name, least in (("min_tokens", 2), ("recompute", 0), ("max_matches", 1), ("window", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} is {value!r}", field=name, remedy=f"give a whole number, {least} or more")
        if not 0 <= self.min_share <= 1:
            raise InputError(f"min_share is {self.min_share}", field="min_share", remedy="give 0 to 1")


# {option: (setting of ShiftedReuse, its minimum (None: a share from 0 to 1), help)}
SETTINGS: dict[str, tuple[str, int | None, str]] = {
    "cache_reuse": ("min_tokens", 16, "With --reuse: minimum tokens of a chunk."),
    "cache_reuse_recompute": ("recompute", 0, "First rows of each chunk that are recomputed."),
    "cache_reuse_max_matches": ("max_matches", 1, "Maximum chunks of a prompt."),
    "cache_reuse_min_overlap": (
        "min_share", None, "Minimum share of a prompt, after its exact prefix, that chunks must cover."
    ),
    "cache_reuse_window": ("window", 2, "Tokens after the exact prefix that are searched for chunks."),
}  # fmt: skip
_DEFAULTS = {field.name: field.default for field in fields(ShiftedReuse)}


def command_options() -> tuple[object, ...]:
    """Return the options for the command line. Imports click."""
    import click

    def option(name: str) -> object:
        setting, least, doc = SETTINGS[name]
        kind = click.FloatRange(0, 1) if least is None else click.IntRange(least)
        metavar, flag = "SHARE" if least is None else "N", f"--{name.replace('_', '-')}"
        return click.option(flag, type=kind, metavar=metavar, help=f"{doc}  [default: {_DEFAULTS[setting]}]")

    return (
        *map(option, SETTINGS),
        click.option("--max-changed", type=click.FloatRange(0, 1), metavar="SHARE",
                     help="With --reuse: share of prompts whose first choice may change.  [default: 0.01]"),
        click.option("-o", "--output", metavar="FILE",
                     help="With --reuse: file to write, for --cache-reuse-shifted."),
    )  # fmt: skip


# Names of the parameters of `command_options`.
names = (*SETTINGS, "max_changed", "output")
