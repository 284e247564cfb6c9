"""The command line on a tiny random checkpoint."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from tiny import tiny_checkpoint

from prefold.cli import main


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
def prefold(model, tmp_path, monkeypatch):
    """prefold("rerank", ...) -> click's Result, in an empty folder, with the tiny model where none is named."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, input=None):
        arguments = [str(a) for a in arguments]
        if arguments[0] not in ("models", "--help") and "-m" not in arguments:
            arguments += ["-m", model]
        result = CliRunner().invoke(main, arguments, input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def lines():
    """The JSON lines of a file."""

    def read(path):
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    return read


@pytest.fixture
def environment():
    """For subprocesses: this source tree, one thread."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


SLOW = """
import time
from pathlib import Path
import prefold.jobs.output as output
from prefold.worker.torch.worker import TorchWorker

start, output.COMMIT_SECONDS = TorchWorker.start, 0.05


def slow(self, message, prepared=None):
    time.sleep(0.1 if Path("slow").exists() else 0)
    return start(self, message, prepared)


TorchWorker.start = slow
"""


@pytest.fixture
def slowed(tmp_path, environment):
    """The environment of jobs in this folder that take 0.1 s a step, as long as it has the file "slow": whoever
    interrupts such a job comes before its end, although it has few records."""
    (tmp_path / "slow_steps.py").write_text(SLOW)
    (tmp_path / "slow").touch()
    return environment | {"PREFOLD_PLUGINS": str(tmp_path / "slow_steps.py")}
