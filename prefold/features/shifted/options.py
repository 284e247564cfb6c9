"""The options of reuse at other positions, in Python and of `prefold verify`. It imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import InputError


@dataclass(frozen=True, slots=True)
class ShiftedReuse:
    """A ShiftedReuse is the choice of the chunks of text that are reused at other positions than they were computed at.

    min_tokens   the fewest tokens of a chunk; it has more than `recompute` in any case
    recompute    how many of the first rows of each chunk are computed anew; 0: none
    max_matches  the most chunks of a prompt
    min_share    the chunks of a prompt are reused where they are at least this part (0 to 1) of its tokens that no
                 exact prefix holds
    window       chunks are looked for among so many tokens behind the exact prefix
    trial        whether this is for measuring, so that no bound of `prefold verify` need have been met

    Raises InputError for values out of range.
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


# {option: (setting of ShiftedReuse, the least it may be (None: it is a share), what it is)}
SETTINGS: dict[str, tuple[str, int | None, str]] = {
    "cache_reuse": ("min_tokens", 16, "With --reuse: the fewest tokens of a chunk."),
    "cache_reuse_recompute": ("recompute", 0, "The first rows of each chunk that are computed anew."),
    "cache_reuse_max_matches": ("max_matches", 1, "The most chunks of a prompt."),
    "cache_reuse_min_overlap": (
        "min_share", None, "The least part of a prompt, behind its exact prefix, that chunks must cover."
    ),
    "cache_reuse_window": ("window", 2, "Tokens behind the exact prefix among which chunks are sought."),
}  # fmt: skip
_DEFAULTS = {field.name: field.default for field in fields(ShiftedReuse)}


def command_options() -> tuple[object, ...]:
    """Return its options of the command line, which click is imported for."""
    import click

    def option(name: str) -> object:
        setting, least, doc = SETTINGS[name]
        kind = click.FloatRange(0, 1) if least is None else click.IntRange(least)
        metavar, flag = "SHARE" if least is None else "N", f"--{name.replace('_', '-')}"
        return click.option(flag, type=kind, metavar=metavar, help=f"{doc}  [default: {_DEFAULTS[setting]}]")

    return (
        *map(option, SETTINGS),
        click.option("--max-changed", type=click.FloatRange(0, 1), metavar="SHARE",
                     help="With --reuse: the part of first choices that may change.  [default: 0.01]"),
        click.option("-o", "--output", metavar="FILE",
                     help="With --reuse: the file that is written, which --cache-reuse-shifted takes."),
    )  # fmt: skip


# The parameters that have them.
names = (*SETTINGS, "max_changed", "output")
