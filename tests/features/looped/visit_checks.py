"""Engines and requests whose rows leave early, and a check of their tokens by the rule a row at a time."""

from __future__ import annotations

from dataclasses import replace

from generating import ask, worker_of
from looped_dense import LOOPED, Dense
from visit_dense import RowByRow

from prefold import LLM
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.spec.model import model_keywords
from prefold.spec.requests import Exits

GATED = LOOPED["loop"] | {"gate": True}
NAMES = {name: f"exit_{name}" for name in ("threshold", "change", "prompts", "visits")}


def engine_of(llm: LLM, *, rows: int = 1000, slots: int | None = None, **options) -> ModelEngine:
    if slots is not None:
        options["kv_memory"] = (slots + 1) * llm.engine.worker.facts.slot_bytes
    generation = GenerateOptions(**model_keywords({"exits": "save"} | options))
    return ModelEngine(worker_of(llm), EngineOptions(max_batch_rows=rows, generation=generation))


def request_of(tokens, exits: Exits, **sampling):
    given = {NAMES.get(name, name): getattr(exits, name) for name in exits.__dataclass_fields__}
    return ask(tokens, **{"max_tokens": 5, "ignore_eos": True} | given | sampling)


def check(dense: Dense, keys: str, tokens: list[int], made: list[int], exits: Exits) -> list[int]:
    """Each token is what the rule gives after those before it. Returns after how many visits the rows left."""
    if exits.threshold is None:
        exits = replace(exits, threshold=1.0)
    oracle = RowByRow(dense, keys).run([*tokens, *made[:-1]], len(tokens), exits, exits.route)
    for step, token in enumerate(made):
        scores = dense.logits(oracle.hidden[len(tokens) - 1 + step])
        assert scores[token] > scores.max() - 2e-3, (step, float(scores.max() - scores[token]))
    return oracle.made
