"""Compiles, without a GPU, what our launchers would launch on one: `record` in place of a launch, then `compile_all`.

Run in a process of its own, in which Triton's interpreter is off.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.bool: "i1", torch.float64: "fp64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass
class Launch:
    fn: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, int] = field(default_factory=dict)

    def key(self) -> str:
        return repr((self.fn.__name__, self.signature, self.constants, self.attributes, self.options))


class Recorder:
    """As a context: every launch is written down, and nothing runs."""

    def __init__(self):
        self.launches: dict[str, Launch] = {}

    def __enter__(self) -> Recorder:
        self._run = JITFunction.run
        recorder = self

        def record(fn, *args, grid, warmup, **kwargs):
            launch = describe(fn, args, kwargs)
            recorder.launches.setdefault(launch.key(), launch)

        JITFunction.run = record
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.run = self._run


def describe(fn: JITFunction, args: tuple, kwargs: dict) -> Launch:
    """As Triton specialises a launch: whole numbers that are 1 are constants, multiples of 16 are known to be such."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(fn.arg_names, args, strict=False)) | kwargs
    assert set(values) == set(fn.arg_names), set(values) ^ set(fn.arg_names)
    launch = Launch(fn, {}, {}, {}, options)
    for number, param in enumerate(fn.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            launch.signature[param.name] = "constexpr"
            launch.constants[(number,)] = value
        elif isinstance(value, torch.Tensor):
            launch.signature[param.name] = "*" + NAMES[value.dtype]
            launch.attributes[(number,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            launch.signature[param.name] = "u1"
        elif isinstance(value, int):
            launch.signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                launch.attributes[(number,)] = [["tt.divisibility", 16]]
        else:
            launch.signature[param.name] = "fp32"
    return launch


def compile_one(launch: Launch, capability: int = 90) -> dict[str, Any]:
    """For sm_90, or another: {"name", "shared" bytes, "registers", "spilled" bytes, tensor
    core instructions "wgmma" (Hopper's own) and "mma"}. Raises what Triton or ptxas raise."""
    source = ASTSource(launch.fn, launch.signature, launch.constants, launch.attributes)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    counts = dict(word.split(":")[:2] for word in usage.split() if word.startswith(("REG:", "STACK:", "LOCAL:")))
    return {
        "name": launch.fn.__name__,
        "shared": done.metadata.shared,
        "registers": int(counts["REG"]),
        "spilled": int(counts["STACK"]) + int(counts["LOCAL"]),
        "wgmma": done.asm["ptx"].count("wgmma.mma_async"),
        "mma": done.asm["ptx"].count("mma.sync"),
    }
