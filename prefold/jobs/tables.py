"""Reads and writes tables: JSONL, CSV, TSV or Parquet records whose columns become the prompts of one task."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InputError, JobError, record_error
from ..spec.fields import near
from ..tasks.results import Answer, Classification, Decision, names_in_lines
from ..text.media import TextWithImages
from ..text.valid import valid_text
from ..wire.decisions import state_of
from .fields import Template, as_text, is_empty, lookup, parse_cell, without_filler
from .record import ParsedRecord, Record, error_object, plain

if TYPE_CHECKING:
    from .gold import Gold

# The names that every output line has beside the fields of its task's answer.
_OF_LINES = {"record", "id", "error", "results"}
_USUAL = {
    "embed": {"prompt": ("text", "prompt", "input")},
    "classify": {"prompt": ("text", "prompt", "input")},
    "decide": {"state": ("state", "text", "input")},
    "rerank": {"query": ("query",), "document": ("document", "documents", "passage", "passages", "text")},
    "score": {"prompt": ("prompt", "context"), "continuation": ("continuation", "continuations")},
    "generate": {"prompt": ("prompt", "question", "instruction", "text", "input")},
}


def reserved_names(task: str, *, has_id: bool = True) -> frozenset[str]:
    """Returns the names of a task's own fields in an output line; columns that it repeats need other names. has_id:
    whether lines have an id of their own (--id)"""
    names = _OF_LINES | names_in_lines(task)
    return frozenset(names if has_id else names - {"id"})


@dataclass(frozen=True)
class Columns:
    """A Columns names the columns of a record's prompts, and those that the output line repeats. Fields that the task
    does not use are None.

    prompt, state, query, document, continuation   templates, or bare column names
    messages   a column of chat messages, in place of prompt or state
    tools      for generate: a column of the tools that the chat template writes
    adapter    a column that names the LoRA adapter; null or an empty text for none
    image      a column of the record's image, or of a list of images: paths, bytes, base64, data URLs
    gold       columns of true answers
    id         a column whose value the output line repeats; "record", where no column has that name, is the record's
               number
    keep       further columns that the output line repeats: {name in the line: column}
    keep_all   whether the line repeats all columns of the record, under the names that `kept_name` gives them
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
        """Returns {name in the line: column} of the columns that a line repeats."""
        return ({"id": self.id} if self.id is not None else {}) | dict(self.keep)

    def paths(self) -> list[str]:
        """Returns the paths of all columns that are named here."""
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
    """Returns the name under which a line repeats a column: its own, or input_NAME where lines have a NAME of their
    own. reserved: the names that lines have of their own

    The name does not depend on the other columns, and no two columns get one name: a column input_NAME is itself
    repeated as input_input_NAME where lines have a NAME.
    """
    return f"input_{column}" if bare(column, "input_") in reserved else column


def bare(name: str, prefix: str) -> str:
    """Returns a name without a prefix, however often it is repeated."""
    while name.startswith(prefix):
        name = name.removeprefix(prefix)
    return name


def default_columns(task: str, have: list[str] | None, options: dict[str, Any]) -> dict[str, Template]:
    """Returns templates for options that the user left out, made from columns with usual names.

    have     the names of the columns; None when they are not known
    options  {option: value}, None for an option that the user left out

    Raises JobError, naming the option to give, when no column has a usual name.
    """
    out: dict[str, Template] = {}
    for option, names in _USUAL[task].items():
        if options.get(option) is not None or (option in ("prompt", "state") and options.get("messages")):
            continue
        name = names[0] if have is None else next((n for n in names if n in have), None)
        if option == "continuation" and (have is None or name is None):
            continue
        if name is None:
            raise JobError(
                f"which column is the {option}? add --{option} COLUMN, or --{option} '...{{column}}...'; "
                f"the input has: {', '.join(have or [])}"
            )
        out[option] = Template(name, f"--{option}")
    return out


class TableAdapter:
    """A TableAdapter is the RecordAdapter of rows of a table.

    task         the name of the task
    columns      the columns that make prompts. Where the last of them (document, continuation, else prompt) holds a
                 list, the record's line has the results of the whole list
    render_chat  makes token ids of a list of chat messages; not used for generate, whose task does so
    chat         for generate: a prompt is what a user says, and is put into the chat template
    keep_empty   null, NaN and an empty text are taken as an empty text; they are errors otherwise
    filled       objects come from Arrow, which fills the fields that they lack with null
    gold         reads the true answers of decisions
    shows        whether the columns of a state of decisions are kept, for rows that a person reviews

    Raises JobError where a column is to be repeated under a name that lines have themselves.
    """

    def __init__(
        self,
        task: str,
        columns: Columns,
        render_chat: Callable[[list[Any]], Any] | None = None,
        *,
        chat: bool = False,
        keep_empty: bool = False,
        filled: bool = False,
        gold: Gold | None = None,
        shows: bool = False,
    ):
        self.reserved = self.reserved_for(task, has_id=columns.id is not None)
        for name in columns.keep:
            if name in self.reserved:
                raise JobError(
                    f"--keep {name} cannot be, as a line has its own {name!r}; write --keep my_{name}={name}"
                )
        self.task = task
        self.columns_used = columns
        used = {part for path in columns.paths() for part in (path, path.split(".")[0])}
        self.columns = None if columns.keep_all else used
        self._render_chat = render_chat
        self._chat = chat
        self._keep_empty = keep_empty
        self._filled = filled
        self.gold, self._shows = gold, shows
        self._names = self._field_names()
        self.labels: Counter[str] = Counter()  # of this run's lines

    def check(self, have: list[str] | None) -> None:
        """Raises JobError if the table lacks a column that is used. have: its columns; None if unknown"""
        for path in self.columns_used.paths() if have is not None else []:
            if path == self.columns_used.id == "record":
                continue  # it stands for the records' numbers
            if path not in have and path.split(".")[0] not in have:
                hint = "; in a text, columns stand in braces: '... {column} ...'" if " " in path.strip() else ""
                raise JobError(f"the input has no column {path!r}; {near(path, have)}it has: {', '.join(have)}{hint}")

    def read(self, record: Record) -> ParsedRecord:
        parsed = ParsedRecord(task=self.task, error=record.error)
        if record.error is not None or record.data is None:
            return parsed
        try:
            parsed.meta = self._meta(record.data, record.number)
            is_list, parsed.items = self._items(record.data)
            if is_list:
                parsed.meta["many"] = True
        except Exception as error:
            parsed.error = record_error(error)
        return parsed

    @classmethod
    def reserved_for(cls, task: str, *, has_id: bool) -> frozenset[str]:
        """Return the names that lines have of their own."""
        return reserved_names(task, has_id=has_id)

    def kept_name(self, column: str) -> str:
        """Returns the name under which lines repeat a column where all columns are repeated."""
        return kept_name(self.reserved, column)

    def _meta(self, data: dict[str, Any], number: int) -> dict[str, Any]:
        columns, meta = self.columns_used, {}
        if columns.id is not None:
            value = number if columns.id == "record" and "record" not in data else lookup(data, columns.id)
            if not isinstance(value, (str, int)) or isinstance(value, bool):
                remedy = "give it a text or a whole number"
                message = f"the id in column {columns.id!r} is {value!r:.100}"
                raise InputError(message, field=columns.id, remedy=remedy, code="wrong_type")
            meta["id"] = valid_text(value, columns.id) if isinstance(value, str) else value
        if columns.keep or columns.keep_all:
            every = data if columns.keep_all else ()
            repeated = {self.kept_name(name): plain(data[name]) for name in every if not name == "id" == columns.id}
            meta["keep"] = repeated | {name: plain(lookup(data, path)) for name, path in columns.keep.items()}
        if self.gold is not None:
            meta["gold"] = self.gold.of(data, number, meta.get("id"))
        if self._shows:
            meta["row"] = {name: plain(data.get(name)) for name in columns.state_columns(data)}
        return meta

    def _items(self, data: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
        """Returns (whether the line has a list of results, the task's items, each with its adapter)."""
        is_list, items = self._texts_of(data)
        column = self.columns_used.adapter
        if column is None:
            return is_list, items
        adapter = lookup(data, column)
        name = None if is_empty(adapter) else as_text(adapter, column)
        return is_list, [item | {"adapter": name} for item in items]

    def _texts_of(self, data: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
        columns = self.columns_used
        if self.task == "generate":
            return self._generate_items(data)
        if self.task == "decide":
            return False, [{"state": self._state(data)}]
        if columns.document is not None:
            assert columns.query is not None
            query = columns.query.render(data, self._keep_empty)
            value = columns.document.render_many(data, self._keep_empty)
            return False, [{"query": query, "documents" if isinstance(value, list) else "document": value}]
        prompt = self._pictured(self._prompt(data), self._images(data))
        if columns.continuation is not None:
            value = columns.continuation.render_many(data, self._keep_empty)
            values = value if isinstance(value, list) else [value]
            return isinstance(value, list), [{"prompt": prompt, "continuation": v} for v in values]
        if self.task != "embed" and isinstance(prompt, list):
            return True, [{"text": text} for text in prompt]
        return False, [{"text": prompt}]

    def _state(self, data: dict[str, Any]) -> Any:
        """Return the state of a record: a conversation, a JSON value of a column by itself, or a text."""
        columns = self.columns_used
        if columns.messages is not None:
            return state_of(self._messages(data, columns.messages))
        assert columns.state is not None
        if (column := columns.state.column) is not None:
            value = self._object(data, column)
            if isinstance(value, (dict, list)) and value:
                return value
        return columns.state.render(data, self._keep_empty)

    def _generate_items(self, data: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
        columns = self.columns_used
        images = self._images(data)
        fields: dict[str, Any] = {} if images is None else {"images": images}
        if columns.tools is not None:
            tools = self._object(data, columns.tools)
            fields["tools"] = None if is_empty(tools) else parse_cell(tools, columns.tools)
        if columns.messages is not None:
            return False, [{"messages": self._messages(data, columns.messages), **fields}]
        assert columns.prompt is not None
        value = columns.prompt.render_many(data, self._keep_empty)
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
        """Returns the images of a record; None without a column of images, or if its cell is empty."""
        column = self.columns_used.image
        value = None if column is None else lookup(data, column)
        if value is None or is_empty(value):
            return None
        value = parse_cell(value, column or "") if isinstance(value, str) and value[:1] == "[" else value
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _pictured(self, prompt: Any, images: list[Any] | None) -> Any:
        """Returns a prompt, or each of a list of them, with its images."""
        if not images:
            return prompt
        if isinstance(prompt, list):
            return [self._pictured(text, images) for text in prompt]
        return TextWithImages(prompt, images)

    def _prompt(self, data: dict[str, Any]) -> Any:
        columns = self.columns_used
        if columns.messages is not None:
            assert self._render_chat is not None
            return self._render_chat(self._messages(data, columns.messages))
        assert columns.prompt is not None
        render = columns.prompt.render if columns.continuation is not None else columns.prompt.render_many
        return render(data, self._keep_empty)

    def _field_names(self) -> dict[str, str]:
        """Returns {name of a task's input: its columns}, with which errors name the user's columns."""
        columns = self.columns_used
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

    def line(self, number: int, meta: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
        for answer in answers:
            if isinstance(answer, Classification) and answer.label:  # an example has none
                self.labels[answer.label] += 1
        head = self._head(number, meta)
        if meta.get("many"):
            return head | {"results": [self._fields_of(answer, is_part=True) for answer in answers]}
        return head | self._fields_of(answers[0])

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        """Return the fields of an answer in the record's line, or if `is_part` in a list of the record's results."""
        return answer.line()

    def error_line(self, number: int, meta: dict[str, Any] | None, error: InputError) -> dict[str, Any]:
        name, bracket, index = (error.field or "").partition("[")
        if name.removesuffix("s") in self._names:
            error = error.renamed(self._names[name.removesuffix("s")] + bracket + index)
        return self._head(number, meta or {}) | {"error": error_object(error)}

    def _head(self, number: int, meta: dict[str, Any]) -> dict[str, Any]:
        head: dict[str, Any] = {"record": number}
        if "id" in meta:
            head["id"] = meta["id"]
        return head | meta.get("keep", {})


class LabelColumns(TableAdapter):
    """The TableAdapter of "classify" for tables that people read: the label, and its probability in the column `p`.

    every  whether each label's probability has a column of its own, p_LABEL
    keeps  whether the objects of probabilities, log-likelihoods and logits stay, as nested columns
    """

    prefix = "p_"

    def __init__(self, *arguments: Any, every: bool = False, keeps: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self._every, self._keeps = every, keeps
        while any(name.startswith(self.prefix) for name in self.columns_used.keep):
            self.prefix += LabelColumns.prefix

    @classmethod
    def reserved_for(cls, task: str, *, has_id: bool) -> frozenset[str]:
        return super().reserved_for(task, has_id=has_id) | {"p"}

    def kept_name(self, column: str) -> str:
        name = super().kept_name(column)
        # Which columns there are is not known beforehand, and a label's column has the same name in all lines.
        clashes = self._every and name == column and bare(name, "input_").startswith(self.prefix)
        return f"input_{name}" if clashes else name

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        assert isinstance(answer, Classification)
        # The label of an example is empty.
        own = {"label": answer.label, "p": answer.probabilities.get(answer.label, 0.0)}
        if self._every:
            own |= {self.prefix + label: p for label, p in answer.probabilities.items()}
        objects = () if self._keeps else answer.numbers
        return own | {name: value for name, value in answer.line().items() if name not in objects}


PREFIX = "answer_"


class DecisionColumns(TableAdapter):
    """The TableAdapter of "decide" for tables that people read: a column NAME with the value of each question.

    Beside it is NAME_p, the probability of this value; of a score NAME_confidence; and NAME_review, whether the answer
    is doubtful, if there is a threshold. With `every` there are also the
    probability of each option, NAME_p_OPTION, NAME_confidence and NAME_label_mass. A question that could not be
    answered has NAME_error in place of these.

    keeps: whether the object of all answers stays, as a nested column
    """

    def __init__(self, *arguments: Any, every: bool = False, keeps: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self._every, self._keeps = every, keeps

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        assert isinstance(answer, Decision)
        own = decision_columns(answer, every=self._every)
        line = {name: value for name, value in answer.line().items() if self._keeps or name != "answers"}
        # A column of the line itself keeps its name: a question called "record" becomes answer_record.
        return {(PREFIX + name if name in self.reserved or name in self.columns_used.keep else name): value
                for name, value in own.items()} | line  # fmt: skip


def decision_columns(decision: Decision, *, every: bool = False) -> dict[str, object]:
    """Return {column: value} of the answers of a Decision, as DecisionColumns has them."""
    own: dict[str, object] = {}
    for name, one in decision.answers.items():
        own[name] = one.value
        of: Any = one.to_dict()["probabilities"]
        if one.type != "score":
            own[f"{name}_p"] = max(one.probabilities.values())
        if one.type == "score" or every:
            own[f"{name}_confidence"] = one.confidence
        if one.review is not None:
            own[f"{name}_review"] = one.review
        if every:
            pairs = of.items() if isinstance(of, dict) else ((str(part["value"]), part["probability"]) for part in of)
            own |= {f"{name}_p_{option}": p for option, p in pairs}
            own |= {} if one.label_mass is None else {f"{name}_label_mass": one.label_mass}
    return own | {f"{name}_error": str(error) for name, error in decision.errors.items()}


class AnswerColumns(TableAdapter):
    """An AnswerColumns is the TableAdapter for "generate" that gives each property of a JSON answer a column.

    For a list of prompts the properties are in each of its `results`. What a property is called does not depend on the
    record. So where a line repeats all columns of its record, and they are not known beforehand, every property is
    called answer_NAME, and a column with such a name is repeated as input_answer_NAME.
    """

    def kept_name(self, column: str) -> str:
        name = super().kept_name(column)
        return f"input_{name}" if name == column and bare(name, "input_").startswith(PREFIX) else name

    def _fields_of(self, answer: Answer, *, is_part: bool = False) -> dict[str, Any]:
        repeated = set() if is_part else set(self.columns_used.keep)
        return with_columns(answer.line(), repeated, every=self.columns_used.keep_all and not is_part)


def with_columns(result: dict[str, Any], repeated: Collection[str], *, every: bool = False) -> dict[str, Any]:
    """Returns a result of "generate" with the properties of the object in its `text` as further fields.

    A property is called answer_NAME where a line has a NAME of its own, or NAME is in `repeated`; so is a property
    called answer_NAME itself, that no two have one name. With names in `repeated` that begin with answer_, another
    answer_ is put before it. A result whose text is no JSON object, such as one that max_tokens cut off, comes back as
    it is.

    every  whether all properties are renamed
    """
    try:
        answer = json.loads(result.get("text", ""))
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets in each other
        return result
    if not isinstance(answer, dict):
        return result
    reserved = {*repeated, *reserved_names("generate")}
    prefix, bases = PREFIX, {bare(name, PREFIX) for name in reserved}
    while any(name.startswith(prefix) for name in reserved):
        prefix += PREFIX
    names = (prefix + name if every or bare(name, PREFIX) in bases else name for name in answer)
    return result | dict(zip(names, map(plain, answer.values()), strict=True))
