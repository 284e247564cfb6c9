"""Every launch of the Triton kernels compiles for the GPUs that we write them for, though there is none here.

The interpreter takes code that Triton's compiler does not; this is what tells. Each family of shapes is recorded and
compiled in a process of its own, in which the interpreter is off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefold.kernels import gpu

TESTS = Path(__file__).parent.parent
PTXAS = Path("backends/nvidia/bin/ptxas")

# What the launches are recorded from, by name: heads, kv_heads, head_dim, dtype, window. More with -m slow.
SHAPES = {
    "qwen3": (16, 8, 128, "bfloat16", None),
    "smollm2": (9, 3, 64, "bfloat16", None),
    "gemma3": (4, 1, 256, "bfloat16", 512),
    "padded": (6, 2, 80, "float16", None),
    "float32": (4, 2, 64, "float32", None),
    "float32-128": (32, 8, 128, "float32", 64),
}
FAST = ("qwen3",)

SCRIPT = """
import json, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/attention"]
import aot, triton_shapes
launches = triton_shapes.{what}(*json.loads(sys.argv[1]))
print(json.dumps([aot.compile_one(launch) for launch in launches]))
"""


def compile_all(what: str, *arguments: object) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = SCRIPT.format(tests=str(TESTS), what=what)
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def compiler():
    if not gpu.has_triton():
        pytest.skip("Triton is not installed")
    import triton

    if not (Path(triton.__file__).parent / PTXAS).exists():
        pytest.skip("Triton came without ptxas")


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if s in FAST else pytest.mark.slow) for s in SHAPES])
@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("rows", {"_forward"}),
        ("gradients", {"_forward", "_gradient_q", "_gradient_kv"}),
        ("slots", {"_write", "_spread", "_attend", "_join"}),
    ],
)
def test_attention_compiles(what, names, shape):
    compiled = compile_all(what, *SHAPES[shape])
    assert {one["name"] for one in compiled} == names
    for one in compiled:
        assert one["shared"] <= 227 * 1024, one
        if SHAPES[shape][3] == "bfloat16" and SHAPES[shape][2] <= 128:
            assert one["spilled"] <= 64, one
        if SHAPES[shape][3] != "float32" and one["name"] in ("_forward", "_gradient_q", "_gradient_kv"):
            assert one["wgmma"], "not on Hopper's tensor cores"
