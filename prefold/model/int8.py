"""Linears whose rows are quantised to int8 before they are multiplied, by choice, on a CPU (`kernels/src/int8.h`).

Matrices that a file has in blocks of whole numbers are used as they are; of others our own form is made. That is less
exact than the dtype's arithmetic, and some models bear it badly: so some text goes through each layer in both when the
model is loaded, and layers that give something else keep the dtype's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..checkpoint import Checkpoint
from ..errors import InputError
from .arrays import ARRAY_DTYPES
from .config import ModelConfig
from .layer import Layer
from .layers import HeldWeight, Linear
from .lora import NO_ADAPTERS
from .ops import choose_ops, wide
from .products import Panels, Product, product_kernels
from .stored import StoredWeights
from .transformer import CausalLM

# Text that goes through the model when it is loaded, to see what int8 changes: prose, a question, code, numbers.
PROBE = (
    "The harbour was quiet when the ferry came in, and the two women who had waited since dawn lifted their bags. "
    "Question: which of the following gases is most abundant in the Earth's atmosphere? Answer: nitrogen.\n",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    "    return total / len(values)\n",
    'On 14 March 1879 the index stood at 1,204.75 points, 3.2 % above 1,167. {"id": 7, "name": "Łódź", "ok": true}\n',
)
PROBE_ROWS = 256  # at most
# What a layer adds to the residual stream, in int8 and in the dtype, must have this cosine in the mean of the rows, and
# so must logits at the end.
LEAST_COSINE = 0.99
LOGITS = 4096  # entries of the vocabulary that are compared
REMEDY = "leave --arithmetic out"


def check_int8(
    dtype: torch.dtype, device: torch.device, *, weights: str, ranks: int, is_quantised: bool, pack: bool = True
) -> None:
    """Raises InputError where rows cannot be multiplied in int8.

    weights       the option; ranks: those that the model is split over
    is_quantised  whether the checkpoint has matrices in blocks of whole numbers
    pack          whether linears are packed; not where the model is trained
    """
    compiled = kernels.load() if device.type == "cpu" else None
    problems = {
        f"this is {device.type}, and int8 is computed on CPUs": device.type != "cpu",
        "the model is trained": not pack,
        f"the model is split over {ranks} ranks": ranks > 1,
        f"the dtype is {str(dtype).removeprefix('torch.')}": dtype not in ARRAY_DTYPES,
        f"there are no compiled kernels here ({kernels.status()})": compiled is None,
        f"this CPU has no VNNI (ARM: dotprod), or its kernels are made without ({kernels.status()})": not (
            compiled is None or compiled.has_int8
        ),
        f"weights are to lie in memory as {weights!r} says": weights in ("file", "dtype"),
    }
    remedies = {"dtype": f"use --dtype bfloat16 or float32, or {REMEDY}", "weights": "leave --weights out"}
    if problem := next((words for words, is_so in problems.items() if is_so), None):
        remedy = next((remedy for word, remedy in remedies.items() if word in problem.split()), REMEDY)
        raise InputError(f"there is no int8 arithmetic: {problem}", field="arithmetic", remedy=remedy)
    if weights == "int8" and is_quantised:
        message = "the checkpoint's weights are quantised already, and to quantise them again would lose more"
        raise InputError(message, field="weights", remedy="leave --weights out: its blocks are used as they are")


def probe_tokens(
    options: Any, checkpoint: Checkpoint, config: ModelConfig, tokenizer: Any, dtype: torch.dtype, device: torch.device
) -> list[int] | None:
    """Returns the tokens of the text of the probe; None where the options of a model ask for no int8. Raises what
    `check_int8` does."""
    if options.arithmetic == "float":
        return None
    file = checkpoint.gguf
    types = [] if file is None else [file.type_name(name) for name in file.tensors]
    check_int8(
        dtype, device, weights=options.weights, ranks=options.tensor_parallel,
        is_quantised=any(kind in kernels.WHOLE_TYPES for kind in types),
    )  # fmt: skip
    # A tokenizer may have more ids than the model.
    ids = [] if tokenizer is None else [i for i in tokenizer.encode("".join(PROBE)).tolist() if i < config.vocab_size]
    # Any tokens are better than none.
    return ids or torch.linspace(0, config.vocab_size - 1, PROBE_ROWS // 2).long().tolist()


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

    def words(self, dtype: torch.dtype) -> str:
        """Returns a sentence for people."""
        name, used = str(dtype).removeprefix("torch."), [n for n in self.cosines if n not in self.kept_layers]
        text = f"int8 arithmetic in {len(used)} of {len(self.cosines)} layers"
        if used:
            text += f" (least cosine of a layer {min(self.cosines[n] for n in used):.4f}"
            text += ")" if self.logits is None else f", of logits {self.logits:.4f})"
        if self.kept_layers:
            layers = ", ".join(f"{n} ({self.cosines[n]:.3f})" for n in self.kept_layers)
            text += f"; {name} in those that int8 changes too much: {layers}"
        if self.num_requantised:
            text += f"; {self.num_requantised} matrices of mixed types quantised a second time"
        return text


class Probe:
    """A Probe takes rows of text through a model's layers while they are loaded."""

    def __init__(self, model: CausalLM, tokens: Sequence[int]):
        """tokens: of a text"""
        self._model = model
        self._tokens = torch.tensor(tokens[: min(PROBE_ROWS, model.config.max_positions)], dtype=torch.int64)
        self._cos_sin: list[Tensor] = []
        self._exact = self._quantised = torch.empty(0)
        self.report = Report()

    def layer(self, number: int, choices: Sequence[tuple[Linear, Product]]) -> None:
        """Lets the linears of a layer multiply in int8 from now on where that changes little. choices: these linears,
        with their products in int8"""
        if not number:
            positions = torch.arange(len(self._tokens))
            self._cos_sin = self._model.cos_sin(positions)
            self._exact = self._quantised = self._model.embed(self._tokens, positions)
        floats = [linear.product for linear, _ in choices]
        exact = self._through(number, self._exact)
        for linear, product in choices:
            linear.product = product
        added = [wide(stream) - wide(self._exact) for stream in (exact, self._through(number, self._exact))]
        cosine = float(F.cosine_similarity(*added, dim=1).mean())
        self.report.cosines[number] = cosine
        if not cosine >= LEAST_COSINE:
            self.report.kept_layers.append(number)
            for (linear, _), before in zip(choices, floats, strict=True):
                linear.product = before
        self._exact, self._quantised = exact, self._through(number, self._quantised)

    def finish(self) -> Report:
        """Returns the report, after the last layer."""
        model = self._model
        if model.config.lm_head and self.report.cosines:
            ids = torch.linspace(0, model.config.vocab_size - 1, min(LOGITS, model.config.vocab_size)).long()
            ops = choose_ops(model.dtype, model.device)
            exact, quantised = (
                model.logits(model.norm(x.clone(), None, ops), ids) for x in (self._exact, self._quantised)
            )
            self.report.logits = float(F.cosine_similarity(exact, quantised, dim=1).min())
        return self.report

    def _through(self, number: int, x: Tensor) -> Tensor:
        """Returns the residual stream after a layer; x is left as it is."""
        model, config = self._model, self._model.config
        plane = config.visited.index(number)
        x, delta = model.layers[number](
            x.clone(), None, cos_sin=self._cos_sin[plane], attend=partial(self._attend, config.planes[plane].window),
            read=None, adapters=NO_ADAPTERS, ops=choose_ops(model.dtype, model.device),
        )  # fmt: skip
        return x if delta is None else x + delta

    def _attend(self, window: int | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Returns causal attention of one sequence, [rows, heads, dim]. sinks: as of `RowAttention.attend`"""
        config = self._model.config
        shared = q.shape[1] // k.shape[1]
        k, v = (wide(t).repeat_interleave(shared, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", wide(q), k) * config.scale
        if config.attention_cap is not None:
            scores = config.attention_cap * torch.tanh(scores / config.attention_cap)
        ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
        visible = (ages >= 0) & (ages < (window or len(q)))
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # a key whose value is 0
            scores = torch.cat((scores, wide(sinks)[:, None, None].expand(-1, len(q), 1)), 2)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v).to(q.dtype)


def fill_in_int8(
    model: CausalLM,
    weights: Iterable[tuple[int, HeldWeight]],
    fill_one: Callable[..., None],
    stored: StoredWeights,
    tokens: Sequence[int],
) -> Report:
    """Fills all parameters of a model, a layer at a time, and lets its linears multiply in int8 where the probe allows.

    weights   the model's, with their places, layer by layer after those that are in none
    fill_one  fills one of them (with its place, and where memory comes from), and packs it in the dtype
    stored    the weights that stay as they are stored
    tokens    of the text that goes through the model; nothing is left to int8 unseen

    Raises InputError for a model of another kind.
    """
    compiled = product_kernels(torch.empty(1, 2, dtype=model.dtype))
    if compiled is None or type(model) is not CausalLM:
        message = "there is no int8 arithmetic for models with layers of another kind than attention and an MLP"
        raise InputError(message, field="arithmetic", remedy=REMEDY)
    pool, probe = kernels.PanelPool(), Probe(model, tokens)
    numbers = {id(module): n for n, layer in enumerate(model.layers) for module in layer.modules()}
    for number, group in groupby(weights, lambda pair: numbers.get(id(pair[1].owner))):
        choices: list[tuple[Linear, Product]] = []
        # What is packed in the dtype beside int8 is soon let go: it takes no part of a larger piece of memory.
        beside = pool if number is None else kernels.PanelPool(piece=0)
        linears = [] if number is None else _linears(cast(Layer, model.layers[number]))
        for place, weight in group:
            linear = weight.owner
            if weight.attribute != "weight" or not any(linear is item for item in linears):
                fill_one(place, weight, pool)
                continue
            assert isinstance(linear, Linear)
            if stored.is_whole(weight) and stored.use(place, weight, pool):
                assert isinstance(linear.product, Panels)
                choices.append((linear, linear.product.in_int8()))
                continue
            probe.report.num_requantised += stored.is_whole(weight)
            fill_one(-1, weight, beside, pack=False)
            choices.append((linear, linear.in_int8(compiled, pool)))
            linear.pack(beside)
        if number is not None:
            with torch.inference_mode():
                probe.layer(number, choices)
    return probe.finish()


def _linears(layer: Layer) -> list[Linear]:
    """Returns the linears of attention and of an MLP; experts have matrices of their own."""
    return [linear for linear in layer.linears.values() if linear.panels is not None]
