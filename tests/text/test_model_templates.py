"""The chat templates of well-known models write what transformers' apply_chat_template writes."""

from __future__ import annotations

import model_templates
import pytest
from tokenizers import Tokenizer as Backend

from prefold.text import Tokenizer

transformers = pytest.importorskip("transformers")

NAMES = ["LLAMA3", "QWEN3", "GEMMA3", "MISTRAL", "DEEPSEEK", "COMMAND_R", "PHI", "HERMES"]
PROPERTIES = {
    "city": {"type": "string", "description": " Größe of <it> "},
    "days": {"type": "array", "items": {"type": "integer"}, "description": "which"},
    "more": {"type": "object", "additionalProperties": {"type": "number"}, "description": "or none"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": " Hi <b> & 東京\n\nthere "}
BOT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello 😀 "}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "rain"}
TALKS = {
    "plain": [USER],
    "long": [SYSTEM, USER, BOT, USER],
    "tools": [SYSTEM, USER, CALLING, TOLD, BOT, USER],
}


@pytest.fixture(scope="module")
def pair(backends):
    backend = Backend.from_str(backends["smollm"])
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    return Tokenizer(backend, special_tokens=named), theirs


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", NAMES)
def test_models(pair, name, talk):
    ours, theirs = pair
    template = getattr(model_templates, name)
    options = {"tools": [TOOL, TOOL]} if talk == "tools" and "tools" in template else {}
    if talk == "long" and "documents" in template:
        options["documents"] = [{"title": "t", "text": "x\ny"}]
    for opened in (True, False):
        options["add_generation_prompt"] = opened
        found = ours.render_chat(TALKS[talk], template=template, **options)
        if name == "PHI" and "tools" in options:  # which takes its tools as a text in a message
            assert "<tools>" in found and "<tool_response>" in found
            continue
        assert found == theirs.apply_chat_template(TALKS[talk], chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize("template", model_templates.PIECES)
def test_pieces(pair, template):
    ours, theirs = pair
    talk = TALKS["tools"]
    found = ours.render_chat(talk, template=template)
    assert found == theirs.apply_chat_template(talk, chat_template=template, tokenize=False)
