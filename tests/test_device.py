"""What a machine has."""

from __future__ import annotations

import psutil
import pytest
import torch

from prefold import kernels
from prefold.errors import InputError
from prefold.kernels.threads import VARIABLES
from prefold.kernels.threads import process as kernel_threads
from prefold.model import machine
from prefold.spec import container
from prefold.worker.torch import device


@pytest.fixture
def cores_of_process(monkeypatch):
    """Lets the process run on so many cores."""
    return lambda count: monkeypatch.setattr("os.sched_getaffinity", lambda _: range(count), raising=False)


def test_available_memory_respects_the_container(control_groups):
    cpu = torch.device("cpu")
    assert 0 < device.available_memory(cpu) <= psutil.virtual_memory().total
    (control_groups / "memory.max").write_text("1000000\n")
    (control_groups / "memory.current").write_text("900000\n")
    (control_groups / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert device.available_memory(cpu) == 150_000
    (control_groups / "memory.max").write_text("max\n")
    assert device.available_memory(cpu) > 150_000


@pytest.mark.parametrize(
    ("of_process", "folder"),
    [
        ("4:memory:/", "memory"),
        ("4:memory:/docker/of-the-host", "memory"),
        ("5:cpu:/x\n4:memory:/jobs/7", "memory/jobs"),
    ],
)
def test_available_memory_respects_groups_of_the_first_version(control_groups, of_process, folder):
    """Ours, the one above it, or what a container sees in place of it."""
    (control_groups / "own").write_text(of_process + "\n")
    group = control_groups / folder
    group.mkdir(parents=True)
    for name, text in (("limit_in_bytes", "1000000"), ("usage_in_bytes", "900000")):
        (group / f"memory.{name}").write_text(text + "\n")
    (group / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 50000\n")
    assert device.available_memory(torch.device("cpu")) == 150_000
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert device.available_memory(torch.device("cpu")) > 150_000


@pytest.mark.parametrize(
    ("of_process", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000"}, 64),
        ("0::/jobs/7\n", {"jobs/7/cpu.max": "max 100000", "jobs/cpu.max": "300000 100000"}, 3),
        ("0::/jobs/7\n", {"jobs/7/cpu.max": "200000 100000", "jobs/cpu.max": "300000 100000"}, 2),
        ("0::/of/the-host\n", {"cpu.max": "300000 50000"}, 6),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("4:memory:/x\n3:cpu,cpuacct:/docker/1\n0::/\n",
         {"cpu,cpuacct/docker/1/cpu.cfs_quota_us": "500000", "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000"}, 5),
        ("3:cpu,cpuacct:/docker/1\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("0::/\n", {"cpu.max": "what is this"}, 64),
        (None, {}, 64),
    ],
)  # fmt: skip
def test_the_cpu_quota_of_a_container_bounds_the_cores(control_groups, cores_of_process, of_process, files, cores):
    cores_of_process(64)
    if of_process is not None:
        (control_groups / "own").write_text(of_process)
    for name, text in files.items():
        (control_groups / name).parent.mkdir(parents=True, exist_ok=True)
        (control_groups / name).write_text(text + "\n")
    assert container.usable_cores() == cores


def test_cores_are_those_that_the_process_may_run_on(control_groups, cores_of_process):
    (control_groups / "cpu.max").write_text("400000 100000\n")
    cores_of_process(3)
    assert container.usable_cores() == 3


@pytest.mark.parametrize(
    ("given", "variable", "now", "expected"),
    [
        (None, None, 64, 4),  # the quota
        (None, "OMP_NUM_THREADS", 64, 64),
        (None, None, 7, 7),  # by torch.set_num_threads
        (8, None, 64, 8),
        (8, "OMP_NUM_THREADS", 64, 8),
        (64, None, 64, 64),
    ],
)
def test_threads_are_at_most_the_cores_unless_they_are_chosen(
    monkeypatch, control_groups, cores_of_process, given, variable, now, expected
):
    torchs = [64]
    cores_of_process(4)
    monkeypatch.setattr(kernel_threads, "chosen", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs[-1])
    monkeypatch.setattr(torch, "set_num_threads", torchs.append)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "64")
    found = device.TorchThreads()
    torchs[:] = [now]
    found.settle(given)
    assert torchs[-1] == kernels.threads() == expected and len(torchs) <= 2
    found.settle(None)  # of another model
    assert torchs[-1] == kernels.threads() == expected and len(torchs) <= 2
    torch.set_num_threads(5)
    found.settle(None)
    assert kernels.threads() == 5, "the program's own choice, after a model was made"
    kernels.set_threads(3)
    found.settle(None)
    assert torchs[-1] == kernels.threads() == 3, "PyTorch has the number that the program chose for the kernels"


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_AS"), reason="no limits of a process")
def test_available_memory_respects_the_limit_of_the_process(monkeypatch):
    used = psutil.Process().memory_info().vms
    limits = iter([used + 300_000_000, 1000])
    monkeypatch.setattr(psutil.Process, "rlimit", lambda self, kind: (next(limits), -1))
    assert 100_000_000 < device.available_memory(torch.device("cpu")) <= 300_000_000
    assert device.available_memory(torch.device("cpu")) == 0


def test_a_device_or_dtype_that_is_not_there_is_refused():
    assert device.choose_device("cpu") == torch.device("cpu")
    for name in ("nothing", "cpu:x", ""):
        with pytest.raises(InputError, match="device is"):
            device.choose_device(name)
    with pytest.raises(InputError, match="float32, bfloat16, float16"):
        device.choose_dtype("float99", {}, torch.device("cpu"))


def test_auto_is_what_is_stored_where_the_device_computes_in_it(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(machine, "computes_bf16", lambda native=native: native)
        assert device.choose_dtype("auto", {"torch_dtype": "bfloat16"}, cpu) == expected
    assert device.choose_dtype("auto", {"dtype": "float16"}, cuda) == torch.float16
    assert device.choose_dtype("auto", {}, cuda) == torch.float32
    assert device.choose_dtype("bfloat16", {"dtype": "float16"}, cpu) == torch.bfloat16
