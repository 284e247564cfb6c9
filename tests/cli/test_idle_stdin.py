"""A job that waits for standard input ends cleanly when it is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def written(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_a_signal_while_standard_input_is_idle(model, environment, tmp_path, number, options):
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    command = [sys.executable, "-m", "prefold", "embed", "-", "-m", model, "-o", str(out), *options]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as process:
        process.stdin.write(b'{"text": "yes"}\n')
        process.stdin.flush()
        # Without --stream nothing is written before the input has ended.
        wait_for(lambda: written(out) == 1 if options else journal.exists(), process)
        time.sleep(1)
        process.send_signal(number)
        process.wait(60)
        error = process.stderr.read().decode()
        process.stdin.close()
    assert process.returncode == 128 + number, error
    assert "Fatal Python error" not in error and "Traceback" not in error
    assert "finished records are written" in error
    assert written(out) == len(options)
