"""Linears whose rows are quantised to int8 before they are multiplied, by choice (`kernels/src/int8.h`).

Matrices that a file has in blocks of whole numbers are used as they are; other matrices are quantised at load. int8 is
less exact than the dtype's arithmetic, and some models bear it badly. So some text goes through each layer in both when
the model is loaded, and a layer whose output changes too much keeps the dtype's arithmetic.
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

# Text that goes through the model when it is loaded, to see what int8 changes: prose, a question, code, numbers.
PROBE = (
    "The harbour was quiet when the ferry came in, and the two women who had waited since dawn lifted their bags. "
    "Question: which of the following gases is most abundant in the Earth's atmosphere? Answer: nitrogen.\n",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    "    return total / len(values)\n",
    'On 14 March 1879 the index stood at 1,204.75 points, 3.2 % above 1,167. {"id": 7, "name": "Łódź", "ok": true}\n',
)
PROBE_ROWS = 256  # at most
# What a layer adds to the residual stream, in int8 and in the dtype, must have this cosine in the mean of the rows.
LEAST_COSINE = 0.99
LOGITS = 4096  # entries of the vocabulary that are compared
REMEDY = "leave --arithmetic out"


def check_int8(config: ModelConfig, dtype: str, device: str, *, weights: str, ranks: int, is_quantised: bool) -> None:
    """Raise InputError if rows of a model cannot be multiplied in int8.

    dtype, device  by name
    weights        the option
    ranks          that the model is split over
    is_quantised   whether the checkpoint has matrices in blocks of whole numbers
    """
    compiled = kernels.load() if device == "cpu" else None
    lacks = f"this CPU has no VNNI (ARM: dotprod), or its kernels are made without ({kernels.status()})"
    problems = {
        f"this is {device}, and int8 is computed on CPUs": device != "cpu",
        "the model is computed by modules of transformers": bool(config.loading),
        f"the model is split over {ranks} ranks": ranks > 1,
        f"the dtype is {dtype}": dtype not in ("float32", "bfloat16"),
        f"there are no compiled kernels here ({kernels.status()})": compiled is None,
        lacks: not (compiled is None or compiled.has_int8),
        f"weights are to lie in memory as {weights!r} says": weights in ("file", "dtype"),
    }
    remedies = {"dtype": f"use --dtype bfloat16 or float32, or {REMEDY}", "weights": "leave --weights out"}
    if problem := next((words for words, is_so in problems.items() if is_so), None):
        remedy = next((remedy for word, remedy in remedies.items() if word in problem.split()), REMEDY)
        raise InputError(f"there is no int8 arithmetic: {problem}", field="arithmetic", remedy=remedy)
    if weights == "int8" and is_quantised:
        message = "the checkpoint's weights are quantised already, and to quantise them again would lose more"
        raise InputError(message, field="weights", remedy="leave --weights out: its blocks are used as they are")
    is_plain = config.latent is None and not config.layer_inputs and not any(one.sizes for one in config.planes)
    if len(config.planes) != config.layers or not is_plain:
        message = "there is no int8 arithmetic for models with layers of another kind than attention and an MLP"
        raise InputError(message, field="arithmetic", remedy=REMEDY)


def check_options(options: ModelSpec, checkpoint: Checkpoint, config: ModelConfig, dtype: str, device: str) -> None:
    """Raise what `check_int8` does, for the options of a model."""
    file = checkpoint.gguf
    types = [] if file is None else [file.type_name(name) for name in file.tensors]
    check_int8(
        config, dtype, device, weights=options.weights, ranks=options.tensor_parallel,
        is_quantised=any(kind in kernels.WHOLE_TYPES for kind in types),
    )  # fmt: skip


def probe_tokens(tokenizer: Tokenizer | None, config: ModelConfig) -> np.ndarray:
    """Return the tokens of the text of the probe, int64, for a model."""
    # A tokenizer may have more ids than the model.
    ids = [] if tokenizer is None else [i for i in tokenizer.encode("".join(PROBE)).tolist() if i < config.vocab_size]
    # Any tokens are better than none.
    tokens = np.array(ids) if ids else np.linspace(0, config.vocab_size - 1, PROBE_ROWS // 2)
    return tokens[: min(PROBE_ROWS, config.max_positions)].astype(np.int64)


@dataclass(slots=True)
class Report:
    """A Report says what int8 does to the text of the probe.

    cosines          of what each layer adds, by its number, in the mean of the rows
    kept_layers      the layers that keep the dtype's arithmetic
    logits           the least cosine of a row's logits; None: the checkpoint has no LM head
    num_requantised  matrices that are quantised a second time, since a panel of them would have columns of two types
    """

    cosines: dict[int, float] = field(default_factory=dict)
    kept_layers: list[int] = field(default_factory=list)
    logits: float | None = None
    num_requantised: int = 0

    def words(self, dtype: str) -> str:
        """Return a sentence for people. dtype: by name"""
        used = [number for number in self.cosines if number not in self.kept_layers]
        text = f"int8 arithmetic in {len(used)} of {len(self.cosines)} layers"
        if used:
            text += f" (least cosine of a layer {min(self.cosines[number] for number in used):.4f}"
            text += ")" if self.logits is None else f", of logits {self.logits:.4f})"
        if self.kept_layers:
            layers = ", ".join(f"{number} ({self.cosines[number]:.3f})" for number in self.kept_layers)
            text += f"; {dtype} in those that int8 changes too much: {layers}"
        if self.num_requantised:
            text += f"; {self.num_requantised} matrices of mixed types quantised a second time"
        return text


class Probe:
    """A Probe takes rows of text through a model's layers while they are loaded.

    batch  the rows
    exact  their residual stream before the next layer, in the dtype's arithmetic, [rows, hidden]
    """

    def __init__(self, model: NativeModel, tokens: np.ndarray):
        """tokens: of a text, int64"""
        config = model.config
        self._model = model
        self._store = NativeStore(layouts_of(model.kernels, config, model.dtype)[:1], len(tokens) + 1, model.kernels)
        self.batch = prepare_slots(_one_sequence(tokens), replace(config, invariant=False))
        self.exact = self._quantised = np.empty(0)
        self.report = Report()

    def layer(self, number: int, choices: Mapping[Weight, Blocks]) -> None:
        """Let linears of a layer multiply in int8 from now on if that changes little. choices: their matrices"""
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
        """Return the report, after the last layer."""
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
        """Return the residual stream after a layer; x is left as it is."""
        program = NativeProgram(self._model, part=Part(((number, 0, number),)))
        return program.through(x.copy(), self.batch, self._store)


def _one_sequence(tokens: np.ndarray) -> SlotStep:
    """Return the step of one sequence, of which all rows are read. Slot 0 is scratch."""
    rows = np.arange(len(tokens))
    one = np.zeros(1, np.int64)
    return SlotStep(
        tokens.astype(np.int32), rows.astype(np.int32), rows + 1, run_start=one + 1, run_count=one + len(rows),
        run_position=one, run_first=one, run_last=one + len(rows), read_rows=rows,
    )  # fmt: skip


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of a with that of b, [rows]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(1) / np.maximum(lengths, 1e-8))
