"""The files of deploy/ fit the server: the options of the example, the probes, the extras and the command of the
service. How PREFOLD_SERVE_* variables, the file and the command line override each other."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from prefold.cli import main

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
EXAMPLE = (DEPLOY / "prefold.toml").read_text(encoding="utf-8")
CONTAINERFILE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
SERVE = main.commands["serve"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("PREFOLD_SERVE_")]:
        monkeypatch.delenv(name)


def options(*arguments: str) -> dict[str, object]:
    """The options of `prefold serve` with these arguments, by the names of the parameters."""
    return SERVE.make_context("serve", list(arguments)).params


def test_the_example_has_every_option_with_its_default(tmp_path):
    """`scripts/generate --check` compares the file with the options; see test_task_options.py."""
    entries = re.findall(r"^#([a-z-]+) = (.*)$", EXAMPLE, re.M)
    names = {name for name, _ in entries}
    flags = [{flag[2:] for flag in one.opts if flag.startswith("--")} for one in SERVE.params]
    assert all(len(names & of) == 1 for of in flags if not of & {"config", "help"})
    assert len(entries) == len(names) > 40
    defaults = [f"{name} = {value}" for name, value in entries if not re.search("[A-Z]{3}|^[A-Z]", value)]
    assert len(defaults) > 25
    (tmp_path / "p.toml").write_text("\n".join(defaults))
    assert options("--config", str(tmp_path / "p.toml")) == options()
    assert tomllib.loads(EXAMPLE) == {}


def test_variables_override_the_file_and_the_command_line_overrides_both(tmp_path, monkeypatch):
    path = tmp_path / "p.toml"
    path.write_text('port = 1\nmax-n = 1\nmax-texts = 1\nserved-model-name = ["a", "b"]\ninsecure = true\n')
    monkeypatch.setenv("PREFOLD_SERVE_CONFIG", str(path))
    monkeypatch.setenv("PREFOLD_SERVE_PORT", "2")
    monkeypatch.setenv("PREFOLD_SERVE_MAX_N", "2")
    monkeypatch.setenv("PREFOLD_SERVE_INSECURE", "false")
    monkeypatch.setenv("PREFOLD_SERVE_MAX_BODY_BYTES", "1MiB")
    monkeypatch.setenv("PREFOLD_SERVE_DATA_DIR", "")  # counts as not set
    found = options("--port", "3")
    assert (found["port"], found["max_n"], found["max_texts"]) == (3, 2, 1)
    assert (found["insecure"], found["max_body_bytes"], found["data_dir"]) == (False, 1 << 20, None)
    assert found["served_names"] == ("a", "b")
    monkeypatch.setenv("PREFOLD_SERVE_SERVED_MODEL_NAME", "c d")
    assert options()["served_names"] == ("c", "d")
    other = tmp_path / "other.toml"
    other.write_text("max-texts = 9")
    assert options("--config", str(other))["max_texts"] == 9  # --config overrides PREFOLD_SERVE_CONFIG


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PREFOLD_SERVE_PROT", "1", "PREFOLD_SERVE_PROT: prefold serve has no option --prot; did you mean"
         " PREFOLD_SERVE_PORT? remove or rename the variable"),
        ("PREFOLD_SERVE_PORT", "tcp://10.0.0.1:80", "PREFOLD_SERVE_PORT='tcp://10.0.0.1:80': 'tcp://10.0.0.1:80' is"
         " not a valid whole number"),
        ("PREFOLD_SERVE_CACHE", "newest", "PREFOLD_SERVE_CACHE='newest': 'newest' is not one of"),
        ("PREFOLD_SERVE_CONFIG", "none.toml", "cannot read none.toml"),
    ],
)  # fmt: skip
def test_wrong_variables_are_errors_that_name_them(monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 1 and said in result.output, result.output


def test_the_container_installs_extras_that_exist_and_probes_a_path_that_the_server_has():
    extras = re.search(r"\.whl\)\[(.*)\]", CONTAINERFILE)[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "serve" in extras and {*extras} <= {*known}
    assert not any("torch" in line for extra in extras for line in known[extra])
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", CONTAINERFILE, re.M)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
    *_, probe = json.loads(re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", CONTAINERFILE, re.M)[1])
    compile(probe, "HEALTHCHECK", "exec")
    assert "/livez" in probe
    flags = {flag[2:].replace("-", "_").upper() for one in SERVE.params for flag in one.opts}
    assert {*re.findall(r"PREFOLD_SERVE_(\w+)", CONTAINERFILE)} <= flags
    assert "USER 10001" in CONTAINERFILE and CONTAINERFILE.index("USER") < CONTAINERFILE.index("ENTRYPOINT")
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.M)[1])
    assert entry == ["prefold", "serve"]


def test_the_service_runs_a_command_that_parses(tmp_path):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "prefold.service", encoding="utf-8")
    service = unit["Service"]
    program, command, flag, path = shlex.split(service["ExecStart"])
    assert Path(program).name == "prefold" and (command, flag) == ("serve", "--config")
    (tmp_path / Path(path).name).write_text(EXAMPLE)
    drain = options(flag, str(tmp_path / Path(path).name))["drain_seconds"]
    assert drain < float(service["TimeoutStopSec"])
    assert isinstance(SERVE, click.Command) and service["User"] != "root"
