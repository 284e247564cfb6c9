"""The kernels for ARM, compiled for it on another machine and run in emulation, where the tools for that are there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from prefold.kernels.compile import PROBE, VARIANTS, compile_sources, run_compiler

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
ARM = {variant.name: variant for variant in VARIANTS if "aarch64" in variant.machines}
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER}, or no {EMULATOR}"
    ),
]


def emulated(cpu: str, *command: str | Path) -> str:
    done = subprocess.run(
        [EMULATOR, "-cpu", cpu, "-L", ROOT, *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(("name", "cpu"), [("i8mm", "max"), ("dotprod", "cortex-a76"), ("neon", "cortex-a72")])
def test_products_of_blocks_and_of_int8(tmp_path, name, cpu):
    """On a CPU that has what the variant asks for and little else: another instruction would end the process."""
    library, driver = tmp_path / "kernels.so", tmp_path / "driver"
    flags = [flag for flag in ARM[name].flags if flag != "-O3"]
    compile_sources([COMPILER], (*flags, "-O0"), library)
    run_compiler(
        [COMPILER, "-std=gnu++17", "-O1", "-Wno-psabi", str(HERE / "arm_products.cpp"), "-ldl", "-o", str(driver)]
    )
    said = emulated(cpu, driver, library, "1", "80")
    assert f"int8 {int(name != 'neon')}, products 1\n" in said and ", 0 wrong;" in said


@pytest.mark.parametrize(("cpu", "bits"), [("max", {5, 6}), ("cortex-a76", {5}), ("cortex-a72", set())])
def test_the_probe_says_what_a_cpu_has(tmp_path, cpu, bits):
    (tmp_path / "main.cpp").write_text(
        '#include <cstdio>\nextern "C" unsigned prefold_probe();\nint main() { printf("%u", prefold_probe()); }\n'
    )
    run_compiler([COMPILER, "-O1", str(PROBE), str(tmp_path / "main.cpp"), "-o", str(tmp_path / "probe")])
    assert int(emulated(cpu, tmp_path / "probe")) == sum(1 << bit for bit in bits)
