"""Runs the command line in forks of a process that has imported torch and prefold, which takes most of a small job's
time. Each fork is otherwise a process as any other: it runs what `python -m prefold` runs."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "prefold.llm"])


def begin(arguments: list[str], folder: Path, stdin: str = os.devnull) -> BaseProcess:
    """Returns a process that runs prefold, or a script of Python, in a folder; `stdout` and `stderr` there are what it
    writes."""
    process = _context.Process(target=_run, args=(arguments, str(folder), stdin))
    process.start()
    return process


def _run(arguments: list[str], folder: str, stdin: str) -> None:
    os.chdir(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, path, mode in ((0, stdin, os.O_RDONLY), (1, "stdout", flags), (2, "stderr", flags)):
        os.dup2(os.open(path, mode, 0o644), number)
    sys.stdin = os.fdopen(0, encoding="utf-8")
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv = ["prefold", *arguments]
        runpy.run_module("prefold", run_name="__main__", alter_sys=True)
