"""Libraries of the kernels on emulated CPUs that have what a variant asks for and little else: another instruction
ends the process. ARM's are compiled on this machine for ARM, and those of Windows for Windows, which Wine stands for:
on Windows itself the same compiler runs without a name of the system. The tests need qemu's user mode and a cross
compiler; Wine and the package ziglang."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from prefold.kernels.build import build
from prefold.kernels.compile import PROBE, VARIANTS, compile_sources, find_compiler, run_compiler, runnable
from prefold.kernels.loader import process

PRODUCTS, ATTENTION = (Path(__file__).parent / f"emulated_{name}.cpp" for name in ("products", "attention"))
MAIN = '#include <cstdio>\nextern "C" unsigned prefold_probe();\nint main() { printf("%u", prefold_probe()); }\n'
FLAGS = {variant.name: variant.flags for variant in VARIANTS}
pytestmark = pytest.mark.slow


class Kind(NamedTuple):
    """A Kind of machine has the command that compiles for it, and the one that runs its programs here."""

    compiler: tuple[str, ...]
    emulator: tuple[str, ...]

    def run(self, cpu: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
        run = [*self.emulator, *(("-cpu", cpu) if cpu else ()), *map(str, command)]
        return subprocess.run(run, capture_output=True, text=True, check=False, env=os.environ | {"WINEDEBUG": "-all"})


ARM = Kind(("aarch64-linux-gnu-g++",), ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"))
X86 = Kind((find_compiler() or ("g++",)) if platform.machine() == "x86_64" else ("none",), ("qemu-x86_64",))
WINDOWS = Kind((sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-windows-gnu"), ("wine",))


def compile_program(kind: Kind, target: Path, *sources: Path) -> Path:
    if not (shutil.which(kind.compiler[0]) and shutil.which(kind.emulator[0])) or (
        kind is WINDOWS and not find_spec("ziglang")
    ):
        pytest.skip(f"no {' '.join(kind.compiler)}, or no {kind.emulator[0]}")
    system = [] if kind is WINDOWS else ["-ldl"]
    run_compiler([*kind.compiler, "-std=gnu++17", "-O1", "-Wno-psabi", *map(str, sources), *system, "-o", str(target)])
    return target


@pytest.mark.parametrize(
    ("kind", "name", "cpu", "lesser"),
    [
        (X86, "avx2", "Haswell", "Nehalem"),
        (ARM, "i8mm", "max", "cortex-a76"),
        (ARM, "dotprod", "cortex-a76", "cortex-a72"),
        (ARM, "neon", "cortex-a72", None),
        *((WINDOWS, variant.name, "", None) for variant in VARIANTS if "AMD64" in variant.machines),
    ],
    ids=lambda value: value if isinstance(value, str) else "windows" if value is WINDOWS else "",
)
def test_products_of_blocks_and_of_int8_and_attention(tmp_path, kind, name, cpu, lesser):
    program = compile_program(kind, tmp_path / "products.exe", PRODUCTS)
    if kind is WINDOWS and next(v for v in VARIANTS if v.name == name) not in runnable(process.probe()):
        pytest.skip("Wine emulates no CPU, and this one is another")
    library = tmp_path / "kernels.so"
    if kind is X86:
        library = build(flags=FLAGS[name])
    else:  # with little optimisation: all of it takes minutes
        less = "-O1" if kind is WINDOWS else "-O0"
        compile_sources(kind.compiler, (*(flag for flag in FLAGS[name] if flag != "-O3"), less), library, jobs=2)
    done = kind.run(cpu, program, library, "1", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    has_int8 = name not in ("avx2", "neon")
    says = f"int8 {int(has_int8)}, products 1, of bfloat16 {int(name != 'avx512')}\n"
    assert says in done.stdout and ", 0 wrong;" in done.stdout
    attention = compile_program(kind, tmp_path / "attention.exe", ATTENTION)
    done = kind.run(cpu, attention, library, "1", "40")
    assert done.returncode == 0 and ", 0 wrong;" in done.stdout, done.stdout + done.stderr
    if lesser is not None:
        assert kind.run(lesser, program, library, "1", "80").returncode, "emulation takes any instruction"


@pytest.mark.parametrize(
    ("kind", "cpu", "bits"),
    [
        (ARM, "max", {5, 6}),
        (ARM, "cortex-a76", {5}),
        (ARM, "cortex-a72", set()),
        (X86, "Haswell", {0}),
        (X86, "Nehalem", set()),
        (WINDOWS, "", None),
    ],
    ids=["max", "cortex-a76", "cortex-a72", "haswell", "nehalem", "windows"],
)
def test_the_probe_says_what_a_cpu_has(tmp_path, kind, cpu, bits):
    (tmp_path / "main.cpp").write_text(MAIN)
    done = kind.run(cpu, compile_program(kind, tmp_path / "probe.exe", PROBE, tmp_path / "main.cpp"))
    assert int(done.stdout) == (process.probe() if bits is None else sum(1 << bit for bit in bits))
