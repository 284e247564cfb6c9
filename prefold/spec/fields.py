"""How the fields of specs are declared, and how their values are checked.

The metadata of a field say what it means (`doc`), which values it may have, and under which names it can be given; see
`option`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from textwrap import fill
from typing import Any, Literal

from ..errors import InputError


def option(
    default: Any,
    doc: str,
    *cli: str | None,
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

    cli          the parameters of the command line that it is made of: by default one of the field's own name; None:
                 none
    one_of       the allowed values; None: all
    least, most  the bounds of a number
    above        whether the number has to be above `least`, which itself is not allowed
    journal      whether a job with another value is another job: by default of a task's options, not of a model's
    on           of a model's options: the commands of the command line that have it, by the group in `cli.options`;
                 None: it is set in Python only
    http         the parameters of an HTTP request that set it, separated by blanks; "": the parameter with the field's
                 own name; None: none
    sent         how a request to another server for text sets it. "openai": it is a parameter of OpenAI's API,
                 and always sent, as a server may take what a body leaves out from its checkpoint's files; "vllm": it is
                 none of OpenAI's, but most servers know it, so it is always sent to those that do; "set": it is sent
                 where it is not the default; "own": bodies have a form of their own for it. None: no request
                 to another server can set it, so that one which should is refused
    draws        what it is to the sampler, which gets one column of numbers for each filter and each penalty
    metavar      what the help of the command line writes in place of a value; None: as its type says
    flags        the flags of the command line, separated by blanks; "": made from the parameter's name
    """
    metadata = dict(locals())
    del metadata["default"]
    metadata["journal"] = on is None if journal is None else journal
    return field(default=default, metadata=metadata)


class SpecError(InputError):
    """Options that exclude each other, or that a command does not take. The command line exits with status 2."""


def parameter_of(option: Field[Any]) -> str:
    """Return the parameter of the command line of an option that has one."""
    return (option.metadata["cli"] or (option.name,))[0]


def flags_of(option: Field[Any], parameter: str) -> tuple[str, ...]:
    """Return the flags of an option of the command line. A flag that is on by default has a form that turns it off."""
    if option.metadata["flags"]:
        return tuple(option.metadata["flags"].split())
    flag = parameter.replace("_", "-")
    two = kind_of(option) is bool and option.default is not False
    return (f"--{flag}/--no-{flag}" if two else f"--{flag}",)


def kind_of(option: Field[Any]) -> type | None:
    """Returns the type of an option's values, besides None: bool, int, float or str; None for any other type."""
    simple = re.fullmatch(r"(bool|int|float|str)( \| None)?", str(option.type))
    return {"bool": bool, "int": int, "float": float, "str": str}[simple[1]] if simple else None


def check_values(options: object, declared: Iterable[Field[Any]]) -> None:
    """Raises InputError for a value of one of these options that its declaration does not allow."""
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
    """Returns the error of an option with a value that it may not have."""
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
    """Returns a value as a bool, str, int or float, `kind`. Raises InputError for a value of another type, or out of
    bounds.

    A whole number may come as 5.0, as out of a table, and numbers may be NumPy's. above: `least` itself is not allowed.
    quoted: whether the message quotes the field, which may then be renamed.
    """
    # Nearly all values are of this kind, and within no bounds or these.
    if type(value) is kind and kind is not float and least is None and most is None:
        return value
    expected = "give " + _WORDS[kind]
    if least is not None:
        expected += f", more than {least}" if above else f", {least} or more"
    expected += "" if most is None else f", at most {most}"
    name, is_bool = repr(field) if quoted else field, type(value).__name__ in ("bool", "bool_")  # NumPy's too
    if kind is str or kind is bool:
        fits = isinstance(value, str) if kind is str else is_bool
    else:
        fits = isinstance(value, Real) and not is_bool and (kind is float or value == value // 1)
    if not fits:
        raise InputError(f"{name} is {value!r:.200}", field=field, remedy=expected, code="wrong_type")
    value = value if kind is str else kind(value)  # a text may be more than a str
    # What is no number is within no bounds.
    low = least is None or (value > least if above else value >= least)
    if not low or not (most is None or value <= most) or (kind is float and not isfinite(value)):
        raise InputError(f"{name} is {value!r:.200}", field=field, remedy=expected, code="out_of_range")
    return value


def check_options(
    owner: str, names: Iterable[str], valid: Sequence[str], wholes: Mapping[str, Field[Any]] | None = None
) -> None:
    """Raise InputError for an unknown option, naming the nearest known name.

    owner   the task or class, for the message
    wholes  {parameter of the command line: the option that it is a part of}
    """
    for name in names:
        if name not in valid:
            whole = (wholes or {}).get(name)
            hint = f"use {whole.name} ({whole.metadata['doc'][:-1]}); " if whole else near(name, valid)
            remedy = f"{hint}it has: {', '.join(valid)}"
            raise InputError(f"{owner} has no option {name!r}", field=name, remedy=remedy, code="unknown_option")


def near(name: str, candidates: Iterable[str], then: str = " ") -> str:
    """Returns "did you mean NAME?" and `then` for a name that is not known: the nearest known one; "" for none."""
    return "".join(f"did you mean {close}?{then}" for close in get_close_matches(name, [*candidates], n=1))


def described(*kinds: type) -> str:
    """Returns the options of dataclasses with what they mean, as lines of a docstring."""
    lines = [f"    {entry.name:<18} {entry.metadata['doc']}" for kind in kinds for entry in fields(kind)]
    return "\n".join(fill(line, 116, subsequent_indent=" " * 23) for line in lines)
