"""Render chat templates: a conversation becomes the text format that a checkpoint was trained on.

Templates see only plain JSON values and run in Jinja's sandbox (`sandbox.py`). Templates from requests run in a
subprocess with limits on time and memory (`template_process.py`). If a template raises any error, `render` raises
InputError. The rendered text is always valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from .template_process import TemplateProcess
from .valid import plain_json, wrong_type

# Limit on the CPU seconds that a request's template may use for one conversation. Most need less than 1 ms.
TEMPLATE_SECONDS = 10.0

_CONTENT = "give it a text, or a list of parts"
# Names of the field with a message's reasoning. Most templates read the first name, gpt-oss's the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
# A reasoning model writes its reasoning between these marks, and its chat template contains them.
THINK = ("<think>", "</think>")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplates:
    """The chat templates of a checkpoint by name ("default", "tool_use", ...); may be empty."""

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, str], process: TemplateProcess | None = None
    ):
        """Store the templates and the values that all of them see.

        Args:
            templates: {name: source}.
            variables: The special tokens, such as {"bos_token": "<s>"}.
            process: Renders the templates of requests; None creates a process.
        """
        self.templates = dict(templates)
        self.variables = dict(variables)
        self.process = process or TemplateProcess()

    def __bool__(self) -> bool:
        return bool(self.templates)

    def thinks(self, template: str | None) -> bool:
        """Return True if the template, or with None any template of the checkpoint, contains the mark of reasoning."""
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
        """Return the text of a conversation, equal to transformers' apply_chat_template(tokenize=False).

        Args:
            messages: [{"role": "user", "content": "..."}, ...], at least one. The content of an assistant's message may
                be missing or null; if the template fails without it, the template gets "".
            template: The name of one of the checkpoint's templates, or a template's source text.
            add_generation_prompt: End with the text that introduces the assistant's next message.
            continue_final_message: Leave the last message open, so that the model continues it.
            tools: Tools passed to the template. For a template without tools, they are written into the messages
                (`sandbox.with_tools`).
            documents: Documents passed to the template. A template without documents refuses them.
            in_subprocess: Render a template given as source text in a subprocess with limits on CPU time and memory.
                Use it for templates from requests.
            template_seconds: CPU time that the subprocess may use, in seconds.
            variables: Further names that the template may look up.

        Raises:
            InputError: The template does not exist, or it does not accept these messages.
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
        """Return (the template's name as error messages show it, its source)."""
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
    if "content" in plain and not isinstance(plain["content"], (str, list, dict)):  # a tool's answer may be an object
        raise wrong_type(plain["content"], content, "a text", _CONTENT)
    if "content" in message and "content" not in plain and plain["role"] != "assistant":
        raise InputError(f"{content!r} is null", field=content, remedy=_CONTENT, code="null")
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _open_final(chat: list[dict[str, Any]], source: str) -> str:
    """Mark the end of the last message in `chat`, and return the text of that message without the mark."""
    content = chat[-1].get("content")
    if not isinstance(content, str) or "content" not in source:
        raise InputError(
            "continue_final_message needs a last message with a text as content",
            field=f"messages[{len(chat) - 1}].content",
            remedy="give it as a string, or leave the option out",
            code="wrong_type",
        )
    chat[-1]["content"] = content + _CONTINUE
    return content


def _close_final(text: str, final: str) -> str:
    """Return the rendered text up to the end of the last message."""
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
