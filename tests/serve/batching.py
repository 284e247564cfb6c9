"""Asks for files and batches with the `openai` package."""

from __future__ import annotations

import json

import openai
from serving import until

LONG = {"max_tokens": 100}


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def completion(i, **body):
    body = {"model": "tiny", "prompt": f"yes no the {i}", "max_tokens": 6, "temperature": 0, "ignore_eos": True} | body
    return {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}


def upload(client, lines, **options):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch", **options)


def batch_of(client, lines, endpoint="/v1/completions", **options):
    options = {"completion_window": "24h"} | options
    return client.batches.create(input_file_id=upload(client, lines).id, endpoint=endpoint, **options)


def ended(client, batch):
    found = []

    def has_ended():
        found[:] = [client.batches.retrieve(batch.id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    until(has_ended)
    return found[0]


def lines_of(client, file):
    return (
        {} if file is None else {one["custom_id"]: one for one in map(json.loads, content(client, file).splitlines())}
    )


def content(client, file):
    return client.files.content(file).text
