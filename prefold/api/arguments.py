"""Convert the arguments of LLM's methods to items of tasks. Every InputError names the wrong argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..tasks import ClassifyItem, DecideItem, EmbedItem, ScoreItem
from ..text.media import TextWithImages

T = TypeVar("T")
Message = Mapping[str, object]  # {"role": "user", "content": "..."}


class TensorLike(Protocol):
    """The type of PyTorch tensors of token ids, declared without importing torch."""

    def detach(self) -> object: ...
    def cpu(self) -> object: ...


Vector = NDArray[np.float32]
Ids: TypeAlias = "Sequence[int] | NDArray[np.integer] | TensorLike"
Text: TypeAlias = "str | Ids | TextWithImages"  # a text, its token ids, or a text with images
# A text, a conversation, or the fields of GenerateItem.
Prompt: TypeAlias = "Text | Sequence[Message] | Mapping[str, object]"
# Usual names of text columns, for the remedy of an error.
USUAL_COLUMNS = ("text", "body", "prompt", "question", "content", "document", "query", "messages")
TEXT = "give a text, a list of token ids, or a list of texts or token id lists"


def refuse_table(value: Any, argument: str) -> None:
    """Raise InputError for a table, because iterating it would yield column names instead of rows.

    Tables are pandas and Polars DataFrames, PyArrow Tables, DuckDB relations and structured arrays.
    """
    names = getattr(value, "column_names", None)
    names = getattr(value, "columns", None) if names is None else names
    if isinstance(value, np.ndarray):
        names = value.dtype.names
    if names is None or callable(names) or isinstance(value, (str, Mapping)):
        return
    names = [str(name) for name in names]
    column = next((name for name in names if name in USUAL_COLUMNS), names[0] if names else "text")
    # DuckDB relations and Polars lazy frames must be computed before a column can be selected.
    compute = next((f".{step}()" for step in ("fetchnumpy", "collect") if hasattr(value, step)), "")
    raise InputError(
        f"{argument} is a table, of type {type(value).__name__}, with the columns {', '.join(names)[:200] or '(none)'}",
        field=argument,
        remedy=f"give a column: df{compute}[{column!r}]",
        code="wrong_type",
    )


def only_tables(**keywords: str | None) -> None:
    """Raise InputError if a keyword that only applies to tables is not None. Called if the input is no table."""
    for name, value in keywords.items():
        if value is not None:
            remedy = "leave it out, or give a DataFrame, a PyArrow Table or a DuckDB relation"
            raise InputError(f"{name} is for tables", field=name, remedy=remedy)


def refuse_mapping(value: Any, argument: str) -> None:
    """Raise InputError for a mapping, because iterating it would yield its keys."""
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))[:200]
        message = f"{argument} is a mapping with the keys {names or '(none)'}"
        remedy = f"give one of its values, such as {argument}[{next(iter(value), 'text')!r}], or its values as a list"
        raise InputError(message, field=argument, remedy=remedy, code="wrong_type")


def as_list(value: Any, argument: str) -> Any:
    """Convert a Series, array, tensor, generator or other iterable to a list of its elements.

    Return a text, bytes, a mapping or a value that is not iterable unchanged. Raise InputError for a table or a set.
    """
    value = _array(value)
    refuse_table(value, argument)
    if isinstance(value, (set, frozenset)):
        message = f"{argument} is a {type(value).__name__}, which has no order"
        raise InputError(message, field=argument, remedy="give a list", code="wrong_type")
    is_one = value is None or isinstance(value, (str, bytes, bytearray, Mapping))
    if is_one or not isinstance(value, Iterable) or _is_scalar(value):
        return value
    if hasattr(value, "to_pylist"):  # a PyArrow array; list() would return PyArrow scalars
        return value.to_pylist()
    return list(value)


def items_of(value: Any) -> list[Any]:
    """Convert the items of a task to a list. Raise InputError for a single item, a table or a set."""
    items = as_list(value, "items")
    if not isinstance(items, list):
        raise InputError(f"items is {_kind(items)}", field="items", remedy="give a list of items", code="wrong_type")
    return items


def as_items(value: Any, argument: str, *, mapping: bool = False) -> tuple[list[Any], bool]:
    """Return (list of items, whether a single item was given). An item is a text, or token ids.

    Token ids may be in a list, a NumPy array or a PyTorch tensor. The items themselves are not checked.

    Args:
        value: One item, or a collection of items.
        argument: Name of the argument, for errors.
        mapping: Accept a mapping as an item, instead of raising InputError.

    Raises:
        InputError: The value is neither an item nor a collection of items.
    """
    value = _array(value)
    refuse_table(value, argument)
    if not mapping:
        refuse_mapping(value, argument)
    if isinstance(value, (str, Mapping, TextWithImages)):
        return [value], True
    if value is None or isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable) or _is_scalar(value):
        raise InputError(f"{argument} is {_kind(value)}", field=argument, remedy=TEXT, code="wrong_type")
    items = [_array(item) for item in as_list(value, argument)]
    if items and all(_is_whole(item) for item in items):
        return [value if isinstance(value, np.ndarray) else items], True
    return items, False


def as_texts(value: Any, argument: str) -> tuple[list[Any], bool]:
    """Like `as_items`, but replace an item by an InputError if it is a list of texts, or an array that is not 1-D."""
    items, single = as_items(value, argument)
    return [_text(item) for item in items], single


def chats_of(messages: Any) -> tuple[list[Any], bool]:
    """Return (items for generation, whether a single conversation was given).

    Raise InputError if `messages` is not a list, Series, array or generator.

    Args:
        messages: A conversation (a list of messages), or a list of conversations.
    """
    messages = as_list(messages, "messages")
    if not isinstance(messages, (list, tuple)):
        remedy = 'give a conversation, [{"role": "user", "content": "..."}], or a list of conversations'
        raise InputError(f"messages is {_kind(messages)}", field="messages", remedy=remedy, code="wrong_type")
    single = bool(messages) and isinstance(messages[0], Mapping)
    chats = [messages] if single else [as_list(chat, f"messages[{i}]") for i, chat in enumerate(messages)]
    return [{"messages": chat} for chat in chats], single


def take_adapters(items: list[Any], single: bool, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return (items, options of the task). If the option `adapter` is a list, move its names into the items.

    Raise InputError if a single item was given, or if the length of the list is not the number of items.
    """
    adapter = options.get("adapter")
    if not isinstance(adapter, (list, tuple)):
        return items, dict(options)
    if single or len(adapter) != len(items):
        message = f"adapter is a list of {len(adapter)}, for {'one prompt' if single else f'{len(items)} prompts'}"
        raise InputError(message, field="adapter", remedy="give one name, or a list with a name for each prompt")
    named = [_with_adapter(item, name) for item, name in zip(items, adapter, strict=True)]
    return named, {**options, "adapter": None}


def _with_adapter(item: Any, name: str | None) -> Any:
    if name is None or isinstance(item, InputError):
        return item
    if isinstance(item, (EmbedItem, ClassifyItem, DecideItem, ScoreItem)):
        return replace(item, adapter=name)
    if isinstance(item, list) and item and isinstance(item[0], ScoreItem):
        return [replace(pair, adapter=name) for pair in item]
    if isinstance(item, Mapping):
        return item if item.get("adapter") is not None else {**item, "adapter": name}
    is_chat = isinstance(item, (list, tuple)) and item and isinstance(item[0], Mapping)
    return {"messages" if is_chat else "prompt": item, "adapter": name}


def pair_up(prompts: Any, continuations: Any) -> tuple[list[list[ScoreItem]], bool, bool]:
    """Pair each prompt with each of its continuations.

    A prompt has one continuation, or a list of continuations. In a list of prompts, either every prompt has one
    continuation, or every prompt has a list.

    Returns:
        (the pairs of each prompt, whether a single prompt was given, whether continuations were given as lists)
    """
    texts, single = as_items(prompts, "prompts")
    items, is_single = as_items(continuations, "continuations")
    if single:
        lists = [items]
    elif is_single or len(items) != len(texts):
        number = "one continuation" if is_single else f"{len(items)} continuations"
        remedy = "give one continuation, or a list of them, for each prompt"
        raise InputError(f"{len(texts)} prompts and {number}", field="continuations", remedy=remedy)
    else:
        split = [as_items(continuation, f"continuations[{i}]") for i, continuation in enumerate(items)]
        is_single = all(alone for _, alone in split)
        if not is_single and any(alone for _, alone in split):
            remedy = "give each prompt one continuation, or each a list of them"
            raise InputError("some continuations are lists and some are not", field="continuations", remedy=remedy)
        lists = [values for values, _ in split]
    pairs = [[ScoreItem(text, continuation) for continuation in many] for text, many in zip(texts, lists, strict=True)]
    return pairs, single, not is_single


def check_errors(errors: str) -> bool:
    """Return True for "return" and False for "raise". Raise InputError for any other value."""
    if errors not in ("raise", "return"):
        raise InputError(f"errors is {errors!r}", field="errors", remedy='use "raise" or "return"')
    return errors == "return"


def first_error(results: Sequence[T | InputError], argument: str = "", *, single: bool = False) -> list[T]:
    """Return the results if none is an InputError. Else raise the first one, with the number of its item.

    Args:
        results: A result or an error for each item.
        argument: Name of the argument with the items, for the error.
        single: Leave the item's number out, because the caller passed a single item.
    """
    good: list[T] = []
    for number, result in enumerate(results):
        if isinstance(result, InputError):
            place = "" if single else f"item {number} of {argument}: " if argument else f"item {number}: "
            raise InputError(f"{place}{result}", field=result.field, code=result.code) from result
        good.append(result)
    return good


def _text(item: Any) -> Any:
    if isinstance(item, (list, tuple)) and item and not _is_whole(item[0]):
        return InputError("it is a list instead of one text", remedy=TEXT, code="wrong_type")
    if isinstance(item, np.ndarray) and item.ndim != 1:
        return InputError(f"it is an array of {item.ndim} dimensions", remedy=TEXT, code="wrong_type")
    return item


def _array(value: Any) -> Any:
    """Convert a PyTorch tensor to an array; return any other value unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "cpu") else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "None" if value is None else f"{value!r:.40}, of type {type(value).__name__}"
