"""A backend that nobody knew of: one file, by --plugin or by an entry point, and jobs run on it."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from prefold import plugins
from prefold.cli import main
from prefold.cluster import backends
from prefold.cluster.backends import BACKENDS, backend_named, backend_names
from prefold.cluster.http_bodies import MESSAGES
from prefold.errors import InputError

TEXTS = ("abc", "abd", "x")
MIRROR = '''
import threading

from prefold.cluster.backends import BACKENDS, Backend
from prefold.cluster.replicas import ReplicaFacts, ReplicaReport, requests_of
from prefold.types import Generated


class Host:
    """Answers with the number of the prompt's tokens."""

    def __init__(self, times):
        self.facts, self._times = ReplicaFacts({"mirror": "1"}), times
        self._report, self._changed = ReplicaReport(), threading.Condition()

    def begin(self, call): ...
    def end(self): ...
    def retell(self): ...
    def close(self): ...

    def give(self, windows):
        with self._changed:
            for number, place, request in requests_of(windows):
                text = f"{len(request.tokens)} " * self._times
                self._report.answers.append((number, place, [Generated((), text, "stop")]))
            self._changed.notify()

    def report(self, wait):
        with self._changed:
            self._changed.wait_for(lambda: self._report.answers, wait)
            self._report, report = ReplicaReport(), self._report
        return report


class Mirror(Backend):
    where = "in a mirror"
    takes = frozenset({"backend_option"})

    def refusal(self, o):
        return "a mirror has no --adapter" if o.get("adapter") else ""

    def options(self, o, llm, own):
        return {"times": own.get("times", 1)}

    def host(self, model, options):
        return Host(options["times"])


MIRROR = Mirror()
'''


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Runs `prefold run` on three texts; the folder has the backend's file, which nothing imports by itself."""
    (tmp_path / "a_mirror.py").write_text(MIRROR + 'BACKENDS["mirror"] = MIRROR\n')
    (tmp_path / "entered.py").write_text(MIRROR)
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv(plugins.VARIABLE, "")

    def run(*more):
        given = ["run", "in.jsonl", "--task", "generate", "--prompt", "{text}", "-m", "any", "--id", "id"]
        return CliRunner().invoke(main, [*given, "-o", "out.jsonl", "--quiet", *more])

    return run


def lines(folder):
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {line["id"]: line["text"] for line in found}


def length(text):
    """The bytes of a conversation, which a backend that has no tokenizer here is sent."""
    return len(MESSAGES.encode() + json.dumps({"messages": [{"role": "user", "content": text}]}).encode())


def test_a_plugin_adds_a_backend(mirror, tmp_path):
    done = mirror("--plugin", "a_mirror.py", "--backend", "mirror", "--backend-option", "times=2")
    assert done.exit_code == 0, done.output
    assert lines(tmp_path) == {i: f"{length(text)} " * 2 for i, text in enumerate(TEXTS)}
    refused = mirror("--plugin", "a_mirror.py", "--backend", "mirror", "--adapter", "fr=.")
    assert refused.exit_code == 2 and "a mirror has no --adapter" in refused.stderr
    other = mirror("--plugin", "a_mirror.py", "--backend", "mirror", "--tokenizer", "x")
    assert "--tokenizer needs --url, or --backend vllm" in other.stderr and "mirror" not in other.stderr
    more = mirror("--plugin", "a_mirror.py", "--backend-option", "times=2")
    assert "--backend-option needs --backend vllm, or --backend mirror" in more.stderr


def test_an_entry_point_adds_a_backend(mirror, tmp_path, monkeypatch):
    entry = EntryPoint("mirror", "entered:MIRROR", "prefold.backends")
    monkeypatch.setattr(backends, "entry_points", lambda group: [entry] if group == "prefold.backends" else [])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mirror("--backend", "mirror").exit_code == 0
    assert lines(tmp_path) == {i: f"{length(text)} " for i, text in enumerate(TEXTS)}
    assert backend_names()[-1] == "mirror"


def test_an_actor_on_ray_makes_its_replica_of_any_backend(mirror, tmp_path):
    actors = pytest.importorskip("prefold.cluster.ray_replicas", reason="needs ray")
    actor = actors._Actor()
    assert actor.load("any", {"times": 1}, "mirror", [str(tmp_path / "a_mirror.py")]).identity == {"mirror": "1"}


def test_a_backend_that_nobody_has_added(mirror):
    done = mirror("--backend", "misrror")
    assert done.exit_code == 2 and "there is no backend 'misrror'" in done.stderr and "use prefold, vllm" in done.stderr
    with pytest.raises(InputError, match="no backend"):
        backend_named("mirror")
