"""The description of the server: it says what there is, and what it says is so."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import pytest
from serving import serving
from starlette.routing import Route

from prefold.errors import InputError
from prefold.serve import app
from prefold.serve.app import DIALECTS, make_app
from prefold.serve.context import Dialect, Entry
from prefold.serve.http import json_response
from prefold.wire import KINDS, anthropic, numbers, tei
from prefold.wire.body import Body

GOOD = {
    "embeddings": {"input": "a"}, "rerank": {"query": "a", "documents": ["b"]}, "score": {"text_1": "a", "text_2": "b"},
    "chat": {"messages": [{"role": "user", "content": "a"}]}, "completion": {"prompt": "a"}, "response": {"input": "a"},
    "decisions": {"input": "a", "questions": [{"type": "predicate"}]},
    "systemone": {"state": "a", "questions": {"q": {"type": "noul"}}},
}  # fmt: skip
OTHERS = {
    tei.TeiEmbed: {"inputs": "a"},
    tei.TeiRerank: {"query": "a", "texts": ["b"]},
    tei.TeiPredict: {"inputs": "a"},
    tei.TeiSimilarity: {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    anthropic.Message: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    anthropic.CountTokens: {"messages": [{"role": "user", "content": "a"}]},
    numbers.CohereEmbed: {"texts": ["a"]},
}


ODD = [5.5]


def is_refused(read, body):
    """Whether a reader says of a body that it has a field that is not known, whatever else it says."""
    try:
        read(body)
    except InputError as error:
        return "unknown" in error.message
    return False


def test_every_path_is_described_once(server):
    found = httpx.get(f"{server.url}/openapi.json").json()
    assert found["openapi"] == "3.1.0"
    said = {(path, method.upper()) for path, one in found["paths"].items() for method in one}
    there = {
        (route.path.replace(":path", ""), method)
        for route in make_app(server.state).routes
        if isinstance(route, Route) and route.path not in ("/openapi.json", "/docs")
        for method in route.methods - {"HEAD"}
    }
    assert said == there and len(said) > 35
    tags = {path: {tag for way in one.values() for tag in way["tags"]} for path, one in found["paths"].items()}
    ours = {"/health", "/healthz", "/livez", "/ping", "/readyz", "/version", "/metrics", "/page/data", "/cache"}
    ours |= {"/cache/pin", "/cache/unpin", "/cache/clear"}
    assert {path for path in tags if tags[path] == {"server"}} == ours
    operations = [one for path in found["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert [one["operationId"] for one in operations if one["summary"] in ("", "Answers.")] == []
    for place in json.dumps(found).split('"$ref": "#/components/schemas/')[1:]:
        assert place.partition('"')[0] in found["components"]["schemas"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_parameters_are_those_that_are_read(server, kind):
    body = KINDS[kind]
    schema = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"][body.__name__]
    for name in schema.get("required", []):
        with pytest.raises(InputError):
            body.of({key: value for key, value in GOOD[kind].items() if key != name}).read({})
    for name in [*schema["properties"], "no_such"]:
        assert not is_refused(lambda sent: body.of(sent).read({}), GOOD[kind] | {name: None})
        assert is_refused(body.of, GOOD[kind] | {name: ODD}) is (name == "no_such"), name


@pytest.mark.parametrize("kind", OTHERS)
def test_the_fields_of_other_apis_are_those_that_are_read(server, kind):
    good = OTHERS[kind]
    schema = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"][kind.__name__]
    kind.of(good | dict.fromkeys(set(schema["properties"]) - set(schema["required"])))
    for name in [*schema["properties"], "no_such"]:
        assert is_refused(kind.of, good | {name: ODD}) is (name == "no_such"), name
    for name in schema["required"]:
        with pytest.raises(InputError):
            kind.of({key: value for key, value in good.items() if key != name})


def test_every_body_has_its_fields(server):
    """Those that a path of the server reads are what is described; a field that is not is refused there."""
    found = httpx.get(f"{server.url}/openapi.json").json()
    schemas = found["components"]["schemas"]
    assert {kind.__name__ for dialect in DIALECTS for entry in dialect.ENTRIES for kind in entry.bodies} <= set(schemas)
    for path, kind, body in (
        ("/tokenize", "TokenizePrompt", {"prompt": "a"}),
        ("/tokenize", "TokenizeChat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", "Detokenize", {"tokens": [1]}),
        ("/decode", "TeiDecode", {"ids": [1]}),
        ("/embed_all", "TeiEmbedAll", {"inputs": "a"}),
    ):
        assert f'/{kind}"' in json.dumps(found["paths"][path]) and set(body) == set(schemas[kind]["required"])
        names = set(schemas[kind]["properties"]) - set(body)
        assert httpx.post(server.url + path, json=body | dict.fromkeys(names)).status_code == 200, path
        wrong = httpx.post(server.url + path, json=body | {"no_such": ODD})
        assert wrong.status_code in (400, 422) and "no_such" in wrong.text


def test_docs_work_without_anything_from_elsewhere(browser, server):
    browser.call("Page.navigate", url=f"{server.url}/docs")
    browser.wait("document.querySelectorAll('details').length > 35")
    assert browser.value("document.documentElement.scrollWidth - innerWidth") <= 0
    place = "[...document.querySelectorAll('details')].find(e => e.textContent.includes('/v1/completions'))"
    browser.value(f"{place}.open = true; 1")
    browser.wait(f"{place}.querySelectorAll('table tr').length > 10")
    listed = "[...document.querySelectorAll('details')].find(e => e.textContent.startsWith('GET/v1/files '))"
    assert browser.value(f"{listed}.querySelector('summary span code').textContent") == "limit"
    assert browser.value("document.body.textContent.includes('`')") is False
    browser.value(f"{place}.querySelector('button').click()")
    browser.wait(f"({place}.querySelector('pre') || {{}}).textContent?.includes('text_completion') === true")
    several = "[...document.querySelectorAll('details')].find(e => e.textContent.startsWith('POST/tokenize '))"
    browser.value(f"{several}.open = true; 1")
    browser.wait(f"{several}.querySelectorAll('table').length === 3")
    for path in ("/decode", "/similarity", "/v1/embed", "/v1/messages"):  # what is proposed to be sent is right
        place = f"[...document.querySelectorAll('details')].find(e => e.textContent.startsWith('POST{path} '))"
        browser.value(f"{place}.open = true; 1")
        browser.wait(f"{place}.querySelector('button') !== null")
        browser.value(f"{place}.querySelector('button').click()")
        browser.wait(f"({place}.querySelector('pre') || {{}}).textContent?.startsWith('200') === true")
    assert browser.value("document.documentElement.scrollWidth - innerWidth") <= 0
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requested())
    assert browser.complaints() == []


def test_a_dialect_is_a_list_of_entries(llm, keep):
    """Its path is answered, refused in its form, and described by the struct of its body."""

    class Greeting(Body):
        """Greets somebody."""

        name: str

    async def greet(context):
        return json_response({"said": f"Hello {Greeting.of(context.body).name}"})

    polite = Dialect("polite", lambda status, message, code, param: (status, {"sorry": message}))
    own = SimpleNamespace(ENTRIES=[Entry(polite, "POST", "/greet", greet, (Greeting,))])
    keep(app.DIALECTS)
    app.DIALECTS.append(own)
    with serving(llm) as server:
        assert httpx.post(f"{server.url}/greet", json={"name": "Ada"}).json() == {"said": "Hello Ada"}
        assert httpx.post(f"{server.url}/greet", json={"name": 5}).json() == {"sorry": "'name' is 5; give a text"}
        found = httpx.get(f"{server.url}/openapi.json").json()
        described = found["paths"]["/greet"]["post"]
        assert (described["tags"], described["summary"]) == (["polite"], "Greets somebody.")
        assert found["components"]["schemas"]["Greeting"]["required"] == ["name"]
