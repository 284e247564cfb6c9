"""Compilation of the C++ sources into shared libraries: for this CPU, or for the variants of a wheel.

Standard library only: setup.py imports this file.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import NamedTuple

from ..spec import environment

HERE = Path(__file__).parent
SOURCES = HERE / "src"
PROBE = HERE / "probe.cpp"
# gnu++17 (rather than c++17) and these flags let the compiler fuse multiplications and additions. The ABI warnings
# concern vector arguments of functions that are always inlined.
COMMON = ("-std=gnu++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NATIVE = (*COMMON, "-march=native")
# Code for Windows is position-independent anyway, and its compilers reject the flag.
_ANYWHERE = () if platform.system() == "Windows" else ("-fPIC",)
_ZIG = ("-m", "ziglang", "c++")  # https://pypi.org/project/ziglang: Clang, its C++ library, and a linker
_ZIGS_NAMES = {"x86-64-v": "x86_64_v", "armv8.2-a": "generic+v8_2a", "armv8-a": "generic"}
TIMEOUT_SECONDS = 900  # time limit of one compiler
# The sources that take longest to compile, the slowest first, so that no compiler runs alone at the end.
LONGEST = ("attention", "few_rows", "blocks", "states", "experts")
# Flags of single sources, which override earlier flags: -O3 takes 2.2 times as long for attention, without any gain.
OWN_FLAGS = {"attention": ("-O2",)}


class BuildError(Exception):
    """The kernels cannot be compiled here. The message is one line."""


class Variant(NamedTuple):
    """An instruction set for which a wheel has a library."""

    name: str  # used by the library, PREFOLD_ISA and messages
    machines: tuple[str, ...]  # values of `platform.machine` for such CPUs
    march: tuple[str, ...]  # the compiler's flags for the instruction set
    features: tuple[int, ...] = ()  # features that the CPU and its system need: numbers of the bits of `probe.cpp`

    @property
    def flags(self) -> tuple[str, ...]:
        return (*COMMON, *self.march)

    @property
    def library(self) -> str:
        """The file name of the library in a wheel."""
        return f"kernels-{self.name}.so"


_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
# The best first. Each variant has code of its own in the sources. "amx" runs only on Linux, which must permit tiles.
VARIANTS = (
    Variant("amx", ("x86_64",), (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"), (0, 1, 2, 3)),
    Variant("avx512-bf16", _X86, (*_AVX512, "-mavx512bf16"), (0, 1, 2)),
    Variant("avx512", _X86, _AVX512, (0, 1)),
    Variant("avx2-vnni", _X86, ("-march=x86-64-v3", "-mavxvnni"), (0, 4)),
    Variant("avx2", _X86, ("-march=x86-64-v3",), (0,)),
    Variant("i8mm", _ARM, ("-march=armv8.2-a+dotprod+i8mm",), (5, 6)),
    Variant("dotprod", _ARM, ("-march=armv8.2-a+dotprod",), (5,)),
    Variant("neon", _ARM, ("-march=armv8-a",)),
)


def variants() -> list[Variant]:
    """Return the variants for this kind of machine, the best first."""
    return [variant for variant in VARIANTS if platform.machine() in variant.machines]


def runnable(bits: int) -> list[Variant]:
    """Return the variants that run on a CPU with these features, the best first.

    Args:
        bits: See `probe.cpp`.
    """
    return [variant for variant in variants() if all(bits >> feature & 1 for feature in variant.features)]


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler, or None if there is none.

    Tries $CXX, g++, c++, clang++ and the package ziglang, in this order; with PREFOLD_COMPILER=zig only ziglang. On
    Windows it tries only $CXX and ziglang: there GCC does not align vectors on the stack
    (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=54412), and Clang may lack a C++ library.

    Raise BuildError if $CXX cannot be parsed, or if PREFOLD_COMPILER has another value.
    """
    zig = (sys.executable, *_ZIG) if find_spec(_ZIG[1]) else None
    if wish := environment.compiler():
        if wish != "zig":
            raise BuildError(f"PREFOLD_COMPILER is {wish!r}: write zig, or name a compiler in CXX")
        return zig
    windows = platform.system() == "Windows"
    for command in (os.environ.get("CXX"), *(() if windows else ("g++", "c++", "clang++"))):
        if not command:
            continue
        if path := shutil.which(command):  # the path may have spaces
            return (path,)
        try:
            first, *others = (word.strip('"') for word in shlex.split(command, posix=not windows))
        except ValueError as error:
            raise BuildError(f"the compiler in $CXX cannot be read: {error}") from None
        if path := shutil.which(first):
            return path, *others
    return zig


def compiler_or_error() -> tuple[str, ...]:
    """Return the result of `find_compiler`. Raise BuildError if there is no compiler."""
    compiler = find_compiler()
    if compiler is None and environment.compiler():
        raise BuildError("PREFOLD_COMPILER is zig, and the package ziglang is missing: pip install ziglang")
    if compiler is None:
        raise BuildError("no C++ compiler found ($CXX, g++, c++, clang++): install g++, or the package ziglang")
    return compiler


def compile_sources(compiler: Sequence[str], flags: Sequence[str], target: Path, *, jobs: int) -> None:
    """Compile the kernels with these flags, at most `jobs` sources at once. Raise BuildError if that fails."""
    order = {f"{name}.cpp": number for number, name in enumerate(LONGEST)}
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (order.get(source.name, len(order)), source.name))
    _compile(compiler, flags, sources, target, jobs)


def compile_probe(compiler: Sequence[str], target: Path) -> None:
    """Compile `probe.cpp` into a library that runs on any CPU of this kind. Raise BuildError if that fails."""
    any_cpu = ("-mcpu=baseline",) if _ZIG[1] in compiler else ()  # zig compiles for this CPU unless another is named
    _compile(compiler, ("-std=gnu++17", "-O1", *any_cpu), [PROBE], target, 1)


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], target: Path, jobs: int) -> None:
    """Run a compiler for each source, in their order, then link.

    The library appears under its name when it is complete, even if other processes compile it too. Temporary files
    remain only if the process is killed. A later compilation removes them (`_remove_stale`).
    """
    if _ZIG[1] in compiler:
        for name, its_name in _ZIGS_NAMES.items():
            flags = [flag.replace(name, its_name) for flag in flags]
    with _unwound_by_sigterm(), TemporaryDirectory(prefix="build-", dir=target.parent) as work:
        _remove_stale(Path(work))
        objects = [str(Path(work, source.stem + ".o")) for source in sources]
        commands = [
            [*compiler, *flags, *OWN_FLAGS.get(source.stem, ()), *_ANYWHERE, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        compilers = _Compilers()
        with ThreadPoolExecutor(jobs) as pool:
            done = [pool.submit(compilers.run, command) for command in commands]
            try:
                for one in as_completed(done):
                    one.result()
            except BaseException:
                compilers.stop()
                raise
        linked = Path(work, target.name)
        run_compiler([*compiler, *flags, "-shared", *objects, "-o", str(linked)])
        linked.replace(target)


def _remove_stale(work: Path) -> None:
    """Remove the folders beside `work` that killed compilations have left.

    A running compilation changes its folder at least once in TIMEOUT_SECONDS. The clock of the file system is used,
    because several machines may share the folder.
    """
    now = work.stat().st_mtime
    for old in work.parent.glob("build-*"):
        with suppress(OSError):
            if now - old.stat().st_mtime > 4 * TIMEOUT_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with an exception, so that temporary folders are removed.

    Does nothing outside of the main thread, or if the program has set a handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Terminated(BaseException):
    """Raised by SIGTERM."""


def compile_variants(folder: Path, *, jobs: int) -> None:
    """Compile the probe, and the library of each variant for this kind of machine.

    At most `jobs` sources are compiled at once. Raise BuildError if that fails.
    """
    compiler = compiler_or_error()
    folder.mkdir(parents=True, exist_ok=True)
    compile_probe(compiler, folder / "probe.so")
    for variant in variants():
        compile_sources(compiler, variant.flags, folder / variant.library, jobs=jobs)


def run_compiler(command: Sequence[str]) -> None:
    """Run a command. If it fails, raise BuildError with the first line of its errors."""
    _Compilers().run(command)


class _Compilers:
    """Compilers that run in parallel, with one waiting thread each."""

    def __init__(self) -> None:
        self._lock, self._is_stopped = threading.Lock(), False
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: Sequence[str]) -> None:
        """Run a command, unless `stop` was called. If it fails, raise BuildError with the first line of its errors."""
        name = _ZIG[1] if _ZIG[1] in command else command[0]
        with TemporaryFile("w+", errors="replace") as said:
            with self._lock:
                if self._is_stopped:
                    return
                null = subprocess.DEVNULL
                # A file, because a pipe stays open until the last child of the command ends.
                process = subprocess.Popen(command, stdin=null, stdout=null, stderr=said)
                self._running.add(process)
            try:
                process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise BuildError(f"{name} took more than {TIMEOUT_SECONDS} seconds") from None
            finally:
                with self._lock:
                    self._running.discard(process)
                if process.poll() is None:  # after any exception
                    process.kill()
                    process.wait()
            if process.returncode:
                said.seek(0)
                lines = said.read().strip().splitlines()
                first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
                raise BuildError(f"{name} failed: {first}")

    def stop(self) -> None:
        """Terminate the running compilers, and start no others."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.terminate()
