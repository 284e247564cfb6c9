"""Render chat templates in Jinja's sandbox, with the functions and filters of transformers.

The sandbox isolates a template from the machine, but limits neither time nor memory. So templates from requests are
rendered in a process with such limits (`template_process.py`).

If a template does not use tools, they are written into the messages. The system message describes the functions. Calls
appear between <tool_call> and </tool_call> in the assistant's messages, and results between <tool_response> and
</tool_response> in a user message. Hermes and Qwen use the same marks, and so does the search for calls in answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InputError


class TooLong(InputError):
    """A template wrote more characters than allowed."""


def write(name: str, source: str, values: Mapping[str, Any], longest: float = math.inf) -> str:
    """Return the text of a template, which is valid Unicode.

    Args:
        name: The template's name in error messages.
        values: The plain JSON values that the template may look up. If it does not look up "tools", they are written
            into "messages". If it does not look up "documents", they are an error.
        longest: Maximum number of characters that the template may write.

    Raises:
        InputError: The template raised any error.
        TooLong: The template wrote more than `longest` characters.
    """
    with _input_errors(name):
        template, variables = compile_template(source)
        if values.get("documents") and "documents" not in variables:
            raise InputError(
                f"the chat template {name} does not use documents, so the model would not see them",
                field="documents",
                remedy="write them into a message, use a model with a template for documents, or give chat_template",
                code="unused_documents",
            )
        if values.get("tools") and "tools" not in variables:
            values = {**values, "messages": with_tools(values["messages"], values["tools"])}
        text = _write(name, template, values, longest)
        text.encode()  # raises if the template wrote half of a surrogate pair
    return text


@lru_cache(maxsize=16)
def compile_template(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Return the compiled template and the names that it looks up; values of other names have no effect.

    Raise TemplateSyntaxError, or an error of Python's compiler if the template is nested too deep.
    """
    environment = _environment()
    tree = environment.parse(source)
    names = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    globals_ = environment.make_globals(None)
    return jinja2.Template.from_code(environment, environment.compile(tree), globals_), names


@lru_cache(maxsize=16)
def literals(source: str) -> str:
    """Return the literal texts in a template, joined with NUL."""
    tree = _environment().parse(source)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(texts)


def _write(name: str, template: jinja2.Template, values: Mapping[str, Any], longest: float) -> str:
    """Return the text of a template with these values.

    If the template fails and an assistant's message has no content, retry with "" as its content.
    """

    def written(values: Mapping[str, Any]) -> Iterator[str]:
        letters = 0
        for piece in template.generate(values):
            letters += len(piece)
            if letters > longest:
                message = f"the chat template {name} was stopped: it writes more than {longest:,} letters"
                remedy = "correct it, or give another one"
                raise TooLong(message, field="chat_template", remedy=remedy, code="template_limit")
            yield piece

    try:
        return "".join(written(values))
    except Exception as error:
        chat = values["messages"]
        bare = {i for i, message in enumerate(chat) if message["role"] == "assistant" and "content" not in message}
        if not bare or isinstance(error, TooLong):
            raise
    filled = [message | ({"content": ""} if i in bare else {}) for i, message in enumerate(chat)]
    return "".join(written({**values, "messages": filled}))


@contextmanager
def _input_errors(name: str) -> Iterator[None]:
    """Turn any exception of a template into a one-line InputError."""
    field, remedy, code = "messages", "check which fields this model's messages and tools have", "invalid_input"
    try:
        yield
        return
    except InputError:
        raise
    except jinja2.TemplateSyntaxError as error:
        message = f"has a syntax error in line {error.lineno}: {error.message}"
        field, remedy = "chat_template", "correct it, or give another one"
    except MemoryError:
        message = "was stopped: it needs more memory than there is"
        field, remedy, code = "chat_template", "correct it, or give another one", "template_limit"
    except SecurityError as error:
        message = f"does something that templates may not do: {error}"
        field, remedy = "chat_template", "correct it, or give another one"
    except jinja2.UndefinedError as error:
        message = f"fails on these messages: {error}"
    except jinja2.TemplateError as error:
        message = f"refuses these messages: {error}"
        remedy = "check which roles the model expects, and in which order"
    except Exception as error:  # a template may raise anything, and so may Python's compiler for deep nesting
        message = f"fails on these messages: {type(error).__name__}: {error}"
    # A template's own message may have any size and any characters, so cut it to one line and escape lone surrogates.
    line = " ".join(f"the chat template {name} {message[:4000]}".split())[:400]
    raise InputError(line.encode("utf-8", "backslashreplace").decode(), field=field, remedy=remedy, code=code)


class _Generation(Extension):
    """The Jinja extension for {% generation %}, which marks the assistant's text for training. Its content is kept."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace() without attributes of Python objects such as `__class__`."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a chat template may not set the attribute {name!r}")
        super().__setitem__(name, value)


class _Dict:
    """Python's dict() for templates, without methods that change a dict."""

    __call__ = staticmethod(dict)
    fromkeys = staticmethod(dict.fromkeys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own filter escapes HTML
    environment.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_TOOLS = """You can call functions. Each line between <tools> and </tools> describes a function in JSON:
<tools>
{}
</tools>
To call a function, write its name and its arguments as a JSON object, in this form:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages with the tools, their calls and their results written as text."""
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    out: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        after_result, is_result = is_result, message["role"] == "tool"
        content, calls = message.get("content"), message.get("tool_calls")
        if is_result:
            joined = _joined("<tool_response>\n", content, "\n</tool_response>")
            if after_result:  # some templates require user and assistant to alternate
                out[-1]["content"] = _joined(out[-1]["content"], "\n", joined)
            else:
                out.append({"role": "user", "content": joined})
        elif isinstance(calls, list) and calls:
            written = "\n".join(f"<tool_call>\n{_json(_call(call))}\n</tool_call>" for call in calls)
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            out.append({**rest, "content": _joined(content, "\n" if content else "", written)})
        else:
            out.append(dict(message))
    described = _TOOLS.format("\n".join(_json(_without_nulls(tool)) for tool in tools))
    if out[0]["role"] in ("system", "developer"):
        content = out[0].get("content")
        out[0]["content"] = _joined(content, "\n\n" if content else "", described)
    else:
        out.insert(0, {"role": "system", "content": [{"type": "text", "text": described}] if in_parts else described})
    return out


def _call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return function
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


def _without_nulls(tool: Any) -> Any:
    """Return a tool without the null fields of its function."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if value is not None}}


def _joined(*contents: Any) -> Any:
    """Return contents joined: a text, or a list of parts if any of them is a list."""
    texts = [_json(content) if isinstance(content, Mapping) else content or "" for content in contents]
    if not any(isinstance(text, list) for text in texts):
        return "".join(texts)
    parts = [text if isinstance(text, list) else [{"type": "text", "text": text}] for text in texts if text]
    return [part for group in parts for part in group]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
