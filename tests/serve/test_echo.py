"""Prompts that are given back with the log-probabilities of their tokens, beside what `score` says of them."""

from __future__ import annotations

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from prefold.cluster.http_bodies import logprob_bodies, logprobs_of
from prefold.spec.requests import Readout, Request

PROMPTS = ["The cat sat on the mat", "A"]


@pytest.fixture(scope="module")
def client(server):
    host, port = server.bound_at
    return OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)


def scored(llm, ids):
    """The log-probability of every token of a prompt but the first."""
    return llm.score([ids[:1]], [ids[1:]])[0].logprobs if len(ids) > 1 else np.zeros(0)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo(llm, client, as_ids, max_tokens):
    ids = [llm.tokenizer.encode(text).tolist() for text in PROMPTS]
    prompts = ids if as_ids else PROMPTS
    plain = client.completions.create(model="tiny", prompt=prompts, max_tokens=3, temperature=0, logprobs=2)
    found = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=max_tokens, temperature=0, logprobs=2, echo=True
    )
    assert found.usage.completion_tokens == max_tokens * len(prompts)
    for text, own, choice, made in zip(PROMPTS, ids, found.choices, plain.choices, strict=True):
        told = choice.logprobs
        assert choice.text.startswith(text) and made.text.startswith(choice.text[len(text) :])
        assert len(told.tokens) == len(own) + max_tokens
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        np.testing.assert_allclose(told.token_logprobs[1 : len(own)], scored(llm, own), atol=1e-5)
        continued = told.token_logprobs[len(own) :]
        np.testing.assert_allclose(continued, made.logprobs.token_logprobs[:max_tokens], atol=1e-5)
        assert told.tokens[len(own) :] == made.logprobs.tokens[:max_tokens]
        assert all(len(top) <= 3 and max(top.values()) >= own for top, own in
                   zip(told.top_logprobs[1:], told.token_logprobs[1:], strict=True))  # fmt: skip


def test_prompt_logprobs(llm, client):
    """Those of vLLM: the most likely token of a row is the one of rank 1, and a token that is there twice is once."""
    (ids,) = [llm.tokenizer.encode(PROMPTS[0]).tolist()]
    more = {"prompt_logprobs": 2}
    found = client.completions.create(model="tiny", prompt=ids, max_tokens=2, temperature=0, extra_body=more)
    first, *entries = found.choices[0].prompt_logprobs
    assert first is None and not found.choices[0].text.startswith(PROMPTS[0])
    logprobs = scored(llm, ids)
    greedy = 0
    for token, logprob, entry in zip(ids[1:], logprobs, entries, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(float(logprob), abs=1e-5)
        ranks = {one["rank"]: one["logprob"] for one in entry.values()}
        assert {1, 2} <= ranks.keys() and ranks[1] == max(ranks.values()) and len(entry) <= 3
        above = sum(one["logprob"] > entry[str(token)]["logprob"] for one in entry.values())
        assert entry[str(token)]["rank"] >= 1 + above
        greedy += entry[str(token)]["rank"] == 1
    assert llm.score([ids[:1]], [ids[1:]])[0].greedy is (greedy == len(entries))
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=1, extra_body=more
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_a_job_on_this_server_reads_what_it_asks_of_vllm(llm, client):
    ids = np.array(llm.tokenizer.encode(PROMPTS[0]).tolist(), np.int32)
    request, readout = Request(ids[:-1], ids[3:]), Readout("logprobs")
    said = [client.post(path.removeprefix("/v1"), body=body.sent, cast_to=object)
            for path, body in logprob_bodies(request, readout, "tiny")]  # fmt: skip
    found = logprobs_of(said, request, readout)
    np.testing.assert_allclose(found.values, scored(llm, ids.tolist())[2:], atol=1e-5)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "stream": True}, "echo"),
        ({"echo": True, "truncate_prompt_tokens": 4}, "echo"),
        ({"echo": True, "max_tokens": 0, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_what_cannot_be_honoured(client, more, field):
    with pytest.raises(BadRequestError) as caught:
        client.post("/completions", body={"model": "tiny", "prompt": "a b", **more}, cast_to=object)
    assert caught.value.body["param"] == field


def test_the_evaluation_harness(llm, server):
    """Its model of OpenAI's completions gives what `score` does, with texts that it makes ids of itself."""
    for name in ("lm_eval", "aiohttp", "tenacity", "requests"):
        pytest.importorskip(name)
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    host, port = server.bound_at
    remote = get_model("local-completions").create_from_arg_obj(
        {"model": "tiny", "base_url": f"http://{host}:{port}/v1/completions", "tokenizer": str(llm.folder),
         "tokenizer_backend": "huggingface"}, {"batch_size": 3}
    )  # fmt: skip
    pairs = [("a cat", " sat"), ("a cat", " on the mat"), ("the dog ran", " ran ran"), ("b", " b")]
    found = remote.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    wanted = llm.score(*map(list, zip(*pairs, strict=True)))
    assert [greedy for _, greedy in found] == [one.greedy for one in wanted]
    assert [logprob for logprob, _ in found] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
