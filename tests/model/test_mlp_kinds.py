"""An MLP of another kind is one file: a mixture of two experts, of which each row goes through the likelier."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import DenseAttend, randomise, tiny_checkpoint
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, LlamaForCausalLM

from prefold.checkpoint import resolve
from prefold.errors import UnsupportedModelError
from prefold.model import MlpKind, add_mlp, add_operation, builders, config_from, families, program, register_family
from prefold.model.decoders import llama
from prefold.model.program import Operation, Weight
from prefold.spec.plugins import load_plugins
from prefold.worker.torch.load import load_model

EXPERTS = 2


@dataclass(frozen=True, slots=True)
class LikeliestExpert(Operation):
    """out = what the likelier expert gives for a row of source, times its share."""

    source: str
    out: str
    router: Weight
    first: tuple[Weight, ...]
    second: tuple[Weight, ...]

    @property
    def row_weights(self):
        return self.router.size + self.first[0].size + self.second[0].size


def build(builder, h, out):
    config, prefix = builder.config, f"{builder.prefix}mlp."
    hidden, width = config.hidden, config.intermediate

    def matrix(inputs, *modules):
        return Weight(tuple((f"{prefix}{module}.weight", rows) for module, rows in modules), (inputs,))

    names = [f"experts.{number}." for number in range(EXPERTS)]
    first = tuple(matrix(hidden, (f"{name}gate_proj", width), (f"{name}up_proj", width)) for name in names)
    second = tuple(matrix(width, (f"{name}down_proj", hidden)) for name in names)
    builder.add(LikeliestExpert(h, out, matrix(hidden, ("router", EXPERTS)), first, second))


def likeliest(operation, weights, rows):
    h = rows.get(operation.source)
    share, chosen = F.linear(h, weights.router).softmax(-1).max(-1)
    out = torch.empty_like(h)
    for number in range(EXPERTS):
        own = (chosen == number).nonzero()[:, 0]
        gate, up = F.linear(h[own], weights.first[number]).chunk(2, -1)
        out[own] = F.linear(F.silu(gate) * up, weights.second[number])
    rows.put(operation.out, out * share[:, None])


class TheirExperts(nn.Module):
    """The same for transformers."""

    def __init__(self, mlp, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.experts = nn.ModuleList(type(mlp)(config) for _ in range(EXPERTS))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        return (every * (shares * (shares == shares.amax(-1, keepdim=True)))[..., None]).sum(-2)


@pytest.fixture
def checkpoint(tmp_path, keep):
    """A checkpoint of a family that two calls add, and the model of transformers."""
    load_plugins()  # into the tables themselves
    keep(builders.MLPS, families.FAMILIES, families.REGISTERED, program.ADDED)
    add_mlp("experts", MlpKind(build))
    add_operation(LikeliestExpert, likeliest)
    register_family("TwoExpertsForCausalLM", lambda hf: replace(llama(hf), mlp="experts"))
    folder = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    theirs = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    for layer in theirs.model.layers:
        layer.mlp = TheirExperts(layer.mlp, theirs.config)
    randomise(theirs, seed=3)
    theirs.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"architectures": ["TwoExpertsForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return resolve(str(folder)), theirs.eval()


def test_a_mixture_of_experts_in_one_file(checkpoint):
    checkpoint, theirs = checkpoint
    ours = load_model(checkpoint, dtype=torch.float32, device="cpu")
    tokens = torch.arange(40) * 7 % 300
    with torch.inference_mode():
        found = ours.logits(ours(tokens, torch.arange(40), DenseAttend(ours.config)))
        torch.testing.assert_close(found, theirs(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)
        router = ours.layers[0].likeliest_expert.router
        chosen = (torch.randn(100, ours.config.hidden) @ router.T).argmax(-1)
    assert set(chosen.tolist()) == {0, 1}
    assert ours.config.num_parameters == sum(p.numel() for p in theirs.parameters())
    linears = [m for n, m in theirs.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    unmet = [m for n, m in theirs.named_modules() if isinstance(m, nn.Linear) and "experts.1." in n]
    assert ours.config.linear_flops == 2 * sum(m.weight.numel() for m in linears) - 2 * sum(
        m.weight.numel() for m in unmet
    )


def test_a_kind_that_was_not_added_is_an_error(checkpoint):
    found = config_from(checkpoint[0].config)
    with pytest.raises(UnsupportedModelError, match="mlp is 'mixture'; it must be one of gated, plain, experts"):
        replace(found, mlp="mixture").program()


def test_an_operation_that_no_function_computes_is_an_error(checkpoint):
    del program.ADDED[LikeliestExpert]
    with pytest.raises(UnsupportedModelError, match="an operation LikeliestExpert, and no function computes it"):
        load_model(checkpoint[0], dtype=torch.float32, device="cpu")
