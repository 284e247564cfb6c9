"""The C interface of the kernels: one header, which C++, ctypes and the compiled library agree with."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefold import kernels
from prefold.kernels import abi, interface
from prefold.kernels.compile import SOURCES, find_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import c_interface

HEADER = (SOURCES / "interface.h").read_text(encoding="utf-8")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def header_of(declarations: str) -> str:
    return f"#pragma once\n#include <cstdint>\nnamespace prefold {{\n{declarations}\n}}  // namespace prefold\n"


def test_what_a_header_declares():
    header = c_interface.read(
        header_of("""
struct Bf16;  // opaque
enum Kind : int32_t { kOne = 1, kNextOne, kLast = 7 };
constexpr int32_t kInInt8 = 256;
struct Inner { const int64_t *a, *const* b; int32_t c, d; };  // a comment
struct Outer {
  Inner inner;
  float x;
};
template <class E, class W>
using Sum = int32_t(const E* x, W weight, const Outer* outer);
extern "C" Sum<Bf16, float> prefold_sum_bfloat16_float32, prefold_other;
extern "C" const char* prefold_text();
extern "C" void prefold_end(double seconds);
""")
    )
    assert header.constants == {"kInInt8": 256} and header.enums == {"Kind": {"kOne": 1, "kNextOne": 2, "kLast": 7}}
    assert header.structures == {
        "Inner": {"a": "p", "b": "p", "c": "i", "d": "i"}, "Outer": {"inner": "Inner", "x": "f"},
    }  # fmt: skip
    assert header.functions == {
        "prefold_sum_bfloat16_float32": "i:pfp", "prefold_other": "i:pfp", "prefold_text": "p:", "prefold_end": ":d",
    }  # fmt: skip
    assert "IN_INT8 = 256" in c_interface.python(header) and "NEXT_ONE = 2" in c_interface.python(header)


@pytest.mark.parametrize(
    ("declarations", "message"),
    [
        ("struct A { int x; };", "line 4: unknown type int"),
        ("struct A { int32_t x[3]; };", r"line 4: unexpected '\['"),
        ("struct A { int32_t x : 3; };", "line 4: expected ';', found ':'"),
        ("struct A { int32_t get() const; };", r"expected ';', found '\('"),
        ("struct A { virtual ~A(); };", "unexpected '~'"),
        ("struct A { int32_t x; int64_t x; };", "A has two fields x"),
        ("struct A { uint8_t x; };", "uint8_t may only occur behind a pointer"),
        ("struct A;\nstruct B { A a; };", "line 5: A may only occur behind a pointer"),
        ("struct A { int32_t x; };\nstruct A { int32_t x; };", "A is declared twice"),
        ("union A { int32_t x; };", "a declaration starts with struct, .*, not with 'union'"),
        ("#define X 1", "line 4: the only lines with #"),
        ("enum A { kA };", "expected ':'"),
        ("enum A : int32_t { kA = -1 };", "expected a number, found '-'"),
        ('extern "C" void prefold_f(int32_t);', r"expected a name, found '\)'"),
        ('extern "C" void other(int32_t x);', "does not start with prefold_"),
        ('extern "C" void prefold_f(void x);', "argument of type void"),
        ('extern "C" void prefold_f();\nextern "C" void prefold_f();', "declared twice"),
        ('template <class E> using A = void(E* x);\nextern "C" A<float, float> prefold_f;', "A takes 1 types"),
        ("struct A { int32_t x;", "expected ';', found ''"),
    ],
)
def test_an_unknown_form_is_an_error(declarations, message):
    with pytest.raises(c_interface.HeaderError, match=message):
        c_interface.read(header_of(declarations))


def test_each_function_has_a_key_of_its_own():
    keys = interface._keys()
    assert keys.keys() == abi.FUNCTIONS.keys() and len({*keys.values()}) == len(keys)
    by_key = {key if isinstance(key, str) else (key[0], *map(str, key[1:])): name for name, key in keys.items()}
    for key, name in {
        "run_program": "prefold_run_program",
        ("linear", "float32", "float32"): "prefold_linear_float32",
        ("linear", "bfloat16", "float32"): "prefold_linear_bfloat16_float32",
        ("gated_linear", "gelu_tanh", "bfloat16"): "prefold_gated_linear_gelu_tanh_bfloat16",
        ("experts", "clamped", "float32"): "prefold_experts_clamped_float32",
        ("block_rows", "bfloat16"): "prefold_block_rows_bfloat16",
        ("pack_words", "float16", "bfloat16"): "prefold_pack_words_float16_bfloat16",
        ("pack_words", "float32", "float32"): "prefold_pack_words_float32",
        "has_int8": "prefold_has_int8",
    }.items():
        assert by_key[key] == name


def test_prototypes_stand_in_the_header_alone():
    """A source that defines or calls a function of the interface includes it, and declares none by hand."""
    for path in SOURCES.iterdir():
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        if path.name == "interface.h" or "prefold_" not in text:
            continue
        assert not re.search(r'extern "C"[^{}]*;', text), path.name
        assert '#include "interface.h"' in text or path.name == "layout.cpp", path.name  # that one: layout.h has it


@pytest.mark.skipif(kernels.load() is None, reason="no kernels")
def test_the_library_agrees_on_all_values_places_and_signatures():
    found = ctypes.string_at(kernels.load()._calls["layout"]()).decode().splitlines()
    assert found == list(interface.layout())
    places = [line for line in found if len(line.split()) == 3]
    assert len(places) == len(abi.STRUCTURES) + sum(len(one._fields_) for one in abi.STRUCTURES) > 200


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("float cap;", "double cap;", "TileCall.cap"),
        ("int64_t slots, kv_heads, dim, value_dim;", "int64_t kv_heads, slots, dim, value_dim;", "SlotPlane.slots"),
        ("int32_t threads, is_bf16;", "int32_t is_bf16, threads;", "ProgramCall.threads"),
        ("keys, int64_t draws", "keys, int32_t draws", "prefold_draw"),
        ("kPick, kEmbed", "kEmbed, kPick", "Kind.PICK"),
        ("kInInt8 = 256", "kInInt8 = 512", "IN_INT8"),
    ],
)
def test_a_library_of_another_header_is_refused(tmp_path, old, new, name):
    """`scripts/generate` has not been run after the change."""
    assert HEADER.count(old) == 1
    (tmp_path / "interface.h").write_text(HEADER.replace(old, new))
    for file in ("layout.h", "layout.cpp"):
        shutil.copy(SOURCES / file, tmp_path)
    library = tmp_path / "kernels.so"
    command = [*find_compiler(), "-std=gnu++17", "-shared", "-fPIC", str(tmp_path / "layout.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(interface.InterfaceError, match=f"do not agree on {name}; .*scripts/generate"):
        interface.bind(ctypes.CDLL(str(library)))


@needs_compiler
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("draw.cpp", "keys, int64_t draws", "keys, int32_t draws"),
        ("ranks.cpp", "E* x, int64_t count, int32_t threads", "E* x, int64_t count, int64_t threads"),
        ("logits.cpp", 'extern "C" void prefold_entropy', 'extern "C" int32_t prefold_entropy'),
    ],
)
def test_a_definition_that_is_not_as_declared_does_not_compile(tmp_path, file, old, new):
    assert HEADER.count(old) == 1
    shutil.copytree(SOURCES, tmp_path / "src")
    (tmp_path / "src" / "interface.h").write_text(HEADER.replace(old, new))
    command = [*find_compiler(), "-std=gnu++17", "-fsyntax-only", "-Wno-psabi", str(tmp_path / "src" / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and "error" in done.stderr and "prefold_" in done.stderr
