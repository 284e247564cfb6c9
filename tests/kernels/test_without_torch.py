"""The kernels in a process without PyTorch, and the number of threads that they take there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prefold import kernels
from prefold.kernels.threads import VARIABLES, Threads, default_threads


@pytest.fixture
def machine(monkeypatch, tmp_path, control_groups):
    """Lets the process run on hardware threads of a machine whose cores have so many each, without any variable."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(count: int, per_core: int) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(count), raising=False)
        monkeypatch.setattr("os.cpu_count", lambda: count)
        for number in range(count):
            topology = tmp_path / f"cpu{number}" / "topology"
            topology.mkdir(parents=True)
            first = number // per_core * per_core
            (topology / "thread_siblings_list").write_text(f"{first}-{first + per_core - 1}\n")
        monkeypatch.setattr(sys.modules[Threads.__module__], "CPUS", tmp_path)

    return make


def test_calls_without_torch():
    code = """
import sys
import numpy as np
from prefold import kernels
loaded, rng = kernels.load(), np.random.default_rng(0)
if loaded is not None:
    weight, x = rng.random((70, 64), np.float32), rng.random((9, 64), np.float32)
    found = loaded.linear(x, loaded.pack_words(weight), 70)
    assert np.allclose(found, x @ weight.T), "products"
    loaded.log_sum_exp(found)
    loaded.gate_mul(found, "silu")
kernels.calm_openmp()
sys.exit(3 if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(kernels.load() is None, reason="no kernels")
def test_threads_of_openmp_are_calmed_when_torch_is_imported_later():
    """By prefold's own import of PyTorch; `test_threads.py` has the other order."""
    code = """
import sys
from prefold import kernels
from prefold.kernels.loader import Kernels
calm, calls = Kernels.calm_openmp, []
Kernels.calm_openmp = lambda self: calls.append("torch" in sys.modules) or calm(self)
kernels.load()
import prefold.worker.torch.device
print(calls)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.strip() == "[False, True]"


def test_two_hardware_threads_of_a_core_count_once(machine, control_groups):
    machine(8, 2)
    assert default_threads() == 4
    (control_groups / "cpu.max").write_text("300000 100000\n")
    assert default_threads() == 3, "the quota of the container"


def test_a_system_that_says_nothing_of_cores(machine, monkeypatch, tmp_path):
    machine(6, 1)
    monkeypatch.setattr(sys.modules[Threads.__module__], "CPUS", tmp_path / "none")
    assert default_threads() == 6
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert default_threads() == 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"MKL_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"OMP_NUM_THREADS": "many"}, 4),
        ({"OMP_NUM_THREADS": "0"}, 4),
        ({"OMP_NUM_THREADS": ""}, 4),
    ],
)
def test_variables_of_the_environment(machine, monkeypatch, given, expected):
    machine(4, 1)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert default_threads() == expected


def test_a_number_that_is_set_counts(machine, monkeypatch):
    machine(4, 1)
    found = Threads()
    assert found.get() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert found.get() == 4, "the environment is looked at once"
    found.set(9)
    assert found.get() == 9
    with pytest.raises(ValueError, match="0 threads; use at least 1"):
        found.set(0)
    assert found.get() == 9
