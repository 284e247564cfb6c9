"""Every launch of the Triton kernels compiles for the GPUs that we write them for, though there is none here.

The interpreter takes code that Triton's compiler does not; this is what tells. Launches are recorded and compiled in a
process of its own, in which the interpreter is off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefold.worker.torch import device

SUPPORT = Path(__file__).parents[2] / "support"
# heads, kv_heads, head_dim, dtype, window
SHAPES = {
    "qwen3": (16, 8, 128, "bfloat16", None),
    "smollm2": (9, 3, 64, "bfloat16", None),
    "gemma3": (4, 1, 256, "bfloat16", 512),
    "padded": (6, 2, 80, "float16", None),
    "float32": (4, 2, 64, "float32", None),
    "float32-128": (32, 8, 128, "float32", 64),
}
ROWS, GRADIENTS = {"_forward"}, {"_forward", "_gradient_q", "_gradient_kv"}
SLOTS, OPERATIONS = {"_write", "_spread", "_attend", "_join"}, {"_add_rms_norm", "_rope", "_gate", "_draw"}
# Bytes a thread: a few registers more than there are, outside of the loops.
MOST_SPILLED = 128
PRODUCTS = {"_forward", "_gradient_q", "_gradient_kv"}

SCRIPT = """
import json, sys
sys.path[:0] = [{support!r}]
import aot, triton_shapes
from prefold.worker.torch.attention import row_triton
capability, shared = map(int, sys.argv[3:])
row_triton.block_memory = lambda device: shared
launches = getattr(triton_shapes, sys.argv[1])(*json.loads(sys.argv[2]))
print(json.dumps([aot.compile_one(launch, capability) for launch in launches]))
"""


@pytest.fixture(autouse=True)
def compiler():
    if not device.has_triton():
        pytest.skip("Triton is not installed")
    import triton

    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("Triton came without ptxas")


def compiled(what: str, shape: tuple, capability: int = 90, shared: int = 227 << 10) -> list[dict]:
    """Returns what is known of each launch, compiled for a GPU whose blocks have so many bytes of shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = [what, json.dumps(shape), str(capability), str(shared)]
    command = [sys.executable, "-c", SCRIPT.format(support=str(SUPPORT)), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for one in found:
        assert one["shared"] <= shared, one
        assert one["spilled"] <= MOST_SPILLED or capability < 90, one  # sizes were chosen for Hopper
        if shape[3] != "float32" and one["name"] in PRODUCTS:
            assert one["wgmma"] or one["mma"], "not on tensor cores"
            assert one["wgmma"] or shape[2] > 128 or capability < 90, "not by Hopper's own instructions"
    return found


def test_each_kernel_compiles():
    found = compiled("some", SHAPES["qwen3"])
    assert sorted(one["name"] for one in found) == sorted(GRADIENTS | SLOTS | OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("what", "names"),
    [("rows", ROWS), ("gradients", GRADIENTS), ("slots", SLOTS), ("operations", OPERATIONS)],
    ids=["rows", "gradients", "slots", "operations"],
)
def test_every_launch_compiles(what, names, shape):
    assert {one["name"] for one in compiled(what, SHAPES[shape])} == names


@pytest.mark.slow
@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if shape[3] != "float32"])
@pytest.mark.parametrize("what", ["rows", "gradients", "slots"])
def test_what_is_launched_fits_on_a_smaller_card(what, shape):
    """An A10G, an L4, or a card of the 30 and 40 series."""
    compiled(what, SHAPES[shape], 89, 99 << 10)
