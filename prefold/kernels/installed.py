"""The libraries of an installation, and a forecast of the kernels for this process. Loads no kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from ..spec import environment
from .build import build_probe, kept, library_name
from .compile import HERE, NATIVE, BuildError, Variant, compiler_or_error, runnable, variants

LIBRARIES = HERE / "lib"
SWITCHED_OFF = "PyTorch: compiled kernels are switched off by PREFOLD_KERNELS=0"
COMPILED, OF_THE_WHEEL = "compiled on this machine", "from the wheel"


class Installed:
    """The libraries in a folder.

    They are one library for the machine on which prefold was installed, or the variants of a wheel. A wheel also has
    the probe, which tells which variants run on this CPU.

    Args:
        probe: Returns the bits of `probe.cpp` (default: the bits of this CPU and its system).
    """

    def __init__(self, folder: Path = LIBRARIES, probe: Callable[[], int] | None = None):
        self.folder = folder
        self.probe = probe or self._probe

    @property
    def is_wheel(self) -> bool:
        return (self.folder / "probe.so").exists()

    @property
    def native(self) -> Path | None:
        """The library for this CPU and these sources, or None."""
        path = self.folder / library_name()
        return path if path.exists() else None

    def reason(self, error: Exception) -> str:
        """Return why there are no kernels.

        Args:
            error: The reason why they cannot be compiled.
        """
        if self.is_wheel or self.native or not any(self.folder.glob("kernels-*.so")):
            return str(error)
        return (
            f"{error}; prefold was installed on a machine with another CPU, and its kernels do not run here: "
            "install it with PREFOLD_WHEEL=1 to compile them for every CPU of this kind"
        )

    def path(self, variant: Variant) -> Path | None:
        path = self.folder / variant.library
        return path if path.exists() else None

    def _probe(self) -> int:
        """Return the bits of `probe.cpp`.

        Raise OSError if its library is damaged, and BuildError if it cannot be compiled.
        """
        library = ctypes.CDLL(str(self.folder / "probe.so" if self.is_wheel else build_probe()))
        try:
            return library.prefold_probe()
        except AttributeError as error:
            raise OSError(str(error)) from None


def variant_of(name: str) -> Variant:
    """Return the variant that PREFOLD_ISA names. Raise BuildError if this kind of machine has no such variant."""
    variant = next((choice for choice in variants() if choice.name == name), None)
    if variant is None:
        raise BuildError(f"it must be one of {', '.join(choice.name for choice in variants())} here")
    return variant


def foreseen(installed: Installed | None = None) -> str:
    """Return the line that `status` will return once the kernels are loaded.

    Looks for libraries in the order of `KernelLoader.load`, but neither loads nor compiles one. So only `load` notices
    a damaged library, or a variant in PREFOLD_ISA that this CPU cannot run.
    """
    installed = installed or Installed()
    if environment.kernels() == "0":
        return SWITCHED_OFF
    if name := environment.instruction_set():
        try:
            held = installed.path(variant_of(name))
        except BuildError as error:
            return f"PREFOLD_ISA is {name!r}: {error}"
        return f"{OF_THE_WHEEL}: {name}" if held else _compiled(installed, name)
    if installed.native is not None:
        return f"{COMPILED}: native"
    if environment.kernels() != "native" and installed.is_wheel:
        try:
            here = [variant.name for variant in runnable(installed.probe()) if installed.path(variant)]
        except OSError:
            here = []
        if here:
            return f"{OF_THE_WHEEL}: {here[0]}"
    return _compiled(installed, "native")


def _compiled(installed: Installed, name: str) -> str:
    if kept(NATIVE if name == "native" else variant_of(name).flags) is not None:
        return f"{COMPILED}: {name}"
    try:
        compiler_or_error()
    except BuildError as error:
        return f"PyTorch: {installed.reason(error)}"
    return "will be compiled on first use" + ("" if name == "native" else f": {name}")
