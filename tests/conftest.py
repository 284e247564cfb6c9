import os
import random
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch starts its threads: the models here are tiny, and threads that spin while they wait steal the time
# of those that work when tests run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Triton decides when it is imported whether it compiles for a GPU, or interprets its kernels on a CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Helpers shared by the tests (`tiny`, `running`, `nests`) lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

# A process that was begun in the background ignores these signals, and so would those that tests begin and stop.
for name in ("SIGINT", "SIGHUP"):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), lambda *_: None)

# The same examples in each run and on each machine, however slow or busy it is. --hypothesis-profile=default draws
# others, and keeps those that fail.
same = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", **same)
settings.register_profile("prefold", derandomize=True, **same)
settings.load_profile("prefold")


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="draw the order of modules, and of the tests of each")


def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--shuffle")
    if seed is not None:
        draw = random.Random(seed)
        places = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (places[item.path], draw.random()))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """What more threads change has tests of its own."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws at random does not depend on the tests before it."""
    import torch

    torch.manual_seed(0)
