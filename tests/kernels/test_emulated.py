"""Libraries of the kernels on emulated CPUs that have what a variant asks for and little else: another instruction ends
the process. ARM's are compiled on this machine for ARM. The tests need qemu's user mode and a cross compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from prefold.kernels.build import build
from prefold.kernels.compile import PROBE, VARIANTS, compile_sources, find_compiler, run_compiler

PRODUCTS, ATTENTION = (Path(__file__).parent / f"emulated_{name}.cpp" for name in ("products", "attention"))
MAIN = '#include <cstdio>\nextern "C" unsigned prefold_probe();\nint main() { printf("%u", prefold_probe()); }\n'
FLAGS = {variant.name: variant.flags for variant in VARIANTS}
pytestmark = pytest.mark.slow


class Kind(NamedTuple):
    compiler: str | None
    emulator: tuple[str, ...]


ARM = Kind("aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"))
X86 = Kind(find_compiler() if platform.machine() == "x86_64" else None, ("qemu-x86_64",))


def emulated(kind: Kind, cpu: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    run = [*kind.emulator, "-cpu", cpu, *map(str, command)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def compile_program(kind: Kind, target: Path, *sources: Path) -> Path:
    if not (kind.compiler and shutil.which(kind.compiler) and shutil.which(kind.emulator[0])):
        pytest.skip(f"no {kind.compiler}, or no {kind.emulator[0]}")
    run_compiler([kind.compiler, "-std=gnu++17", "-O1", "-Wno-psabi", *map(str, sources), "-ldl", "-o", str(target)])
    return target


@pytest.mark.parametrize(
    ("kind", "name", "cpu", "lesser"),
    [
        (X86, "avx2", "Haswell", "Nehalem"),
        (ARM, "i8mm", "max", "cortex-a76"),
        (ARM, "dotprod", "cortex-a76", "cortex-a72"),
        (ARM, "neon", "cortex-a72", None),
    ],
    ids=["avx2", "i8mm", "dotprod", "neon"],
)
def test_products_of_blocks_and_of_int8_and_attention(tmp_path, kind, name, cpu, lesser):
    program = compile_program(kind, tmp_path / "products", PRODUCTS)
    library = tmp_path / "kernels.so"
    if kind is X86:
        library = build(flags=FLAGS[name])
    else:  # without optimisation, which takes minutes
        compile_sources([kind.compiler], (*(flag for flag in FLAGS[name] if flag != "-O3"), "-O0"), library)
    done = emulated(kind, cpu, program, library, "1", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"int8 {int(name in ('i8mm', 'dotprod'))}, products 1\n" in done.stdout and ", 0 wrong;" in done.stdout
    attention = compile_program(kind, tmp_path / "attention", ATTENTION)
    done = emulated(kind, cpu, attention, library, "1", "40")
    assert done.returncode == 0 and ", 0 wrong;" in done.stdout, done.stdout + done.stderr
    if lesser is not None:
        assert emulated(kind, lesser, program, library, "1", "80").returncode, "emulation takes any instruction"


@pytest.mark.parametrize(
    ("kind", "cpu", "bits"),
    [
        (ARM, "max", {5, 6}),
        (ARM, "cortex-a76", {5}),
        (ARM, "cortex-a72", set()),
        (X86, "Haswell", {0}),
        (X86, "Nehalem", set()),
    ],
    ids=["max", "cortex-a76", "cortex-a72", "haswell", "nehalem"],
)
def test_the_probe_says_what_a_cpu_has(tmp_path, kind, cpu, bits):
    (tmp_path / "main.cpp").write_text(MAIN)
    done = emulated(kind, cpu, compile_program(kind, tmp_path / "probe", PROBE, tmp_path / "main.cpp"))
    assert int(done.stdout) == sum(1 << bit for bit in bits)
