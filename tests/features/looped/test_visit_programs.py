"""Blocks of a looped model as one compiled call each, against the modules."""

from __future__ import annotations

import pytest
import torch
from generating import generate
from looped_dense import looped_checkpoint
from running import prompts
from visit_checks import GATED, engine_of, request_of

from prefold import LLM
from prefold.features.looped.worker import Programs, SlotPass
from prefold.spec.requests import Exits

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
def test_a_pass_is_that_of_the_modules_to_the_last_bit(tmp_path, monkeypatch, family, differs, dtype):
    llm = LLM(str(looped_checkpoint(tmp_path, family, intermediate_size=64, **differs)), dtype=dtype, device="cpu")
    run, of, parts = SlotPass.run, Programs.of, set()
    compiled: list[torch.Tensor] = []
    exits = [Exits(max_visits=2), Exits(), Exits(max_visits=1, prompts=True)]
    asked = [request_of(tokens, some) for tokens in prompts(3, count=4) for some in exits]

    def hidden_states() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def noted(rows):
            hidden, step = run(rows)
            found.append(hidden.clone())
            return hidden, step

        monkeypatch.setattr(SlotPass, "run", noted)
        generate(engine_of(llm, rows=20), asked)
        return found

    def program(programs, part, first):
        if compiled:  # the second time the modules run
            return None
        found = of(programs, part, first)
        assert found is not None
        parts.add((part, first > 0))
        return found

    monkeypatch.setattr(Programs, "of", program)
    compiled += hidden_states()
    for one, other in zip(compiled, hidden_states(), strict=True):
        assert torch.equal(one, other)
    assert {part for part, _ in parts} == {number for number, layers in llm.model.parts.items() if len(layers)}
    assert any(is_last for _, is_last in parts)  # of the last plane only the rows that are read
