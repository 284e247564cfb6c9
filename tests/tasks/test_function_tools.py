"""Python functions as tools are described as transformers describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from task_inputs import FakeCheckpoint, chatty

from prefold.errors import InputError
from prefold.tasks import make_task
from prefold.tasks.conversations import as_tools


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", near: list[float] | None = None) -> str:
    """Say what the weather will be.

    Args:
        city: The name of the city,
            with its country.
        days: How many days ahead.
        unit: The scale.
        near: Latitude and longitude.

    Returns:
        A sentence.
    """
    return city


def test_a_function_is_described_as_transformers_does():
    utils = pytest.importorskip("transformers.utils")
    expected = utils.get_json_schema(weather)
    expected["function"].pop("return", None)
    (found,) = as_tools([weather])
    assert found == expected
    assert found["function"]["parameters"]["required"] == ["city"]
    schema = {"type": "function", "function": {"name": "f"}}
    assert as_tools([schema]) == [schema] and as_tools(None) is None and as_tools("x") == "x"


def test_other_types():
    def f(a: dict, b: int | str, c: Sequence[bool], d: list, *rest: object) -> None:
        """Do it."""

    (found,) = as_tools([f])
    assert found["function"]["description"] == "Do it."
    assert found["function"]["parameters"]["properties"] == {
        "a": {"type": "object"},
        "b": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "c": {"type": "array", "items": {"type": "boolean"}},
        "d": {"type": "array"},
    }


def test_what_cannot_be_described():
    def silent(a: int) -> None: ...

    def untyped(a):
        """Do it."""

    def odd(a: bytes) -> None:
        """Do it."""

    for function, message in (
        (silent, "'silent' in 'tools' has no docstring"),
        (untyped, "'a' of 'untyped' in 'tools' has no type"),
        (odd, "is of type bytes, which JSON lacks"),
    ):
        with pytest.raises(InputError, match=message) as error:
            as_tools([function])
        assert error.value.field == "tools"


def test_the_template_is_told():
    template = (
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}{% endfor %}{{ messages[0].content }}"
    )
    for options, item in (({"tools": [weather]}, {}), ({}, {"tools": [weather]})):
        made = make_task("generate", FakeCheckpoint(), chatty(), chat_template=template, **options)
        (work,) = made.prepare([{"messages": [{"role": "user", "content": " Go"}], **item}])
        text = made.inputs.tokenizer.decode(work.requests[0].tokens)
        assert text == "weather: Say what the weather will be. Go"
