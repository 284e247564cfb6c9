"""A small real HTTP server that answers as OpenAI's API does, and has the faults that a test asks for."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """A text is continued by its length and its seed; a vector is the number of its characters, and of its "e"s.

    fault(path, body, number): called with every request; returns None, a (status, headers, body), or "torn"
    metrics(): what it counts, as text; None: it does not tell
    """

    daemon_threads = True

    def __init__(self, *, ids=True, key=None, fault=None, models=("m",), decode=None, tei=False, seconds=0.0,
                 metrics=None, context=None, refusal=None):  # fmt: skip
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ids, self.key, self.fault, self.models, self.tei = ids, key, fault, models, tei
        self.decode = decode or (lambda ids: bytes(ids).decode())
        self.seconds, self.metrics, self.context = seconds, metrics, context
        self.refusal = refusal  # (status, body) of each GET
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.times: list[float] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Says nothing: in tests clients go away. To print a traceback would disturb pytest's parser (Python 3.11)."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        if body.get("model", "m") not in self.models:
            return 404, {}, {"error": {"message": f"no model {body['model']}"}}
        if path == "/embed":
            return 200, {}, [_vector(text) for text in body["inputs"]]
        if path == "/v1/embeddings" and not self.tei:
            return self._embeddings(body)
        if path == "/v1/chat/completions":
            return 200, {}, _choices(body, "/".join(message["content"] for message in body["messages"]), chat=True)
        if path == "/v1/completions":
            prompt = body["prompt"]
            if "prompt_logprobs" in body:
                return self._logprobs(prompt)
            if isinstance(prompt, list):
                if not self.ids:
                    return 422, {}, {"error": "prompt: expected a string"}
                prompt = self.decode(prompt)
            if "refused" in prompt:
                return 400, {}, {"error": {"message": "this prompt is not allowed"}}
            return 200, {}, _choices(body, prompt)
        return 404, {}, {"error": "no such path"}

    def _logprobs(self, ids):
        """As vLLM gives them: of each token of the prompt, but the first, and of the likeliest one."""
        entries = [None]
        for number in range(1, len(ids)):
            value = logprob_of(ids[:number], ids[number])
            entries.append({str(ids[number]): {"logprob": value, "rank": 1 if value > -1 else 2}})
            entries[-1].setdefault("7", {"logprob": -0.01, "rank": 1})
        return 200, {}, {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}], "usage": {}}

    def _embeddings(self, body):
        texts = body["input"]
        if isinstance(texts[0], list):
            if not self.ids:
                return 422, {}, {"error": "input: expected strings"}
            texts = [self.decode(ids) for ids in texts]
        if any("refused" in text for text in texts):
            return 413, {}, {"error": "an input is too long"}
        data = [{"index": i, "embedding": _vector(text)} for i, text in enumerate(texts)]
        return 200, {}, {"data": data[::-1]}


def logprob_of(before, token):
    """What the server says of a token behind others."""
    return -((sum(before) * 31 + token * 17) % 40) / 8


def _vector(text):
    return [float(len(text)), float(text.count("e"))]


def _choices(body, prompt, chat=False):
    text = f"{len(prompt)} of {prompt[:30]}/{body.get('seed', 0)}"
    message = {"message": {"content": text}} if chat else {"text": text}
    choices = [{"index": i, "finish_reason": "length", **message} for i in range(body.get("n", 1))]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 3 * len(choices)}
    return {"choices": choices[::-1], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body of an answer waits until the client has acknowledged its head
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.server.refusal is not None:
            status, body = self.server.refusal
            self._send(status, {}, body)
        elif self.path == "/v1/models" and self._may():
            context = {} if self.server.context is None else {"max_model_len": self.server.context}
            self._send(200, {}, {"data": [{"id": name} | context for name in self.server.models]})
        elif self.path == "/metrics":
            found = self.server.metrics
            self._write(404, {}, b"") if found is None else self._write(200, {}, found().encode())

    def _may(self):
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._send(401, {}, {"error": {"message": "no"}})
        return False

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        with server.lock:
            number = len(server.requests)
            server.requests.append((self.path, body))
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(server.seconds)
        fault = server.fault(self.path, body, number) if server.fault is not None else None
        with server.lock:
            server.now -= 1
        if fault == "torn":
            self.close_connection = True
            self.connection.close()
            return
        self._send(*(fault or server.answer(self.path, body)))

    def _send(self, status, headers, body):
        self._write(status, headers, json.dumps(body).encode())

    def _write(self, status, headers, data):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(kind=Server, **options):
    server = kind(**options)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
