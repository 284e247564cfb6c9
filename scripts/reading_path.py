#!/usr/bin/env python3
"""Write the reading path of a decode step into docs/design.md: every file that a greedy step on a CPU executes.

A Llama with random weights generates for 8 sequences. `sys.setprofile` traces the Python functions of one step in the
engine's thread. The C++ files follow from the `#include`s and the calls of program.cpp.
With --check nothing is written, and the exit status is 1 if docs/design.md lists other files. Counts of lines are not
compared.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tempfile
import threading
import tokenize
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, DESIGN = ROOT / "prefold", ROOT / "docs" / "design.md"
BEGIN, END = "<!-- reading path: scripts/reading_path.py -->", "<!-- end of the reading path -->"
SEQUENCES, STEP = 8, 6  # at the traced step all prompts have been computed
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]


def traced_functions() -> set[CodeType]:
    """Return the Python functions of prefold that one decode step runs, in the engine's thread."""
    import tiny

    from prefold import LLM, kernels
    from prefold.engine.generate import Generator

    if kernels.load() is None:
        sys.exit("the kernels cannot be compiled here; the reading path is traced in a compiled step")
    found: set[CodeType] = set()
    step, count = Generator.step, 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            found.add(code)

    def traced(generator: Generator) -> bool:
        nonlocal count
        count += 1
        if count != STEP:
            return step(generator)
        caller = sys._getframe().f_back
        while caller is not None:  # the engine's loop calls the step
            note(caller, "call", None)
            caller = caller.f_back
        sys.setprofile(note)
        try:
            return step(generator)
        finally:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(tiny.tiny_checkpoint(Path(folder), hidden_size=48, intermediate_size=128)),
            dtype="float32",
            device="cpu",
            threads=1,
        )
        assert "one compiled call" in llm.passes, llm.passes
        Generator.step = traced  # type: ignore[method-assign]
        try:
            llm.generate([[5, 6, 7 + i] for i in range(SEQUENCES)], max_tokens=STEP + 4, ignore_eos=True)
        finally:
            Generator.step = step  # type: ignore[method-assign]
            llm.close()
    assert threading.current_thread() is threading.main_thread()
    return found


# Headers whose functions are defined in a source of another name.
DEFINED_IN = {"parallel.h": "pool.cpp"}


def compiled_files() -> list[Path]:
    """Return the C++ files of the program: program.cpp, the sources of the functions that it calls, and all they
    include."""
    source = PACKAGE / "kernels" / "src"
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.iterdir())}
    found, pending = set[Path](), [source / "program.cpp"]
    called = set(re.findall(r"prefold_\w+", texts[pending[0]]))
    for path, text in texts.items():
        # Macros define a function for each dtype: the name up to `##` is then the start of the name that is called.
        exported = re.findall(r'extern "C"[^;{(]*\b(prefold_\w+?)(_##\w+)*\(', text) if path.suffix == ".cpp" else []
        if any(
            name in called or (suffix and any(each.startswith(name) for each in called)) for name, suffix in exported
        ):
            pending.append(path)
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        pending += [source / name for name in re.findall(r'#include "([\w.]+)"', texts[path])]
        own = source / DEFINED_IN.get(path.name, path.with_suffix(".cpp").name)
        if own in texts:
            pending.append(own)
    return sorted(found)


def lines_of_code(source: str, first: int = 0, last: int = 1 << 30) -> int:
    """Count the lines of code from line `first` to line `last`, without blank lines, comments and docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(first <= line <= last for line in code)


def ends_of_functions(source: str) -> dict[int, int]:
    """Return {first line of a function or of its first decorator: its last line}."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {min([f.lineno, *(d.lineno for d in f.decorator_list)]): f.end_lineno or f.lineno for f in functions}


def compiled_lines(source: str) -> int:
    """Count the lines of code of a C++ file."""
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in source.splitlines())


def table() -> str:
    """Return the Markdown table of files, with the number of traced functions and the lines of code."""
    files: dict[Path, list[CodeType]] = {}
    for code in traced_functions():
        files.setdefault(Path(code.co_filename), []).append(code)
    rows, total, run = [], 0, 0
    order = {layer: number for number, layer in enumerate(_layers())}
    for path in sorted(files, key=lambda path: (order[path.relative_to(PACKAGE).parts[0].removesuffix(".py")], path)):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        ends = ends_of_functions(source)
        spans = {code.co_firstlineno: ends[code.co_firstlineno] for code in files[path]}
        lines = sum(lines_of_code(source, first, last) for first, last in spans.items())
        total, run = total + lines_of_code(source), run + lines
        rows.append(f"| `{name}` | {len(spans)} | {lines} | {lines_of_code(source)} |")
    sources = compiled_files()
    compiled = sum(compiled_lines(path.read_text(encoding="utf-8")) for path in sources)
    head = (
        f"When this table was written, a greedy step of {SEQUENCES} sequences on a CPU ran "
        f"{sum(map(len, files.values()))} Python functions ({run} lines of code) in {len(files)} files. A program can "
        f"call {len(sources)} C++ files ({compiled} lines of code)."
    )
    listed = ", ".join(f"`{path.name}`" for path in sources)
    lines = [head, "", "| file | functions run | their lines | lines of the file |", "|---|---|---|---|", *rows, ""]
    return "\n".join([*lines, f"The C++ files, in `kernels/src/`: {listed}.", ""])


def _layers() -> list[str]:
    source = (ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8")
    return list(ast.literal_eval(re.search(r"^LAYERS = (\[.*?\n\])", source, re.MULTILINE | re.DOTALL)[1]))  # type: ignore[index]


def main() -> int:
    text = DESIGN.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        listed = [re.findall(r"^\| `([\w/.]+)`", whole.partition(BEGIN)[2], re.MULTILINE) for whole in (new, text)]
        return int(listed[0] != listed[1])
    DESIGN.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
