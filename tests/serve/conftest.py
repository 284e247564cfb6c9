from __future__ import annotations

import json

import httpx
import pytest
from batching import client_of
from browsers import browser  # noqa: F401
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine.cache import CacheOptions

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
    made = LLM(str(folder), dtype="float32", kv_memory=1 << 23, cache=CacheOptions(min_overlap=0))
    made.folder = folder
    return made


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
