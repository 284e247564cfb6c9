"""Defines the kinds of values that options have beside those of click: each reads a text, or says how to write it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, ClassVar

import click


class Bytes(click.ParamType):
    """Reads a number of bytes: 1000000, 512MiB, 4GiB, 2GB."""

    name = "bytes"
    units: ClassVar[str] = "kmgt"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(value).strip().lower())
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is not a number of bytes; write 512MiB, or 4GiB", param, ctx)
        number, unit, binary = match.groups()
        return int(float(number) * (1024 if binary else 1000) ** (1 + self.units.index(unit) if unit else 0))


class Threshold(click.ParamType):
    """Reads a share above 0 and at most 1, or auto."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        with suppress(ValueError):
            if value == "auto" or 0 < float(value) <= 1:
                return value if value == "auto" else float(value)
        self.fail(f"{value!r} is no share; write auto, or a number above 0 and at most 1, such as 0.85", param, ctx)


class Device(click.ParamType):
    """Reads a device, named as torch does: auto, cpu, cuda, cuda:N, the kinds that prefold has kernels for.

    Whether the machine has it is not checked here, as that takes torch.
    """

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)) is None:
            self.fail(f"{value!r} is not a device; write auto, cpu, cuda, or cuda:1 for the second GPU", param, ctx)
        return str(value)


class Blocks(click.ParamType):
    """Reads the blocks of a route: 0,1,0."""

    name = "blocks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, (list, tuple)):
            return tuple(value)
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", str(value).strip()) is None:
            self.fail(f"{value!r} is not a route; write the numbers of blocks: 0,1,0", param, ctx)
        return tuple(int(block) for block in str(value).split(","))
