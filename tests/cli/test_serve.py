"""`prefold serve` as a process: its configuration, its signals, its errors."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from click.testing import CliRunner
from tiny import tiny_checkpoint

from prefold import Calibration
from prefold.cli import main


def start(*arguments):
    command = [sys.executable, "-m", "prefold", "serve", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    found = re.search(r"http://\S+:\d+", line)
    assert found, line + process.stderr.read()
    return process, found[0]


def test_a_server_from_beginning_to_end(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "serve.toml").write_text(
        f'model = "{folder}"\nport = 0\nserved-model-name = ["tiny"]\ndtype = "float32"\n'
        'kv-memory = "8MiB"\nthreads = 1\n'
    )
    process, url = start("--config", str(tmp_path / "serve.toml"))
    try:
        assert httpx.get(f"{url}/health").status_code == 503  # bound at once, and loading
        end = time.monotonic() + 60
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        body = {"prompt": "the yes", "max_tokens": 400, "ignore_eos": True, "stream": True}
        texts = []
        asking = threading.Thread(
            target=lambda: texts.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).text)
        )
        asking.start()
        while not re.search(r"num_requests_running{.*} 1\.0", httpx.get(f"{url}/metrics").text):
            assert time.monotonic() < end
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert texts[0].endswith("data: [DONE]\n\n") and "error" not in texts[0]
        assert process.wait(60) == 0
        said = process.stderr.read()
        assert "Traceback" not in said
        stamped = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} prefold: (.*)")
        told = [stamped.fullmatch(line)[1] for line in said.splitlines()]
        assert [line.split(" ")[0] for line in told] == ["ready", "each", "draining:", "the"]
        assert told[-1] == "the server ends; all requests have been answered"
    finally:
        process.kill()
        process.stderr.close()


def test_a_model_that_cannot_be_loaded(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    process, _ = start("--port", "0", "-m", str(folder))
    with process.stderr:
        assert process.wait(60) == 1
        said = process.stderr.read()
    assert "Traceback" not in said and str(tmp_path) in said


def test_a_calibration_of_another_model_ends_the_server(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    Calibration(questions={}, model="other", model_digest="d", prompt="p").save(tmp_path / "c.json")
    process, _ = start("--port", "0", "-m", str(folder), "--calibration", str(tmp_path / "c.json"))
    with process.stderr:
        assert process.wait(60) == 1
        said = process.stderr.read()
    assert "Traceback" not in said and "the calibration was made with another model (other" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-m", "typo"], "there is no model 'typo'"),
        (["-m", "."], "contains neither a config.json nor a .gguf file"),
        (["-m", "tiny", "--adapter", "mine=typo"], "--adapter mine: there is no folder typo"),
    ],
)
def test_names_are_looked_up_before_the_server_says_that_it_listens(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["serve", "--port", "0", *options])
    assert result.exit_code == 1 and said in result.output and "listening" not in result.output, result.output


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('port = "eight"', "serve.toml: port = 'eight': 'eight' is not a valid whole number"),
        ('cache = "newest"', "serve.toml: cache = 'newest': "),
        ('max-body-bytes = "many"', "serve.toml: max-body-bytes = 'many': "),
        ('adapter = "mine"', "--adapter 'mine': write NAME=FOLDER"),
        ("no-such = 1", "there is no option 'no-such'; prefold serve --help-all lists the options"),
        ("prot = 1", "there is no option 'prot'; did you mean port? prefold serve --help-all lists"),
        ("port = [", "serve.toml is not valid TOML"),
        ("port = 100000", "port"),
        ('host = "0.0.0.0"', "--insecure"),
        ('api-keys = "none.toml"', "cannot read none.toml: No such file or directory"),
    ],
)
def test_wrong_configurations(tmp_path, config, said):
    path = tmp_path / "serve.toml"
    path.write_text(config)
    result = CliRunner().invoke(main, ["serve", "--config", str(path)])
    assert result.exit_code in (1, 2) and said in result.output, result.output
