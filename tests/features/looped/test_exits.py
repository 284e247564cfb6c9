"""Exits of looped models asked for by task and by request, over the stream and over slots, against the definition."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from generating import ask, engine_of, generate, tokens_of
from looped_dense import LOOPED, Dense, looped_checkpoint
from running import as_request, prompts, run

from prefold import LLM, InputError
from prefold.api.streams import ResponseStream
from prefold.cli.specs import job_spec
from prefold.engine.protocol import EngineOptions
from prefold.engine.requests import check_asked
from prefold.engine.worker import Facts
from prefold.features.looped.engine import engine_part
from prefold.spec.requests import Exits, Readout, Sampling

GATED = LOOPED["loop"] | {"gate": True}
ASKED = [
    Exits(),
    Exits(0.3),
    Exits(0.7),
    Exits(1.0),
    Exits(0.3, 2),
    Exits(0.9, 1, 3),
    Exits(None, 3),
    Exits(0.01, 4, 4),
]


@pytest.fixture(scope="module", params=["ouro", "looped", "inject", "add"])
def model(request, tmp_path_factory):
    overrides = {"total_ut_steps": 5, "early_exit_threshold": 0.5}
    if request.param != "ouro":
        fed = {"inject": {"between": "inject", "noise": 0.5}, "add": {"between": "add"}}.get(request.param, {})
        overrides = {"loop": GATED | {"threshold": 0.5} | fed}
    family = "ouro" if request.param == "ouro" else "looped"
    folder = looped_checkpoint(tmp_path_factory.mktemp("exits"), family, **overrides)
    dense = Dense(folder)
    dense.visits = functools.cache(dense.visits)
    return LLM(str(folder), dtype="float32", device="cpu"), dense


def read(dense: Dense, tokens: list[int], exits: Exits, row: int = -1) -> torch.Tensor:
    """The hidden state of a token that leaves as asked, one visit at a time."""
    states = dense.visits(tuple(tokens))
    shares = dense.leaving(states)[:, row].tolist()
    threshold = 0.5 if exits.threshold is None else exits.threshold
    left, visit = shares[0], 0
    while visit < len(shares) - 1 and visit + 1 != exits.max_visits:
        if left >= threshold and threshold < 1 and visit + 1 >= exits.min_visits:
            break
        visit += 1
        left += shares[visit]
    return states[visit][row]


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("exits", ASKED, ids=str)
@pytest.mark.parametrize("rows", [2, 1000])
def test_numbers_of_a_run(model, sharing, exits, rows):
    llm, dense = model
    token_lists = prompts(3, count=6)
    found = run(llm, [as_request(t) for t in token_lists], Readout("last", exits=exits), sharing=sharing, rows=rows)
    for result, tokens in zip(found, token_lists, strict=True):
        np.testing.assert_allclose(result.values, read(dense, tokens, exits), rtol=1e-4, atol=1e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [3, 1000])
def test_every_request_has_exits_of_its_own(model, rows):
    """The same prompts with different exits share their rows, and each token is read where its request asks."""
    llm, dense = model
    names = ("exit_threshold", "min_visits", "max_visits")
    cases = [(tokens, exits) for tokens in prompts(5, count=3)[:4] for exits in ASKED]
    engine = engine_of(llm, rows=rows)
    requests = [
        ask(
            tokens,
            max_tokens=4,
            ignore_eos=True,
            **dict(zip(names, (e.threshold, e.min_visits, e.max_visits), strict=True)),
        )
        for tokens, e in cases
    ]
    differ = 0
    for (tokens, exits), given in zip(cases, tokens_of(generate(engine, requests)), strict=True):
        for step in range(4):
            scores = dense.logits(read(dense, [*tokens, *given[:step]], exits))
            assert scores[given[step]] > scores.max() - 1e-3
        full = dense.logits(read(dense, tokens, Exits(1.0)))
        differ += int(full.argmax()) != given[0]
    assert differ > 3


def test_options_of_tasks(model):
    llm, dense = model
    tokens = prompts(7)[0]
    for exits in (Exits(0.3), Exits(1.0), Exits(None, 4), Exits(1.0, 1, 2)):
        options = {"exit_threshold": exits.threshold, "min_visits": exits.min_visits, "max_visits": exits.max_visits}
        vector = llm.embed([tokens], normalize=False, **options)[0]
        np.testing.assert_allclose(vector, read(dense, tokens, exits), rtol=1e-4, atol=1e-4)
        scores = dense.logits(read(dense, tokens, exits))
        assert (
            scores[llm.generate([tokens], max_tokens=1, ignore_eos=True, **options)[0].tokens[0]] > scores.max() - 1e-3
        )
        target = int(tokens[0])
        found = llm.score([tokens], [[target]], **options)[0].logprobs[0]
        assert found == pytest.approx(float(scores.log_softmax(-1)[target]), abs=1e-3)


def test_a_job_with_other_exits_is_another_job():
    given = {"exit_threshold": 0.5, "min_visits": 2, "max_visits": 3}
    assert given.items() <= job_spec(given, task="embed").identity().items()


def test_exits_that_cannot_be(model, tmp_path):
    llm, _ = model
    for options, message in (
        ({"exit_threshold": 0}, "exit_threshold"),
        ({"exit_threshold": 1.5}, "exit_threshold"),
        ({"min_visits": 6}, "min_visits is 6; give a number from 1 to 5"),
        ({"max_visits": 0}, "max_visits"),
        ({"min_visits": 3, "max_visits": 2}, "min_visits is 3, which is more than max_visits"),
    ):
        for call in (llm.embed, llm.generate):
            with pytest.raises(InputError, match=message):
                call([[5, 6]], **options)
    plain = LLM(str(looped_checkpoint(tmp_path, "looped")), dtype="float32", device="cpu")
    for options in ({"exit_threshold": 0.5}, {"min_visits": 2}, {"max_visits": 1}):
        for call in (plain.embed, plain.generate):
            with pytest.raises(InputError, match="the model has no gate"):
                call([[5, 6]], **options)


def test_an_engine_refuses_exits_of_a_model_that_does_not_loop():
    """Also where a request comes with no task that has looked at it."""
    part = engine_part(SimpleNamespace(facts=Facts(depth=1, max_rows=8)), EngineOptions())
    with pytest.raises(InputError, match="exit_threshold is given, but the model is not looped"):
        check_asked([part], Readout("last", exits=Exits(threshold=0.5)))
    check_asked([part], Readout("last", exits=Exits()))
    check_asked([part], Sampling())


def test_rows_that_are_kept_are_read_after_the_visit_that_is_asked_for(model):
    """In the slots, for replies; requests with other exits share none of these rows."""
    llm, dense = model
    token_lists = prompts(3, count=4)

    async def answers():
        replies = [ResponseStream(asyncio.get_running_loop(), 1) for _ in ASKED]
        for reply, exits in zip(replies, ASKED, strict=True):
            llm.engine.submit([as_request(t) for t in token_lists], Readout("every", exits=exits), reply)
        return [await reply.answer() for reply in replies]

    for found, exits in zip(asyncio.run(answers()), ASKED, strict=True):
        for result, tokens in zip(found, token_lists, strict=True):
            expected = np.stack([read(dense, tokens, exits, row) for row in range(len(tokens))])
            np.testing.assert_allclose(result.values, expected, rtol=1e-4, atol=1e-4)
