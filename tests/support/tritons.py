"""Triton's kernels on a CPU, in Triton's interpreter: `tests/conftest.py` switches it on where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from prefold.worker.torch import device

needs_triton = pytest.mark.skipif(not device.has_triton(), reason="Triton is not installed")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@contextmanager
def triton_on(*kinds: str) -> Iterator[None]:
    """A context in which our Triton kernels run on these kinds of device, and on no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "TRITON_DEVICES", kinds)
        yield


@pytest.fixture
def on_triton(request) -> Iterator[str]:
    """The device on which everything goes through Triton's kernels, where they can take it."""
    if not device.has_triton():
        pytest.skip("Triton is not installed")
    if DEVICE == "cpu":
        mend_interpreter()
        request.getfixturevalue("no_kernels")
    with triton_on(DEVICE):
        yield DEVICE


def mend_interpreter() -> None:
    """What Triton 3.6's interpreter gets wrong: it turns arrays of one number into whole numbers in a way that NumPy
    2.4 gave up, and takes the bits of bfloat16 numbers for whole numbers in products."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "mended", False):
        return
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    def widened(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = widened
    interpreter.mended = True
