"""Libraries that are compiled on this machine, once, and kept in the cache folder; standard library only."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..spec.container import usable_cores
from ..spec.environment import cache_folder
from .compile import NATIVE, PROBE, SOURCES, BuildError, compile_probe, compile_sources, compiler_or_error


def build(*, flags: Sequence[str] = NATIVE, again: bool = False) -> Path:
    """Returns the compiled library for these sources, flags and this CPU; it is compiled unless it is in the cache.

    `again` compiles even so. Raises BuildError where it cannot be done.
    """

    def make(compiler: Sequence[str], path: Path) -> None:
        line = "prefold: compiling the kernels, once on this machine (up to a minute); PREFOLD_KERNELS=0 goes without"
        print(line, file=sys.stderr, flush=True)
        compile_sources(compiler, flags, path, jobs=usable_cores())

    return _kept(_name(flags), make, again)


def is_built() -> bool:
    """Returns whether `build` has its library in the cache, and need not compile."""
    try:
        return (cache_folder() / "kernels" / _name(NATIVE)).exists()
    except (OSError, RuntimeError):
        return False


def _name(flags: Sequence[str]) -> str:
    return f"kernels-{fingerprint(flags)}.so"


def build_probe() -> Path:
    """Returns the compiled probe (`probe.cpp`), which is compiled unless it is in the cache. Raises BuildError."""
    digest = hashlib.sha256(PROBE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    return _kept(f"probe-{digest}.so", compile_probe, False)


def _kept(name: str, make: Callable[[Sequence[str], Path], None], again: bool) -> Path:
    """Returns the library of a name in the cache folder, which `make` compiles where it is missing, and with `again`.

    Many processes may do it at once: each compiles under a name of its own, and renames what it made.
    """
    try:
        folder = cache_folder() / "kernels"
    except RuntimeError as error:  # of a user without a home
        raise BuildError(f"there is no cache folder (set PREFOLD_CACHE to one): {error}") from error
    target = folder / name
    if target.exists() and not again:
        return target
    compiler = compiler_or_error()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make(compiler, target)
    except OSError as error:
        if target.exists() and not again:  # Windows keeps a library that another process has made and loaded meanwhile
            return target
        raise BuildError(
            f"cannot write to the cache folder {folder} (set PREFOLD_CACHE to another): {error}"
        ) from error
    return target


def fingerprint(flags: Sequence[str], sources: Path = SOURCES) -> str:
    """Returns a name that changes with the sources, the flags and the CPU: -march=native code may not run on
    another."""
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
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
