import os
import sys
from pathlib import Path

import pytest

# Before torch starts its threads: the models here are tiny, and threads that spin while they wait steal the time
# of those that work when tests run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Triton decides when it is imported whether it compiles for a GPU, or interprets its kernels on a CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Helpers shared by the tests (`tiny`, `running`, `nests`) lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """What more threads change has tests of its own."""
    import torch

    torch.set_num_threads(1)
