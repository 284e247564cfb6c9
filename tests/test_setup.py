"""scripts/setup, with an environment that only notes what would be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def setup(tmp_path):
    """setup("base", TORCH=..., EXTRAS=...) -> what pip is told to install."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup").write_text((ROOT / "scripts" / "setup").read_text())
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    told = tmp_path / "told"
    for name, text in (("python", "exit 0"), ("pip", f'echo "$@" >> {told}')):
        path = tmp_path / ".venv" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def call(*arguments, **settings):
        told.write_text("")
        plain = {name: value for name, value in os.environ.items() if name not in ("TORCH", "EXTRAS")}
        command = ["bash", str(tmp_path / "scripts" / "setup"), *arguments]
        subprocess.run(command, env=plain | settings, check=True, capture_output=True)
        return [line.removeprefix("install --quiet ") for line in told.read_text().splitlines()]

    return call


def test_settings_that_are_given_hold_where_there_is_an_environment_already(setup):
    assert setup() == ["-e .[dev]"]  # a torch is there
    assert setup() == []
    assert setup(TORCH="torch==1 --index-url x") == ["torch==1 --index-url x", "-e .[dev]"]
    assert setup(TORCH="torch==1 --index-url x") == []
    assert setup(EXTRAS="ray") == ["-e .[ray]"]
    assert setup(TORCH="torch==1 --index-url x") != []  # what was installed last need not be that any more


def test_a_call_without_settings_takes_what_there_is(setup, tmp_path):
    assert setup(TORCH="torch==1", EXTRAS="ray") == ["torch==1", "-e .[ray]"]
    for _ in range(2):  # as scripts/test and scripts/demo call it
        assert setup() == []
        assert setup(TORCH="torch==1", EXTRAS="ray") == []
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'another'\n")
    assert setup() == ["-e .[dev]"]


def test_the_demo_takes_less_than_the_tests_and_both_run_in_either_order(setup, tmp_path):
    assert setup("base") == ["-e ."]
    assert setup("base") == []
    assert setup() == ["-e .[dev]"]
    assert setup() == setup("base") == []  # the demo runs with more as well
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'another'\n")
    assert setup("base") == ["-e ."] and setup(EXTRAS="ray") == ["-e .[ray]"]
    assert setup() == setup("base") == []
    scripts = {name: (ROOT / "scripts" / name).read_text() for name in ("demo", "check", "test")}
    assert "\nscripts/setup base\n" in scripts.pop("demo")
    assert all("\nscripts/setup\n" in script for script in scripts.values())
    assert "\nscripts/setup bare\n" in scripts["test"] and "bare" not in scripts["check"]


def test_torch_is_installed_first_where_there_is_none(setup, tmp_path):
    (tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/sh\n[ "$2" != "import torch" ]\n')
    assert setup() == ["torch==2.13.0", "-e .[dev]"]


@pytest.fixture
def bare(setup, tmp_path):
    """The environment of `setup("bare")`, which this Python makes; pip still installs nothing."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    return tmp_path / ".venv" / "bare"


BARE = [
    "--python .venv/bare/bin/python install --quiet -r .venv/bare/dependencies.txt",
    "--python .venv/bare/extras/bin/python install --quiet -r .venv/bare/extras.txt",
]


def test_a_bare_environment_has_the_dependencies_and_another_one_the_extras(setup, bare):
    assert setup("bare") == BARE and setup("bare") == []
    dependencies, extras = ((bare / f"{name}.txt").read_text().splitlines() for name in ("dependencies", "extras"))
    assert any(line.startswith("numpy") for line in dependencies)
    assert {line for line in extras if line.startswith(("ray", "uvicorn", "pillow"))} >= {"ray>=2.40,<2.60"}
    assert not [line for line in (*dependencies, *extras) if line.startswith(("torch", "prefold", "transformers"))]
    (bare / "lib" / "marked.py").touch()
    (bare.parents[1] / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "\n")
    assert setup("bare") == BARE and not (bare / "lib" / "marked.py").exists(), "another pyproject.toml: made anew"


def test_the_extras_see_the_dependencies_and_neither_sees_pip(setup, bare):
    setup("bare")
    (package,) = bare.glob("lib/python*/site-packages")
    (package / "of_the_base.py").touch()
    look = "import importlib.util as u, sys; print(*(u.find_spec(name) is not None for name in ('of_the_base', 'pip')))"
    for python in (bare / "bin" / "python", bare / "extras" / "bin" / "python"):
        found = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True)
        assert found.stdout == "True False\n"


def test_a_bare_environment_that_was_interrupted_is_made_anew(setup, bare):
    pip = bare.parent / "bin" / "pip"
    working = pip.read_text()
    pip.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        setup("bare")
    assert bare.is_dir()
    pip.write_text(working)
    assert setup("bare") == BARE and setup("bare") == []
    (bare / "bin" / "python").unlink()  # its interpreter has gone
    assert setup("bare") == BARE
    assert setup("base") == ["-e ."] and setup("bare") == [], "either leaves the other alone"
