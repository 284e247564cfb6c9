"""Bodies that are being received have bounds together, and answers that are being sent hold the server open."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from serving import Raw, serving, until

from prefold.errors import JobError
from prefold.serve.http import Bodies, Refusal
from prefold.serve.keys import Tenant
from prefold.spec.server import ServerSpec

LONG = {"prompt": "the yes", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


class Sending:
    """A request whose body comes in parts, and does not end until it is told to."""

    def __init__(self, *sizes):
        self.headers, self.sizes, self.end = {}, sizes, asyncio.Event()

    async def stream(self):
        for size in self.sizes:
            yield b"x" * size
        await self.end.wait()


@pytest.mark.parametrize("keys", [None, "keys.toml"])
def test_what_is_being_received_is_bounded(keys):
    one, other = Tenant("one"), Tenant("other")

    async def run():
        bodies = Bodies(ServerSpec(max_receiving_bytes=100, api_keys=keys))
        first = Sending(10, 30)
        reading = asyncio.create_task(bodies.read(first, one))
        await asyncio.sleep(0)
        assert bodies.num_bytes == 40
        with pytest.raises(Refusal, match="being received") as refused:
            await bodies.read(Sending(5, 5, 5 if keys else 90), one)
        assert refused.value.status == 429 and bodies.num_bytes == 40
        wanted = Sending(50)
        wanted.end.set()
        assert len(await bodies.read(wanted, other)) == 50
        first.end.set()
        assert len(await reading) == 40 and not bodies.num_bytes and not bodies._sizes

    asyncio.run(run())


def test_a_body_that_is_allowed_can_be_received():
    ServerSpec(max_body_bytes=1 << 30).check()
    for keys, least in ((None, 101), ("keys.toml", 202)):
        options = {"max_body_bytes": 101, "api_keys": keys}
        with pytest.raises(JobError, match=f"--max-body-bytes .* give --max-receiving-bytes {least} or more"):
            ServerSpec(**options, max_receiving_bytes=least - 1).check()
        ServerSpec(**options, max_receiving_bytes=least).check()


def test_an_answer_that_is_being_sent_holds_the_server_open(llm, tmp_path):
    with serving(llm, data_dir=str(tmp_path)) as server:
        content = b"x" * (32 << 20)
        made = httpx.post(f"{server.url}/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)}).json()
        raw = Raw(server).send(f"/v1/files/{made['id']}/content", b"", method="GET")
        raw.read_until(b"\r\n\r\nx")
        assert server.state.busy == 1
        raw.close()
        until(lambda: not server.state.busy)


def test_a_client_that_leaves_in_the_middle_of_a_stream_is_counted(server):
    def count():
        text = httpx.get(f"{server.url}/metrics").text
        return float(
            next(line for line in text.splitlines() if line.startswith("prefold:requests_cancelled_total"))[-4:]
        )

    before = count()
    raw = Raw(server).send("/v1/completions", LONG)
    raw.read_until(b"data: ")
    raw.close()
    until(lambda: count() == before + 1)
