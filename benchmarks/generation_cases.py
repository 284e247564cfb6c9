"""Makes the prompts of generate.py, {name: Case}, of the token ids of local data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from classify import spread_over
from common import read_jsonl

Prompts = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """about: one line for the table; max_tokens: of every output."""

    about: str
    prompts: Prompts
    max_tokens: int


class Pool:
    """Running text as token ids (GSM8K's questions and answers), handed out piece by piece, none twice."""

    def __init__(self, data: Path, tokenizer):
        lines = read_jsonl(data / "gsm8k" / "dev.jsonl.gz")
        texts = [f"{line['question']}\n{line['answer']}\n\n" for line in lines]
        self._ids = np.concatenate(tokenizer.encode_batch(texts, special=False))
        self._at = 0

    def take(self, count: int) -> np.ndarray:
        if self._at + count > len(self._ids):
            raise RuntimeError("the text is used up")
        self._at += count
        return self._ids[self._at - count : self._at]


def groups(data: Path, llm) -> Case:
    pool = Pool(data, llm.tokenizer)
    prompts = [
        np.concatenate((shared, pool.take(64))) for shared in [pool.take(256) for _ in range(8)] for _ in range(8)
    ]
    return Case("64 requests, 8 groups, 256 shared + 64 own, 32 out", prompts, 32)


def mmlu(data: Path, llm) -> Case:
    prefixes = {line["prefix_id"]: line["prefix"] for line in read_jsonl(data / "mmlu_5shot" / "prefixes.jsonl.gz")}
    items = spread_over(read_jsonl(data / "mmlu_5shot" / "dev.jsonl.gz"), 240)
    prompts = llm.tokenizer.encode_batch([prefixes[item["prefix_id"]] + item["suffix"] for item in items])
    return Case("MMLU 5-shot, 240 questions, 8 out", prompts, 8)


def unrelated(data: Path, llm) -> Case:
    pool = Pool(data, llm.tokenizer)
    return Case("64 unrelated prompts, 128 in, 128 out", [pool.take(128) for _ in range(64)], 128)


def airline(data: Path, llm, runs: int = 6, max_tokens: int = 48) -> Case:
    """Every step of an agent in some runs, each of another task: policy and tools, then the talk so far.

    A prompt that is too long for the model loses its end, so that what it shares with the others stays.
    """
    (shared,) = read_jsonl(data / "tau_airline" / "shared.jsonl.gz")
    by_task = {line["task_id"]: line for line in reversed(read_jsonl(data / "tau_airline" / "dev.jsonl.gz"))}
    tools = "\n".join(json.dumps(tool) for tool in shared["tools"])
    system = {"role": "system", "content": f"{shared['system']}\n\n# Tools\n\n{tools}"}
    texts = []
    for run in spread_over([by_task[number] for number in sorted(by_task)], runs):
        for number, message in enumerate(run["messages"]):
            if message["role"] == "assistant":
                talk = [system, *map(plain_message, run["messages"][:number])]
                texts.append(llm.tokenizer.render_chat(talk, add_generation_prompt=True))
    room = llm.config.max_positions - max_tokens
    prompts = [ids[:room] for ids in llm.tokenizer.encode_batch(texts, special=False)]
    return Case(f"tau-bench airline, {len(prompts)} steps of {runs} runs, {max_tokens} out", prompts, max_tokens)


def plain_message(message: dict) -> dict:
    """A message as a chat template without tools takes it: calls are written out as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = "\n".join([message.get("content") or "", *map(json.dumps, calls)]).strip()
    return {"role": message["role"], "content": content}


def short(data: Path, llm) -> Case:
    """Many groups of what is called a system prompt: too short for a block of any size that is in use."""
    pool, rng = Pool(data, llm.tokenizer), np.random.default_rng(0)
    prompts = [
        np.concatenate((shared, pool.take(int(rng.integers(32, 49)))))
        for shared in [pool.take(int(rng.integers(20, 61))) for _ in range(32)]
        for _ in range(8)
    ]
    return Case("256 requests, 32 groups, 20-60 shared + about 40 own, 32 out", prompts, 32)


CASES: dict[str, Callable[[Path, object], Case]] = {
    "groups": groups,
    "mmlu": mmlu,
    "unrelated": unrelated,
    "airline": airline,
    "short": short,
}


def questions(data: Path, llm) -> Prompts:
    """60 questions that have nothing to do with each other."""
    texts = [line["question"] for line in read_jsonl(data / "llava_bench_wild" / "dev.jsonl.gz")]
    texts += [line["text"] for line in read_jsonl(data / "trec_qc" / "dev.jsonl.gz")]
    return llm.tokenizer.encode_batch(texts[:60])
