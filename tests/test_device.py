"""What a machine has."""

from __future__ import annotations

import psutil
import pytest
import torch

from prefold import device
from prefold.errors import InputError


def test_available_memory_respects_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert 0 < device.available_memory(cpu) <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert device.available_memory(cpu) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert device.available_memory(cpu) > 150_000


@pytest.mark.parametrize(
    ("of_process", "folder"),
    [
        ("4:memory:/", "memory"),
        ("4:memory:/docker/of-the-host", "memory"),
        ("5:cpu:/x\n4:memory:/jobs/7", "memory/jobs"),
    ],
)
def test_available_memory_respects_groups_of_the_first_version(tmp_path, monkeypatch, of_process, folder):
    """Ours, the one above it, or what a container sees in place of it."""
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(device, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(of_process + "\n")
    group = tmp_path / folder
    group.mkdir(parents=True)
    for name, text in (("limit_in_bytes", "1000000"), ("usage_in_bytes", "900000")):
        (group / f"memory.{name}").write_text(text + "\n")
    (group / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 50000\n")
    assert device.available_memory(torch.device("cpu")) == 150_000
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert device.available_memory(torch.device("cpu")) > 150_000


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_AS"), reason="no limits of a process")
def test_available_memory_respects_the_limit_of_the_process(monkeypatch):
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(psutil.Process, "rlimit", lambda self, kind: (used + 300_000_000, -1))
    assert 100_000_000 < device.available_memory(torch.device("cpu")) <= 300_000_000
    monkeypatch.setattr(psutil.Process, "rlimit", lambda self, kind: (1000, -1))
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
        monkeypatch.setattr(device, "computes_bf16", lambda native=native: native)
        assert device.choose_dtype("auto", {"torch_dtype": "bfloat16"}, cpu) == expected
    assert device.choose_dtype("auto", {"dtype": "float16"}, cuda) == torch.float16
    assert device.choose_dtype("auto", {}, cuda) == torch.float32
    assert device.choose_dtype("bfloat16", {"dtype": "float16"}, cpu) == torch.bfloat16
