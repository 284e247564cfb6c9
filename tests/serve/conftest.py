from __future__ import annotations

import pytest
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.cache import CacheOptions


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("serve"), "llama")
    made = LLM(str(folder), dtype="float32", kv_memory=1 << 23, cache=CacheOptions(min_overlap=0))
    made.folder = folder
    return made


@pytest.fixture(scope="session")
def server(llm):
    with serving(llm, served_names=("tiny", "other")) as made:
        yield made
