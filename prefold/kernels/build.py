"""Libraries that are compiled on this machine, once: during installation, or on first use into the cache folder.

Standard library only: setup.py imports this file.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..spec.container import usable_cores
from ..spec.environment import cache_folder, kernels, makes_wheel
from .compile import (
    NATIVE,
    OWN_FLAGS,
    PROBE,
    SOURCES,
    BuildError,
    compile_probe,
    compile_sources,
    compile_variants,
    compiler_or_error,
)


def build(*, flags: Sequence[str] = NATIVE, again: bool = False) -> Path:
    """Return the library for these sources, flags and this CPU, from the cache or compiled now.

    Raise BuildError if it cannot be compiled.

    Args:
        again: compile even if it is in the cache
    """

    def make(compiler: Sequence[str], path: Path) -> None:
        line = "prefold: compiling the kernels, once on this machine (up to a minute); PREFOLD_KERNELS=0 skips this"
        print(line, file=sys.stderr, flush=True)
        compile_sources(compiler, flags, path, jobs=usable_cores())

    return _kept(library_name(flags), make, again)


def kept(flags: Sequence[str] = NATIVE) -> Path | None:
    """Return the library if `build` would find it in the cache, else None."""
    try:
        path = cache_folder() / "kernels" / library_name(flags)
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def library_name(flags: Sequence[str] = NATIVE) -> str:
    """Return the file name of the library for these sources, flags and this CPU."""
    return f"kernels-{fingerprint(flags)}.so"


def install(folder: Path | None) -> str:
    """Compile the libraries of an installation. Return a line about the result.

    Compiles the library for this machine, or with PREFOLD_WHEEL=1 the libraries of a wheel. PREFOLD_KERNELS=0 compiles
    nothing. If this machine cannot compile, the installation continues without kernels. Raise BuildError only with
    PREFOLD_WHEEL=1.

    Args:
        folder: for the libraries; other files in it are deleted. None for an editable installation: its sources may
            change, so the library goes to the cache folder, where `build` looks for it.
    """
    name = library_name()
    stays = "" if makes_wheel() or kernels() == "0" else name
    if folder is not None and folder.exists():  # setuptools reuses its folder for the next installation
        for old in folder.iterdir():
            if old.name != stays:
                old.unlink()
    if kernels() == "0":
        return "PREFOLD_KERNELS=0: the kernels are not compiled"
    if makes_wheel() and folder is not None:
        compile_variants(folder, jobs=usable_cores())
        return "the kernels are compiled for every CPU of this kind"
    try:
        if folder is None:
            build()
            return "the kernels are compiled for this machine, in the cache folder"
        target = folder / name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            if (library := kept()) is not None:
                shutil.copyfile(library, target)
            else:
                compile_sources(compiler_or_error(), NATIVE, target, jobs=usable_cores())
    except (BuildError, OSError) as error:
        return (
            f"the kernels are NOT compiled; without them prefold needs PyTorch, and is several times slower: {error}; "
            "then install prefold again, or let the first run compile them"
        )
    return "the kernels are compiled for this machine"


def build_probe() -> Path:
    """Return the library of `probe.cpp`, from the cache or compiled now. Raise BuildError if it cannot be compiled."""
    digest = hashlib.sha256(PROBE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    return _kept(f"probe-{digest}.so", compile_probe, False)


def _kept(name: str, make: Callable[[Sequence[str], Path], None], again: bool) -> Path:
    """Return a library in the cache folder. If it is missing, or with `again`, `make` compiles it.

    Processes may do this at the same time. Each compiles to a temporary name and renames the result.
    """
    try:
        folder = cache_folder() / "kernels"
    except RuntimeError as error:  # the user has no home
        raise BuildError(f"there is no cache folder (set PREFOLD_CACHE to one): {error}") from error
    target = folder / name
    if target.exists() and not again:
        return target
    compiler = compiler_or_error()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make(compiler, target)
    except OSError as error:
        if target.exists() and not again:  # another process has compiled and loaded it, and Windows cannot replace it
            return target
        raise BuildError(
            f"cannot write to the cache folder {folder} (set PREFOLD_CACHE to another): {error}"
        ) from error
    return target


def fingerprint(flags: Sequence[str], sources: Path = SOURCES, own: Mapping[str, tuple[str, ...]] = OWN_FLAGS) -> str:
    """Return a name that depends on the sources, the flags and the CPU: native code may not run on another CPU.

    Args:
        own: additional flags of single sources
    """
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((*flags, repr(own), *cpu())).encode())
    return digest.hexdigest()[:16]


def cpu() -> list[str]:
    """Return texts that identify this CPU's instruction set."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {line.split(":", 1)[0].strip(): line for line in lines if line.startswith(names)}
    # `platform.processor` runs a program, which may be missing from PATH, so it is the last resort.
    known = [values[name] for name in sorted(values)] or [platform.processor()]
    return [platform.system(), platform.machine(), *known]
