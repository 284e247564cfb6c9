"""What an installation compiles, and which library is used then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

from prefold import kernels
from prefold.kernels.build import fingerprint, install, library_name
from prefold.kernels.compile import NATIVE, BuildError, find_compiler, runnable, variants
from prefold.kernels.installed import Installed
from prefold.kernels.loader import KernelLoader

ROOT = Path(__file__).parents[2]
NAMES = ("CXX", "PREFOLD_COMPILER", "PREFOLD_ISA", "PREFOLD_KERNELS", "PREFOLD_WHEEL")


@pytest.fixture(scope="module")
def mine() -> Path:
    """The library that this process uses, which stands for those that an installation compiles."""
    if (used := kernels.load()) is None:
        pytest.skip("no kernels here")
    return used.path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what setup.py needs, so that nothing is written into this one."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "prefold", copy / "prefold", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def machine(no_compiler, monkeypatch, tmp_path):
    """A machine without a compiler and with an empty cache. Returns the folder that installed libraries are for."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "lib"


@pytest.fixture
def compiler(machine, monkeypatch, tmp_path):
    """A compiler that writes files of one byte, and notes each call. Returns the notes."""
    program, noted = tmp_path / "a-compiler", tmp_path / "noted"
    lines = 'for word; do [ "$last" = -o ] && out=$word; last=$word; done', f'echo "$*" >> {noted}', 'printf x > "$out"'
    program.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    program.chmod(0o755)
    noted.touch()
    monkeypatch.setenv("CXX", str(program))
    return noted


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def use(folder: Path, library: Path, name: str) -> Path:
    """Install a copy of a library under this name."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(library, folder / name))


def test_an_installation_compiles_once_for_this_machine_and_removes_what_is_old(machine, compiler):
    machine.mkdir()
    for old in ("kernels-0123456789abcdef.so", "kernels-avx2.so", "probe.so"):
        (machine / old).touch()
    assert install(machine) == "the kernels are compiled for this machine"
    assert files(machine) == [library_name()]
    calls = compiler.read_text().splitlines()
    assert sum("attention.cpp" in call for call in calls) == 1 and all("-march=native" in call for call in calls)
    assert install(machine).startswith("the kernels are compiled") and compiler.read_text().splitlines() == calls


def test_a_library_in_the_cache_is_copied_and_no_compiler_is_needed(machine, tmp_path):
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels" / library_name()).write_text("a library")
    install(machine)
    assert (machine / library_name()).read_text() == "a library"


def test_an_installation_whose_sources_may_change_compiles_into_the_cache(machine, compiler, tmp_path):
    assert "in the cache folder" in install(None)
    assert files(tmp_path / "cache" / "kernels") == [library_name()]


def test_an_installation_for_every_cpu_compiles_all_variants(machine, compiler, monkeypatch):
    monkeypatch.setenv("PREFOLD_WHEEL", "1")
    machine.mkdir()
    (machine / library_name()).touch()
    install(machine)
    assert files(machine) == sorted(["probe.so", *(variant.library for variant in variants())])
    monkeypatch.delenv("CXX")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        install(machine)


def test_an_installation_without_a_compiler_says_so_and_succeeds(machine, monkeypatch, tmp_path):
    said = install(machine)
    assert "NOT compiled" in said and "no C++ compiler found" in said and "install prefold again" in said
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "NOT compiled" in install(machine) and "failed" in install(None)
    assert files(machine) == []


def test_an_installation_with_the_kernels_switched_off_compiles_nothing(machine, compiler, monkeypatch):
    install(machine)
    noted = compiler.read_text()
    monkeypatch.setenv("PREFOLD_KERNELS", "0")
    for folder in (machine, None):
        assert install(folder) == "PREFOLD_KERNELS=0: the kernels are not compiled"
    assert files(machine) == [] and compiler.read_text() == noted


def test_ziglang_where_it_is_asked_for(machine, no_compiler, compiler, monkeypatch):
    monkeypatch.setenv("PREFOLD_COMPILER", "zig")
    assert "the package ziglang is missing: pip install ziglang" in install(machine)
    no_compiler.add("ziglang")
    assert find_compiler() == (sys.executable, "-m", "ziglang", "c++")  # although there is another
    monkeypatch.setenv("PREFOLD_COMPILER", "rustc")
    assert "PREFOLD_COMPILER is 'rustc': write zig" in install(machine)
    assert compiler.read_text() == ""


def test_flags_of_single_sources_replace_others_and_change_the_name(machine, compiler):
    assert fingerprint(NATIVE) != fingerprint(NATIVE, own={"attention": ("-O1",)})
    install(machine)
    (attention,) = (call for call in compiler.read_text().splitlines() if "attention.cpp" in call)
    (blocks,) = (call for call in compiler.read_text().splitlines() if "blocks.cpp" in call)
    assert attention.rindex("-O2") > attention.rindex("-O3") and "-O2" not in blocks


class TestWhichIsUsed:
    @pytest.fixture(autouse=True)
    def library(self, mine, machine):
        self.library = mine

    def load(self, folder: Path, bits: int = -1) -> KernelLoader:
        made = KernelLoader(libraries=folder, probe=lambda: bits)
        foreseen = kernels.foreseen(made.installed)
        assert made.load().status == foreseen
        return made

    def test_the_library_of_this_machine_and_no_cache(self, machine, tmp_path):
        path = use(machine, self.library, library_name())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = self.load(machine)
        assert loaded.loaded.kernels.path == path and loaded.loaded.status == "compiled on this machine: native"
        assert not (tmp_path / "cache").exists()

    def test_it_goes_before_variants_and_these_go_with_native(self, machine, monkeypatch):
        for variant in variants():
            use(machine, self.library, variant.library)
        (machine / "probe.so").touch()
        assert self.load(machine).loaded.status == f"from the wheel: {variants()[0].name}"
        assert self.load(machine, 1).loaded.status == f"from the wheel: {runnable(1)[0].name}"
        native = use(machine, self.library, library_name())
        assert self.load(machine).loaded.kernels.path == native
        monkeypatch.setenv("PREFOLD_KERNELS", "native")
        assert self.load(machine).loaded.kernels.path == native

    def test_what_the_cache_has_or_nothing(self, machine, monkeypatch, tmp_path):
        with pytest.warns(RuntimeWarning, match="without its compiled kernels"):
            assert self.load(machine).loaded.status.startswith("PyTorch: no C++ compiler")
        kept = use(tmp_path / "cache" / "kernels", self.library, library_name())
        assert self.load(machine).loaded.kernels.path == kept
        monkeypatch.setenv("PREFOLD_KERNELS", "0")
        assert "switched off" in self.load(machine).loaded.status

    def test_a_variant_that_is_asked_for(self, machine, monkeypatch, tmp_path):
        use(machine, self.library, library_name())
        worst = variants()[-1]
        kept = use(tmp_path / "cache" / "kernels", self.library, library_name(worst.flags))
        monkeypatch.setenv("PREFOLD_ISA", worst.name)
        loaded = self.load(machine).loaded
        assert loaded.kernels.path == kept and loaded.status == f"compiled on this machine: {worst.name}"
        path = use(machine, self.library, worst.library)
        assert self.load(machine).loaded.kernels.path == path

    def test_one_that_was_compiled_for_another_cpu_is_never_loaded(self, machine):
        use(machine, self.library, "kernels-0123456789abcdef.so")
        with pytest.warns(RuntimeWarning, match="machine with another CPU.*PREFOLD_WHEEL=1") as seen:
            assert self.load(machine).loaded.kernels is None
        assert len(seen) == 1

    def test_a_damaged_one_is_a_warning_and_the_next_is_used(self, machine, tmp_path):
        use(machine, self.library, library_name()).write_bytes(b"not a library")
        kept = use(tmp_path / "cache" / "kernels", self.library, library_name())
        with pytest.warns(RuntimeWarning, match="installed kernels cannot be loaded.*install prefold again"):
            assert KernelLoader(libraries=machine).load().kernels.path == kept


def test_what_is_foreseen_of_names_that_do_not_exist(machine, monkeypatch):
    monkeypatch.setenv("PREFOLD_ISA", "sse9")
    assert kernels.foreseen(Installed(machine)).startswith("PREFOLD_ISA is 'sse9': it must be one of")


def test_pip_installs_the_library_for_this_machine(mine, source, compiler, tmp_path):
    """By a compiler that copies the library in use, into a wheel of this platform."""
    program = tmp_path / "a-compiler"
    program.write_text(program.read_text().replace('printf x > "$out"', f'/bin/cp {mine} "$out"'))
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"  # as pip does
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in made.name and "-any" not in made.name
    zipfile.ZipFile(made).extractall(tmp_path / "site")
    assert files(tmp_path / "site" / "prefold" / "kernels" / "lib") == [library_name()]
    code = "from prefold import kernels; print(kernels.foreseen()); kernels.load(); print(kernels.status())"
    plain = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=plain, cwd=tmp_path
    )
    assert done.stdout == "compiled on this machine: native\n" * 2 and not done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "settings", [{}, {"PREFOLD_COMPILER": "zig"}, {"PREFOLD_COMPILER": "zig", "PREFOLD_KERNELS": "0"}]
)
def test_pip_fetches_ziglang_if_it_is_to_compile(machine, source, settings):
    code = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=source, env=os.environ | settings
    )
    assert ("ziglang" in done.stdout) is (settings == {"PREFOLD_COMPILER": "zig"})
