"""Runs in place of `prefold.text.template_process` in the process of a test: its sandbox has holes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from prefold.text import sandbox, template_process


def main(argv, source, sink):
    holes = sandbox._environment().globals
    holes["spin"] = lambda: all(itertools.repeat(1))  # compiled code, which Python cannot interrupt
    holes["fill"] = lambda: len(bytearray(1 << 32))
    holes["die"] = lambda: os._exit(3)
    holes["open"] = lambda path: Path(path).write_text("x")
    template_process.main(argv, source, sink)
