"""Blocks of a looped model as one compiled call each, against the modules."""

from __future__ import annotations

import pytest
import torch
from generating import generate
from looped_dense import looped_checkpoint
from running import prompts
from visit_checks import GATED, engine_of, request_of

from prefold import LLM
from prefold.model.ops import choose_ops
from prefold.model.transformer import CausalLM, Pass
from prefold.types import Exits
from prefold.worker.program import Program
from prefold.worker.slots import SlotAttend

PARTS = {"blocks": 2, "order": [1, 0, 1], "prelude": 1, "coda": 1, "between": "inject", "noise": 0.5, "seed": 2}


pytestmark = pytest.mark.usefixtures("own_products")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "differs"),
    [
        ("ouro", {"total_ut_steps": 3}),
        ("looped", {"loop": GATED | {"between": "norm"}}),
        ("looped", {"num_hidden_layers": 6, "loop": PARTS}),
        ("huginn", {"mean_recurrence": 2}),
    ],
)
def test_a_visit_is_that_of_the_modules_to_the_last_bit(tmp_path, monkeypatch, family, differs, dtype):
    llm = LLM(str(looped_checkpoint(tmp_path, family, intermediate_size=64, **differs)), dtype=dtype, device="cpu")
    through, seen = Program.through, set()

    def both(program, x, batch, store):
        layers = next(part for part in llm.model.parts.values() if len(part) and program is programs.get(part))
        first = [llm.model.first[layer] for layer in layers]
        planes, tables = [llm.model.config.planes[plane] for plane in first], llm.model.cos_sin(batch.positions)
        attend = SlotAttend(store, batch, planes, llm.model.config.scale)
        angles, ops = [tables[plane] for plane in first], choose_ops(x.dtype, x.device)
        rows = Pass(x.clone(), None, angles, attend, None, batch.adapters, ops)
        CausalLM.go_through(llm.model, rows, layers)
        expected = rows.stream
        assert torch.equal(through(program, x, batch, store), expected)
        seen.add(layers)
        return expected

    programs, init = {}, Program.__init__

    def note(program, model, compiled, part=None):
        init(program, model, compiled, part)
        programs[range(part[0][0], part[-1][0] + 1)] = program

    monkeypatch.setattr(Program, "__init__", note)
    monkeypatch.setattr(Program, "through", both)
    exits = [Exits(max_visits=2), Exits()]
    generate(engine_of(llm, rows=20), [request_of(tokens, some) for tokens in prompts(3, count=4) for some in exits])
    assert seen == {part for part in llm.model.parts.values() if len(part)}
