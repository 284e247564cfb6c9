"""A backend that nobody knew of, that of docs/scale.md: one file, by --plugin or by an entry point; jobs run on it."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny import SIZES, write_tokenizer

from prefold.cli import main
from prefold.cluster import backends
from prefold.cluster.backends import BACKENDS, backend_named, backend_names
from prefold.cluster.http_bodies import MESSAGES
from prefold.errors import InputError
from prefold.spec import environment, plugins

TEXTS = ("abc", "abd", "x")
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
MIRROR = re.search(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]


@pytest.fixture
def mirror(tmp_path, monkeypatch, keep):
    """Runs `prefold run` on three texts; the folder has the backend's file, which nothing imports by itself."""
    (tmp_path / "a_mirror.py").write_text(MIRROR)
    (tmp_path / "entered.py").write_text(MIRROR.replace('BACKENDS["mirror"]', "MIRROR"))
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    keep(BACKENDS, plugins.loaded)
    plugins.loaded.clear()
    monkeypatch.setenv(environment.PLUGINS, "")

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
    assert "is for jobs on servers (--url) or with --backend vllm" in other.stderr and "mirror" not in other.stderr
    more = mirror("--plugin", "a_mirror.py", "--backend-option", "times=2")
    assert "--backend-option is for jobs with --backend vllm or with --backend mirror" in more.stderr


@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_backend_reads_the_text_of_a_prompt(mirror, tmp_path, tokenizer):
    """As the page says: by the model's tokenizer, or without any."""
    reading = MIRROR.replace('f"{len(request.tokens)} "', "self.tokenizer.decode(request.tokens)")
    reading = reading.replace(
        "return MirrorHost", "MirrorHost.tokenizer = remote_model(model, None)[1]\n        return MirrorHost"
    )
    (tmp_path / "a_mirror.py").write_text(f"from prefold.cluster.http_bodies import remote_model\n{reading}")
    if tokenizer:
        write_tokenizer(tmp_path / "any")
        (tmp_path / "any" / "config.json").write_text(json.dumps(SIZES))
    assert mirror("--plugin", "a_mirror.py", "--backend", "mirror").exit_code == 0
    for i, text in lines(tmp_path).items():
        if tokenizer:
            assert f"user\n{TEXTS[i]}" in text
        else:
            conversation = json.loads(text.removeprefix(MESSAGES))
            assert conversation == {"messages": [{"role": "user", "content": TEXTS[i]}]}


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
