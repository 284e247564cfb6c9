"""Answers of tasks, written as the fields of their lines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from prefold.tasks.results import ANSWERS, Answer, Choice, Generation


def answer_of(**values: Any) -> Answer:
    """Return the answer that has these fields, of whatever task. The fields of a single choice are a Generation's."""
    values = {
        name: np.array(v) if name in ("scores", "logprobs") and is_numbers(v) else v for name, v in values.items()
    }
    if "choices" in values:
        return Generation(**values | {"choices": tuple(choice_of(**choice) for choice in values["choices"])})
    if "text" in values or "finish_reason" in values:
        own = {name: values.pop(name) for name in names_of(Choice) & values.keys()}
        return Generation((choice_of(**own),), **values)
    kinds = [kind for every in ANSWERS.values() for kind in every if values.keys() <= names_of(kind)]
    return kinds[0](**values)


def choice_of(**values: Any) -> Choice:
    """Return a choice, which ends with "stop" if nothing else is said."""
    return Choice(**{"finish_reason": "stop", **values})


def names_of(kind: type[Answer]) -> set[str]:
    return {field.name for field in fields(kind)}


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, (int, float)) for number in value)
