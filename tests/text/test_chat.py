"""Chat templates against transformers' apply_chat_template."""

from __future__ import annotations

import json

import pytest
from small_tokenizers import FolderCheckpoint, GgufCheckpoint, gguf_metadata
from tokenizers import Tokenizer as Backend

from prefold.errors import CheckpointError, InputError
from prefold.text import ChatTemplates, Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """{%- set ns = namespace(count=0, last=none) %}
{%- if tools %}
  {%- for tool in tools %}
    {{- tool | tojson }}
    {{- tool | tojson(indent=2) }}
  {%- endfor %}
{%- endif %}
  {% if documents is not none %}
    {{ documents | length }} documents
  {% endif %}
{%- for message in messages %}
  {%- if message.role == 'stop' %}{%- break %}{%- endif %}
  {%- set ns.count = ns.count + 1 %}
  {%- if message.reasoning_content is defined %}
<think>{{ message.reasoning_content }}|{{ message.thinking }}</think>
  {%- endif %}
  {%- if message.content is string %}
{{ message.role }}: {{ message.content }}
  {%- elif message.content is defined %}
{{ message.role }} parts: {{ message.content | map(attribute='text') | join(' ') }}
  {%- else %}
{{ message.role }} calls: {{ message.tool_calls | tojson }}
  {%- endif %}
{%- endfor %}
{{ ns.count }} {{ flavour }} {{ enable_thinking }} {{ eos_token }} [{{ pad_token }}]
{% if add_generation_prompt %}assistant:{% endif %}
"""
USER = {"role": "user", "content": "  Grüße <b> & \"q\" \\n {{x}} 'é' "}
BOT = {"role": "assistant", "content": "Sure, 東京 😀  "}
TOOL = {"type": "function", "function": {"name": "f<é>", "parameters": {"x": [1, 2.5, None, True]}}}

CASES = [
    (CHATML, [USER], {}),
    (CHATML, [USER, BOT, USER], {"add_generation_prompt": True}),
    (CHATML, [{"role": "system", "content": "S"}, USER, BOT], {"continue_final_message": True}),
    (ALTERNATING, [USER, BOT, USER], {}),
    (ALTERNATING, [USER, BOT], {"continue_final_message": True}),
    (ALTERNATING, [USER], {"continue_final_message": True}),
    (TOOLS, [USER, BOT | {"reasoning": "hm"}], {"tools": [TOOL], "flavour": "sweet", "enable_thinking": False}),
    (TOOLS, [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL]}, BOT], {"add_generation_prompt": True}),
    (TOOLS, [USER, {"role": "stop", "content": ""}, BOT], {"documents": [{"title": "t", "text": "x"}]}),
    (TOOLS, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    ("{{ strftime_now('%Y') }}", [USER], {}),
]


@pytest.fixture(scope="module")
def pair(backends):
    backend = Backend.from_str(backends["smollm"])
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    return Tokenizer(backend, special_tokens=named), theirs


@pytest.mark.parametrize("case", range(len(CASES)))
def test_rendering_equals_transformers(pair, case):
    ours, theirs = pair
    template, messages, options = CASES[case]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    before = json.dumps(messages)
    assert ours.render_chat(messages, template=template, **options) == expected
    assert json.dumps(messages) == before
    ids = theirs.apply_chat_template(messages, chat_template=template, **options)["input_ids"]
    assert ours.encode(expected, special=False).tolist() == ids


def folder(tmp_path, backends, **config) -> FolderCheckpoint:
    (tmp_path / "tokenizer.json").write_text(backends["smollm"], encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return FolderCheckpoint(tmp_path)


NAMED = [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]


def test_where_templates_are_found(tmp_path, backends):
    def both(**options) -> tuple[str, str]:
        ours = load_tokenizer(FolderCheckpoint(tmp_path))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        return ours.render_chat([USER], **options), theirs.apply_chat_template([USER], tokenize=False, **options)

    folder(tmp_path, backends, chat_template="A{{ eos_token }}")
    assert both() == ("A<|im_end|>",) * 2
    folder(tmp_path, backends, chat_template=NAMED)
    assert both() == ("D<|im_end|>",) * 2
    assert both(tools=[TOOL]) == ("T1",) * 2
    ours = load_tokenizer(FolderCheckpoint(tmp_path))
    assert ours.render_chat([USER], template="tool_use", tools=[TOOL, TOOL]) == "T2"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert both() == ("F",) * 2
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("FT{{ tools | length }}")
    assert both() == ("F",) * 2
    assert both(tools=[TOOL]) == ("FT1",) * 2


def test_gguf_templates(backends):
    backend = Backend.from_str(backends["smollm"])
    more = {"chat_template": CHATML, "chat_templates": ["tool_use"], "chat_template.tool_use": "T{{ tools | length }}"}
    ours = load_tokenizer(GgufCheckpoint(gguf_metadata(backend, "smollm", **more)))
    assert ours.render_chat([USER]).startswith("<|im_start|>system\nYou are helpful")
    assert ours.render_chat([USER], tools=[TOOL]) == "T1"


def test_a_template_that_is_none(tmp_path, backends):
    with pytest.raises(CheckpointError, match=r"chat_template of .* is 5; it must be a text"):
        load_tokenizer(folder(tmp_path, backends, chat_template=5))


@pytest.mark.parametrize(
    ("template", "messages", "options", "field", "message"),
    [
        (CHATML, [], {}, "messages", "empty"),
        (CHATML, "hi", {}, "messages", "of type str"),
        (CHATML, ["hi"], {}, "messages[0]", "role"),
        (CHATML, [{"content": "x"}], {}, "messages[0]", "role"),
        (CHATML, [USER, {"role": "user"}], {}, "messages", "no attribute 'content'"),
        ("{{ messages + 1 }}", [USER], {}, "messages", "fails"),
        (CHATML, [{"role": "user", "content": "\ud800"}], {}, "messages[0].content", "surrogate"),
        (CHATML, [{"role": "user", "content": object()}], {}, "messages[0].content", "of type object"),
        (CHATML, [USER], {"x": object()}, "x", "of type object"),
        (ALTERNATING, [BOT], {}, "messages", "roles must alternate"),
        ("{% if %}", [USER], {}, "chat_template", "syntax error in line 1"),
        ("{{ messages[0].__class__.__mro__ }}", [USER], {}, "chat_template", "may not do: .* unsafe"),
        ("{{ messages.append(1) }}", [USER], {}, "chat_template", "may not do: .* unsafe"),
        (
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            [USER],
            {},
            "chat_template",
            "may not do: .*__class__",
        ),
        (CHATML, [USER], {"add_generation_prompt": True, "continue_final_message": True}, None, "exclude"),
        ("content", [USER], {"continue_final_message": True}, "chat_template", "no chat template 'content'"),
        ("{# content #}", [USER], {"continue_final_message": True}, "continue_final_message", "cannot be continued"),
        (
            CHATML,
            [{"role": "user", "content": ["a"]}],
            {"continue_final_message": True},
            None,
            "with a text as content",
        ),
    ],
)
def test_bad_conversations_are_input_errors(pair, template, messages, options, field, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as caught:
        pair[0].render_chat(messages, template=template, **options)
    assert field is None or caught.value.field == field
    assert caught.value.remedy


def test_a_missing_template_says_what_to_do():
    with pytest.raises(InputError, match=r"no chat template.*chat_template.*instruction-tuned") as caught:
        ChatTemplates({}, {}).render([USER])
    assert caught.value.code == "no_chat_template"
    two = ChatTemplates({"a": "A", "b": "B"}, {})
    with pytest.raises(InputError, match=r"several.*a, b"):
        two.render([USER])
    with pytest.raises(InputError, match=r"no chat template 'c'.*a, b"):
        two.render([USER], template="c")
    assert two.render([USER], template="b") == "B"
    assert ChatTemplates({"only": "X"}, {}).render([USER]) == "X"
    assert not ChatTemplates({}, {})


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize("absent", [{}, {"content": None}])
def test_an_assistant_that_only_calls_needs_no_content(pair, absent):
    message = {"role": "assistant", **absent, "tool_calls": CALLS}
    text = pair[0].render_chat([USER, message, USER], template=CHATML)
    assert text == pair[0].render_chat([USER, message | {"content": ""}, USER], template=CHATML)
    # A template that can do without is told that there is none, as transformers tells it.
    told = "{% for m in messages %}{{ m.content is defined }} {% endfor %}"
    assert pair[0].render_chat([USER, message], template=told) == "True False "
    with pytest.raises(InputError, match="roles must alternate"):
        pair[0].render_chat([message], template=ALTERNATING)


@pytest.mark.parametrize(
    ("content", "role", "message", "code"),
    [
        (5, "user", r"'messages\[0\]\.content' is of type int, not a text; give it a text, or a list", "wrong_type"),
        (True, "assistant", "is of type bool, not a text", "wrong_type"),
        (None, "user", r"'messages\[0\]\.content' is null; give it a text", "null"),
        (None, "tool", "is null", "null"),
    ],
)
def test_contents_that_are_no_text(pair, content, role, message, code):
    with pytest.raises(InputError, match=message) as caught:
        pair[0].render_chat([{"role": role, "content": content}], template=CHATML)
    assert (caught.value.field, caught.value.code) == ("messages[0].content", code)


def test_documents_that_the_template_does_not_use_are_refused():
    plain = ChatTemplates({"default": CHATML, "rag": CHATML + "{{ documents[0].text }}"}, {})
    with pytest.raises(InputError, match="the chat template 'default' does not use documents") as caught:
        plain.render([USER], documents=[{"text": "x"}])
    assert (caught.value.field, caught.value.code) == ("documents", "unused_documents")
    with pytest.raises(InputError, match="the chat template that was given does not use documents"):
        plain.render([USER], template="{{ messages }}{# documents #}", documents=[{"text": "x"}])
    assert plain.render([USER], tools=[], documents=None) == plain.render([USER])
    assert plain.render([USER], template="rag", documents=[{"text": "x"}]).endswith("x")


@pytest.mark.parametrize("where", ["content", "tools", "variable"])
def test_what_is_nested_too_deep(pair, where):
    deep = []
    for _ in range(600):
        deep = [deep]
    message = USER | ({"content": deep} if where == "content" else {})
    options = {"tools": {"tools": [{"x": deep}]}, "variable": {"x": deep}}.get(where, {})
    with pytest.raises(InputError, match="nested more than 100 deep") as caught:
        pair[0].render_chat([message], template=TOOLS, **options)
    assert len(str(caught.value)) < 300


def test_half_a_surrogate_in_a_name(pair):
    with pytest.raises(InputError, match="surrogate"):
        pair[0].render_chat([USER | {"\ud800": 1}], template=CHATML)


@pytest.mark.parametrize("template", [5, ["{{ x }}"], {"default": "x"}])
def test_a_template_of_another_type(pair, template):
    with pytest.raises(InputError, match="'chat_template' is of type"):
        pair[0].render_chat([USER], template=template)
