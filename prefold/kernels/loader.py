"""Load the kernels once a process, and say why if there are none."""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..spec import environment
from .attention import AttentionKernels
from .build import build, build_probe, is_built
from .compile import HERE, NATIVE, BuildError, runnable, variants
from .interface import InterfaceError, bind
from .operations import ElementwiseKernels, ExpertKernels, LogitKernels, StateKernels
from .products import BlockKernels, PackKernels, ProductKernels
from .program import ProgramKernels, RankKernels


class Kernels(
    AttentionKernels,
    BlockKernels,
    ElementwiseKernels,
    ExpertKernels,
    LogitKernels,
    PackKernels,
    ProductKernels,
    ProgramKernels,
    RankKernels,
    StateKernels,
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


LIBRARIES = HERE / "lib"  # what a wheel has


@dataclass(slots=True)
class LoadedKernels:
    kernels: Kernels | None
    status: str


class KernelLoader:
    """Loads the kernels once, from a wheel's libraries or compiled, and says why if there are none.

    libraries  the folder of a wheel's libraries
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
        self.libraries, self.build = libraries, build
        self.probe = probe or self._probe
        self.loaded: LoadedKernels | None = None
        self._lock = threading.Lock()

    def load(self) -> LoadedKernels:
        """Load the kernels at the first call, as the function `load` says."""
        if self.loaded is None:
            with self._lock:
                if self.loaded is None:
                    self.loaded = self._attempt()
        return self.loaded

    def status(self, *, compiles: bool = True) -> str:
        """Return what the function `status` does."""
        is_chosen = environment.kernels() == "0" or environment.instruction_set()
        if not (compiles or self.loaded or self._has_wheel() or is_chosen or is_built()):
            return "will be compiled on first use"
        return self.load().status

    def _has_wheel(self) -> bool:
        return (self.libraries / "probe.so").exists()

    def _attempt(self) -> LoadedKernels:
        wish = environment.kernels()
        if wish == "0":
            return LoadedKernels(None, "PyTorch: compiled kernels are switched off by PREFOLD_KERNELS=0")
        ignored = None
        if forced := environment.instruction_set():
            try:
                return self._variant(forced)
            except (BuildError, OSError, InterfaceError) as error:
                ignored = f"PREFOLD_ISA is {forced!r}, and is ignored: {error}"
        loaded = self._of_wheel() if wish != "native" and self._has_wheel() else None
        if loaded is None:
            try:
                loaded = LoadedKernels(self._compiled(NATIVE), "compiled on this machine: native")
            except (BuildError, OSError, InterfaceError) as error:
                _warn(f"prefold runs without its compiled kernels, more slowly: {error}")
                loaded = LoadedKernels(None, f"PyTorch: {error}")
        if ignored:
            _warn(f"{ignored}; kernels in use instead: {loaded.status}")
        return loaded

    def _of_wheel(self) -> LoadedKernels | None:
        """Return the best kernels of the wheel that run here, or None. Warn once if some cannot be loaded."""
        loaded, damaged = None, []
        try:
            for variant in runnable(self.probe()):
                try:
                    kernels = Kernels(self.libraries / variant.library)
                    loaded = LoadedKernels(kernels, f"of the wheel: {variant.name}")
                    break
                except (OSError, InterfaceError) as error:
                    damaged.append(str(error))
        except OSError as error:  # of the probe
            damaged.append(str(error))
        if damaged:
            _warn(
                "kernels of the wheel cannot be loaded, so others are used; install prefold again: "
                + "; ".join(damaged)
            )
        return loaded

    def _variant(self, name: str) -> LoadedKernels:
        """Return the kernels of the variant that PREFOLD_ISA names, from the wheel or compiled.

        Raise BuildError, OSError or InterfaceError if this machine cannot run, compile or load them.
        """
        variant = next((choice for choice in variants() if choice.name == name), None)
        if variant is None:
            raise BuildError(f"it must be one of {', '.join(choice.name for choice in variants())} here")
        if variant not in runnable(self.probe()):
            raise BuildError("this CPU, or its system, has not all the instructions for it")
        path = self.libraries / variant.library
        held = [one.name for one in variants() if (self.libraries / one.library).exists()]
        if path.exists():
            return LoadedKernels(Kernels(path), f"of the wheel: {name}")
        try:
            return LoadedKernels(self._compiled(variant.flags), f"compiled on this machine: {name}")
        except BuildError as error:
            if not held:
                raise
            raise BuildError(f"the wheel has only {', '.join(held)}, and it cannot be compiled: {error}") from error

    def _probe(self) -> int:
        """Return the bits of `probe.cpp`. Raise OSError if its library is damaged, BuildError if it cannot be
        compiled."""
        library = ctypes.CDLL(str(self.libraries / "probe.so" if self._has_wheel() else build_probe()))
        try:
            return library.prefold_probe()
        except AttributeError as error:
            raise OSError(str(error)) from None

    def _compiled(self, flags: Sequence[str]) -> Kernels:
        """Return the kernels that are compiled with these flags. Raise BuildError, OSError or InterfaceError."""
        try:
            return Kernels(self.build(flags=flags))
        except OSError:
            # Damaged in the cache, or made against another C library: once more.
            return Kernels(self.build(flags=flags, again=True))


process = KernelLoader()  # has the kernels that this process uses


def load() -> Kernels | None:
    """Returns the compiled kernels, or None. The best library of the wheel that runs here is loaded; where the wheel
    has none, the sources are compiled at the first call (some seconds, once a machine).

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


def status(*, compiles: bool = True) -> str:
    """Returns one line for people: which kernels are in use, or why none are. compiles: whether it compiles them where
    that is still to be done."""
    return process.status(compiles=compiles)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
