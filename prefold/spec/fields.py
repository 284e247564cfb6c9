"""How the fields of specs are declared, and how their values are checked.

The metadata of a field hold its help text, its allowed values, and the names under which it can be given; see `option`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from textwrap import fill
from typing import Any, Literal, get_args

from ..errors import InputError

HelpGroup = Literal[
    "Server", "Input", "Prompt", "Task", "Sampling", "Output", "Model", "Performance", "Replicas", "Limits",
    "Calibration", "Images", "Looped models", "Advanced",
]  # fmt: skip
HELP_GROUPS: tuple[HelpGroup, ...] = get_args(HelpGroup)  # in the order of --help and of the reference pages


def option(
    default: Any,
    doc: str,
    *cli: str | None,
    details: str = "",
    group: HelpGroup = "Advanced",
    common: bool = False,
    one_of: tuple[Any, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: bool = False,
    journal: bool | None = None,
    on: str | None = None,
    http: str | None = "",
    sent: Literal["openai", "vllm", "set", "own"] | None = None,
    draws: Literal["filter", "penalty"] | None = None,
    metavar: str | None = None,
    flags: str = "",
) -> Any:
    """Return a field of a spec.

    Args:
        default: The default value.
        doc: The help text, one sentence that fits one line. A default that is not a value ends it in words, as in
            "... (default: from the checkpoint)."; a default that is a value is added by the pages that show it.
        cli: The command-line parameters that set the option (default: one parameter with the field's name). None: the
            command line has no such parameter.
        details: Further sentences for the reference pages and for Python's help.
        group: The group of the option in --help and on the reference page.
        common: Whether --help shows the option; --help-all shows every option.
        one_of: The allowed values; empty: any value.
        least: The lower bound of a number.
        most: The upper bound of a number.
        above: Whether `least` itself is forbidden.
        journal: Whether a job with another value is another job (default: yes for task options, no for model options).
        on: For model options: the commands that have the option, as a group of `cli.options`. None: Python only.
        http: The HTTP parameters that set the option, separated by blanks. "": one parameter with the field's name.
            None: requests cannot set the option.
        sent: How a request to another server sets the option. "openai": always sent, as a parameter of OpenAI's API,
            because a server may take a missing parameter from the checkpoint's files. "vllm": always sent to servers
            that know it; most servers do, although OpenAI's API lacks it. "set": sent if it differs from the default.
            "own": each body writes it in its own way. None: cannot be sent, so a request that sets it is refused.
        draws: The sampler column that the option fills; the sampler has one column per filter and per penalty.
        metavar: The placeholder of the value in --help (default: from the type).
        flags: The command-line flags, separated by blanks (default: made from the parameter's name).
    """
    metadata = dict(locals())
    del metadata["default"]
    metadata["journal"] = on is None if journal is None else journal
    return field(default=default, metadata=metadata)


def explained(option: Field[Any]) -> str:
    """Return the help text of an option, with its details."""
    return f"{option.metadata['doc']} {option.metadata['details']}".rstrip()


def with_notes(doc: str, *notes: str) -> str:
    """Return a help text with notes in parentheses before its last full stop: "Port to listen on (default: 8000)."

    Notes join the parentheses that already end the text. A text without notes is returned unchanged.
    """
    text, joined = doc.removesuffix("."), "; ".join(filter(None, notes))
    if not joined:
        return doc
    return f"{text[:-1]}; {joined})." if text.endswith(")") else f"{text} ({joined})."


class SpecError(InputError):
    """Options that exclude each other, or that a command does not have. The command line exits with status 2."""


def parameter_of(option: Field[Any]) -> str:
    """Return the first command-line parameter of an option."""
    return (option.metadata["cli"] or (option.name,))[0]


def flags_of(option: Field[Any], parameter: str) -> tuple[str, ...]:
    """Return the command-line flags of an option. A flag that is not off by default also has a --no-... form."""
    if option.metadata["flags"]:
        return tuple(option.metadata["flags"].split())
    flag = parameter.replace("_", "-")
    two = kind_of(option) is bool and option.default is not False
    return (f"--{flag}/--no-{flag}" if two else f"--{flag}",)


def kind_of(option: Field[Any]) -> type | None:
    """Return bool, int, float or str if this is the type of the option's values (None aside); else return None."""
    simple = re.fullmatch(r"(bool|int|float|str)( \| None)?", str(option.type))
    return {"bool": bool, "int": int, "float": float, "str": str}[simple[1]] if simple else None


def check_values(options: object, declared: Iterable[Field[Any]]) -> None:
    """Check the values of these options against their declarations, and convert them. Raise InputError."""
    for entry in declared:
        value, kind = getattr(options, entry.name), kind_of(entry)
        allowed = entry.metadata["one_of"]
        if allowed and not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise wrong_value(entry.name, value, f"use one of {', '.join(repr(choice) for choice in allowed)}")
        if allowed or kind is None or (value is None and entry.default is None):
            continue
        limits = {name: entry.metadata[name] for name in ("least", "most", "above")}
        object.__setattr__(options, entry.name, checked(kind, value, entry.name, **limits, quoted=False))


def wrong_value(name: str, value: object, remedy: str, code: str = "invalid_input") -> InputError:
    """Return the error for an option with a forbidden value."""
    return InputError(f"{name} is {value!r:.80}", field=name, remedy=remedy, code=code)


_WORDS: dict[type, str] = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}


def checked(
    kind: type,
    value: Any,
    field: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: bool = False,
    quoted: bool = True,
) -> Any:
    """Return a value converted to `kind`, which is bool, str, int or float.

    An int may come as 5.0, because tables have such values. NumPy numbers are accepted.

    Args:
        above: Whether `least` itself is forbidden.
        quoted: Whether the error message quotes the field; `InputError.renamed` can then replace it.

    Raises:
        InputError: The value has another type or is out of bounds.
    """
    # The usual case: nothing to convert and no bounds to check.
    if type(value) is kind and kind is not float and least is None and most is None:
        return value
    expected = "give " + _WORDS[kind]
    if least is not None:
        expected += f", more than {least}" if above else f", {least} or more"
    expected += "" if most is None else f", at most {most}"
    name, is_bool = repr(field) if quoted else field, type(value).__name__ in ("bool", "bool_")  # np.bool_ too
    if kind is str or kind is bool:
        fits = isinstance(value, str) if kind is str else is_bool
    else:
        fits = isinstance(value, Real) and not is_bool and (kind is float or value == value // 1)
    if not fits:
        raise InputError(f"{name} is {value!r:.200}", field=field, remedy=expected, code="wrong_type")
    value = value if kind is str else kind(value)  # a text may be of a subclass of str
    # A NaN fails every comparison, so it is out of bounds.
    low = least is None or (value > least if above else value >= least)
    if not low or not (most is None or value <= most) or (kind is float and not isfinite(value)):
        raise InputError(f"{name} is {value!r:.200}", field=field, remedy=expected, code="out_of_range")
    return value


def check_options(
    owner: str, names: Iterable[str], valid: Sequence[str], wholes: Mapping[str, Field[Any]] | None = None
) -> None:
    """Raise InputError for an unknown option; the message suggests the nearest known name.

    Args:
        owner: The task or class, for the message.
        names: The names that were given.
        valid: The known names.
        wholes: {command-line parameter: the option that it is a part of}.
    """
    for name in names:
        if name not in valid:
            whole = (wholes or {}).get(name)
            hint = f"use {whole.name} ({whole.metadata['doc'][:-1]}); " if whole else near(name, valid)
            remedy = f"{hint}it has: {', '.join(valid)}"
            raise InputError(f"{owner} has no option {name!r}", field=name, remedy=remedy, code="unknown_option")


def near(name: str, candidates: Iterable[str], then: str = " ") -> str:
    """Return "did you mean NAME?" plus `then`, with the candidate nearest to `name`; "" if none is near."""
    return "".join(f"did you mean {close}?{then}" for close in get_close_matches(name, [*candidates], n=1))


def described(*kinds: type) -> str:
    """Return the options of dataclasses with their help texts, as the body of a docstring block."""
    lines = [f"    {entry.name:<18} {explained(entry)}{_default(entry)}" for kind in kinds for entry in fields(kind)]
    return "\n".join(fill(line, 116, subsequent_indent=" " * 23) for line in lines)


def _default(option: Field[object]) -> str:
    """Return a sentence with the default, unless the help text contains it or the default is no plain value."""
    is_plain = isinstance(option.default, (bool, int, float, str)) and option.default != ""
    return f" Default: {option.default!r}." if is_plain and "default" not in option.metadata["doc"] else ""
