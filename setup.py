"""Builds prefold. With PREFOLD_WHEEL=1 a wheel is for this platform, and has the kernels compiled for every variant of
its kind of CPU (on Windows by the compiler of the package ziglang); otherwise it is for any platform, and the kernels
are compiled on first use."""

import os
import platform
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


def load(path: str) -> ModuleType:
    """Return a file of prefold as a module. prefold itself cannot be imported here."""
    spec = spec_from_file_location(Path(path).stem, Path(path))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Compiles the kernels into the folder that becomes the wheel."""

    def run(self) -> None:
        super().run()
        jobs = load("prefold/spec/container.py").usable_cores()
        load("prefold/kernels/compile.py").compile_variants(
            Path(self.build_lib, "prefold", "kernels", "lib"), jobs=jobs
        )


class PlatformWheel(bdist_wheel):
    """The libraries are loaded by ctypes, so that a wheel serves every Python of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if os.environ.get("PREFOLD_WHEEL") == "1":
    setup(
        cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
        distclass=PlatformDistribution,
        setup_requires=["ziglang>=0.15"] if platform.system() == "Windows" else [],
    )
else:
    setup()
