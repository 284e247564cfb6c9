"""Bodies as agent clients (Codex, Claude Code, guidance, rerankers, AI SDK) send them, with the packages of OpenAI and
Anthropic where these have what is sent."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest

from prefold.errors import InputError
from prefold.wire.anthropic import Message
from prefold.wire.body import ServedModel
from prefold.wire.completions import Chat
from prefold.wire.responses import Responses

SCHEMA = {"type": "object", "properties": {"at": {"enum": ["yes", "no"]}}, "required": ["at"]}
HELLO = [{"role": "user", "content": "hello"}]


def function(name: str) -> dict:
    return {"type": "function", "name": name, "description": "Looks.", "strict": False, "parameters": SCHEMA}


def in_chat(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": SCHEMA}}


# What Codex sends.
CODEX = {
    "model": "tiny", "instructions": "You are a coding agent.", "store": False, "stream": True,
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    "tools": [
        function("shell"), function("plan"),
        {"type": "custom", "name": "apply_patch", "description": "Patches.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "web_search", "external_web_access": True}, {"type": "local_shell"},
    ],
    "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x", "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "y"}, "max_output_tokens": 4,
}  # fmt: skip
# What Claude Code sends.
CLAUDE = {
    "model": "tiny", "max_tokens": 4, "stream": True, "metadata": {"user_id": "x"},
    "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "s"},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"at": "yes"}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}]},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive"}, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "output_config": {"effort": "high"},
}  # fmt: skip


def test_codex_starts(server):
    with httpx.stream("POST", f"{server.url}/v1/responses", json=CODEX, timeout=60) as answer:
        assert answer.status_code == 200 and "event: response.incomplete" in answer.read().decode()
    items, _ = Responses.of(CODEX).read({})
    assert [tool["function"]["name"] for tool in items[0]["tools"]] == ["shell", "plan"]


def test_claude_code_starts(server):
    with httpx.stream("POST", f"{server.url}/v1/messages?beta=true", json=CLAUDE, timeout=60) as answer:
        assert answer.status_code == 200 and "message_stop" in answer.read().decode()
    (item,) = Message.of(CLAUDE).order(ServedModel(None)).items
    assert [tool["function"]["name"] for tool in item["tools"]] == ["Bash"]
    assert item["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert item["messages"][2]["reasoning_content"] == "I look."


def test_a_tool_of_an_unknown_type_is_refused():
    body = CLAUDE | {"tools": [{"name": "a"}, {"name": "b", "type": "costum"}]}
    with pytest.raises(InputError, match=r"'tools\[1\].type' is 'costum'"):
        Message.of(body).order(ServedModel(None))


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(kind, mode):
    choice = {"mode": mode, "tools": [{"type": "function", "name": "plan"}, {"type": "web_search"}]}
    if kind == "chat":
        choice = {"mode": mode, "tools": [{"type": "function", "function": {"name": "plan"}}]}
        body = {"messages": HELLO, "tools": [in_chat("shell"), in_chat("plan")]}
        asked = Chat.of(body | {"tool_choice": {"type": "allowed_tools", "allowed_tools": choice}})
    else:
        asked = Responses.of(CODEX | {"tool_choice": {"type": "allowed_tools", **choice}})
    (item,), meta = asked.read({})
    assert [tool["function"]["name"] for tool in item["tools"]] == meta["calls"]["names"] == ["plan"]
    assert meta["calls"]["forced"] is ("grammar" in item["sampling"]) is (mode == "required")


@pytest.mark.parametrize("allowed", [{"mode": "never", "tools": [{"name": "plan"}]}, {"tools": [{"name": "x"}]}, {}])
def test_allowed_tools_that_are_wrong(allowed):
    with pytest.raises(InputError) as wrong:
        Responses.of(CODEX | {"tool_choice": {"type": "allowed_tools", **allowed}}).read({})
    assert wrong.value.field == "tool_choice"


def test_the_older_name_of_an_output_format():
    """LiteLLM sends it."""
    format = {"type": "json_schema", "schema": SCHEMA}
    body = {"messages": HELLO, "max_tokens": 4}
    grammars = [
        Message.of(body | more).order(ServedModel(None)).items[0]["sampling"]["grammar"]
        for more in (
            {"output_format": format},
            {"output_config": {"format": format}},
            {"output_config": {"format": format}, "output_format": format},
        )
    ]
    assert grammars[0] == grammars[1] == grammars[2] == {"json_schema": SCHEMA}
    other = {"output_config": {"format": format}, "output_format": format | {"schema": {"type": "array"}}}
    with pytest.raises(InputError, match="different schemas"):
        Message.of(body | other).order(ServedModel(None))
    order = Message.of(body | {"output_format": format}).order(ServedModel(None))
    assert order.fields["grammar"] == "output_format"


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "x"}, {"type": "tool"}])
def test_a_wrong_tool_choice_is_told_in_anthropics_form(choice):
    with pytest.raises(InputError, match='"type": "tool", "name": '):
        Message.of(CLAUDE | {"tool_choice": choice}).order(ServedModel(None))


# ------------------------------------------------------------------------------------------------------ OpenAI's


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_end_of_a_call_is_told(client):
    """The helper of OpenAI's package looks for it in a chunk behind the call's."""
    tool = in_chat("look") | {"function": in_chat("look")["function"] | {"strict": True}}
    tool["function"]["parameters"] = SCHEMA | {"additionalProperties": False}
    options = {"model": "tiny", "messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 60}
    with client.chat.completions.stream(**options) as stream:
        events = list(stream)
        calls = stream.get_final_completion().choices[0].message.tool_calls
    kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert done.arguments == calls[0].function.arguments and done.name == "look"
    last = [event.chunk.choices[0] for event in events if event.type == "chunk"][-1]
    assert last.finish_reason == "tool_calls" and last.delta.tool_calls is last.delta.content is None


def test_equal_grammars_under_two_names_are_one(client):
    """guidance's VLLMModel sends a grammar for older versions of vLLM, and for newer ones."""
    grammar = 'start: "ab" | "cd"'
    asked = {"guided_decoding_backend": "guidance", "guided_grammar": grammar}
    found = client.completions.create(
        model="tiny", prompt="a", max_tokens=9, extra_body=asked | {"structured_outputs": {"grammar": grammar}}
    )
    assert found.choices[0].text in ("ab", "cd")
    with pytest.raises(openai.BadRequestError, match="structured_outputs and guided_grammar are different grammars"):
        client.completions.create(model="tiny", prompt="a", extra_body=asked | {"structured_outputs": {"regex": "a"}})


def test_verbosity_changes_nothing(client):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "temperature": 0}
    texts = {client.chat.completions.create(**options, **more).choices[0].message.content
             for more in ({}, {"verbosity": "low"})}  # fmt: skip
    assert len(texts) == 1


# ---------------------------------------------------------------------------------------------------- rerankers'


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(("count", "units"), [(2, 1), (100, 1), (101, 2)])
def test_a_rerank_has_coheres_meta(server, path, count, units):
    """The AI SDK wants it."""
    body = {"query": "a", "documents": ["b"] * count, "top_n": 1}
    found = httpx.post(server.url + path, json=body, timeout=60).json()
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": units}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "a", "texts": ["b", "c"], "top_n": 1, "return_text": True}), ("/embed", {"inputs": "a"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}), ("/decode", {"ids": [5]}),
        ("/tokenize", {"inputs": "a"}), ("/embed_all", {"inputs": "a"}),
    ],
)  # fmt: skip
def test_tei_paths_take_a_model(server, path, body):
    """The package rerankers sends it."""
    assert httpx.post(server.url + path, json=body | {"model": "tiny"}, timeout=60).status_code == 200
    assert httpx.post(server.url + path, json=body | {"model": "none"}, timeout=60).status_code == 404


# ---------------------------------------------------------------------------------------------------- Anthropic's


def test_models_in_anthropics_form(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        listed = list(client.models.list())
        assert [one.id for one in listed] == ["tiny", "other"] == [one.display_name for one in listed]
        found = client.models.retrieve("tiny")
        assert (found.type, found.display_name, found.created_at.tzinfo is None) == ("model", "tiny", False)
        with pytest.raises(anthropic.NotFoundError) as error:
            client.models.retrieve("none")
        assert error.value.body["type"] == "error"
    plain = httpx.get(f"{server.url}/v1/models").json()
    assert plain["object"] == "list" and plain["data"][0]["object"] == "model"


# ------------------------------------------------------------------------------------------------------ all paths


def test_request_ids(server, client):
    found = [client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1) for _ in range(2)]
    assert found[0]._request_id and found[0]._request_id != found[1]._request_id
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="tiny", messages=HELLO, max_tokens=1)
        assert message._request_id
    for path in ("/v1/models", "/health", "/nowhere", "/metrics"):
        assert httpx.get(server.url + path, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for wrong in ("x" * 129, "a b", ""):
        assert httpx.get(f"{server.url}/health", headers={"x-request-id": wrong}).headers["x-request-id"] != wrong
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=HELLO, max_tokens=1, stream=True, extra_headers={"x-request-id": "abc-2"}
    ) as stream:
        assert stream.headers["x-request-id"] == "abc-2"


def test_what_is_missing_is_told_before_what_another_path_takes(server):
    def message(**body):
        return httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]["message"]

    assert message(prompt="a") == "messages is missing; give it"
    assert "unknown parameter 'mesages'; did you mean messages?" in message(mesages=HELLO)
    assert "'max_tokns'; did you mean max_tokens?" in message(messages=HELLO, max_tokns=5)


def test_a_model_that_is_not_served_names_the_option(server):
    found = httpx.post(f"{server.url}/v2/rerank", json={"model": "rerank-v3.5", "query": "a", "documents": ["b"]})
    assert found.status_code == 404 and "--served-model-name" in found.json()["message"]
