"""Folders of spools go with their process: at once, or when the next spool is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prefold.stream import Spool
from prefold.types import Request

pytest.importorskip("fcntl")
OWNER = """
import sys, time
import numpy as np
from prefold.stream import Spool
from prefold.types import Request
spool = Spool(memory_bytes=1, directory=sys.argv[1])
spool.add(Request(np.array([1, 2, 3], np.int32)))
print("ready", flush=True)
time.sleep(100)
"""


def spill(folder):
    """A spool that has written to disk."""
    spool = Spool(memory_bytes=1, directory=folder)
    spool.add(Request(np.array([1, 2], np.int32)))
    return spool


def left(folder):
    return sorted(folder.glob("prefold-spool-*"))


@pytest.fixture
def owner(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_folder_goes_when_its_process_was_killed_and_not_before(tmp_path, owner):
    (first,) = left(tmp_path)
    with spill(tmp_path):
        assert first in left(tmp_path) and len(left(tmp_path)) == 2
    assert left(tmp_path) == [first]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert left(tmp_path) == [first]
    with spill(tmp_path) as spool:
        assert len(left(tmp_path)) == 1 and not first.exists()
        spill(tmp_path).close()
        assert [window.num_requests for window in spool.windows(max_tokens=9)] == [1]
    assert not left(tmp_path)


def dead(folder, name="prefold-spool-dead"):
    """A folder as a killed process leaves it."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "0.run").write_bytes(b"x")
    (path / "lock").touch()
    return path


def test_what_is_not_a_dead_spools_is_left_alone(tmp_path):
    parent = tmp_path / "parent"
    away = dead(tmp_path, "away")
    no_lock = dead(parent, "prefold-spool-no-lock")
    (no_lock / "lock").unlink()
    pipe = dead(parent, "prefold-spool-pipe")
    (pipe / "lock").unlink()
    os.mkfifo(pipe / "lock")  # one that waited for a writer would wait for ever
    link = dead(parent, "prefold-spool-link")
    (link / "lock").unlink()
    (link / "lock").symlink_to(away / "lock")
    nested = dead(parent, "prefold-spool-nested")
    (nested / "more").mkdir()
    (parent / "prefold-spool-away").symlink_to(away)
    (parent / "prefold-spool-file").touch()
    others = [dead(parent, "prefold-spool-other"), dead(parent, "prefold-spool-others-lock") / "lock"]
    if os.getuid() == 0:
        for path in others:
            os.chown(path, 12345, 12345)
    gone = dead(parent, "prefold-spool-gone")
    spill(parent).close()
    assert not gone.exists()
    assert (away / "0.run").exists() and (away / "lock").exists()
    for path in (no_lock, pipe, link, *([] if os.getuid() else [others[0], others[1].parent])):
        assert (path / "0.run").exists()
    assert (nested / "more").exists() and (nested / "lock").exists()


def test_without_locks_nothing_is_swept(tmp_path, monkeypatch):
    path = dead(tmp_path)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with spill(tmp_path):
        (own,) = (folder for folder in left(tmp_path) if folder != path)
        assert not (own / "lock").exists()
    assert left(tmp_path) == [path]
    monkeypatch.undo()
    spill(tmp_path).close()
    assert not path.exists()
