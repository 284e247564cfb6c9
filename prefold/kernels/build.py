"""Compiling the C++ sources into a shared library in the cache folder; standard library only."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..checkpoint import cache_folder

SOURCES = Path(__file__).parent / "src"
# gnu++17 (rather than c++17) and these flags let the compiler fuse multiply and add. The ABI notes are about
# vector arguments of functions that are all inlined.
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wno-psabi")
TIMEOUT_SECONDS = 300


class BuildError(Exception):
    """Says why the kernels cannot be compiled here, in one line."""


def find_compiler() -> str | None:
    """Returns the path of $CXX, g++, c++ or clang++, whichever is there first; None: there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def build(*, flags: Sequence[str] = FLAGS, again: bool = False) -> Path:
    """Returns the compiled library for these sources, flags and this CPU; it is compiled unless it is in the cache.

    `again` compiles even so. Safe with many processes at once: each compiles to a name of its own and
    renames, and the last one wins with the same content. Raises BuildError where it cannot be done.
    """
    try:
        folder = cache_folder() / "kernels"
    except RuntimeError as error:  # of a user without a home
        raise BuildError(f"there is no cache folder (set PREFOLD_CACHE to one): {error}") from error
    target = folder / f"kernels-{fingerprint(flags)}.so"
    if target.exists() and not again:
        return target
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found (looked for $CXX, g++, c++, clang++): install g++")
    line = "prefold: compiling the kernels, once on this machine (10 to 25 seconds); PREFOLD_KERNELS=0 goes without"
    print(line, file=sys.stderr, flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
            made = Path(work) / target.name
            compile_sources(compiler, flags, made)
            made.replace(target)
    except OSError as error:
        raise BuildError(
            f"cannot write to the cache folder {folder} (set PREFOLD_CACHE to another): {error}"
        ) from error
    return target


def compile_sources(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Runs a compiler process for each source, side by side, then one to link."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [target.with_name(f"{source.stem}.o") for source in sources]
    commands = [
        [compiler, *flags, "-fPIC", "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(run_compiler, commands))
    run_compiler([compiler, *flags, "-shared", *map(str, objects), "-o", str(target)])


def run_compiler(command: Sequence[str]) -> None:
    """Runs a command; raises BuildError with the first line of what it complains of."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_SECONDS} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{command[0]} failed: {first}")


def fingerprint(flags: Sequence[str]) -> str:
    """Returns a name that changes with the sources, the flags and the CPU: -march=native code may not run on
    another."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((*flags, *cpu())).encode())
    return digest.hexdigest()[:16]


def cpu() -> list[str]:
    """Returns what tells this CPU's instruction set from another's."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {line.split(":", 1)[0].strip(): line for line in lines if line.startswith(names)}
    return [platform.system(), platform.machine(), platform.processor(), *(values[name] for name in sorted(values))]
