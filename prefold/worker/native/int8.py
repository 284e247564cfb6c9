"""Linears in int8 arithmetic (`arithmetic="int8"`): each input row is quantised to int8 first (`kernels/src/int8.h`).

Matrices that a file stores in integer blocks are used as they are; other matrices are quantised at load. int8 is
less accurate than the dtype's arithmetic, and some models tolerate it badly. So a probe text runs through each layer in
both arithmetics at load. A layer whose output changes too much stays in the dtype's arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ... import kernels
from ...checkpoint import Checkpoint
from ...engine.schedule.steps import SlotStep
from ...errors import InputError
from ...kernels import Blocks
from ...model.config import ModelConfig
from ...model.program import Weight
from ...spec.model import ModelSpec
from ...text import Tokenizer
from .model import NativeModel
from .program import NativeProgram, Part
from .steps import prepare_slots
from .store import NativeStore, layouts_of

# Probe text, run through the model at load to measure the effect of int8: prose, a question, code, numbers.
PROBE = (
    "The harbour was quiet when the ferry came in, and the two women who had waited since dawn lifted their bags. "
    "Question: which of the following gases is most abundant in the Earth's atmosphere? Answer: nitrogen.\n",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    "    return total / len(values)\n",
    'On 14 March 1879 the index stood at 1,204.75 points, 3.2 % above 1,167. {"id": 7, "name": "Łódź", "ok": true}\n',
)
PROBE_ROWS = 256  # maximum
# Minimum cosine, as the mean over rows, between the updates of the residual stream in int8 and in the dtype.
LEAST_COSINE = 0.99
LOGITS = 4096  # number of vocabulary entries that are compared
REMEDY = "leave --arithmetic out"


def check_int8(config: ModelConfig, dtype: str, device: str, *, weights: str, ranks: int, is_quantised: bool) -> None:
    """Raise InputError if a model cannot run in int8.

    Args:
        dtype: Name of the dtype.
        device: Name of the device.
        weights: The option of this name.
        ranks: Number of ranks of the model.
        is_quantised: The checkpoint has matrices in integer blocks.
    """
    compiled = kernels.load() if device == "cpu" else None
    lacks = f"this CPU has no VNNI (ARM: dotprod), or its kernels are compiled without it ({kernels.status()})"
    problems = {
        f"the device is {device}, and int8 runs only on CPUs": device != "cpu",
        "modules of transformers compute the model": bool(config.loading),
        f"the model is split over {ranks} ranks": ranks > 1,
        f"the dtype is {dtype}": dtype not in ("float32", "bfloat16"),
        f"there are no compiled kernels here ({kernels.status()})": compiled is None,
        lacks: not (compiled is None or compiled.has_int8),
        f"the option weights is {weights!r}": weights in ("file", "dtype"),
    }
    remedies = {"dtype": f"use --dtype bfloat16 or float32, or {REMEDY}", "weights": "leave --weights out"}
    if problem := next((words for words, is_so in problems.items() if is_so), None):
        remedy = next((remedy for word, remedy in remedies.items() if word in problem.split()), REMEDY)
        raise InputError(f"int8 arithmetic is not available: {problem}", field="arithmetic", remedy=remedy)
    if weights == "int8" and is_quantised:
        message = "the checkpoint's weights are quantised already, and quantising them again would lose accuracy"
        raise InputError(message, field="weights", remedy="leave --weights out: the blocks are used directly")
    is_plain = config.latent is None and not config.layer_inputs and not any(one.sizes for one in config.planes)
    if len(config.planes) != config.layers or not is_plain:
        message = "int8 arithmetic supports only models whose layers are attention and an MLP"
        raise InputError(message, field="arithmetic", remedy=REMEDY)


def check_options(options: ModelSpec, checkpoint: Checkpoint, config: ModelConfig, dtype: str, device: str) -> None:
    """Raise the errors of `check_int8` for the options of a model."""
    file = checkpoint.gguf
    types = [] if file is None else [file.type_name(name) for name in file.tensors]
    check_int8(
        config, dtype, device, weights=options.weights, ranks=options.tensor_parallel,
        is_quantised=any(kind in kernels.WHOLE_TYPES for kind in types),
    )  # fmt: skip


def probe_tokens(tokenizer: Tokenizer | None, config: ModelConfig) -> np.ndarray:
    """Return the tokens of the probe text for a model, int64."""
    # A tokenizer may have more ids than the model.
    ids = [] if tokenizer is None else [i for i in tokenizer.encode("".join(PROBE)).tolist() if i < config.vocab_size]
    # Without a tokenizer, evenly spaced tokens still give a usable measurement.
    tokens = np.array(ids) if ids else np.linspace(0, config.vocab_size - 1, PROBE_ROWS // 2)
    return tokens[: min(PROBE_ROWS, config.max_positions)].astype(np.int64)


@dataclass(slots=True)
class Report:
    """The effect of int8 on the probe text."""

    cosines: dict[int, float] = field(default_factory=dict)  # {layer: cosine of its updates}, the mean over rows
    kept_layers: list[int] = field(default_factory=list)  # layers that stay in the dtype's arithmetic
    logits: float | None = None  # minimum cosine of a row's logits; None: there is no LM head
    num_requantised: int = 0  # matrices quantised twice, because a panel would mix columns of two types

    def words(self, dtype: str) -> str:
        """Describe the report in one sentence.

        Args:
            dtype: Name of the dtype.
        """
        used = [number for number in self.cosines if number not in self.kept_layers]
        text = f"int8 arithmetic in {len(used)} of {len(self.cosines)} layers"
        if used:
            text += f" (least cosine of a layer {min(self.cosines[number] for number in used):.4f}"
            text += ")" if self.logits is None else f", of logits {self.logits:.4f})"
        if self.kept_layers:
            layers = ", ".join(f"{number} ({self.cosines[number]:.3f})" for number in self.kept_layers)
            text += f"; {dtype} in layers that int8 changes too much: {layers}"
        if self.num_requantised:
            text += f"; {self.num_requantised} matrices of mixed types quantised a second time"
        return text


class Probe:
    """The run of the probe text through a model's layers, while they are loaded.

    Args:
        model: The model.
        tokens: int64, the tokens of the probe text.

    Attributes:
        batch: The rows of the text.
        exact: [rows, hidden], the residual stream before the next layer in the dtype's arithmetic.
    """

    def __init__(self, model: NativeModel, tokens: np.ndarray):
        config = model.config
        self._model = model
        self._store = NativeStore(layouts_of(model.kernels, config, model.dtype)[:1], len(tokens) + 1, model.kernels)
        self.batch = prepare_slots(_one_sequence(tokens), replace(config, invariant=False))
        self.exact = self._quantised = np.empty(0)
        self.report = Report()

    def layer(self, number: int, choices: Mapping[Weight, Blocks]) -> None:
        """Switch a layer's linears to int8 if that changes little.

        Args:
            choices: The int8 matrices of these linears.
        """
        if not number:
            self.exact = self._quantised = self._embedded()
        matrices = self._model.memory.matrices
        before = {weight: matrices[weight] for weight in choices}
        exact = self._through(number, self.exact)
        matrices.update(choices)
        added = [after - _wide(self.exact) for after in map(_wide, (exact, self._through(number, self.exact)))]
        cosine = float(_cosines(*added).mean())
        self.report.cosines[number] = cosine
        if not cosine >= LEAST_COSINE:
            self.report.kept_layers.append(number)
            matrices.update(before)
        self.exact, self._quantised = exact, self._through(number, self._quantised)

    def finish(self) -> Report:
        """Return the report. Call this after the last layer."""
        config = self._model.config
        if config.lm_head and self.report.cosines:
            ids = np.linspace(0, config.vocab_size - 1, min(LOGITS, config.vocab_size)).astype(np.int64)
            program = NativeProgram(self._model, part=Part(ends=True))
            streams = [program.end_of(x, self.batch) for x in (self.exact, self._quantised)]
            self.report.logits = float(_cosines(*(self._model.logits(x, ids) for x in streams)).min())
        return self.report

    def _embedded(self) -> np.ndarray:
        """Return the residual stream before the first layer."""
        return NativeProgram(self._model, part=Part(embeds=True)).through(None, self.batch, self._store)

    def _through(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return the residual stream after a layer; x is not modified."""
        program = NativeProgram(self._model, part=Part(((number, 0, number),)))
        return program.through(x.copy(), self.batch, self._store)


def _one_sequence(tokens: np.ndarray) -> SlotStep:
    """Return the step of one sequence; every row is read. Slot 0 is scratch."""
    rows = np.arange(len(tokens))
    one = np.zeros(1, np.int64)
    return SlotStep(
        tokens.astype(np.int32), rows.astype(np.int32), rows + 1, run_start=one + 1, run_count=one + len(rows),
        run_position=one, run_first=one, run_last=one + len(rows), read_rows=rows,
    )  # fmt: skip


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of a with the same row of b, [rows]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(1) / np.maximum(lengths, 1e-8))
