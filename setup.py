"""Builds prefold, with the kernels in it (`prefold/kernels/build.py`, `install`).

An installation compiles them for this machine alone. With PREFOLD_WHEEL=1 they are compiled for every variant of its
kind of CPU, and with PREFOLD_KERNELS=0 not at all, so that the wheel is for any platform. PREFOLD_COMPILER=zig, and
Windows, compile by the package ziglang, which pip fetches for the build.
"""

import platform
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).parent))

from prefold.kernels.build import install
from prefold.spec import environment


class BuildWithKernels(build_py):
    """Compiles the kernels into the folder that becomes the wheel."""

    def run(self) -> None:
        super().run()
        folder = None if self.editable_mode else Path(self.build_lib, "prefold", "kernels", "lib")
        print(f"prefold: {install(folder)}", file=sys.stderr, flush=True)


class PlatformWheel(bdist_wheel):
    """The libraries are loaded by ctypes, so that a wheel serves every Python of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if environment.kernels() == "0":
    setup(cmdclass={"build_py": BuildWithKernels})  # which removes what earlier builds left
else:
    needs_zig = platform.system() == "Windows" or environment.compiler() == "zig"
    setup(
        cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
        distclass=PlatformDistribution,
        setup_requires=["ziglang>=0.15"] if needs_zig else [],
    )
