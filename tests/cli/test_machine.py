"""What a machine refuses is one message and the right status, and no traceback; the same command goes on after it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from prefold.cli import main, process
from prefold.cli.models import models

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def files_up_to(size):
    """Any file that grows beyond so many bytes is refused by the system, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path, count=40):
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"text": f"{i} text", "k": f"k{i}" * 9}) + "\n" if i % 10 else "nonsense\n")


def one_message(result):
    lines = [line for line in result.stderr.splitlines() if not line.startswith("prefold: resuming")]
    assert len(lines) == 1 and lines[0].startswith("prefold: cannot write"), result.stderr
    return lines[0]


def content(path):
    """Returns the text of an output with numbers of four digits: what a job that was broken off had done by then, which
    is a matter of time, changes which rows run together, and so the last digits. A Parquet file's text is its rows."""
    if path.suffix == ".parquet":
        text = str(pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist())
    else:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.4f}", text)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "out.jsonl.gz"])
def test_a_disk_that_is_full_at_any_moment_is_one_message_and_the_job_goes_on(prefold, tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    write(tmp_path / "in.jsonl")
    arguments = ["embed", "in.jsonl", "--prompt", "text", "--keep", "k", "--dimensions", 2, "--quiet", "-o", name]
    assert prefold(*arguments[:-1], "whole" + name, "--keep-order").exit_code == 3
    want = content(tmp_path / ("whole" + name))
    codes = []
    for size in (0, 100, 700, 1500, 3500, 4500, 6000, 100_000):
        with files_up_to(size):
            done = prefold(*arguments, "--keep-order")
        codes.append(done.exit_code)
        assert not list(tmp_path.glob("*.tmp"))
        if done.exit_code == 1:
            said = one_message(done)
            assert "File too large" in said and "same command" in said
            assert not (tmp_path / name).exists() or name.endswith("jsonl")
    assert codes[0] == 1 and codes[-1] == 3 and codes.count(1) >= 4
    assert content(tmp_path / name) == want
    assert sorted(p.name for p in tmp_path.glob("out*")) == [name, f"{name}.journal"]


def test_a_report_that_cannot_be_written_is_one_message(prefold, tmp_path):
    write(tmp_path / "in.jsonl")
    with files_up_to(9000):
        done = prefold("embed", "in.jsonl", "--prompt", "text", "--dimensions", 1, "-o", "out.jsonl", "--quiet",
                       "--report", "r.html")  # fmt: skip
    assert done.exit_code == 1 and "cannot write the report r.html: File too large" in one_message(done)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 40
    assert sorted(p.name for p in tmp_path.glob("r.*")) == []


def test_places_that_cannot_be_written_are_refused_before_anything_is_read(prefold, tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    before = sorted(tmp_path.iterdir())
    for option in ("-o", "--report"):
        for overwrite in ([], ["--overwrite", "-o", "x.jsonl"]):
            done = prefold("embed", "in.jsonl", "--prompt", "text", *overwrite, option, "folder.jsonl")
            assert done.exit_code == 1 and "folder.jsonl is a folder" in done.stderr and "replaces" not in done.stderr
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode: False)  # a read-only file system, for those who may all
            done = prefold("embed", "in.jsonl", "--prompt", "text", option, "x.jsonl")
            assert done.exit_code == 1 and "is not writable" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "option",
    [
        ["--dtype", "float8"],
        ["--device", "tpu"],
        ["--sharing", "some"],
        ["--max-batch-rows", "x"],
        ["--backend", "vllm", "--url", "http://localhost:1"],
        ["--tensor-parallel", "99"],
    ],
)
def test_a_wrong_command_leaves_the_old_output_and_no_journal(prefold, tmp_path, option):
    write(tmp_path / "in.jsonl")
    (tmp_path / "old.jsonl").write_text("precious\n")
    for name in ("old.jsonl", "new.jsonl"):
        done = prefold("embed", "in.jsonl", "--prompt", "text", "-o", name, "--overwrite", *option)
        assert done.exit_code == (1 if "99" in option else 2) and "Traceback" not in done.output
    assert (tmp_path / "old.jsonl").read_text() == "precious\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "old.jsonl"]


PROGRAM = f"{sys.executable} -c 'from prefold.cli import main; main()'"


def shell(command, folder, environment):
    done = subprocess.run(
        command.replace("prefold", PROGRAM, 1), shell=True, cwd=folder, env=environment, capture_output=True,
        text=True, check=False, executable="/bin/bash",
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done


def test_standard_streams_that_are_full_or_closed(model, tmp_path, environment):
    write(tmp_path / "in.jsonl", 5)
    job = f"prefold embed in.jsonl --prompt text --dimensions 1 -m {model} --quiet"
    done = shell(f"{job} > /dev/full", tmp_path, environment)
    assert done.returncode == 1
    assert done.stderr == "prefold: cannot write standard output: No space left on device\n"
    done = shell(f"{job} >&-", tmp_path, environment)
    assert done.returncode == 1 and done.stderr == "prefold: standard output is closed; add -o FILE\n"
    done = shell(f"prefold embed - --prompt text -m {model} <&-", tmp_path, environment)
    assert done.returncode == 1 and "standard input is closed" in done.stderr
    done = shell(f"{job.removesuffix('--quiet')} -o out.jsonl <&- >&- 2>&-", tmp_path, environment)
    assert done.returncode == 3 and len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
    done = shell(f"{job.removesuffix('--quiet')} -o more.jsonl 2> /dev/full", tmp_path, environment)
    assert done.returncode == 3 and len((tmp_path / "more.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    "command", ["--help", *(pytest.param(c, marks=pytest.mark.slow) for c in ("models", "--version"))]
)
def test_other_commands_into_a_full_or_closed_output(tmp_path, environment, command):
    for where, why in (("> /dev/full", "No space left on device"), (">&-", "standard output is closed")):
        done = shell(f"prefold {command} {where}", tmp_path, environment)
        assert done.returncode == 1 and done.stderr == f"prefold: system error: {why}\n"
    assert shell(f"set -o pipefail; prefold {command} | head -c 1", tmp_path, environment).stderr == ""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_outside_of_a_job_removes_temporary_folders(tmp_path, environment, name):
    code = (
        "import sys, time, tempfile, click\n"
        "from prefold.cli.process import guarded\n"
        f"with guarded():\n"
        f"    folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n" and len(list(tmp_path.iterdir())) == 1
    time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    assert process.wait(60) == 128 + getattr(signal, name)
    process.stdout.close()
    assert not list(tmp_path.iterdir())


LEAVING = """
import atexit, os, signal, sys, time
import click
from prefold import cli
from prefold.cli import process

@cli.main.command()
@click.option("--status", type=int)
def end(status):
    if status is None:
        signal.raise_signal(signal.SIGTERM)
    sys.exit(status)

def once_more():
    signal.raise_signal(signal.SIGINT)
    os.write(1, b"cleaned up")

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT, write=os.write):
        kill(pid, number)
        write(1, b", taken down")

process.ENDING_SECONDS = float(os.environ["SECONDS"])
atexit.register(once_more)
last = Last()
cli.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of Windows end a process at once")
@pytest.mark.parametrize("status", [None, 0, 3])
def test_a_signal_while_the_process_leaves_changes_nothing(environment, status):
    arguments = ["end"] if status is None else ["end", f"--status={status}"]
    command = [sys.executable, "-c", LEAVING, *arguments]
    done = subprocess.run(command, env=environment | {"SECONDS": "100"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == (143 if status is None else status)
    assert done.stdout == "cleaned up, taken down"
    assert done.stderr == ("prefold: interrupted\n" if status is None else "")


@pytest.mark.skipif(os.name == "nt", reason="signals of Windows end a process at once")
def test_a_late_signal_ends_a_process_that_takes_long_to_leave(environment):
    command = [sys.executable, "-c", LEAVING, "end"]
    done = subprocess.run(command, env=environment | {"SECONDS": "0"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "prefold: interrupted\n")


def test_a_second_signal_does_not_disturb_what_cleans_up():
    before, cleaned = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as ended, process.guarded():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append("up")
    assert (ended.value.code, cleaned) == (143, ["up"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("method", ["parse_args", "invoke"])
def test_ctrl_c_before_a_job_runs_is_an_interruption(tmp_path, environment, method):
    code = (
        "import signal, click, prefold.cli\n"
        f"click.Group.{method} = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        "prefold.cli.main(['models'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 130 and "Aborted" not in done.stderr and "Traceback" not in done.stderr


def test_a_signal_while_a_class_is_made_ends_the_command_as_any_other(monkeypatch, capsys):
    """Python 3.11 raises a RuntimeError in place of what `__set_name__` raises, also where a signal came there."""

    class Interrupting:
        def __set_name__(self, owner, name):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(models, "callback", lambda: type("Made", (), {"x": Interrupting()}))
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "prefold: interrupted\n"
