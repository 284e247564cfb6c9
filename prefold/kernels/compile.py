"""Compiling the C++ sources into shared libraries: for this CPU, or for the variants of a wheel. Standard library only:
setup.py uses it."""

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
# gnu++17 (rather than c++17) and these flags let the compiler fuse multiply and add. The ABI notes are about
# vector arguments of functions that are all inlined.
COMMON = ("-std=gnu++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NATIVE = (*COMMON, "-march=native")
# Code on Windows can lie anywhere as it is, and compilers for it take no such flag.
_ANYWHERE = () if platform.system() == "Windows" else ("-fPIC",)
_ZIG = ("-m", "ziglang", "c++")  # https://pypi.org/project/ziglang: Clang, its C++ library, and a linker
_ZIGS_NAMES = {"x86-64-v": "x86_64_v", "armv8.2-a": "generic+v8_2a", "armv8-a": "generic"}
TIMEOUT_SECONDS = 900  # of one compiler
# The sources that take longest to compile, the longest first: no compiler is to run alone at the end.
LONGEST = ("attention", "few_rows", "blocks", "states", "experts")
# Flags of single sources, in place of earlier ones: -O3 compiles attention 2.2 times as long, and makes it no faster.
OWN_FLAGS = {"attention": ("-O2",)}


class BuildError(Exception):
    """Says why the kernels cannot be compiled here, in one line."""


class Variant(NamedTuple):
    """A Variant is what a library of a wheel is compiled for.

    name      of the library, of PREFOLD_ISA, and in messages
    machines  the names that `platform.machine` has for such CPUs
    march     the instruction set, as compilers are told of it
    features  what a CPU and its system must offer, by the numbers of the bits that `probe.cpp` returns
    """

    name: str
    machines: tuple[str, ...]
    march: tuple[str, ...]
    features: tuple[int, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the compiler's flags."""
        return (*COMMON, *self.march)

    @property
    def library(self) -> str:
        """Returns the name of the library's file in a wheel."""
        return f"kernels-{self.name}.so"


_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
# The best first. What differs between two of them is in the sources: a variant that has no code of its own is not here.
# The code of tiles asks Linux for them.
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
    """Returns the variants for machines of this kind, the best first."""
    return [variant for variant in VARIANTS if platform.machine() in variant.machines]


def runnable(bits: int) -> list[Variant]:
    """Returns the variants that run on a CPU with these features, the best first; bits: as `probe.cpp` returns them."""
    return [variant for variant in variants() if all(bits >> feature & 1 for feature in variant.features)]


def find_compiler() -> tuple[str, ...] | None:
    """Returns the command of the compiler: $CXX, g++, c++, clang++ or that of the package ziglang, whichever is there
    first; with PREFOLD_COMPILER=zig, that of ziglang; None: there is none.

    On Windows $CXX and ziglang alone are asked: there GCC puts vectors where the stack is not aligned for them
    (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=54412), and Clang may lack a C++ library.
    Raises BuildError for a $CXX that cannot be read, and for another PREFOLD_COMPILER.
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
        if path := shutil.which(command):  # which may have spaces in it
            return (path,)
        try:
            first, *others = (word.strip('"') for word in shlex.split(command, posix=not windows))
        except ValueError as error:
            raise BuildError(f"the compiler in $CXX cannot be read: {error}") from None
        if path := shutil.which(first):
            return path, *others
    return zig


def compiler_or_error() -> tuple[str, ...]:
    """Returns what `find_compiler` does. Raises BuildError where there is no compiler."""
    compiler = find_compiler()
    if compiler is None and environment.compiler():
        raise BuildError("PREFOLD_COMPILER is zig, and the package ziglang is missing: pip install ziglang")
    if compiler is None:
        raise BuildError("no C++ compiler found ($CXX, g++, c++, clang++): install g++, or the package ziglang")
    return compiler


def compile_sources(compiler: Sequence[str], flags: Sequence[str], target: Path, *, jobs: int) -> None:
    """Compile the library of the kernels with these flags, at most `jobs` sources at once. Raise BuildError."""
    order = {f"{name}.cpp": number for number, name in enumerate(LONGEST)}
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (order.get(source.name, len(order)), source.name))
    _compile(compiler, flags, sources, target, jobs)


def compile_probe(compiler: Sequence[str], target: Path) -> None:
    """Compile the library that says what a CPU and its system offer: for any CPU of this kind. Raise BuildError."""
    any_cpu = ("-mcpu=baseline",) if _ZIG[1] in compiler else ()  # it means this CPU where none is named
    _compile(compiler, ("-std=gnu++17", "-O1", *any_cpu), [PROBE], target, 1)


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], target: Path, jobs: int) -> None:
    """Run a compiler for each source, in their order, then one to link.

    The library appears under its name when it is whole, even if other processes compile it too. Nothing else stays in
    its folder, unless the process is killed. A later compile removes that (`_remove_stale`).
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
    """Remove the folders beside `work` that killed compiles have left.

    A running compile changes its folder at least once in TIMEOUT_SECONDS. The file system's own clock is used, because
    several machines may share the folder.
    """
    now = work.stat().st_mtime
    for old in work.parent.glob("build-*"):
        with suppress(OSError):
            if now - old.stat().st_mtime > 4 * TIMEOUT_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process by an exception, so that temporary folders are removed.

    This takes the main thread. A handler that the program has set stays.
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
    """SIGTERM came."""


def compile_variants(folder: Path, *, jobs: int) -> None:
    """Compile the probe, and the library of each variant for machines of this kind. Raise BuildError.

    At most `jobs` sources are compiled at once.
    """
    compiler = compiler_or_error()
    folder.mkdir(parents=True, exist_ok=True)
    compile_probe(compiler, folder / "probe.so")
    for variant in variants():
        compile_sources(compiler, variant.flags, folder / variant.library, jobs=jobs)


def run_compiler(command: Sequence[str]) -> None:
    """Run a command. Raise BuildError with the first line of its complaint."""
    _Compilers().run(command)


class _Compilers:
    """Compilers that run side by side, each in a thread that waits for it."""

    def __init__(self) -> None:
        self._lock, self._is_stopped = threading.Lock(), False
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: Sequence[str]) -> None:
        """Run a command, unless `stop` was called. Raise BuildError with the first line of its complaint."""
        name = _ZIG[1] if _ZIG[1] in command else command[0]
        with TemporaryFile("w+", errors="replace") as said:
            with self._lock:
                if self._is_stopped:
                    return
                null = subprocess.DEVNULL
                # A pipe would end only with the last process that the command started.
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
        """End the compilers that run, and let no other start."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.terminate()
