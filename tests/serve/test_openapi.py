"""The description of the server: it says what there is, and what it says is so."""

from __future__ import annotations

import json

import httpx
import pytest
from starlette.routing import Route
from test_page import browser  # noqa: F401

from prefold.api import ENDPOINTS, KINDS
from prefold.api.schema import SUMMARIES, body_schema
from prefold.errors import InputError
from prefold.serve.app import make_app

GOOD = {
    "embeddings": {"input": "a"}, "rerank": {"query": "a", "documents": ["b"]}, "score": {"text_1": "a", "text_2": "b"},
    "chat": {"messages": [{"role": "user", "content": "a"}]}, "completion": {"prompt": "a"}, "response": {"input": "a"},
}  # fmt: skip


def test_every_path_is_described_once(server):
    found = httpx.get(f"{server.url}/openapi.json").json()
    assert found["openapi"] == "3.1.0"
    said = {(path, method.upper()) for path, one in found["paths"].items() for method in one}
    there = {
        (route.path.replace(":path", ""), method)
        for route in make_app(server.site).routes
        if isinstance(route, Route) and route.path not in ("/openapi.json", "/docs")
        for method in route.methods - {"HEAD"}
    }
    assert said == there and len(said) > 35
    operations = [one for path in found["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert [one["operationId"] for one in operations if one["summary"] in ("", "Answers.")] == []
    for place in json.dumps(found).split('"$ref": "#/components/schemas/')[1:]:
        assert place.partition('"')[0] in found["components"]["schemas"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_parameters_are_those_that_are_read(kind):
    assert set(SUMMARIES) == set(KINDS) == set(ENDPOINTS.values())
    schema = body_schema(kind)
    for name in schema.get("required", []):
        with pytest.raises(InputError):
            KINDS[kind].read({key: value for key, value in GOOD[kind].items() if key != name}, {})
    for name in [*schema["properties"], "no_such"]:
        try:
            KINDS[kind].read(GOOD[kind] | {name: None}, {})
        except InputError as error:
            # Two are read before, as they are no part of a line of a batch.
            assert name in ("no_such", "cache_prompt", "truncate_prompt_tokens") or error.code != "unsupported", error
        else:
            assert name != "no_such"


def test_docs_work_without_anything_from_elsewhere(browser, server):  # noqa: F811
    browser.call("Page.navigate", url=f"{server.url}/docs")
    browser.wait("document.querySelectorAll('details').length > 35")
    assert browser.value("document.documentElement.scrollWidth - innerWidth") <= 0
    place = "[...document.querySelectorAll('details')].find(e => e.textContent.includes('/v1/completions'))"
    browser.value(f"{place}.open = true; 1")
    browser.wait(f"{place}.querySelectorAll('table tr').length > 10")
    browser.value(f"{place}.querySelector('button').click()")
    browser.wait(f"({place}.querySelector('pre') || {{}}).textContent?.includes('text_completion') === true")
    assert browser.value("document.documentElement.scrollWidth - innerWidth") <= 0
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requested())
    assert browser.complaints() == []
