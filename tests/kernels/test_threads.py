"""Parallel loops: the same results on any number of threads, from any thread, and after a fork."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from machines import threads_in_use
from tensors import tensor_kernels

from prefold import kernels
from prefold.kernels.compile import SOURCES, find_compiler

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


@pytest.fixture(autouse=True)
def threads():
    with threads_in_use(kernels.threads()):
        yield kernels.set_threads


def products(seed: int) -> list[torch.Tensor]:
    """Results of loops of all kinds, large enough that several threads take part."""
    loaded = tensor_kernels()
    noise = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(40, 512, generator=noise), torch.randn(1024, 512, generator=noise)
    logits = torch.randn(64, 5000, generator=noise)
    gated = torch.randn(300, 1024, generator=noise)
    linear = loaded.linear(x, loaded.pack_words(weight), 1024)
    return [linear, *loaded.log_sum_exp(logits), loaded.gate_mul(gated, "silu")]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_same_results_on_any_number_of_threads(threads, count):
    threads(1)
    expected = products(0)
    threads(count)
    for _ in range(20):
        for found, one in zip(products(0), expected, strict=True):
            assert torch.equal(found, one)


def test_many_callers_at_once(threads):
    threads(1)
    expected = [products(seed) for seed in range(8)]
    threads(3)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for found, wanted in zip(pool.map(products, range(8)), expected, strict=True):
                assert all(map(torch.equal, found, wanted))


def state(thread: str) -> str:
    """Returns what a thread of this process does: R runs, or waits for a core to run on."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""  # it has ended


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what threads do from /proc")
def test_threads_sleep_after_a_while(threads):
    """Nobody spins while there is nothing to do."""
    threads(4)
    products(0)
    end = time.monotonic() + 60
    while len(busy := [tid for tid in os.listdir("/proc/self/task") if state(tid) == "R"]) > 1:  # this one runs
        assert time.monotonic() < end, f"{len(busy)} threads run"
        time.sleep(0.01)


def test_a_fork_has_threads_of_its_own(threads):
    code = """
import os, sys
import numpy as np
from prefold import kernels
kernels.set_threads(3)
loaded, rng = kernels.load(), np.random.default_rng(0)
x, packed = rng.random((40, 512), np.float32), loaded.pack_words(rng.random((1024, 512), np.float32))
expected = loaded.linear(x, packed, 1024)
child = os.fork()
if not child:
    os._exit(0 if all(np.array_equal(loaded.linear(x, packed, 1024), expected) for _ in range(20)) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp")
def test_threads_of_openmp_sleep_too():
    """After an operation of torch's on several threads: by itself libgomp spins for milliseconds after each,
    and would not sleep between two that come one millisecond apart."""
    code = """
import os, time, torch
from prefold import kernels
kernels.load()
torch.set_num_threads(2)
x = torch.randn(1 << 20)

def sleeps():
    count = 0
    for thread in os.listdir("/proc/self/task"):
        if thread != str(os.getpid()):
            with open(f"/proc/self/task/{thread}/status") as file:
                count += next(int(line.split()[1]) for line in file if line.startswith("voluntary"))
    return count

x.exp_()
before = sleeps()
for _ in range(100):
    x.exp_()
    time.sleep(0.001)
print(sleeps() - before)
"""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50


def test_threads_spin_as_long_as_gaps_last_unless_a_core_is_wanted(tmp_path):
    """A program with a clock of its own prints how long threads would spin for a loop and callers for threads."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, source = tmp_path / "patience", Path(__file__).parent / "patience.cpp"
    subprocess.run([*compiler, "-std=gnu++17", f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "new 50 500",
        "gaps of 300: 600 500",
        "a gap of 1500: 3000",
        "gaps of 300 again, and one switch a window: 600 500",
        "idle for 30000: 600",
        "wanted: nearly always",
        "free again: 600 500",
    ]
