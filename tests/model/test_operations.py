"""Programs of random configs: what tensors compute is what a plain reading of the operations gives, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from configs import configs
from dense import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from routing import route

from prefold.model import ModelConfig, Plane, RopeConfig
from prefold.model.builders import widths_of
from prefold.model.mixtures import mixture
from prefold.model.program import (
    ActivateGated,
    Add,
    Attend,
    ByPosition,
    Experts,
    Gate,
    Interpolate,
    Linear,
    Norm,
    NormHeads,
    Pick,
    Program,
    Rope,
    ScaleHeads,
    Weight,
    Xielu,
)
from prefold.worker.torch.layer import Layer, dead_buffers
from prefold.worker.torch.lora import NO_ADAPTERS
from prefold.worker.torch.model import CausalLM
from prefold.worker.torch.operations import Place, Rows, gate
from prefold.worker.torch.ops import PYTORCH
from prefold.worker.torch.parallel import ALONE

ROWS = 9


ACTIVATIONS = {
    "": lambda x: x,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
}


class Dense:
    """A plain reading of the operations: float64, whole buffers, one head and one row at a time."""

    def __init__(self, model: CausalLM, tokens: np.ndarray, read: np.ndarray | None):
        self.tensors = {
            name: part.detach().numpy()
            for held in model.held
            for (name, _), part in zip(held.parts, held.parameter.split([n for _, n in held.parts]), strict=True)
        }
        self.program: Program = model.program
        self.config, self.tokens, self.read = model.config, tokens, read
        self.positions = np.arange(len(tokens))
        self.tables = [table.double().numpy() for table in model.cos_sin(torch.from_numpy(self.positions))]
        self.buffers: dict[str, np.ndarray] = {}

    def weight(self, weight: Weight | None) -> np.ndarray | float:
        return 0.0 if weight is None else np.concatenate([self.tensors[name] for name, _ in weight.parts])

    def run(self) -> np.ndarray:
        embed = self.program.embed
        x = self.weight(embed.table)[self.tokens] * embed.scale
        self.buffers["x"] = (
            x if embed.positions is None else x + self.weight(embed.positions)[self.positions + embed.first]
        )
        for plane, operations in enumerate(self.program.layers):
            for operation in operations:
                getattr(self, type(operation).__name__.lower())(operation, plane)
        for operation in self.program.end:
            self.norm(operation, -1)
        return self.buffers["out"]

    def norm(self, op: Norm, plane: int) -> None:
        x = self.buffers[op.source][:, op.at : op.at + op.size]
        if op.kind == "layer":
            x = x - x.mean(1, keepdims=True)
        x = x / np.sqrt(self.square(op, x) + op.eps)
        x = x * (1 if op.weight is None else self.weight(op.weight)) + self.weight(op.bias)
        if op.source == op.out:
            self.buffers[op.out][:, op.at : op.at + op.size] = x
        else:
            self.buffers[op.out] = x

    @staticmethod
    def square(op: Norm | NormHeads, x: np.ndarray) -> np.ndarray:
        squares = x**2
        return squares.sum(1, keepdims=True) if op.kind == "unit" else squares.mean(1, keepdims=True)

    def normheads(self, op: NormHeads, plane: int) -> None:
        for head in range(op.heads):
            x = self.buffers[op.source][:, op.at + head * op.stride :][:, : op.dim]
            if op.kind == "layer":
                x -= x.mean(1, keepdims=True)
            x /= np.sqrt(self.square(op, x) + op.eps)
            for weight, change in ((op.weight, np.multiply), (op.bias, np.add)):
                if weight is not None:
                    numbers = self.weight(weight)
                    change(x, numbers if len(numbers) == op.dim else numbers[head * op.dim :][: op.dim], out=x)

    def byposition(self, op: ByPosition, plane: int) -> None:
        factors = np.array([1 + op.rate * math.log(1 + position // op.period) for position in self.positions])
        for head in range(op.heads):
            self.buffers[op.source][:, op.at + head * op.stride :][:, : op.dim] *= factors[:, None]

    def scaleheads(self, op: ScaleHeads, plane: int) -> None:
        numbers = self.weight(op.weight)
        for head in range(op.heads):
            x = self.buffers[op.source][:, op.at + head * op.stride :][:, : op.dim]
            x *= (op.factor * numbers[head * op.dim :][: op.dim]) ** op.power

    def activategated(self, op: ActivateGated, plane: int) -> None:
        gate, up = np.split(self.buffers[op.source], [op.width], 1)
        self.buffers[op.out] = ACTIVATIONS[op.activation](gate) * up

    def interpolate(self, op: Interpolate, plane: int) -> None:
        x, y = self.buffers[op.source], self.buffers[op.beside]
        rate = np.abs(op.factor * self.weight(op.weight))
        self.buffers[op.source] = (1 - rate) * x + rate * y

    def xielu(self, op: Xielu, plane: int) -> None:
        p, n = (np.log1p(np.exp(self.weight(weight))) for weight in (op.alpha_p, op.alpha_n))
        beta, eps, x = self.weight(op.beta), self.weight(op.eps), self.buffers[op.source]
        below = (beta + n) * (np.exp(np.minimum(x, eps)) - 1 - x)
        self.buffers[op.source] = np.where(x > 0, p * x**2, below) + beta * x

    def linear(self, op: Linear, plane: int) -> None:
        out = self.buffers[op.source] @ self.weight(op.weight).T
        if op.bias is not None:
            out[:, : op.bias.rows] += self.weight(op.bias)
        if op.gated:
            gate, up = np.split(out, 2, 1)
            out = ACTIVATIONS[op.activation](op.gate_scale * gate) * up
        else:
            out = ACTIVATIONS[op.activation](out)
        self.buffers[op.out] = out

    def rope(self, op: Rope, plane: int) -> None:
        table, half = self.tables[plane][self.positions], op.turned // 2
        for head in range(op.heads):
            x = self.buffers[op.source][:, op.at + head * op.stride :][:, : op.dim]
            if op.norm is not None:
                x[:] = x / np.sqrt((x**2).mean(1, keepdims=True) + op.eps) * self.weight(op.norm)
            if half:
                cos, sin = np.split(table, 2, 1)
                a, b = x[:, :half].copy(), x[:, half : 2 * half].copy()
                x[:, :half], x[:, half : 2 * half] = a * cos - b * sin, b * cos + a * sin

    def attend(self, op: Attend, plane: int) -> None:
        q, beside, size = self.buffers[op.source], self.buffers[op.beside], op.kv_heads * op.dim
        out = np.zeros((len(q), op.heads * op.dim))
        for row, position in enumerate(self.positions):
            first = 0 if (window := self.config.planes[plane].window) is None else max(0, position - window + 1)
            for head in range(op.heads):
                own = q[row, op.at + head * op.stride :][: op.dim]
                at = op.keys + head // (op.heads // op.kv_heads) * op.dim
                seen = beside[first : position + 1]
                scores = seen[:, at : at + op.dim] @ own * self.config.scale
                if op.sinks is not None:
                    scores = np.append(scores, self.weight(op.sinks)[head])
                shares = np.exp(scores - scores.max())
                shares = (shares / shares.sum())[: len(seen)]
                out[row, head * op.dim : (head + 1) * op.dim] = shares @ seen[:, at + size : at + size + op.dim]
        self.buffers[op.out] = out

    def gate(self, op: Gate, plane: int) -> None:
        for group in range(op.groups):
            at, columns = op.at + group * op.stride, slice(group * op.dim, (group + 1) * op.dim)
            gates = self.buffers[op.by][:, at : at + (op.dim if op.each else 1)]
            self.buffers[op.source][:, columns] *= 1 / (1 + np.exp(-gates))

    def add(self, op: Add, plane: int) -> None:
        self.buffers[op.source] = self.buffers[op.source] + op.scale * self.buffers[op.beside]

    def pick(self, op: Pick, plane: int) -> None:
        if self.read is not None:
            for name in op.sources:
                self.buffers[name] = self.buffers[name][self.read]
            self.positions = self.positions[self.read]

    def experts(self, op: Experts, plane: int) -> None:
        h, count = self.buffers[op.source], op.experts
        matrices = [self.weight(weight).reshape(count, -1, weight.inputs[0]) for weight in (op.gate_up, op.down)]
        biases = [
            np.zeros((count, 1)) if weight is None else self.weight(weight).reshape(count, -1)
            for weight in (op.gate_up_bias, op.down_bias)
        ]
        logits = self.buffers[op.by or op.source] @ self.weight(op.router).T + self.weight(op.router_bias)
        out = np.zeros((len(h), op.down.rows // count))
        for row, x in enumerate(h):
            chosen, shares = route(
                logits[row], op.chosen, normalised=op.normalised, score=op.score, scale=op.scale,
                correction=None if op.correction is None else self.weight(op.correction), groups=op.groups,
                chosen_groups=op.chosen_groups, group_best=op.group_best,
                corrects_logits=op.corrects_logits, least_sum=op.least_sum, tolerance=op.tolerance,
            )  # fmt: skip
            for expert in chosen:
                first = matrices[0][expert] @ x + biases[0][expert]
                gate, up = np.split(first, 2) if op.gated else (first, 1.0)
                if op.activation == "clamped":
                    gate = np.minimum(gate, 7)
                    inner = gate / (1 + np.exp(-1.702 * gate)) * (1 + np.clip(up, -7, 7))
                else:
                    inner = ACTIVATIONS[op.activation](gate) * up
                out[row] += shares[expert] * (matrices[1][expert] @ inner + biases[1][expert])
        self.buffers[op.out] = out


class DenseAttend:
    def __init__(self, config: ModelConfig, read: torch.Tensor | None):
        self.config, self.read = config, read

    def __call__(self, plane, q, k, v, sinks=None):
        at = torch.arange(len(k)) if len(q) == len(k) else self.read
        distance = at[:, None] - torch.arange(len(k))
        visible = (distance >= 0) & (distance < (self.config.planes[plane].window or len(k)))
        return dense_attention(q, k, v, visible, scale=self.config.scale, sinks=sinks)


@settings(deadline=None, max_examples=40)
@given(config=configs(), reads=st.booleans(), seed=st.integers(0, 9))
def test_random_programs(config, reads, seed):
    generator = torch.Generator().manual_seed(seed)
    model = CausalLM(config, dtype=torch.float64, device=torch.device("cpu")).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    tokens = torch.randint(30, (ROWS,), generator=generator)
    read = torch.tensor([2, ROWS - 1]) if reads else None
    found = model(tokens, torch.arange(ROWS), DenseAttend(config, read), read)
    expected = Dense(model, tokens.numpy(), None if read is None else read.numpy()).run()
    assert found.shape == (2 if reads else ROWS, config.hidden)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_each_parameter_is_one_weight_of_the_program():
    config = ModelConfig(
        vocab_size=30, hidden=6, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=5, norm_eps=1e-3,
        rope=RopeConfig(), max_positions=20, planes=(Plane(), Plane()), sinks=True, qk_norm=True, qk_bias=True,
        norm="layer", gated=True,
    )  # fmt: skip
    config = mixture(config, count=3, chosen=2, shared=4, shared_gate=True, biases=True)
    model = CausalLM(config, dtype=torch.float32, device=torch.device("meta"))
    held = list(model.held)
    assert {id(one.parameter) for one in held} == {id(parameter) for parameter in model.parameters()}
    shapes = {weight.parts: weight.shape for weight in model.program.weights}
    assert {one.parts: tuple(one.parameter.shape) for one in held} == shapes and len(held) == len(shapes)
    names = {name.removeprefix("layers.1.") for name, _ in model.named_parameters() if name.startswith("layers.1.")}
    assert {"q.weight", "kv.bias", "q_norm.weight", "attend.sinks", "experts.router.weight"} <= names


def test_buffers_are_free_when_no_operation_reads_them_any_more():
    weight = Weight((("w", 1),), (1,))
    operations = [
        Linear("x", "a", weight),
        Linear("a", "b", weight),
        Norm("b", "a", weight, 1e-3),
        Rope("a", 0, 1, 2, 2, 2),
        Add("x", "a"),
    ]
    assert dead_buffers(operations) == [(), ("a",), ("b",), (), ("a",)]


def test_a_buffer_has_rows_of_one_width():
    config = ModelConfig(30, 6, 1, 1, 1, 2, 5, 1e-3, RopeConfig(), 20, (Plane(),))
    wide, narrow = (Linear("x", "wide", Weight((("w", rows),), (6,))) for rows in (8, 5))
    assert widths_of(config, [[wide], [wide]])["wide"] == 8
    with pytest.raises(ValueError, match="'wide' has rows of 8 and of 5 elements"):
        widths_of(config, [[wide], [narrow]])


def test_gates_that_begin_anywhere():
    generator = torch.Generator().manual_seed(0)
    x, by = (torch.randn(3, columns, generator=generator) for columns in (6, 20))
    state = Rows({"a": x, "b": by}, None, None, None, None, None, None, None, False)
    gate(Gate("a", "b", groups=2, dim=3, at=11, stride=4), None, state)
    expected = torch.cat((x[:, :3] * by[:, 11:14].sigmoid(), x[:, 3:] * by[:, 15:18].sigmoid()), 1)
    assert torch.equal(state.buffers["a"], expected)


def test_sums_wait_for_the_norm_that_follows():
    """Two in turn, one whose norm follows, and one that the layer ends with."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = torch.randn(3, 2, 4, generator=generator)
    operations = [
        Add("x", "x", 0.5),
        Add("x", "x"),
        Norm("x", "h", Weight((("n.weight", 4),)), 1e-3),
        Add("x", "h", 3.0),
    ]
    layer = Layer(operations, Place(torch.float32, torch.device("cpu"), ALONE)).requires_grad_(False)
    layer.n.weight.copy_(a[0])
    options = {"cos_sin": None, "attend": None, "read": None, "adapters": NO_ADAPTERS, "ops": PYTORCH}
    stream, delta = layer(x, b, **options)
    total = 3.0 * (x + b)
    torch.testing.assert_close(stream, total)
    normed = a[0] * total / (total.square().mean(1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(delta, 3.0 * normed)
