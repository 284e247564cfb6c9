"""Random records, most of them nearly right: batch lines, and lines of JSONL and CSV tables."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, 1e308, 10**18, 10**40, 2**63, -(2**63), "", "yes", "no", "a" * 50, "\ud800",
    "é\u2028\x00\x1b", "日本", [], {}, [[]], [1, 2, 3], ["yes"], ["yes", None], {"a": 1}, {"text": "yes"},
    {"type": "text", "text": "no"}, float("nan"), float("inf"), -float("inf"), [1.5], [True, 5], "[1,2]", "NaN", "1",
    "x" * 3000, {"\udfff": "\ud800"},
]  # fmt: skip
WORDS = ["yes", "no", "a b", "naïve", "日本語", "one, two", 'he said "hi"', "line\nline", " ", "0"]
NAMES = ["text", "role", "content", "type", "a", "name", "function", "id", "query", "documents"]

CHAT = "/v1/chat/completions"
URLS = ["/v1/embeddings", "/v1/score", "/rerank", "/v1/rerank", CHAT, CHAT, "/v1/completions"]
TEMPLATES = [
    "{{ messages[0]['content'] }}", "{{ x", "{% for i in range(5) %}{{ i }}{% endfor %}", "{{ raise_exception('no') }}",
    "yes", "{{ 1/0 }}", "{{ messages.__class__ }}", "{% break %}", "{{ '\\ud800' }}", "{{ 'x'|truncate(-1) }}",
    "{{ 1e400|int }}", "{{ 'a' * 10**13 }}", "{{ cycler.__init__.__globals__ }}",
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
# What a parameter may hold: right values and wrong ones.
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2, "1", -1, 1e30], "top_p": [1, 0.9, 1.1, "x"], "top_k": [-1, 5, 10**20, 1.5, 2.0],
    "n": [1, 2, 0, "2", 2.5, True, 200_000_000], "seed": [1, -1, 2**64, "a"], "presence_penalty": [0, 3],
    "logit_bias": [{}, {"5": 100}, {"6": "x"}, {"99999": 1}, [], [[1, 2]], "x"], "min_tokens": [0, 5, -1],
    "max_tokens": [1, 2, 0, 10**9, "3"], "stop": ["a", ["a", "b"], "", ["\ud800"], 5], "stop_token_ids": [[1], [-1], 5],
    "logprobs": [True, False, 0, 3, 10**9, "x"], "top_logprobs": [0, 2, 10**6],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "x"}, "x", {"type": "json_schema"},
                        {"type": "json_schema", "json_schema": {"schema": SCHEMA}}],
    "guided_regex": ["[ab]+", "(", 5], "guided_choice": [["yes", "no"], []], "structured_outputs": [{"x": 1}],
    "stream": [False, True], "echo": [True], "model": ["m", "other", 5, [], {}], "tool_choice": ["auto", "required"],
    "tools": [[], 5, [{"type": "function", "function": {"name": "f"}}]], "documents": [["a"], [{"text": "a"}], 5],
    "chat_template": [*TEMPLATES, 5, []], "chat_template_kwargs": [{}, {"a": 1}, {"messages": []}, 5],
    "add_generation_prompt": [True, "x"], "continue_final_message": [True], "cache_salt": ["a", 5],
    "priority": [1, "x"],
    "dimensions": [1, 7, 9, 0, "x", True], "encoding_format": ["float", "base64", "x", []], "top_n": [1, 0, "x"],
    "return_documents": [True, "x"], "instruction": ["do", 5], "unknown": [1], "\ud800": [1],
}  # fmt: skip


def odd(rng: random.Random, depth: int = 0) -> Any:
    """A value of any kind."""
    draw = rng.random()
    if draw < 0.75 or depth > 3:
        return rng.choice(ODD)
    if draw < 0.88:
        return [odd(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(NAMES): odd(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def deep(rng: random.Random) -> bytes:
    """JSON that nests up to far more than Python's recursion takes."""
    levels = rng.choice([10, 150, 250, 600, 980, 5000, 100_000])
    return rng.choice([b"[" * levels + b"]" * levels, b'{"a":' * levels + b"1" + b"}" * levels])


def _body(rng: random.Random, url: str) -> dict[str, Any]:
    word = lambda: rng.choice(WORDS)  # noqa: E731
    if url == CHAT:
        content = rng.choice([word(), [{"type": "text", "text": word()}], odd(rng)])
        messages = rng.choice([[{"role": "user", "content": content}], [{"role": "user"}], [], odd(rng)])
        body = {"messages": messages, "max_tokens": 1}
    elif url == "/v1/completions":
        body = {"prompt": rng.choice([word(), [word(), word()], [1, 2, 3], [[1, 2], [3]], [400], odd(rng)])}
    elif url == "/v1/embeddings":
        body = {"input": rng.choice([word(), [word(), word()], [1, 2, 3], [1.5], odd(rng)])}
    elif url == "/v1/score":
        body = {"text_1": rng.choice([word(), odd(rng)]), "text_2": rng.choice([word(), [word()] * 3, odd(rng)])}
    else:
        documents = rng.choice([[word(), {"text": word()}], [word()] * 5, odd(rng)])
        body = {"query": rng.choice([word(), odd(rng)]), "documents": documents}
    for name in rng.sample(list(PARAMETERS), rng.choice([0, 0, 0, 1, 2])):
        body[name] = rng.choice(PARAMETERS[name]) if rng.random() < 0.9 else odd(rng)
    if rng.random() < 0.03:
        body.pop(next(iter(body)))
    return body


def _broken(rng: random.Random, line: bytes) -> bytes:
    """The line with a few bytes changed."""
    out = bytearray(line)
    for _ in range(rng.randint(1, 4)):
        out[rng.randrange(len(out))] = rng.choice([0, 0xF5, 0xFF, 0x80, 34, 92, 123])
    return bytes(out)


def _encode(rng: random.Random, data: dict[str, Any]) -> bytes:
    line = json.dumps(data, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    line = line.replace(b'"@deep"', deep(rng)) if b"@deep" in line else line
    return _broken(rng, line) if rng.random() < 0.03 else line


def batch_lines(count: int, seed: int) -> Iterator[bytes]:
    """Lines of a batch file, each without its end."""
    rng = random.Random(seed)
    yield b'{"custom_id": "first", "url": "/v1/embeddings", "body": {"input": "yes"}}'
    for number in range(1, count):
        url = rng.choice(URLS)
        data = {"custom_id": f"r{number}", "method": "POST", "url": url, "body": _body(rng, url)}
        draw = rng.random()
        if draw < 0.02:
            noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 200)))
            yield b"x" + noise.replace(b"\n", b" ")
            continue
        if draw < 0.05:
            data[rng.choice(list(data))] = odd(rng)
        elif draw < 0.07:
            data.pop(rng.choice(list(data)))
        elif draw < 0.09:
            data["body"][rng.choice(list(PARAMETERS))] = "@deep"
        yield _encode(rng, data)


def table_lines(count: int, seed: int) -> Iterator[bytes]:
    """Lines of a JSONL table with the columns text, id, k, query, documents and messages, each without its end."""
    rng = random.Random(seed)
    for number in range(count):
        data: dict[str, Any] = {"text": rng.choice(WORDS), "id": number, "k": rng.choice(WORDS), "query": "q"}
        data["documents"] = [rng.choice(WORDS) for _ in range(rng.randint(1, 3))]
        data["messages"] = [{"role": "user", "content": rng.choice(WORDS)}]
        for name in rng.sample(list(data), rng.choice([0, 0, 1, 2])):
            data[name] = odd(rng) if rng.random() < 0.9 else "@deep"
        if rng.random() < 0.03:
            data.pop(rng.choice(list(data)))
        yield _encode(rng, data) if rng.random() < 0.98 else deep(rng)


def csv_lines(count: int, seed: int) -> Iterator[bytes]:
    """Lines of a CSV table with the columns text, id, k, query, documents and messages, header first."""
    rng = random.Random(seed)
    yield b"text,id,k,query,documents,messages"
    for number in range(count):
        cells = [rng.choice(WORDS), f"r{number}", rng.choice(WORDS), "q", "yes", '[{"role": "user", "content": "a"}]']
        if rng.random() < 0.3:
            cells[rng.randrange(6)] = str(odd(rng))
        quoted = ['"' + c.replace('"', '""') + '"' if set(c) & set(',"\n\r') else c for c in cells]
        line = ",".join(quoted[: rng.choice([6] * 20 + [5, 7])]).encode("utf-8", "surrogatepass")
        if rng.random() < 0.05:
            place = rng.randrange(len(line) + 1)
            line = line[:place] + rng.choice([b'"', b",", b"\r", b"\n", b"\xff", b"\x00"]) + line[place:]
        yield line
