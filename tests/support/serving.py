"""Servers of the tests: real ones, on sockets, each in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn.server

from prefold.serve.run import Server, bind
from prefold.serve.state import AppState
from prefold.spec.server import ServerSpec

# uvicorn looks each 0.1 s whether a server should end, and sleeps 0.1 s before it ends: here it is a tenth of that.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 10)})


@contextmanager
def serving(llm: Any, **options: Any) -> Iterator[Server]:
    """A server of an LLM, which is ready; it ends with the context, and the LLM stays.

    llm  or None, for a server whose model is still being loaded
    """
    made = ServerSpec(port=0, **options)
    server = Server(AppState(made), bind(made))
    thread = threading.Thread(target=server.run_bound, daemon=True)
    thread.start()
    until(lambda: server.started)
    if llm is not None:
        server.state.ready(llm)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not end"


def dress(folder: Path) -> None:
    """Gives a tiny checkpoint a prompt, a special token at the end of each text, and a template with a variable."""
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "yes: "}}')
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
                 {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{{ tone }}{% for tool in tools or [] %}{{ tool }}{% endfor %}" + settings["chat_template"]
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def until(done: Any, seconds: float = 300) -> None:
    """Waits until something is so. seconds: a guard, longer than a busy machine needs."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not become so in time"
        time.sleep(0.005)


class Raw:
    """One connection, on which bytes are sent as they are."""

    def __init__(self, server: Server):
        host, port = server.bound_at
        self.socket = socket.create_connection((host, port), timeout=60)

    def send(self, path: str, body: Any, *, method: str = "POST", headers: str = "", whole: bool = True) -> Raw:
        """Sends a request. whole: all of its body, else the half."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
        self.socket.sendall(head.encode() + (data if whole else data[: len(data) // 2]))
        return self

    def read_until(self, mark: bytes) -> bytes:
        """Returns what came, once the mark was among it."""
        got = b""
        while mark not in got:
            part = self.socket.recv(65536)
            assert part, f"the connection ended after {got[-500:]!r}"
            got += part
        return got

    def read_all(self) -> bytes:
        """Returns what comes until the server closes the connection."""
        got = b""
        while part := self.socket.recv(65536):
            got += part
        return got

    def close(self) -> None:
        self.socket.close()


KEYS = """
[[key]]
key = "one"
tenant = "first"
admin = true

[[key]]
sha256 = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"
tenant = "second"
"""
