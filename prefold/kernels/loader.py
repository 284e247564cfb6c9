"""Load the kernels once a process, and say why if there are none."""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..spec import environment
from .attention import AttentionKernels
from .build import build
from .compile import NATIVE, BuildError, runnable, variants
from .installed import COMPILED, LIBRARIES, OF_THE_WHEEL, SWITCHED_OFF, Installed, variant_of
from .interface import InterfaceError, bind
from .operations import ElementwiseKernels, LogitKernels
from .products import BlockKernels, PackKernels, ProductKernels
from .program import ProgramKernels, RankKernels


class Kernels(
    AttentionKernels,
    BlockKernels,
    ElementwiseKernels,
    LogitKernels,
    PackKernels,
    ProductKernels,
    ProgramKernels,
    RankKernels,
):
    """The functions of one compiled library. Calls release the GIL and run on `threads.threads()` threads."""

    def __init__(self, path: Path):
        """Load the library. Raise OSError if it is none, and InterfaceError if it is one of another version."""
        _check_whole(path)
        self.path = path
        self._calls = bind(ctypes.CDLL(str(path)))
        self.calm_openmp()

    def calm_openmp(self) -> None:
        """Let the threads of OpenMP sleep soon after their work, if a package has loaded it, as PyTorch does."""
        self._calls["calm_openmp"]()


def _check_whole(path: Path) -> None:
    """Raises OSError for a library that was cut off: the system would load it, and end the process with a bus error."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"\x7fELF") and len(head) == 64:
        (table,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        if path.stat().st_size < table + size * count:
            raise OSError(f"{path}: its end is missing")


@dataclass(slots=True)
class LoadedKernels:
    kernels: Kernels | None
    status: str


class KernelLoader:
    """Loads the kernels once, from what is installed or compiled, and says why if there are none.

    libraries  the folder of the installed libraries
    build      compiles a library, as `build.build` does
    probe      returns the bits of `probe.cpp`; None: of this CPU and its system
    loaded     what `load` found, once it was called
    """

    def __init__(
        self,
        *,
        libraries: Path = LIBRARIES,
        build: Callable[..., Path] = build,
        probe: Callable[[], int] | None = None,
    ):
        self.installed, self.build = Installed(libraries, probe), build
        self.probe = self.installed.probe
        self.loaded: LoadedKernels | None = None
        self._lock = threading.Lock()

    def load(self) -> LoadedKernels:
        """Load the kernels at the first call, as the function `load` says."""
        if self.loaded is None:
            with self._lock:
                if self.loaded is None:
                    self.loaded = self._attempt()
        return self.loaded

    def _attempt(self) -> LoadedKernels:
        """Look for kernels, in this order: those that PREFOLD_ISA names, the installed library of this machine, the
        variants of a wheel, and what is in the cache or compiled now. `foreseen` has the same order."""
        if environment.kernels() == "0":
            return LoadedKernels(None, SWITCHED_OFF)
        ignored = None
        if forced := environment.instruction_set():
            try:
                return self._variant(forced)
            except (BuildError, OSError, InterfaceError) as error:
                ignored = f"PREFOLD_ISA is {forced!r}, and is ignored: {error}"
        loaded = self._of_installation()
        if loaded is None:
            try:
                loaded = LoadedKernels(self._compiled(NATIVE), f"{COMPILED}: native")
            except (BuildError, OSError, InterfaceError) as error:
                reason = self.installed.reason(error)
                _warn(f"prefold runs without its compiled kernels, more slowly: {reason}")
                loaded = LoadedKernels(None, f"PyTorch: {reason}")
        if ignored:
            _warn(f"{ignored}; kernels in use instead: {loaded.status}")
        return loaded

    def _of_installation(self) -> LoadedKernels | None:
        """Return the best installed kernels that run here, or None. Warn once if some cannot be loaded."""
        loaded, damaged = None, []
        try:
            for path, status in self._installed_here():
                try:
                    loaded = LoadedKernels(Kernels(path), status)
                    break
                except (OSError, InterfaceError) as error:
                    damaged.append(str(error))
        except OSError as error:  # of the probe
            damaged.append(str(error))
        if damaged:
            _warn(
                "installed kernels cannot be loaded, so others are used; install prefold again: " + "; ".join(damaged)
            )
        return loaded

    def _installed_here(self) -> Iterator[tuple[Path, str]]:
        """Yield (library, its status) of what is installed for this CPU, the best first. Raise OSError for a damaged
        probe."""
        if (native := self.installed.native) is not None:
            yield native, f"{COMPILED}: native"
        if environment.kernels() != "native" and self.installed.is_wheel:
            for variant in runnable(self.probe()):
                yield self.installed.folder / variant.library, f"{OF_THE_WHEEL}: {variant.name}"

    def _variant(self, name: str) -> LoadedKernels:
        """Return the kernels of the variant that PREFOLD_ISA names, from the wheel or compiled.

        Raise BuildError, OSError or InterfaceError if this machine cannot run, compile or load them.
        """
        variant = variant_of(name)
        if variant not in runnable(self.probe()):
            raise BuildError("this CPU, or its system, has not all the instructions for it")
        if path := self.installed.path(variant):
            return LoadedKernels(Kernels(path), f"{OF_THE_WHEEL}: {name}")
        try:
            return LoadedKernels(self._compiled(variant.flags), f"{COMPILED}: {name}")
        except BuildError as error:
            held = [one.name for one in variants() if self.installed.path(one)]
            if not held:
                raise
            raise BuildError(f"the wheel has only {', '.join(held)}, and it cannot be compiled: {error}") from error

    def _compiled(self, flags: Sequence[str]) -> Kernels:
        """Return the kernels that are compiled with these flags. Raise BuildError, OSError or InterfaceError."""
        try:
            return Kernels(self.build(flags=flags))
        except OSError:
            # Damaged in the cache, or made against another C library: once more.
            return Kernels(self.build(flags=flags, again=True))


process = KernelLoader()  # has the kernels that this process uses


def load() -> Kernels | None:
    """Returns the compiled kernels, or None. The best installed library that runs here is loaded; where there is none,
    the sources are compiled at the first call (up to a minute, once a machine).

    Warns once where the kernels should be there and are not. The environment is looked at in the first call:
    PREFOLD_KERNELS=0 switches the kernels off, PREFOLD_KERNELS=native compiles them for this machine whatever the wheel
    has, and PREFOLD_ISA names the variant to take (`compile.VARIANTS`).
    """
    return process.load().kernels


def calm_openmp() -> None:
    """Do what `Kernels.calm_openmp` does if the kernels are loaded already; if not, loading them does it.

    For a module that imports a package with OpenMP."""
    if process.loaded is not None and process.loaded.kernels is not None:
        process.loaded.kernels.calm_openmp()


def status() -> str:
    """Returns one line for people: which kernels are in use, or why none are. It loads them, as `load` does."""
    return process.load().status


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
