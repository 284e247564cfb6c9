"""An extension of griffe, which reads the docstrings for docs/reference/python.md (`mkdocs.yml`)."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Class, ExprCall, Extension, Object

EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.M)


class PublicNames(Extension):
    """Adapts prefold's docstrings and declarations to griffe.

    - The section `Example:` becomes a block of code. griffe calls this section `Examples:`.
    - The value of a field that `option` declares becomes its default.
    - Class variables of dataclasses are left out.
    """

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_block, obj.docstring.value + "\n").rstrip()

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            if isinstance(member, Attribute) and str(member.annotation).startswith("ClassVar"):
                del cls.members[name]

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function) == "option":
            attr.value = value.arguments[0]


def _block(match: re.Match[str]) -> str:
    code = match[1]
    if not code.lstrip().startswith(">>>"):
        code = f"    ```py\n{code.rstrip()}\n    ```\n"
    return f"Examples:\n{code}"
