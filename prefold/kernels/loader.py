"""The kernels of this process: loaded once, with a reason if there are none."""

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
    """The functions of one compiled library. Calls release the GIL, and run on `threads.threads()` threads."""

    def __init__(self, path: Path):
        """Load the library. Raise OSError if it is not a library, and InterfaceError if its version differs."""
        _check_whole(path)
        self.path = path
        self._calls = bind(ctypes.CDLL(str(path)))
        self.calm_openmp()

    def calm_openmp(self) -> None:
        """Shorten the time that OpenMP threads spin, if a package such as PyTorch has loaded OpenMP."""
        self._calls["calm_openmp"]()


def _check_whole(path: Path) -> None:
    """Raise OSError if the end of a library is missing: loading it would end the process with a bus error."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"\x7fELF") and len(head) == 64:
        (table,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        if path.stat().st_size < table + size * count:
            raise OSError(f"{path}: the end of the file is missing")


@dataclass(slots=True)
class LoadedKernels:
    kernels: Kernels | None
    status: str


class KernelLoader:
    """Loads the kernels once, from an installed library or a compiled one. Records why if there are none.

    Args:
        libraries: the folder of the installed libraries.
        build: compiles a library, like `build.build`.
        probe: returns the bits of `probe.cpp` (default: the bits of this CPU and its system).

    Attributes:
        loaded: the result of `load`; None before the first call.
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
        """Load the kernels at the first call. See the function `load`."""
        if self.loaded is None:
            with self._lock:
                if self.loaded is None:
                    self.loaded = self._attempt()
        return self.loaded

    def _attempt(self) -> LoadedKernels:
        """Look for kernels in four places. `foreseen` uses the same order.

        1. the variant that PREFOLD_ISA names
        2. the installed library for this machine
        3. the variants of a wheel
        4. the cache folder, or a new compilation
        """
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
        except OSError as error:  # from the probe
            damaged.append(str(error))
        if damaged:
            _warn(
                "installed kernels cannot be loaded, so others are used; install prefold again: " + "; ".join(damaged)
            )
        return loaded

    def _installed_here(self) -> Iterator[tuple[Path, str]]:
        """Yield (library, status) of each installed library for this CPU, the best first.

        Raise OSError if the probe is damaged.
        """
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
            raise BuildError("this CPU, or its system, lacks some of its instructions")
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
            # The cached library is damaged, or needs another C library: compile it again.
            return Kernels(self.build(flags=flags, again=True))


process = KernelLoader()  # the loader of this process


def load() -> Kernels | None:
    """Return the compiled kernels, or None.

    The first call loads the best installed library that runs on this CPU. If there is none, it compiles the sources (up
    to a minute, once per machine). Warn once if kernels are expected but missing.

    The first call reads these environment variables:

    - PREFOLD_KERNELS=0 switches the kernels off.
    - PREFOLD_KERNELS=native compiles them for this machine, even if a wheel has variants.
    - PREFOLD_ISA names the variant to use (`compile.VARIANTS`).
    """
    return process.load().kernels


def calm_openmp() -> None:
    """Call `Kernels.calm_openmp` if the kernels are loaded. Otherwise loading them will call it.

    For modules that import a package with OpenMP.
    """
    if process.loaded is not None and process.loaded.kernels is not None:
        process.loaded.kernels.calm_openmp()


def status() -> str:
    """Return one line for users: which kernels are in use, or why none are. Loads the kernels, like `load`."""
    return process.load().status


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
