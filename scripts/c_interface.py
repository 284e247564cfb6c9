"""Read prefold/kernels/src/interface.h, and make `kernels/abi.py` and `kernels/src/layout.cpp` from it.

The header may have a few simple forms. Any other form is an error that names its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

# Types of one value, by their letters in signatures. Any pointer is a "p".
LETTERS = {
    "void": "", "int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f", "double": "d",
}  # fmt: skip
CTYPES = {
    "p": "c_void_p", "i": "c_int32", "I": "c_uint32", "q": "c_int64", "Q": "c_uint64", "f": "c_float", "d": "c_double",
}  # fmt: skip
# Types that may occur only behind a pointer, in addition to types that the header declares.
POINTED = ("char", "uint8_t")
TOKEN = re.compile(r'[A-Za-z_]\w*|\d+|"C"|[-{}()<>,;:*=]')
LINES = ("#pragma once", "#include <cstdint>")  # the preprocessor lines that a header may have


class HeaderError(Exception):
    """An error in the header, with its line."""


@dataclass(frozen=True, slots=True)
class Function:
    """The type of a function or of a function template. Each type in it is a pair (name, whether it is a pointer).

    Attributes:
        parameters: the template's parameters.
        result: the type of the result.
        arguments: the type of each argument.
    """

    parameters: tuple[str, ...]
    result: tuple[str, bool]
    arguments: tuple[tuple[str, bool], ...]


@dataclass(slots=True)
class Header:
    """The declarations of a header, in its order.

    Attributes:
        constants: name to value.
        enums: name to a mapping of names to values.
        structures: name to a mapping of fields to types: a letter of CTYPES, or the name of a structure.
        functions: name to signature: the letter of the result (void: none), ":", the letters of the arguments.
    """

    constants: dict[str, int] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    structures: dict[str, dict[str, str]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)


def read(text: str) -> Header:
    """Parse a header. Raise HeaderError for an unknown form or name."""
    return _Reader(text).header


class _Reader:
    """A recursive-descent parser. Each method starts at the current token."""

    def __init__(self, text: str):
        self.header, self._opaque, self._types = Header(), set[str](), dict[str, Function]()
        self._tokens: list[tuple[str, int]] = []
        for number, line in enumerate(text.splitlines(), 1):
            code = line.partition("//")[0].strip()
            if code.startswith("#") and code not in LINES:
                raise HeaderError(f"line {number}: the only lines with # are {' and '.join(LINES)}")
            if code.startswith("#"):
                continue
            if rest := TOKEN.sub(" ", code).strip():
                raise HeaderError(f"line {number}: unexpected {rest.split()[0]!r}")
            self._tokens += [(token, number) for token in TOKEN.findall(code)]
        self._at = 0
        for token in ("namespace", "prefold", "{"):
            self._take(token)
        kinds: dict[str, Callable[[], None]] = {
            "struct": self._structure, "enum": self._enum, "constexpr": self._constant, "template": self._template,
            "using": self._using, "extern": self._function,
        }  # fmt: skip
        while not self._found("}"):
            word = self._word()
            if word not in kinds:
                raise self._error(f"a declaration starts with {', '.join(kinds)}, not with {word!r}")
            kinds[word]()
        if self._at != len(self._tokens):
            raise self._error("the namespace must be the end of the header")

    def _structure(self) -> None:
        """Read `struct Name;`, or `struct Name { type a, *b; ... };`."""
        name = self._new_name()
        if self._found(";"):
            self._opaque.add(name)
            return
        self._take("{")
        fields: dict[str, str] = {}
        while not self._found("}"):
            base = self._base(())
            while True:
                is_pointer, name_of = self._pointer(), self._word()
                if name_of in fields:
                    raise self._error(f"{name} has two fields {name_of}")
                fields[name_of] = self._letter(base, is_pointer, values=(*LETTERS, *self.header.structures))
                if not self._found(","):
                    break
            self._take(";")
        self._take(";")
        self.header.structures[name] = fields

    def _enum(self) -> None:
        """Read `enum Name : int32_t { kA = 1, kB, ... };`."""
        name = self._new_name()
        for token in (":", "int32_t", "{"):
            self._take(token)
        values: dict[str, int] = {}
        while not self._found("}"):
            entry = self._word()
            values[entry] = self._number() if self._found("=") else max(values.values(), default=-1) + 1
            if not self._found(","):
                self._take("}")
                break
        self._take(";")
        self.header.enums[name] = values

    def _constant(self) -> None:
        """Read `constexpr int32_t kName = 1;`."""
        self._take("int32_t")
        name = self._new_name()
        self._take("=")
        self.header.constants[name] = self._number()
        self._take(";")

    def _template(self) -> None:
        """Read `template <class A, class B> using ...`."""
        self._take("<")
        parameters = []
        while True:
            self._take("class")
            parameters.append(self._word())
            if not self._found(","):
                break
        for token in (">", "using"):
            self._take(token)
        self._using(tuple(parameters))

    def _using(self, parameters: tuple[str, ...] = ()) -> None:
        """Read `using Name = type(type name, ...);`."""
        name = self._new_name()
        self._take("=")
        result = self._base(parameters), self._pointer()
        self._types[name] = Function(parameters, result, self._arguments(parameters))
        self._take(";")

    def _function(self) -> None:
        """Read `extern "C" type prefold_name(type name, ...);`, or `extern "C" Name<types> prefold_name, ...;`."""
        self._take('"C"')
        if (word := self._peek()) in self._types:
            self._at += 1
            function, types = self._types[word], list[str]()
            if function.parameters:
                self._take("<")
                while True:
                    types.append(self._base(()))
                    if not self._found(","):
                        break
                self._take(">")
            if len(types) != len(function.parameters):
                raise self._error(f"{word} takes {len(function.parameters)} types")
            while True:
                self._declare(self._word(), function, dict(zip(function.parameters, types, strict=True)))
                if not self._found(","):
                    break
        else:
            result = self._base(()), self._pointer()
            name = self._word()
            self._declare(name, Function((), result, self._arguments(())), {})
        self._take(";")

    def _declare(self, name: str, function: Function, types: dict[str, str]) -> None:
        if not name.startswith("prefold_") or name in self.header.functions:
            raise self._error(f"the name {name} does not start with prefold_, or is declared twice")
        letters = [
            self._letter(types.get(base, base), is_pointer, values=tuple(LETTERS))
            for base, is_pointer in (function.result, *function.arguments)
        ]
        if "" in letters[1:]:
            raise self._error(f"{name} has an argument of type void")
        self.header.functions[name] = f"{letters[0]}:{''.join(letters[1:])}"

    def _arguments(self, parameters: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
        self._take("(")
        arguments: list[tuple[str, bool]] = []
        if self._found(")"):
            return ()
        while True:
            arguments.append((self._base(parameters), self._pointer()))
            self._word()
            if not self._found(","):
                break
        self._take(")")
        return tuple(arguments)

    def _base(self, parameters: tuple[str, ...]) -> str:
        """Read a type, without its stars."""
        self._found("const")
        name = self._word()
        header = self.header
        known = (*LETTERS, *POINTED, *self._opaque, *header.structures, *header.enums, *parameters)
        if name not in known:
            raise self._error(f"unknown type {name}")
        return name

    def _pointer(self) -> bool:
        is_pointer = False
        while self._found("*"):
            is_pointer = True
            self._found("const")
        return is_pointer

    def _letter(self, base: str, is_pointer: bool, *, values: tuple[str, ...]) -> str:
        """Return the letter of a type, or the name of a structure."""
        if is_pointer:
            return "p"
        if base not in values:
            raise self._error(f"{base} may only occur behind a pointer")
        return LETTERS.get(base, base)

    def _new_name(self) -> str:
        name, header = self._word(), self.header
        if name in {*self._opaque, *self._types, *header.structures, *header.enums, *header.constants}:
            raise self._error(f"{name} is declared twice")
        return name

    def _number(self) -> int:
        if not self._peek().isdigit():
            raise self._error(f"expected a number, found {self._peek()!r}")
        self._at += 1
        return int(self._tokens[self._at - 1][0])

    def _word(self) -> str:
        word = self._peek()
        if not word.isidentifier():
            raise self._error(f"expected a name, found {word!r}")
        self._at += 1
        return word

    def _take(self, token: str) -> None:
        if not self._found(token):
            raise self._error(f"expected {token!r}, found {self._peek()!r}")

    def _found(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self._at += 1
        return True

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _error(self, message: str) -> HeaderError:
        line = self._tokens[min(self._at, len(self._tokens) - 1)][1] if self._tokens else 1
        return HeaderError(f"line {line}: {message}")


def _python_name(name: str) -> str:
    """Return the name of a constant in Python: IN_INT8 for kInInt8."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def python(header: Header) -> str:
    """Return the module of ctypes structures, enums, constants and signatures."""
    used = {kind for fields in header.structures.values() for kind in fields.values()} & CTYPES.keys()
    parts = [
        f'''"""The declarations of src/interface.h for ctypes. `scripts/generate` writes this file.

The header documents each name.
"""

from __future__ import annotations

from ctypes import Structure, {", ".join(sorted(CTYPES[kind] for kind in used))}
from enum import IntEnum

'''
        + "\n".join(f"{_python_name(name)} = {value}" for name, value in header.constants.items())
    ]
    for name, values in header.enums.items():
        lines = [f"    {_python_name(entry)} = {value}" for entry, value in values.items()]
        parts.append("\n".join([f"class {name}(IntEnum):", *lines]))
    for name, fields in header.structures.items():
        lines = [f'        ("{entry}", {CTYPES.get(kind, kind)}),' for entry, kind in fields.items()]
        parts.append("\n".join([f"class {name}(Structure):", "    _fields_ = (", *lines, "    )"]))
    tables = [
        *("CONSTANTS = {", *(f'    "{name}": {name},' for name in map(_python_name, header.constants)), "}"),
        *("ENUMS: tuple[type[IntEnum], ...] = (", *(f"    {name}," for name in header.enums), ")"),
        *("STRUCTURES: tuple[type[Structure], ...] = (", *(f"    {name}," for name in header.structures), ")"),
        '# The letter of the result (void: none), ":", the letters of the arguments: `LETTERS` of interface.py.',
        "FUNCTIONS = {",
        *(f'    "{name}": "{signature}",' for name, signature in header.functions.items()),
        "}",
    ]
    return "\n\n\n".join([*parts, "\n".join(tables)]) + "\n"


def cpp(header: Header) -> str:
    """Return the source of `prefold_layout`, whose lines have the order of `layout` in kernels/interface.py."""
    values = [f'{{"{_python_name(name)}", {name}}},' for name in header.constants]
    for name, entries in header.enums.items():
        values += [f'{{"{name}.{_python_name(entry)}", {entry}}},' for entry in entries]
    places = []
    for name, fields in header.structures.items():
        places += [f'{{"{name}", 0, sizeof({name})}},', *(f"PLACE({name}, {entry})," for entry in fields)]
    signatures = [f"SIGNATURE({name})," for name in header.functions]
    tables = [("Value values", values), ("Place places", places), ("Signature signatures", signatures)]
    return "\n".join([
        "// Reports sizes, offsets and signatures of interface.h. `scripts/generate` writes this file.",
        '#include "layout.h"',
        "",
        '#define PLACE(type, field) {#type "." #field, offsetof(type, field), sizeof(type::field)}',
        "#define SIGNATURE(name) {#name, signature<decltype(name)>()}",
        "",
        *("namespace prefold {", "namespace {", "", "std::string text() {"),
        *(
            line
            for name, entries in tables
            for line in (f"  const {name}[] = {{", *(f"      {entry}" for entry in entries), "  };")
        ),
        *("  return text_of(values, places, signatures);", "}", "", "}  // namespace", ""),
        'extern "C" const char* prefold_layout() {',
        *("  static const std::string kept = text();", "  return kept.c_str();", "}", ""),
        *("}  // namespace prefold", ""),
    ])  # fmt: skip
