"""Renders chat templates, which write a conversation as the text that a checkpoint was trained on. Templates see plain
JSON values only, and run in Jinja's sandbox (`sandbox.py`); templates of requests run in a subprocess, which bounds
their time and memory (`template_process.py`). Whatever a template raises, `render` returns a text that UTF-8 can hold,
or raises InputError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from .template_process import TemplateProcess
from .valid import plain_json, wrong_type

# Processor seconds that the template of a request may take for a conversation. Usual ones take below a millisecond.
TEMPLATE_SECONDS = 10.0

_CONTENT = "give it a text, or a list of parts"
# Names of the field that holds a message's reasoning. Most templates read the first, that of gpt-oss the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Between these a model that thinks writes its reasoning; its chat template has them too.
THINK = ("<think>", "</think>")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplates:
    """A ChatTemplates holds the chat templates of a checkpoint by name ("default", "tool_use", ...); there may be
    none."""

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, str], process: TemplateProcess | None = None
    ):
        """Keeps the templates, {name: source}, and what every one of them sees: variables, the special tokens
        ({"bos_token": "<s>", ...}). process: renders the templates of requests; None: a new one."""
        self.templates = dict(templates)
        self.variables = dict(variables)
        self.process = process or TemplateProcess()

    def __bool__(self) -> bool:
        return bool(self.templates)

    def thinks(self, template: str | None) -> bool:
        """Returns whether a template has the mark of reasoning; without a template, whether one of the checkpoint's has
        it."""
        named = self.templates.values() if template is None else [self.templates.get(template, template)]
        return any(THINK[0] in source for source in named)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template_seconds: float = TEMPLATE_SECONDS,
        in_subprocess: bool = False,
        **variables: object,
    ) -> str:
        """Returns the text of a conversation, as transformers' apply_chat_template(tokenize=False) writes it.

        messages                [{"role": "user", "content": "..."}, ...], at least one. The content of an assistant's
                                message may be missing or null; it is given as "" to a template that fails without it
        template                the name of one of the checkpoint's templates, or the text of a template
        add_generation_prompt   whether to end with what introduces the assistant's next message
        continue_final_message  whether to leave the last message open, so that the model continues it
        tools, documents        passed to the template. Tools are written into the messages for a template that does
                                not use them (`sandbox.with_tools`); documents are refused then
        in_subprocess           whether a template that is given as a text is rendered in a process of its own, with
                                limits of processor time and memory: for texts that requests bring
        template_seconds        processor time that it may take there
        variables               further names that the template may look up

        Raises InputError when there is no such template, or when the template does not take these messages.
        """
        if add_generation_prompt and continue_final_message:
            raise InputError(
                "add_generation_prompt and continue_final_message exclude each other",
                field="continue_final_message",
                remedy="set only one of them",
            )
        name, source = self._choose(template, tools)
        if not isinstance(messages, (list, tuple)):
            raise wrong_type(messages, "messages", "a list", 'give a list of {"role": ..., "content": ...}')
        if not messages:
            remedy = "give at least one message"
            raise InputError("'messages' is empty", field="messages", remedy=remedy, code="empty")
        chat = [_message(message, i) for i, message in enumerate(messages)]
        final = _open_final(chat, source) if continue_final_message else None
        values: dict[str, Any] = {**self.variables, **{k: plain_json(v, k) for k, v in variables.items()}}
        values |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        values |= {"tools": plain_json(tools, "tools"), "documents": plain_json(documents, "documents")}
        if in_subprocess and template is not None and template not in self.templates:
            text = self.process.write(name, source, values, template_seconds)
        else:
            from .sandbox import write  # Jinja takes a while to import, and only chats need it

            text = write(name, source, values)
        return text if final is None else _close_final(text, final)

    def _choose(self, template: str | None, tools: object) -> tuple[str, str]:
        """Returns (the template's name in messages, its source)."""
        if template is not None and not isinstance(template, str):
            remedy = "give the name of one of the checkpoint's templates, or the text of a template"
            raise wrong_type(template, "chat_template", "a text", remedy)
        if template is not None:
            template_text = self.templates.get(template)
            if template_text is None and "{" not in template:
                names = ", ".join(sorted(self.templates)) or "none"
                raise InputError(
                    f"the checkpoint has no chat template {template!r}",
                    field="chat_template",
                    remedy=f"name one that it has ({names}), or give the text of a template",
                    code="no_chat_template",
                )
            return ("that was given", template) if template_text is None else (repr(template), template_text)
        if not self.templates:
            raise InputError(
                "the checkpoint has no chat template",
                field="messages",
                remedy="give one (chat_template), give a prompt instead of messages, or use an instruction-tuned model",
                code="no_chat_template",
            )
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            if len(self.templates) > 1:
                raise InputError(
                    "the checkpoint has several chat templates and none is called default",
                    field="chat_template",
                    remedy=f"name one of: {', '.join(sorted(self.templates))}",
                    code="no_chat_template",
                )
            name = next(iter(self.templates))
        return repr(name), self.templates[name]


def _message(message: object, index: int) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"{field!r} is not an object with a role",
            field=field,
            remedy='write it as {"role": "user", "content": "..."}',
            code="wrong_type",
        )
    # A null means "absent", as in transformers: templates would write it out as None.
    plain = {key: value for key, value in plain_json(message, field).items() if value is not None}
    content = f"{field}.content"
    if "content" in plain and not isinstance(plain["content"], (str, list, dict)):  # an object is a tool's answer
        raise wrong_type(plain["content"], content, "a text", _CONTENT)
    if "content" in message and "content" not in plain and plain["role"] != "assistant":
        raise InputError(f"{content!r} is null", field=content, remedy=_CONTENT, code="null")
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _open_final(chat: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the last message in `chat`, and returns the text of that message."""
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
    """Returns the rendered text up to the end of the last message."""
    tag = text.rfind(_CONTINUE.strip())
    if tag < 0 or final.strip() not in text:
        raise InputError(
            "the chat template does not write the last message as it is, so it cannot be continued",
            field="continue_final_message",
            remedy="leave the option out",
        )
    # A template that trims its messages has also dropped the tag's own space.
    has_space = text[tag : tag + len(_CONTINUE)] == _CONTINUE
    return text[:tag] if has_space else text[:tag].rstrip()
