"""Chat templates: the text a checkpoint wants a conversation written as.

Templates come with checkpoints, so they are run in Jinja's sandbox and see plain JSON values only.
What they may use is what transformers gives them: `raise_exception`, `strftime_now`, a `tojson`
that does not escape, `{% generation %}`, `{% break %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from ..errors import InputError

__all__ = ["ChatTemplates"]

# The names a message's reasoning goes by; templates read the first, gpt-oss's the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplates:
    """The chat templates of a checkpoint, by name ("default", "tool_use", ...); possibly none."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]):
        """`variables`: what every template sees, the special tokens ({"bos_token": "<s>", ...})."""
        self.templates = dict(templates)
        self.variables = dict(variables)

    def __bool__(self) -> bool:
        return bool(self.templates)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The text of a conversation, as transformers' apply_chat_template(tokenize=False) writes it.

        messages                [{"role": "user", "content": "..."}, ...], at least one
        template                the name of one of the checkpoint's templates, or a template itself
        add_generation_prompt   end with what introduces the assistant's next message
        continue_final_message  leave the last message open, to be continued
        tools, documents, variables   passed to the template

        Raises InputError when there is no template, or when it does not take these messages.
        """
        if add_generation_prompt and continue_final_message:
            raise InputError(
                "add_generation_prompt and continue_final_message exclude each other",
                field="continue_final_message",
                remedy="give one of them",
            )
        source = self._choose(template, tools)
        chat = [_message(message, i) for i, message in enumerate(_checked(messages))]
        final = _open_final(chat, source) if continue_final_message else None
        values: dict[str, Any] = {**self.variables, **{k: _plain(v, k) for k, v in variables.items()}}
        values |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        values |= {"tools": _plain(tools, "tools"), "documents": _plain(documents, "documents")}
        text = _run(source, values)
        return text if final is None else _close_final(text, final)

    def _choose(self, template: str | None, tools: object) -> str:
        if template is not None:
            named = self.templates.get(template)
            if named is None and "{" not in template:
                known = ", ".join(sorted(self.templates)) or "none"
                raise InputError(
                    f"the checkpoint has no chat template {template!r}",
                    field="template",
                    remedy=f"it has: {known}; or give a template's text",
                    code="no_chat_template",
                )
            return template if named is None else named
        if not self.templates:
            raise InputError(
                "the checkpoint has no chat template",
                field="messages",
                remedy="give one with template=, give a prompt instead of messages, or use an instruction-tuned model",
                code="no_chat_template",
            )
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            if len(self.templates) > 1:
                raise InputError(
                    "the checkpoint has several chat templates and none is called default",
                    field="template",
                    remedy=f"name one of: {', '.join(sorted(self.templates))}",
                    code="no_chat_template",
                )
            name = next(iter(self.templates))
        return self.templates[name]


def _checked(messages: object) -> Sequence[object]:
    if not isinstance(messages, (list, tuple)):
        kind = type(messages).__name__
        raise InputError(
            f"'messages' is of type {kind}, not a list",
            field="messages",
            remedy='give a list of {"role": ..., "content": ...}',
            code="wrong_type",
        )
    if not messages:
        raise InputError("'messages' is empty", field="messages", remedy="give at least one message", code="empty")
    return messages


def _message(message: object, index: int) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"{field!r} is not an object with a role",
            field=field,
            remedy='write it as {"role": "user", "content": "..."}',
            code="wrong_type",
        )
    # A null means "absent": templates would write it out as None.
    plain = {key: value for key, value in _plain(message, field).items() if value is not None}
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: object, field: str) -> Any:
    """The value in plain JSON types, copied. Raises InputError for anything else."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            message = f"{field!r} holds half of a surrogate pair, so it is not valid Unicode"
            remedy = "decode it again from its source"
            raise InputError(message, field=field, remedy=remedy, code="invalid_utf8") from None
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{field}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{field}[{i}]") for i, item in enumerate(value)]
    kind = type(value).__name__
    raise InputError(f"{field!r} is of type {kind}", field=field, remedy="give JSON values only", code="wrong_type")


def _open_final(chat: list[dict[str, Any]], source: str) -> str:
    """Mark the end of the last message; returns that message's text."""
    content = chat[-1].get("content")
    if not isinstance(content, str) or "content" not in source:
        raise InputError(
            "continue_final_message needs a last message whose content is a text",
            field=f"messages[{len(chat) - 1}].content",
            remedy="give it as a string, or leave the option out",
            code="wrong_type",
        )
    chat[-1]["content"] = content + _CONTINUE
    return content


def _close_final(text: str, final: str) -> str:
    """Cut the rendered text where the last message ends."""
    tag = text.rfind(_CONTINUE.strip())
    if tag < 0 or final.strip() not in text:
        raise InputError(
            "the chat template does not write the last message as it is, so it cannot be continued",
            field="continue_final_message",
            remedy="leave the option out",
        )
    # A template that trims its messages has also dropped the tag's own space.
    kept = text[tag : tag + len(_CONTINUE)] == _CONTINUE
    return text[:tag] if kept else text[:tag].rstrip()


def _run(source: str, values: dict[str, Any]) -> str:
    import jinja2

    try:
        return _compile(source).render(**values)
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template has a syntax error in line {error.lineno}: {error.message}"
        raise InputError(message, field="template", remedy="correct it, or give another one") from None
    except jinja2.TemplateError as error:
        message = f"the chat template refuses these messages: {error}"
        raise InputError(message, field="messages", remedy="see what roles and order the model expects") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        message = f"the chat template fails on these messages: {type(error).__name__}: {error}"
        raise InputError(message, field="messages", remedy="see what fields the model's messages have") from None


@lru_cache(maxsize=16)
def _compile(source: str):
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what the assistant wrote, for training; here it is only passed through."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Namespace(jinja2.utils.Namespace):
        """namespace() whose attributes cannot be Python's own (`__class__` and the like)."""

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["namespace"] = Namespace
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)
