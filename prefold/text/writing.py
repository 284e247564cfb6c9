"""Writes one conversation by one template: it is compiled, rendered, and whatever it raises becomes an InputError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .valid import is_unicode

if TYPE_CHECKING:
    from .sandbox import Program

__all__ = ["stopped", "write"]


def write(name: str, source: str, values: Mapping[str, Any], seconds: float) -> str:
    """Returns the text, which UTF-8 can hold, that a template writes.

    name     by which messages call the template
    values   {name: value} of what it may look up, plain JSON values: "messages", and "tools" and "documents", which
             it must look up where they are given
    seconds  of processor time that it may take

    Raises InputError for whatever the template raises, or where it was stopped.
    """
    from .sandbox import compile_template  # Jinja takes a while to import, and only chats need it

    with _one_line(name, seconds):
        program = compile_template(source)
        for what in ("tools", "documents"):
            _refuse_unused(what, values.get(what), name, program)
        text = _write(program, values)
        if not is_unicode(text):
            raise ValueError("it wrote half of a surrogate pair, which is not valid Unicode")
    return text


def stopped(name: str, why: str) -> InputError:
    """Returns the error of a template that was stopped."""
    return InputError(
        f"the chat template {name} was stopped: {why}",
        field="chat_template",
        remedy="correct it, or allow it more time with template_seconds (--template-seconds)",
        code="template_limit",
    )


def _refuse_unused(what: str, given: Any, name: str, program: Program) -> None:
    """Raises InputError for tools, or documents, that the template never looks up."""
    if given and what not in program.variables:
        raise InputError(
            f"the chat template {name} does not use {what}, so the model would not see them",
            field=what,
            remedy=f"write them into a message, use a model whose template knows {what}, or give chat_template",
            code="unused_" + what,
        )


def _write(program: Program, values: Mapping[str, Any]) -> str:
    """Returns what the template writes of these values. If it fails because an assistant's message has no content,
    that content is made empty."""
    try:
        return program.render(values)
    except Exception:
        chat = values["messages"]
        bare = {i for i, message in enumerate(chat) if message["role"] == "assistant" and "content" not in message}
        if not bare:
            raise
    filled = [message | ({"content": ""} if i in bare else {}) for i, message in enumerate(chat)]
    return program.render({**values, "messages": filled})


@contextmanager
def _one_line(name: str, seconds: float) -> Iterator[None]:
    """Bounds the time of a template that runs inside, and raises whatever it raises as an InputError of one line."""
    import jinja2

    from .allowance import TemplateLimit, allowed

    try:
        with allowed(seconds):
            yield
    except InputError:
        raise
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template {name} has a syntax error in line {error.lineno}: {error.message}"
        raise InputError(_short(message), field="chat_template", remedy="correct it, or give another one") from None
    except TemplateLimit as error:
        raise stopped(name, str(error)) from None
    except MemoryError:
        raise stopped(name, "it took more memory than there is") from None
    except jinja2.exceptions.SecurityError as error:
        message = f"the chat template {name} does what templates may not: {error}"
        raise InputError(_short(message), field="chat_template", remedy="correct it, or give another one") from None
    except jinja2.UndefinedError as error:
        message = f"the chat template {name} fails on these messages: {error}"
        remedy = "look up which fields the messages and tools of this model have"
        raise InputError(_short(message), field="messages", remedy=remedy) from None
    except jinja2.TemplateError as error:
        message = f"the chat template {name} refuses these messages: {error}"
        remedy = "look up which roles the model expects, and in which order"
        raise InputError(_short(message), field="messages", remedy=remedy) from None
    except Exception as error:  # a template may raise anything, and Python's compiler does for one nested too deep
        message = f"the chat template {name} fails on these messages: {type(error).__name__}: {error}"
        remedy = "look up which fields the messages of this model have"
        raise InputError(_short(message), field="messages", remedy=remedy) from None


def _short(message: str) -> str:
    """Returns the message in one line of at most 400 letters, which any encoding of a terminal can write."""
    line = " ".join(message[:4000].split())[:400]  # a template may raise a message of any size
    return line.encode("utf-8", "backslashreplace").decode()
