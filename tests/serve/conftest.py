from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from batching import client_of
from browsers import browser  # noqa: F401
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.serve.handler import RequestHandler

# By itself httpx waits 5 s for an answer, which a busy machine may need.
httpx._config.DEFAULT_TIMEOUT_CONFIG.__init__(timeout=60)

TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


def pytest_addoption(parser):
    """Long tests run in pieces: each with a seed of its own, and fewer rounds than they have otherwise."""
    parser.addoption("--seed", type=int, default=None, help="of the tests of serving that draw at random")
    parser.addoption("--rounds", type=int, default=None, help="how often the slow ones among them do it")


@pytest.fixture
def seed(request):
    """The seed that was asked for, or None."""
    return request.config.getoption("--seed", None)


@pytest.fixture
def rounds(request):
    """The number of rounds that was asked for, or None."""
    return request.config.getoption("--rounds", None)


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("serve"), "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TOOLS + settings["chat_template"].replace("['content']", "['content'] or ''")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))  # "Yes" is several tokens
    made = LLM(str(folder), dtype="float32", kv_memory=1 << 23, cache=CacheOptions(min_overlap=0))
    made.folder = folder
    return made


@pytest.fixture
def work_by(monkeypatch):
    """Lets functions stand for `validate` and `finish` of a server's batches. Each is called with the function that it
    stands for, and the batch."""

    def put(server, **functions):
        batches, work = server.state.batches, server.state.batches.work
        by_name = {
            name: partial(functions[name], getattr(work, name)) if name in functions else getattr(work, name)
            for name in ("validate", "finish")
        }
        monkeypatch.setattr(batches, "work", SimpleNamespace(**by_name))

    return put


@pytest.fixture
def prepare_by(monkeypatch):
    """Lets a function prepare requests. It is called with the function that it stands for, the handler, and the
    order."""

    def put(function):
        prepare = RequestHandler._prepare
        monkeypatch.setattr(RequestHandler, "_prepare", lambda handler, order: function(prepare, handler, order))

    return put


@pytest.fixture
def submit_by(monkeypatch):
    """Lets a function submit requests to the engine. It is called with the function that it stands for, the handler,
    and what that is given."""

    def put(function):
        submit = RequestHandler._submit
        monkeypatch.setattr(
            RequestHandler, "_submit", lambda handler, *given, **options: function(submit, handler, *given, **options)
        )

    return put


@pytest.fixture
def few_running(llm):
    """Lets at most two sequences run at once in the engine that tests share."""
    scheduler, before = llm.engine.generator.scheduler, llm.engine.generator.scheduler.max_running
    scheduler.max_running = 2
    yield
    scheduler.max_running = before


@pytest.fixture
def few_rows(llm):
    """Lets steps of the engine that tests share have at most 32 rows."""
    budget, before = llm.engine.budget, llm.engine.budget.rows
    budget.rows = 32
    yield
    budget.rows = before


@pytest.fixture(scope="session")
def server(llm):
    with serving(llm, served_names=("tiny", "other")) as made:
        yield made


@pytest.fixture(scope="module")
def kept(llm, tmp_path_factory):
    """A server that keeps files and batches."""
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path_factory.mktemp("data") / "new")) as made:
        yield made


@pytest.fixture(scope="module")
def client(kept):
    with client_of(kept) as made:
        yield made
