"""Batches of numbers of a looped model whose rows leave, beside live requests."""

from __future__ import annotations

import pytest
from batching import batch_of, client_of, ended, lines_of
from looped_dense import LOOPED, looped_checkpoint
from serving import serving

from prefold import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = looped_checkpoint(tmp_path_factory.mktemp("looped"), "looped", loop=LOOPED["loop"] | {"gate": True})
    return LLM(str(folder), dtype="float32", device="cpu", looped={"exits": "save"}, kv_memory=1 << 18)


def test_numbers_of_a_batch_are_bounded_as_its_texts_are(llm, tmp_path, start_by):
    """They run for the batch, so that the policy of admission knows of them; one that is too long has its own error."""
    scheduler, running = llm.engine.generator.scheduler, []

    def watched(start, *given):
        running.append((scheduler.waiting.num_running(batch=True), scheduler.waiting.num_running(batch=False)))
        return start(*given)

    start_by(llm.engine.worker, watched)
    lengths = {str(i): 1 + i for i in range(20)} | {"long": 250}
    assert lengths["long"] * 2 > scheduler.pool.num_slots > 20 * 2
    where = {"url": "/v1/embeddings", "method": "POST"}
    lines = [where | {"custom_id": i, "body": {"model": "tiny", "input": [5, 6] * size}} for i, size in lengths.items()]
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path / "data")) as server:
        client = client_of(server)
        batch = ended(client, batch_of(client, lines, "/v1/embeddings"))
        found, wrong = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
        live = client.embeddings.create(model="tiny", input=[5, 6]).data[0].embedding
    assert sorted(found) == sorted(str(i) for i in range(20)) and list(wrong) == ["long"]
    assert "the K/V of 500 rows" in str(wrong["long"])
    assert max(batch for batch, _ in running) > 0 == running[0][1]
    assert running[-1][1] > 0  # the live one
    assert found["0"]["response"]["body"]["data"][0]["embedding"] == pytest.approx(live, abs=1e-4)
