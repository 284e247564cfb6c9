"""Times chunks of text that are reused at other positions, and measures what that does to answers.

    python benchmarks/images.py --case shifted --set mmlu --data FOLDER --dtype bfloat16 [--each 6]
    python benchmarks/images.py --case shifted --set tau --data FOLDER --dtype bfloat16 [--questions 40]

FOLDER has `mmlu_5shot` and `tau_airline` in it. Of MMLU a subject's five examples are computed once, as they stand;
then questions are asked behind the same examples, each time in another order. Of tau-bench's airline one system prompt
is computed with its functions as they stand; then conversations go on behind it, each time with the functions in
another order. Every prompt is put to all variants in turn, each with an engine and a cache of its own:

    exact    the radix cache alone
    k        chunks reused at other positions, with the first k rows of each computed anew; "whole": all of them

The time is that to the first token. Log-probabilities are those of the 20 likeliest first tokens of "exact". Accuracy
is that of the likeliest of the letters A to D, or whether the likeliest token is the one that the recorded answer of
the assistant begins with; beside it stands the difference to "exact" over the same prompts, and its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import read_jsonl, table

from prefold import LLM
from prefold.cache import CacheOptions
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.shifted.options import ShiftedReuse
from prefold.shifted.verify import TOP
from prefold.types import Generated, Request, Sampling
from prefold.worker.local import LocalWorker

WHOLE = 1 << 20


@dataclass
class Question:
    """A prompt, the tokens that may be right first, and which is; `warm`: a prompt that is only computed."""

    tokens: np.ndarray
    choices: list[int] = field(default_factory=list)
    right: int = -1
    warm: bool = False


def mmlu(options: argparse.Namespace, llm: LLM) -> Iterator[list[Question]]:
    """Yields the questions of each subject."""
    folder = Path(options.data) / "mmlu_5shot"
    prefixes = {row["prefix_id"]: row["prefix"] for row in read_jsonl(folder / "prefixes.jsonl.gz")}
    rows = read_jsonl(folder / "dev.jsonl.gz")
    letters = [int(llm.tokenizer.encode(f" {letter}")[0]) for letter in "ABCD"]
    draw = random.Random(0)
    for subject, prefix in sorted(prefixes.items())[options.first : options.first + options.subjects]:
        head, _, rest = prefix.partition("\n\n")
        head, examples = head + "\n\n", re.split(r"(?<=\nAnswer: [A-D]\n\n)(?=.)", rest)
        assert head + "".join(examples) == prefix
        asked = [row for row in rows if row["prefix_id"] == subject][: options.each]
        found = [Question(llm.tokenizer.encode(prefix + "Question"), warm=True)]
        for row in asked:
            order = list(examples)
            while order == examples and len(examples) > 1:
                draw.shuffle(order)
            tokens = llm.tokenizer.encode(head + "".join(order) + row["suffix"])
            found.append(Question(tokens, letters, letters["ABCD".index(row["answer"])]))
        if asked:
            yield found


def tau(options: argparse.Namespace, llm: LLM) -> Iterator[list[Question]]:
    """Yields conversations, behind one system prompt with its functions in different orders."""
    folder = Path(options.data) / "tau_airline"
    (shared,) = read_jsonl(folder / "shared.jsonl.gz")
    draw = random.Random(0)

    def prompt(tools: list, messages: list) -> np.ndarray:
        text = f"<|im_start|>system\n{shared['system']}\n\n# Tools\n\n"
        text += "".join(json.dumps(tool) + "\n" for tool in tools) + "<|im_end|>\n"
        for message in messages:
            said = message.get("content") or json.dumps(message.get("tool_calls"))
            text += f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"
        return llm.tokenizer.encode(text + "<|im_start|>assistant\n")

    found = [Question(prompt(shared["tools"], []), warm=True)]
    rows = read_jsonl(folder / "dev.jsonl.gz")
    draw.shuffle(rows)
    for row in rows[options.first :]:
        spoken = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant" and m.get("content")]
        at = spoken[min(1, len(spoken) - 1)]
        tools = draw.sample(shared["tools"], len(shared["tools"]))
        tokens = prompt(tools, row["messages"][:at])
        if len(tokens) < 8000 and len(found) <= options.questions:
            found.append(Question(tokens, [], int(llm.tokenizer.encode(row["messages"][at]["content"])[0])))
    yield found


class Variant:
    """An engine with a cache of its own, and what it answered."""

    def __init__(self, llm: LLM, options: argparse.Namespace, recompute: int | None):
        self.recompute = recompute
        shifted = None
        if recompute is not None:
            shifted = ShiftedReuse(min_tokens=options.min_tokens, recompute=recompute, min_share=0.0, trial=True)
        worker = LocalWorker(llm.model)
        generation = GenerateOptions(
            kv_memory=(options.slots + 1) * worker.facts.slot_bytes, cache=CacheOptions(shifted=shifted)
        )
        eos = llm.engine.facts.options.eos_ids
        self.engine = ModelEngine(worker, EngineOptions(generation=generation, eos_ids=eos))
        self.seconds: list[float] = []
        self.found: list[Generated] = []
        self.rows = 0

    def ask(self, question: Question) -> None:
        """Asks for the first token behind a prompt."""
        told: list = []
        before = self.engine.stats.rows_computed
        request = Request(question.tokens, sampling=Sampling(max_tokens=1, logprobs=TOP, ignore_eos=True))
        started = time.perf_counter()
        self.engine.generator.add(request, None, told.append)
        while not told:
            self.engine.generator.step()
        if not question.warm:
            self.seconds.append(time.perf_counter() - started)
            self.found.append(told[0][0])
            self.rows += self.engine.stats.rows_computed - before

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return "exact" if self.recompute is None else "whole" if self.recompute == WHOLE else f"{self.recompute}"


def tops(variant: Variant) -> list[dict[int, float]]:
    """Returns the likeliest first tokens of each prompt, with their log-probabilities."""
    return [dict(one.logprobs[0].top) for one in variant.found]


def right(variant: Variant, questions: list[Question]) -> np.ndarray:
    """Returns whether each answer is right."""
    out = []
    for top, question in zip(tops(variant), questions, strict=True):
        likely = max(question.choices or top, key=lambda token: top.get(token, -math.inf))
        out.append(likely == question.right)
    return np.array(out, float)


def lines_of(variants: list[Variant], questions: list[Question]) -> list[list[str]]:
    """Returns a line of the table for each variant."""
    exact = variants[0]
    base, rights = tops(exact), right(exact, questions)
    total = sum(len(question.tokens) for question in questions)
    lines = []
    for variant in variants:
        moved, firsts = [], []
        for a, b in zip(base, tops(variant), strict=True):
            least = min(b.values())
            moved.append(max(abs(value - b.get(token, least)) for token, value in a.items()))
            best = max(a, key=lambda token: a[token])
            firsts.append(abs(a[best] - b.get(best, least)))
        changed = sum(x.tokens != y.tokens for x, y in zip(exact.found, variant.found, strict=True))
        own = right(variant, questions)
        error = (own - rights).std(ddof=1) / math.sqrt(len(own))
        approximate = sum(one.approximate_tokens for one in variant.found)
        ratios = [a / b for a, b in zip(variant.seconds, exact.seconds, strict=True)]
        lines.append([
            variant.name, f"{1e3 * np.mean(variant.seconds):.0f}", f"{np.median(ratios):.3f}", f"{variant.rows:,}",
            f"{approximate / total:.0%}", f"{max(moved):.3g}", f"{np.median(moved):.3g}", f"{np.mean(firsts):.3g}",
            f"{changed} ({changed / len(own):.1%})", f"{own.mean():.3f}",
            f"{own.mean() - rights.mean():+.3f} ± {error:.3f}",
        ])  # fmt: skip
    return lines


def measure(options: argparse.Namespace) -> list[dict]:
    """Runs one set through all variants, prints the table, and returns what is in it."""
    llm = LLM("smollm2-135m", dtype=options.dtype, device="cpu", kv_memory=1 << 24)
    asked = [None, *(WHOLE if k == "whole" else int(k) for k in options.recompute.split(","))]
    variants = [Variant(llm, options, recompute) for recompute in asked]
    questions: list[Question] = []
    for group in {"mmlu": mmlu, "tau": tau}[options.set](options, llm):
        for question in group:
            turn = len(questions) % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                variant.ask(question)
            if not question.warm:
                questions.append(question)
    total = sum(len(question.tokens) for question in questions)
    print(f"{len(questions):,} prompts, {total:,} tokens; chunks of {options.min_tokens} tokens or more")
    headers = [
        "k", "mean ms", "of exact, median", "rows computed", "tokens copied", "largest change of a log-probability",
        "median of the largest", "mean change, likeliest", "first choices changed", "accuracy", "to exact",
    ]  # fmt: skip
    lines = lines_of(variants, questions)
    print(table(headers, lines))
    answers = {
        variant.name: [[one.tokens, one.logprobs[0].top, one.approximate_tokens] for one in variant.found]
        for variant in variants
    }
    asked = [[len(question.tokens), question.choices, question.right] for question in questions]
    return [*(dict(zip(headers, line, strict=True)) for line in lines), {"asked": asked, "answers": answers}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this benchmark."""
    parser.add_argument("--set", choices=("mmlu", "tau"), default="mmlu")
    parser.add_argument("--recompute", default="0,4,16,64,whole")
    parser.add_argument("--min-tokens", type=int, default=32)
    parser.add_argument("--first", type=int, default=0, help="subjects, or conversations, that are left out")
    parser.add_argument("--subjects", type=int, default=57)
    parser.add_argument("--each", type=int, default=6, help="questions of a subject")
    parser.add_argument("--slots", type=int, default=16000, help="rows of each variant's KV store")
