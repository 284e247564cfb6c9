"""Building and loading: the cache, many builders at once, no compiler, a broken one."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from dense import dense_attention
from nests import random_nest
from tensors import TensorKernels

from prefold import __version__, kernels
from prefold.cli import main
from prefold.kernels import compile as compiling
from prefold.kernels import interface, loader
from prefold.kernels.build import build, cpu, fingerprint
from prefold.kernels.compile import COMMON, NATIVE, BuildError, find_compiler, runnable, variants
from prefold.kernels.loader import KernelLoader
from prefold.worker.attention import visibility
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention
from prefold.worker.torch.tensors import array_of

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
FIRST_USE = "will be compiled on first use"
# Without optimisation: a second, and all the same functions. Each function that a source exports must be declared.
QUICK = ("-std=gnu++17", "-O0", "-Wno-psabi", "-Werror=missing-declarations")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache, and a process that has loaded nothing. Tests that need another loader put it in its place."""
    monkeypatch.setenv("PREFOLD_CACHE", str(tmp_path))
    monkeypatch.delenv("PREFOLD_KERNELS", raising=False)
    monkeypatch.setattr(loader, "process", KernelLoader())
    return tmp_path


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    """A library that was built by the quick flags, once in this run of pytest, whichever of its workers needs it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "quick"
    shared.mkdir(exist_ok=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stderr(StringIO()) as said,
        (shared / "lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("PREFOLD_CACHE", str(shared))
        was_there = any(shared.glob("kernels/*.so"))
        path = build(flags=QUICK)
    assert ("compiling the kernels, once on this machine" in said.getvalue()) is not was_there
    return path


def check_kernels(loaded: kernels.Kernels, *, rows: int = 90) -> None:
    """Attention of `loaded` against the definition."""
    of_tensors = TensorKernels(loaded)
    nest = random_nest(np.random.default_rng(0), rows, 0.2)
    queries = np.arange(5, rows)
    tiles = loaded.plan_rows(nest.end, queries, nest.positions, 30)
    visible = visibility(nest.end, queries, nest.positions, 30)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for heads, kv_heads, dim in ((6, 2, 40), (4, 4, 64), (7, 1, 33)):
            q = torch.randn(rows - 5, heads, dim).to(dtype)
            k, v = (torch.randn(rows, kv_heads, dim).to(dtype) for _ in range(2))
            v[rows // 2] = torch.nan
            out = of_tensors.row_attention(q, k, v, tiles, scale=0.2)
            wanted = dense_attention(q.double(), k.double(), v.double(), visible, scale=0.2)
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance, equal_nan=True)
        x, weight = torch.randn(17, 36).to(dtype), torch.randn(70, 36).to(dtype)
        packed = loaded.pack_words(array_of(weight))
        out = of_tensors.linear(x, packed, 70, out=torch.empty(17, 70))
        torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)
    sums, largest = of_tensors.log_sum_exp(out)
    torch.testing.assert_close(sums, torch.logsumexp(out, -1), rtol=0, atol=1e-5)
    assert torch.equal(largest, out.argmax(-1))


@needs_compiler
def test_second_build_comes_from_the_cache(quick, no_compiler, monkeypatch, capfd):
    stamp = quick.stat().st_mtime_ns
    monkeypatch.setenv("PREFOLD_CACHE", str(quick.parents[1]))
    assert build(flags=QUICK) == quick
    assert quick.stat().st_mtime_ns == stamp
    assert not capfd.readouterr().err, "nothing is compiled"
    assert [path.name for path in quick.parent.iterdir()] == [quick.name], "nothing is left behind"


@needs_compiler
def test_many_builders_at_once(fresh, quick, monkeypatch):
    """In place of a damaged library. A program that copies a library stands for the compiler."""
    copies = fresh / "copies"
    copies.write_text(f'#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\ncp {quick} "$out"\n')
    copies.chmod(0o755)
    monkeypatch.setenv("CXX", str(copies))
    (fresh / "kernels").mkdir()
    (fresh / "kernels" / f"kernels-{fingerprint(QUICK)}.so").write_bytes(b"not a library")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: build(flags=QUICK, again=True), range(2)))
    assert len(set(paths)) == 1
    check_kernels(kernels.Kernels(paths[0]))


def test_the_name_tells_flags_and_sources_apart(tmp_path):
    plain = fingerprint(NATIVE)
    assert fingerprint(NATIVE) == plain
    assert fingerprint((*NATIVE, "-g")) != plain
    (tmp_path / "a.cpp").write_text("int a;")
    other = fingerprint(NATIVE, tmp_path)
    assert other != plain
    (tmp_path / "a.cpp").write_text("int b;")
    assert fingerprint(NATIVE, tmp_path) != other


def test_where_a_compiler_is_looked_for(no_compiler, monkeypatch, tmp_path):
    assert find_compiler() is None
    no_compiler.add("ziglang")
    zig = (sys.executable, "-m", "ziglang", "c++")
    assert find_compiler() == zig
    compiler = tmp_path / "c++"
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == (str(compiler),)
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert find_compiler() == zig
    monkeypatch.setenv("CXX", "c++ -stdlib=libc++")
    assert find_compiler() == (str(compiler), "-stdlib=libc++")
    spaced = tmp_path / "my tools" / "c++"
    spaced.parent.mkdir()
    shutil.copy(compiler, spaced)
    for written in (str(spaced), f'"{spaced}"'):
        monkeypatch.setenv("CXX", written)
        assert find_compiler() == (str(spaced),)
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "'c++")
    with pytest.raises(BuildError, match="CXX cannot be read: No closing quotation"):
        find_compiler()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's list")
def test_the_probe_says_what_linux_says():
    flags = set(next(line for line in cpu() if line.startswith("flags")).split())
    v3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"} <= flags
    v4 = v3 and {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags
    has = [v3, v4 and "avx512_vnni" in flags, v4 and "avx512_bf16" in flags,
           {"amx_tile", "amx_bf16", "amx_int8"} <= flags, v3 and "avx_vnni" in flags]  # fmt: skip
    assert KernelLoader(libraries=Path("none")).probe() == sum(bit << number for number, bit in enumerate(has))


def test_no_compiler_falls_back_with_one_warning(fresh, no_compiler):
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler") as seen:
        assert kernels.load() is None
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.load() is None
        check_fallback()
    assert "no C++ compiler" in kernels.status()


def test_switched_off_by_the_environment(fresh, monkeypatch):
    monkeypatch.setenv("PREFOLD_KERNELS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.load() is None
        check_fallback()
    assert "PREFOLD_KERNELS" in kernels.status()


def check_fallback() -> None:
    nest = random_nest(np.random.default_rng(0), 50, 0.2)
    attention = RowAttention(Heads(6, 2, 8, torch.float32), torch.device("cpu"))
    plan = attention.plan(nest.end, np.arange(50))
    q, k, v = torch.randn(50, 6, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    out = attention.attend(q, k, v, plan, scale=0.3)
    wanted = dense_attention(q, k, v, visibility(nest.end, np.arange(50)), scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="no such thing"):
        build()
    with pytest.warns(RuntimeWarning, match="no such thing"):
        assert kernels.load() is None
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_cache_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREFOLD_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError):
        build()


@pytest.fixture
def slow_compiler(tmp_path):
    """A compiler that notes when it starts and ends, and what the argument `wait` says in seconds."""

    def make(wait: float) -> tuple[str, Path]:
        program, noted = tmp_path / "slow-cc", tmp_path / "noted"
        program.write_text(f"""#!/bin/sh
for word; do case $word in *.cpp) name=${{word##*/}};; esac; [ "$last" = -o ] && out=$word; last=$word; done
echo "+ $$ $name" >> {noted}
exec 3>> {noted}
sleep {wait} & wait
echo "- $$ $name" >&3
: > "$out"
""")
        program.chmod(0o755)
        return str(program), noted

    return make


def test_no_more_compilers_run_at_once_than_there_are_jobs(slow_compiler, tmp_path):
    program, noted = slow_compiler(0.02)
    (tmp_path / "made").mkdir()
    compiling.compile_sources((program,), (), tmp_path / "made" / "kernels.so", jobs=3)
    running, most, started = 0, 0, []
    for line in noted.read_text().splitlines():
        running += 1 if line[0] == "+" else -1
        most = max(most, running)
        started += [line.split(" ")[2]] if line[0] == "+" else []
    names, linking = [f"{name}.cpp" for name in compiling.LONGEST], started.pop()
    assert most <= 3 and {*started[:3]} <= {*names[:5]} and not linking
    assert sorted(started) == sorted(path.name for path in compiling.SOURCES.glob("*.cpp")) and {*names} <= {*started}
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["kernels.so"]


def test_what_killed_compiles_left_is_removed_and_what_others_compile_is_not(slow_compiler, tmp_path):
    made, now = tmp_path / "made", time.time()
    for name, age in (("build-old", 4000), ("build-new", 900), ("other", 4000)):
        (made / name).mkdir(parents=True)
        (made / name / "a.o").touch()
        os.utime(made / name, (now - age, now - age))
    compiling.compile_probe((slow_compiler(0)[0],), made / "probe.so")
    assert {path.name for path in made.iterdir()} == {"build-new", "other", "probe.so"}


@pytest.mark.skipif(platform.system() == "Windows", reason="SIGTERM ends a process at once")
def test_sigterm_leaves_no_folder_and_no_compiler(slow_compiler, tmp_path):
    program, noted = slow_compiler(30)
    (tmp_path / "made").mkdir()
    code = f"""
import pathlib
from prefold.kernels import compile as compiling
compiling.compile_sources(({program!r},), (), pathlib.Path({str(tmp_path / "made" / "kernels.so")!r}), jobs=2)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60
    while not noted.exists() or len(noted.read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert list((tmp_path / "made").iterdir()) == []
    for line in noted.read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)


def test_a_user_without_a_home_falls_back(fresh, monkeypatch):
    monkeypatch.delenv("PREFOLD_CACHE")
    monkeypatch.setattr(Path, "expanduser", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.warns(RuntimeWarning, match="set PREFOLD_CACHE to one"):
        assert kernels.load() is None


@needs_compiler
def test_a_damaged_library_is_built_again(fresh, quick):
    """That a build stands in the damaged one's place shows test_many_builders_at_once."""
    damaged, asked = fresh / "damaged.so", []
    damaged.write_bytes(b"not a library")

    def build_again(flags, again=False):
        asked.append(again)
        return quick if again else damaged

    loaded = KernelLoader(build=build_again).load().kernels
    assert asked == [False, True] and loaded is not None
    check_kernels(loaded)


@needs_compiler
def test_without_optimisation_and_instruction_sets(quick):
    """The generic code: no AVX on x86."""
    check_kernels(kernels.Kernels(quick))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", [*(variant.name for variant in variants()), "baseline"])
def test_other_instruction_sets(fresh, name):
    """What this machine can run of what a wheel has, and what a compiler makes by itself."""
    of = next((variant for variant in variants() if variant.name == name), None)
    if of is not None and of not in runnable(loader.process.probe()):
        pytest.skip(f"this machine cannot run {name}")
    check_kernels(kernels.Kernels(build(flags=COMMON if of is None else of.flags)), rows=300)


def test_nothing_is_compiled_to_say_the_version(fresh, monkeypatch):
    monkeypatch.delenv("PREFOLD_ISA", raising=False)
    loader.process = KernelLoader(libraries=fresh / "none", build=Mock())
    done = CliRunner().invoke(main, ["--version"])
    executor = f"Executor: native; PyTorch {torch.__version__} for models that it lacks"
    assert done.stdout.splitlines() == [f"prefold {__version__}", f"CPU kernels: {FIRST_USE}", executor]
    assert not loader.process.build.called
    monkeypatch.setenv("PREFOLD_KERNELS", "0")
    kernels_line, executor = said_of_the_version().splitlines()[1:]
    assert kernels_line.startswith("CPU kernels: PyTorch: ") and executor == f"Executor: PyTorch {torch.__version__}"


def test_the_version_without_pytorch_names_the_remedies(tmp_path):
    """In a process that finds click, and no other package."""
    (tmp_path / "click").symlink_to(Path(click.__file__).parent)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    for switch, words in (("1", "native (PyTorch, for GPUs and training"), ("0", "none: install a C++ compiler")):
        environment = os.environ | {"PYTHONPATH": path, "PREFOLD_KERNELS": switch}
        command = [sys.executable, "-S", "-m", "prefold", "--version"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert f"Executor: {words}" in done.stdout and "pip install 'prefold[torch]'" in done.stdout


def said_of_the_version() -> str:
    return CliRunner().invoke(main, ["--version"]).stdout


# ------------------------------------------------------------------------------------------------ a wheel's libraries


@pytest.fixture
def wheel(fresh, quick, no_compiler, monkeypatch):
    """A wheel whose libraries are copies of one, for a CPU that runs all variants of its kind."""
    folder = fresh / "lib"
    folder.mkdir()
    monkeypatch.delenv("PREFOLD_ISA", raising=False)
    loader.process = KernelLoader(libraries=folder, probe=lambda: -1)
    (folder / "probe.so").write_bytes(b"")
    for variant in variants():
        shutil.copy(quick, folder / variant.library)
    return folder


@needs_compiler
def test_the_best_library_of_a_wheel_is_taken_without_a_compiler(wheel):
    assert kernels.foreseen(loader.process.installed) == f"from the wheel: {variants()[0].name}"
    check_kernels(kernels.load())
    assert kernels.status() == f"from the wheel: {variants()[0].name}"
    loader.process = KernelLoader(libraries=wheel, probe=lambda: 0b1)
    kernels.load()
    assert kernels.status() == f"from the wheel: {runnable(0b1)[0].name}"


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: b"not a library", lambda data: data[:100_000]], ids=["other", "cut"])
def test_a_damaged_library_of_a_wheel_is_passed_over_with_a_warning(wheel, damage):
    if len(variants()) < 3:
        pytest.skip("there are too few variants")
    best, second, third, *_ = variants()
    for variant in (best, second):
        path = wheel / variant.library
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match="cannot be loaded, so others are used; install prefold again") as seen:
        check_kernels(kernels.load())
    assert len(seen) == 1 and kernels.status() == f"from the wheel: {third.name}"
    assert best.library in str(seen[0].message) and second.library in str(seen[0].message)


@needs_compiler
def test_libraries_of_another_interface_are_refused_with_one_warning(wheel, monkeypatch):
    """Then the kernels are compiled: here again by a build of another interface, which is a warning of its own."""
    monkeypatch.setitem(interface.FUNCTIONS, "prefold_rope_float32", ":pppqqqqffi")
    build_one = Mock(return_value=wheel / variants()[0].library)
    with pytest.warns(RuntimeWarning) as seen:
        assert KernelLoader(libraries=wheel, probe=lambda: -1, build=build_one).load().kernels is None
    message = str(seen[0].message)
    build_one.assert_called_once_with(flags=NATIVE)
    assert len(seen) == 2 and "runs without its compiled kernels" in str(seen[1].message)
    assert "do not agree on prefold_rope_float32" in message and "install prefold again" in message
    assert variants()[0].library in message


@needs_compiler
def test_a_compiled_library_of_another_interface_is_not_compiled_again(fresh, quick, monkeypatch):
    monkeypatch.delenv("PREFOLD_ISA", raising=False)
    monkeypatch.setitem(interface.CONSTANTS, "PANEL", 64)

    def build_once(flags, again=False):
        assert not again
        return quick

    with pytest.warns(RuntimeWarning, match="do not agree on PANEL; .*scripts/generate") as seen:
        assert KernelLoader(libraries=fresh / "none", build=build_once).load().kernels is None
    assert len(seen) == 1


@needs_compiler
def test_a_damaged_probe_of_a_wheel_is_a_warning(wheel):
    with pytest.warns(RuntimeWarning) as seen:
        assert KernelLoader(libraries=wheel).load().kernels is None
    assert "probe.so: file too short" in str(seen[0].message) and len(seen) == 2  # the other: there is no compiler


@needs_compiler
@pytest.mark.parametrize("bits", [-1, 0])
def test_a_variant_may_be_forced(wheel, monkeypatch, bits):
    loader.process = KernelLoader(libraries=wheel, probe=lambda: bits)
    worst = variants()[-1]
    monkeypatch.setenv("PREFOLD_ISA", worst.name)
    if worst in runnable(bits):
        kernels.load()
        assert kernels.status() == f"from the wheel: {worst.name}"
    else:
        with pytest.warns(RuntimeWarning) as seen:
            kernels.load()
        assert f"PREFOLD_ISA is '{worst.name}', and is ignored: this CPU" in str(seen[1].message)
        assert "kernels in use instead: PyTorch" in str(seen[1].message) and len(seen) == 2
        assert "no C++ compiler" in kernels.status()


@needs_compiler
def test_a_variant_that_a_wheel_lacks_is_named_with_what_it_has_and_what_is_used(wheel, monkeypatch):
    best, *others = variants()
    for variant in others:
        (wheel / variant.library).unlink()
    monkeypatch.setenv("PREFOLD_ISA", others[-1].name)
    with pytest.warns(RuntimeWarning) as seen:
        assert kernels.load() is not None
    message = str(seen[0].message)
    assert len(seen) == 1 and message.startswith(f"PREFOLD_ISA is '{others[-1].name}', and is ignored")
    assert f"the wheel has only {best.name}, and it cannot be compiled: no C++ compiler found" in message
    assert message.endswith(f"kernels in use instead: from the wheel: {best.name}")


@needs_compiler
def test_a_variant_that_does_not_exist_is_named_and_ignored(wheel, monkeypatch):
    monkeypatch.setenv("PREFOLD_ISA", "sse9")
    with pytest.warns(RuntimeWarning, match=f"PREFOLD_ISA is 'sse9'.*one of {variants()[0].name}"):
        kernels.load()
    assert kernels.status() == f"from the wheel: {variants()[0].name}"


@pytest.mark.slow
@needs_compiler
def test_a_wheel_runs_where_there_is_no_compiler(tmp_path):
    """It is built of a copy, with the variants of this machine, and loaded by a process that finds no compiler."""
    root, source = Path(__file__).parents[2], tmp_path / "source"
    shutil.copytree(root / "prefold", source / "prefold", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(source)], check=True, env=os.environ | {"PREFOLD_WHEEL": "1"})
    (made,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in made.name and "-any" not in made.name
    zipfile.ZipFile(made).extractall(tmp_path / "site")
    code = "from prefold import kernels; kernels.load(); print(kernels.status())"
    plain = {name: value for name, value in os.environ.items() if name not in ("CXX", "PREFOLD_ISA", "PREFOLD_KERNELS")}
    plain |= {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "site"), "PREFOLD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=plain, cwd=tmp_path
    )
    assert done.stdout.startswith("from the wheel: ") and not done.stderr and not (tmp_path / "cache").exists()
