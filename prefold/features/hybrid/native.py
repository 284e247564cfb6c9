"""The states that the native executor keeps for a hybrid: of paths of row streams, and of slots."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof
from typing import Any

import numpy as np

from ...engine.worker import DONE, Ticket
from ...kernels import FLOAT32
from ...worker.native.model import NativeModel
from ...worker.native.steps import StreamBatch
from ...worker.native.worker import NativeWorker
from ...worker.parts import WorkerPart
from .config import HybridConfig, StateShape
from .states import StateFlow, StateTable
from .steps import MakeStates, StateFacts, StateSlotStep, StateStreamStep
