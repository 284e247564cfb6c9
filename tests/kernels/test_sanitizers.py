"""Programs of random models on 1 to 8 threads, also with kernels that the compiler's sanitizers watch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefold.kernels.build import build, cpu
from prefold.kernels.compile import NATIVE, find_compiler

SCRIPT = Path(__file__).parent / "random_programs.py"
# Each has a library of its own: GCC takes more than half an hour for one with addresses and undefined behaviour both.
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}


def run_programs(library: Path, seed: int, models: int, *more: str, **environment: str) -> str:
    """Returns the digest of all results, which the process prints last."""
    command = [sys.executable, str(SCRIPT), str(library), str(seed), str(models), *more]
    if "LD_PRELOAD" in environment and shutil.which("setarch"):  # the sanitizers want memory at their own addresses
        command = ["setarch", platform.machine(), "-R", *command]
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_programs_of_random_models_give_the_same_on_any_number_of_threads():
    assert len(run_programs(build(), 1, 6)) == 64


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_programs_run_in_a_fork():
    assert len(run_programs(build(), 4, 3, "forked")) == 64


@pytest.mark.slow
@pytest.mark.skipif("amx_bf16" not in "".join(cpu()), reason="no AMX")
def test_where_the_system_refuses_tiles_results_are_those_without_tiles(tmp_path, monkeypatch):
    tiles = build()
    monkeypatch.setenv("PREFOLD_CACHE", str(tmp_path))
    without = build(flags=(*NATIVE, "-mno-amx-tile", "-mno-amx-bf16"))
    assert run_programs(tiles, 3, 8, "refused") == run_programs(without, 3, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNTIMES)
def test_programs_under_a_sanitizer(tmp_path, monkeypatch, kind):
    compiler = find_compiler()
    if compiler is None or "clang" in compiler[0] or "ziglang" in compiler:
        pytest.skip("no GCC")
    found = subprocess.run(
        [*compiler, f"-print-file-name={RUNTIMES[kind]}"], capture_output=True, text=True, check=True
    )
    if not (runtime := Path(found.stdout.strip())).is_absolute():
        pytest.skip(f"GCC has no {RUNTIMES[kind]}")
    monkeypatch.setenv("PREFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr("prefold.kernels.compile.TIMEOUT_SECONDS", 3600)
    flags = tuple("-O1" if flag == "-O3" else flag for flag in NATIVE)
    library = build(flags=(*flags, "-g1", f"-fsanitize={kind}", "-fno-sanitize-recover=all"))
    # PyTorch's own threads meet at barriers of OpenMP, which the sanitizer does not know.
    (tmp_path / "suppressed").write_text("race:libtorch\nrace:libgomp\n")
    digest = run_programs(
        library, 2, 10, LD_PRELOAD=str(runtime), ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS=f"halt_on_error=1:suppressions={tmp_path / 'suppressed'}",
    )  # fmt: skip
    assert len(digest) == 64
