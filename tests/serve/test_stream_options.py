"""What a streamed request says of its stream."""

from __future__ import annotations

import pytest
from openai import BadRequestError, OpenAI


@pytest.fixture(scope="module")
def client(server):
    host, port = server.bound_at
    return OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)


def test_usage_in_every_chunk(client):
    asked = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(
        model="tiny", prompt=["a cat", "b"], n=2, max_tokens=4, stream=True, stream_options=asked,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens == 16 and counts[0] < 16
    assert {chunk.usage.prompt_tokens for chunk in [*chunks, last]} == {last.usage.prompt_tokens}
    assert all(one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens for one in chunks)


def test_continuous_usage_needs_usage(client):
    """As in vLLM."""
    asked = {"include_usage": False, "continuous_usage_stats": True}
    chunks = client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True, stream_options=asked)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("wrong", [{"include_usgae": True}, {"include_usage": "yes"}])
def test_unknown_options(client, wrong):
    with pytest.raises(BadRequestError, match=next(iter(wrong))):
        client.completions.create(model="tiny", prompt="a", stream=True, stream_options=wrong)
