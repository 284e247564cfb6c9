"""Runs jobs and servers as processes of their own, and writes down what they answer."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked import begin

from .exchanges import SERVERS, Exchange
from .jobs import Job, write_inputs
from .models import ADAPTERS, MODELS, Models
from .normal import joined_events, normal

__all__ = ["Recorder"]

ROOT = Path(__file__).parents[2]
SECONDS = 600  # that anything may take: a guard
# Of a response, since they say when and how it was sent.
_HEADERS = ("date", "server", "content-length", "connection", "transfer-encoding", "last-modified", "etag")
# Lines of standard error that say how far a job is, or come from others.
_PASSING = re.compile(r"prefold: (loading|reading|[\d,]+(/[\d,]+)? records,)|(?!prefold|  |error|Error|Usage)")


class Recorder:
    """Makes a recording in a folder.

    out   the folder of the recording
    work  a folder for models, inputs and outputs
    """

    def __init__(self, out: Path, work: Path):
        self._out, self._work = out, work
        self._models = Models(work / "models")
        write_inputs(work / "inputs")

    def _write(self, name: str, text: str) -> None:
        path = self._out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(normal(text, {str(self._work): "<folder>", str(ROOT): "<root>"}), encoding="utf-8")

    def _filled(self, argument: str) -> str:
        """Returns an argument with the folder of a model or an adapter in place of {its name}."""
        names = "|".join((*MODELS, *ADAPTERS))
        return re.sub(rf"{{({names})}}", lambda match: str(self._models.path(match[1])), argument)

    # -------------------------------------------------------------------------------------------------- jobs

    def job(self, job: Job) -> None:
        """Runs a job, and writes down its exit statuses, what it said, and its output."""
        folder = self._work / "jobs" / job.name
        folder.mkdir(parents=True)
        if job.server is None:
            return self._job(job, folder, "")
        with self._serving(job.server) as url:
            self._job(job, folder, url)

    def _job(self, job: Job, folder: Path, url: str) -> None:
        found = []
        for command in job.commands:
            arguments = [self._filled(one).replace("{url}", url) for one in command]
            if job.killed_after and not found:
                found.append(f"killed after {job.killed_after} lines of input")
                self._kill(arguments, folder, job.killed_after)
                continue
            process = begin(arguments, folder, str(self._work / "inputs" / job.input) if job.input else os.devnull)
            process.join(SECONDS)
            assert process.exitcode is not None, f"{job.name} does not end"
            said = [line for line in (folder / "stderr").read_text().splitlines() if not _PASSING.match(line)]
            found += [f"$ {' '.join(command)}", f"status {process.exitcode}", *said, (folder / "stdout").read_text()]
        text = "\n".join(found) + "".join(f"\n--- {name}\n{contents(folder / name)}" for name in job.outputs)
        for field in job.without:
            text = re.sub(rf', "{field}": \d+', "", text)
        self._write(f"jobs/{job.name}", text)

    def _kill(self, arguments: list[str], folder: Path, lines: int) -> None:
        """Gives a job the first lines of its standard input, and kills it once it has answered some of them."""
        os.mkfifo(folder / "stdin")
        process = begin(arguments, folder, str(folder / "stdin"))
        texts = (self._work / "inputs" / "texts.jsonl").read_bytes().splitlines(keepends=True)
        written = folder / f"{arguments[-1]}.partial"
        with open(folder / "stdin", "wb", buffering=0) as pipe:
            pipe.write(b"".join(texts[:lines]))
            until(lambda: written.exists() and written.read_bytes().count(b"\n") > 2)
            assert process.is_alive(), "the job ended before it was killed"
            process.kill()
            process.join()

    # --------------------------------------------------------------------------------------------- exchanges

    def exchanges(self, server: str, chosen: list[str]) -> None:
        """Asks a server, and writes down each answer whose name is chosen."""
        table = SERVERS[server].exchanges
        # Those before them are asked too: what they left in the cache, and in files, shows in answers.
        last = max(number for number, one in enumerate(table) if one.name in chosen)
        kept: dict[str, str] = {}
        with self._serving(server) as url:
            for one in table[: last + 1]:
                text = self._exchange(url, one, kept)
                if one.name in chosen:
                    self._write(f"{server}/{one.name}", text)

    def _exchange(self, url: str, one: Exchange, kept: dict[str, str]) -> str:
        end = time.monotonic() + SECONDS
        while True:
            status, headers, body = ask(url, one, kept)
            if one.until is None or re.search(one.until, body):
                break
            assert time.monotonic() < end, f"{one.name} did not come to {one.until}: {body}"
            time.sleep(0.05)
        for name, field in one.keep.items():
            kept[name] = json.loads(body).get(field) or "nothing"
        if "event-stream" in headers.get("content-type", ""):
            body = joined_events(body)
        if one.rough:
            body = re.sub(r"-?\d+\.\d+(e-?\d+)?", '"<number>"', "\n".join(sorted(body.splitlines(), key=custom_id)))
            body = re.sub(r'("embedding": )"[^"]*"', r'\1"<numbers>"', body)
        lines = [f"{one.method} {one.path}", f"status {status}", *(f"{n}: {v}" for n, v in sorted(headers.items()))]
        return "\n".join(lines) + "\n\n" + body

    @contextmanager
    def _serving(self, name: str) -> Iterator[str]:
        """Runs a server, and yields its address once it is ready. It is asked to end, and has to do so well."""
        server = SERVERS[name]
        folder = self._work / "servers" / f"{name}-{time.monotonic_ns()}"
        folder.mkdir(parents=True)
        for path, text in server.files.items():
            (folder / path).write_text(text)
        log = folder / "stderr"
        process = begin(["serve", "--port", "0", *map(self._filled, server.arguments)], folder)

        def says(words: str) -> bool:
            return not process.is_alive() or (log.exists() and words in log.read_text())

        try:
            until(lambda: says("ready after"))
            match = re.search(r"ready after .* (http://\S+:\d+)", log.read_text())
            assert match, log.read_text()
            yield match[1]
            process.terminate()
            process.join(SECONDS)
            assert process.exitcode == 0, log.read_text()
        finally:
            process.kill()
            process.join()


def custom_id(line: str) -> str:
    """Returns the id of a batch's line."""
    return str(json.loads(line)["custom_id"])


def until(done: Any) -> None:
    """Waits until something is so."""
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end, "it did not become so in time"
        time.sleep(0.05)


def ask(url: str, one: Exchange, kept: dict[str, str]) -> tuple[int, dict[str, str], str]:
    """Returns (status, headers, body) of the answer to a request. kept: {name: what stands for <name> in it}"""

    def filled(text: str) -> str:
        for name, value in kept.items():
            text = text.replace(f"<{name}>", value)
        return text

    headers, data = dict(one.headers), one.body
    if data is not None and not isinstance(data, bytes):
        headers = {"content-type": "application/json"} | headers
        data = json.dumps(data)
    if isinstance(data, str):
        data = filled(data).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)
    try:
        connection.request(one.method, filled(one.path), data, headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders() if name.lower() not in _HEADERS}
        return answer.status, found, answer.read().decode(errors="backslashreplace")
    finally:
        connection.close()


def contents(path: Path) -> str:
    """Returns what a file of output holds, as text."""
    if not path.exists():
        return "there is no such file"
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode()
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        rows = [json.dumps(row, default=str, ensure_ascii=False) for row in table.to_pylist()]
        return "\n".join([*map(str, table.schema), *rows, ""])
    return path.read_text(encoding="utf-8")
