"""Rows of tables as items of a task: which columns make the prompt, and which item a row becomes.

A row is a record of a job, or a row of a data frame given to a method of LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, JobError
from ..spec.fields import near
from ..text.fields import Template, as_text, is_empty, lookup, parse_cell, without_filler
from ..text.media import TextWithImages

_USUAL: dict[str, dict[str, tuple[str, ...]]] = {
    "embed": {"prompt": ("text", "prompt", "input")},
    "classify": {"prompt": ("text", "prompt", "input")},
    "decide": {"state": ("state", "text", "input")},
    "rerank": {"query": ("query",), "document": ("document", "documents", "passage", "passages", "text")},
    "score": {"prompt": ("prompt", "context"), "continuation": ("continuation", "continuations")},
    "generate": {"prompt": ("prompt", "question", "instruction", "text", "input")},
}


@dataclass(frozen=True)
class Columns:
    """The columns that make a record's prompts, and the columns that the output line repeats.

    Attributes:
        prompt, state, query, document, continuation: templates, or bare column names; None: not used by the task
        messages: a column of chat messages, instead of prompt or state
        tools: for generate: a column of tools for the chat template
        adapter: a column that names the LoRA adapter; null or an empty text for none
        image: a column with the record's image, or with a list of images: paths, bytes, base64, data URLs
        gold: columns of true answers
        id: a column whose value the output line repeats; "record": the record's number, unless a column has that name
        keep: further columns that the output line repeats: {name in the line: column}
        keep_all: repeat all columns of the record, under the names of `kept_name`
    """

    prompt: Template | None = None
    state: Template | None = None
    messages: str | None = None
    tools: str | None = None
    adapter: str | None = None
    image: str | None = None
    query: Template | None = None
    document: Template | None = None
    continuation: Template | None = None
    gold: tuple[str, ...] = ()
    id: str | None = None
    keep: Mapping[str, str] = field(default_factory=dict)
    keep_all: bool = False

    def repeated(self) -> dict[str, str]:
        """Return {name in the line: column} of the columns that a line repeats."""
        return ({"id": self.id} if self.id is not None else {}) | dict(self.keep)

    def paths(self) -> list[str]:
        """Return the paths of all columns named here."""
        templates = [
            t for t in (self.prompt, self.state, self.query, self.document, self.continuation) if t is not None
        ]
        names = [path for template in templates for path in template.paths]
        single = (self.messages, self.tools, self.adapter, self.image, self.id)
        return [*names, *(path for path in single if path), *self.gold, *self.keep.values()]

    def state_columns(self, data: Mapping[str, object]) -> list[str]:
        """Return the columns of a record that hold the state of decisions."""
        paths = [self.messages] if self.messages is not None else self.state.paths if self.state is not None else []
        return list(dict.fromkeys(path if path in data else path.split(".")[0] for path in paths))


def kept_name(reserved: Collection[str], column: str) -> str:
    """Return the name under which a line repeats a column: its own name, or input_NAME if lines have a field NAME.

    The name does not depend on the other columns, and two columns never get one name. If lines have a field NAME, a
    column input_NAME becomes input_input_NAME.

    Args:
        reserved: The names of the fields of lines.
    """
    return f"input_{column}" if bare(column, "input_") in reserved else column


def bare(name: str, prefix: str) -> str:
    """Return a name without a prefix that may be repeated."""
    while name.startswith(prefix):
        name = name.removeprefix(prefix)
    return name


def usual_columns(task: str, have: list[str] | None, options: Mapping[str, object]) -> dict[str, str | None]:
    """Return {option: column with a usual name} for options that the user omitted. None: there is no such column.

    Args:
        task: The name of the task.
        have: The names of the columns; None: unknown.
        options: {option: value}, None for an omitted option.
    """
    found: dict[str, str | None] = {}
    for option, names in _USUAL[task].items():
        if options.get(option) is not None or (option in ("prompt", "state") and options.get("messages")):
            continue
        name = names[0] if have is None else next((n for n in names if n in have), None)
        if option != "continuation" or (have is not None and name is not None):
            found[option] = name
    return found


def default_columns(task: str, have: list[str] | None, options: Mapping[str, object]) -> dict[str, Template]:
    """Return templates for options that the user omitted, made from columns with usual names (see `usual_columns`).

    Raise JobError, naming the option to give, if no column has a usual name.
    """
    out: dict[str, Template] = {}
    for option, name in usual_columns(task, have, options).items():
        if name is None:
            raise JobError(
                f"which column is the {option}? add --{option} COLUMN, or --{option} '...{{column}}...'; "
                f"the input has: {', '.join(have or [])}"
            )
        out[option] = Template(name, f"--{option}")
    return out


class RowReader:
    """A reader of table rows as items of a task."""

    def __init__(
        self,
        task: str,
        columns: Columns,
        render_chat: Callable[[list[Any]], Any] | None = None,
        *,
        chat: bool = False,
        keep_empty: bool = False,
        filled: bool = False,
        lists: bool = True,
    ):
        """Prepare the reader.

        Args:
            task: The name of the task.
            columns: The columns that make prompts. The last of them (document, continuation, else prompt) may hold a
                list. Then there is an item for each element, or one item of the whole list.
            render_chat: Makes the prompt of a list of chat messages. For decide, it makes (the state, its images). The
                task generate does not use it.
            chat: For generate: put each prompt into the chat template, as a message of the user.
            keep_empty: Treat null and NaN as an empty text, and allow empty texts. Otherwise they are errors.
            filled: Objects come from Arrow, which adds missing fields as null.
            lists: Whether a column may hold a list of texts.
        """
        self.task = task
        self.columns = columns
        self._render_chat = render_chat
        self._chat = chat
        self._keep_empty = keep_empty
        self._filled = filled
        self._render = Template.render_many if lists else Template.render
        self._names = self._field_names()

    @property
    def used(self) -> set[str]:
        """Return the names of all columns that are read. A path counts as itself and as its first part."""
        return {part for path in self.columns.paths() for part in (path, path.split(".")[0])}

    def check(self, have: list[str]) -> None:
        """Raise JobError if the table lacks a used column.

        Args:
            have: The columns of the table.
        """
        for path in self.columns.paths():
            if path == self.columns.id == "record":
                continue  # means the number of the record
            if path not in have and path.split(".")[0] not in have:
                hint = "; in a text, columns stand in braces: '... {column} ...'" if " " in path.strip() else ""
                raise JobError(f"the input has no column {path!r}; {near(path, have)}it has: {', '.join(have)}{hint}")

    def items(self, data: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
        """Return (whether the line has a list of results, the task's items, each with its adapter)."""
        is_list, items = self._texts_of(data)
        column = self.columns.adapter
        if column is None:
            return is_list, items
        adapter = lookup(data, column)
        name = None if is_empty(adapter) else as_text(adapter, column)
        return is_list, [item | {"adapter": name} for item in items]

    def _texts_of(self, data: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
        columns = self.columns
        if self.task == "generate":
            return self._generate_items(data)
        if self.task == "decide":
            return False, [self._state(data)]
        if columns.document is not None:
            query = {} if columns.query is None else {"query": columns.query.render(data, self._keep_empty)}
            value = self._render(columns.document, data, self._keep_empty)
            return False, [{**query, "documents" if isinstance(value, list) else "document": value}]
        prompt = self._pictured(self._prompt(data), self._images(data))
        if columns.continuation is not None:
            value = self._render(columns.continuation, data, self._keep_empty)
            values = value if isinstance(value, list) else [value]
            return isinstance(value, list), [{"prompt": prompt, "continuation": v} for v in values]
        if self.task != "embed" and isinstance(prompt, list):
            return True, [{"text": text} for text in prompt]
        return False, [{"text": prompt}]

    def _state(self, data: dict[str, Any]) -> Any:
        """Return the state of a record with its images: a conversation, a JSON value of a bare column, or a text."""
        columns, images = self.columns, self._images(data)
        own: dict[str, Any] = {} if images is None else {"images": images}
        if columns.messages is not None:
            assert self._render_chat is not None
            state, found = self._render_chat(self._messages(data, columns.messages))
            if found and images:
                message = f"there are images both in {columns.messages!r} and in {columns.image!r}"
                raise InputError(message, field=columns.image, remedy="give them in one column", code="image_count")
            return {"state": state, **({"images": found} if found else own)}
        assert columns.state is not None
        if (column := columns.state.column) is not None:
            value = self._object(data, column)
            if isinstance(value, (dict, list)) and value:
                return {"state": value, **own}
        return {"state": columns.state.render(data, self._keep_empty), **own}

    def _generate_items(self, data: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
        columns = self.columns
        images = self._images(data)
        fields: dict[str, Any] = {} if images is None else {"images": images}
        if columns.tools is not None:
            tools = self._object(data, columns.tools)
            fields["tools"] = None if is_empty(tools) else parse_cell(tools, columns.tools)
        if columns.messages is not None:
            return False, [{"messages": self._messages(data, columns.messages), **fields}]
        assert columns.prompt is not None
        value = self._render(columns.prompt, data, self._keep_empty)
        texts = value if isinstance(value, list) else [value]
        if self._chat:
            places = [{"type": "image"}] * len(images or ())
            contents = [[*places, {"type": "text", "text": t}] if places else t for t in texts]
            return isinstance(value, list), [{"messages": [{"role": "user", "content": c}], **fields} for c in contents]
        return isinstance(value, list), [{"prompt": text, **fields} for text in texts]

    def _object(self, data: dict[str, Any], path: str) -> Any:
        """Return the value at a path that holds objects: a conversation, or tools."""
        value = lookup(data, path)
        return without_filler(value) if self._filled else value

    def _messages(self, data: dict[str, Any], path: str) -> list[Any]:
        value = self._object(data, path)
        if is_empty(value):
            raise InputError(f"{path!r} is empty", field=path, remedy="give it a list of messages", code="null")
        value = parse_cell(value, path)
        if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
            remedy = 'give it [{"role": "user", "content": "..."}]'
            raise InputError(f"{path!r} is not a list of messages", field=path, remedy=remedy, code="wrong_type")
        return value

    def _images(self, data: dict[str, Any]) -> list[Any] | None:
        """Return the images of a record, or None without a column of images or for an empty cell."""
        column = self.columns.image
        value = None if column is None else lookup(data, column)
        if value is None or is_empty(value):
            return None
        value = parse_cell(value, column or "") if isinstance(value, str) and value[:1] == "[" else value
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _pictured(self, prompt: Any, images: list[Any] | None) -> Any:
        """Return a prompt, or each prompt of a list, with the images."""
        if not images:
            return prompt
        if isinstance(prompt, list):
            return [self._pictured(text, images) for text in prompt]
        return TextWithImages(prompt, images)

    def _prompt(self, data: dict[str, Any]) -> Any:
        columns = self.columns
        if columns.messages is not None:
            assert self._render_chat is not None
            return self._render_chat(self._messages(data, columns.messages))
        assert columns.prompt is not None
        render = self._render if columns.continuation is None else Template.render
        return render(columns.prompt, data, self._keep_empty)

    def _field_names(self) -> dict[str, str]:
        """Return {name of a task's input: its columns}, so that errors name the user's columns."""
        columns = self.columns
        names = {"query": columns.query, "document": columns.document, "continuation": columns.continuation}
        out = {name: ", ".join(template.paths) for name, template in names.items() if template is not None}
        prompt = columns.messages or (columns.prompt and ", ".join(columns.prompt.paths))
        out |= {"tool": columns.tools} if columns.tools else {}
        out |= {"adapter": columns.adapter} if columns.adapter else {}
        out |= {"image": columns.image} if columns.image else {}
        if self.task == "decide":
            state = columns.messages or (columns.state and ", ".join(columns.state.paths))
            return out | {"state": state or "state", "input": state or "state"}
        return out | ({"prompt": prompt, "text": prompt, "message": prompt} if prompt else {})

    def renamed(self, error: InputError) -> InputError:
        """Return an error of an item, with the names of the row's columns."""
        name, bracket, index = (error.field or "").partition("[")
        if name.removesuffix("s") in self._names:
            return error.renamed(self._names[name.removesuffix("s")] + bracket + index)
        return error
