"""Times questions about images: what is reused, and what the tower costs.

    python benchmarks/images.py --case llava --data FOLDER [--rounds 3] [--questions 37] [--tokens 32] [--json FILE]
    python benchmarks/images.py --case llava --merge FILE,FILE,...
    python benchmarks/images.py --case nothing-shared --data FOLDER
    python benchmarks/images.py --case job [--tasks generate,score]
    python benchmarks/images.py --case http [--guesses 400]
    python benchmarks/images.py --case shifted --data FOLDER [--set mmlu] [--dtype bfloat16]
    python benchmarks/images.py --case tower --tower gemma3-4b --dtype bfloat16 [--layers 2] [--step-ms 100]

FOLDER has LLaVA-Bench (In-the-Wild) as dev.jsonl.gz, and the images where they may be had (`--pictures`); seeded
drawings of the listed sizes stand in for those that are missing, and the table says so.

The model has SmolLM2-135M's own text weights and, beside them, a tower of SmolVLM-256M's shape with random weights: the
time is that of a trained one, the answers have nothing to do with the pictures. Questions are asked one at a time. Each
is put to all variants before the next, and their steps are made in turn, so that what else goes on in the machine meets
them alike; a variant's time is that of its own steps. Each variant has an engine of its own, with nothing left from the
round before:

    no reuse    nothing is kept: neither K/V nor what the tower made
    one slot    K/V of the last request alone, as a server with one slot and a prompt cache has it
    exact       the radix cache, and what the tower made
    specimen    one slot again, that matches as a port of RadixAttention did: with the images filtered out (`port.py`)

Answers are compared token for token with those of "no reuse".

    llava           the questions in file order, and shuffled (`llava.py`)
    company         all questions at once, with nothing shared and with the exact cache: are the answers the same?
    vllm            the questions one at a time, to vLLM's CPU build (--peer) and to the exact cache
    nothing-shared  every question with an image of its own: what keys and bookkeeping cost where they save nothing
    job             records with eight example images in their shared prefix and one of their own: rows, tower runs,
                    time against sharing off, and a job that is killed and resumed
    http            64 requests about 16 images at once, by the clients of OpenAI and Anthropic; the time to the first
                    token of a second question; and what a stranger can tell of the images that others sent
    shifted         chunks of text reused at other positions; FOLDER has MMLU and tau-bench then (`shifted.py`)
    tower           a tower's layers beside transformers' and the limit of the machine (`tower.py`); and sequences that
                    generate while the tower runs: their rate, and the longest gap between two tokens
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from common import machine, median, table, write_json
from image_bench import VARIANTS, Asker, Bench, ask_all, bench_config, longest_of, questions
from image_cases import http, job
from image_data import SHAPES, drawing
from llava import llava, vllm
from shifted import add_arguments
from shifted import measure as shifted
from tower import compare

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.images.decode import Image
from prefold.images.worker import image_part
from prefold.types import Request, Sampling
from prefold.worker.local import LocalWorker


def company(options: argparse.Namespace) -> list[dict]:
    """The questions all at once, shared with nothing; with the exact cache; and once more, shuffled, out of what that
    has kept."""
    bench, rows = Bench(options), questions(options)
    longest = longest_of(bench, rows, [bench.picture(row) for row in rows])
    worker = LocalWorker(bench.model, parts=[image_part(bench.tower)])
    kept = GenerateOptions(kv_memory=(longest * len(rows) + 2) * worker.facts.slot_bytes)
    eos = bench.eos
    plain = ModelEngine(worker, EngineOptions(generation=kept, eos_ids=eos, sharing="off", images={"media_memory": 0}))
    exact = bench.engine("exact", longest, len(rows))
    shuffled = random.Random(0).sample(rows, len(rows))
    answers, lines = [], []
    for name, engine, asked in (("nothing shared", plain, rows), ("exact", exact, rows), ("again", exact, shuffled)):
        told: dict[str, list] = {row["id"]: [] for row in asked}
        before = engine.stats.tower_runs, engine.stats.rows_computed
        started = time.perf_counter()
        for row in asked:
            engine.generator.add(bench.request(engine, row, bench.picture(row)), None, told[row["id"]].append)
        while not all(told.values()):
            engine.generator.step()
        seconds = time.perf_counter() - started
        answers.append({name: one[0][0].tokens for name, one in told.items()})
        similar, rouge = bench.similarity(answers[-1], rows)
        changed = sum(answers[-1][row["id"]] != answers[0][row["id"]] for row in rows)
        towers, computed = engine.stats.tower_runs - before[0], engine.stats.rows_computed - before[1]
        tokens = sum(map(len, answers[-1].values()))
        lines.append(
            [name, f"{similar:.6f}", f"{rouge:.6f}", changed, tokens, towers, f"{computed:,}", f"{seconds:.1f}"]
        )
    headers = ["", "similarity", "ROUGE-L", "answers changed", "tokens", "tower runs", "rows", "s"]
    print(table(headers, lines))
    return answers


def nothing_shared(options: argparse.Namespace) -> list[dict]:
    """Every question with an image of its own, with the cache and without."""
    bench = Bench(options)
    rows = [{**row, "before": f"{number}, "} for number, row in enumerate(questions(options))]
    images = [Image(drawing(f"{row['id']}", row["height"] // 4, row["width"] // 4)) for row in rows]
    longest = longest_of(bench, rows, images)
    plain: list[float] = []
    cached: list[float] = []
    overheads = []
    for number in range(options.rounds):
        without, exact = (Asker(bench, name, longest, len(rows)) for name in ("no reuse", "exact"))
        for turn, (row, image) in enumerate(zip(rows, images, strict=True)):
            ask_all([without, exact] if (turn + number) % 2 else [exact, without], row, image)
        a, b = without.end(), exact.end()
        assert a.answers == b.answers and a.rows == b.rows, "nothing is shared, and nothing changes"
        plain += a.latency
        cached += b.latency
        overheads.append(b.overhead / b.seconds)
        print(
            f"  round {number + 1}: {b.seconds / a.seconds:.4f}, keys and bookkeeping {overheads[-1]:.2%}", flush=True
        )
    differences = np.array(cached) - np.array(plain)
    mean = float(np.mean(plain))
    half = 1.96 * float(differences.std(ddof=1)) / math.sqrt(len(differences)) / mean
    medians = 1 + float(np.median(differences / np.array(plain)))
    headers = ["pairs", "mean ms without", "mean, with to without", "median of pairs", "keys, planning and bookkeeping"]
    print(table(headers, [[
        len(plain), f"{1e3 * mean:,.0f}", f"{1 + differences.mean() / mean:.4f} ± {half:.4f}", f"{medians:.4f}",
        f"{median(overheads):.2%}",
    ]]))  # fmt: skip
    return [{"without": plain, "with": cached, "overheads": overheads}]


def tower(options: argparse.Namespace) -> list[dict]:
    """The tower beside the machine's limit and transformers. Then eight sequences generate, and an image is asked
    about: their rate while the tower runs, to the mean of that before and that afterwards, when contexts are longer."""
    config = replace(bench_config(options), layers=options.layers)
    compared = compare(config, getattr(torch, options.dtype), rounds=options.rounds)
    print()
    bench = Bench(options)
    engine = bench.engine("exact", 3000, 9)
    generator, tokenizer = engine.generator, bench.tokenizer
    text = Sampling(max_tokens=2000, ignore_eos=True)
    keys = [
        generator.add(
            Request(tokenizer.encode(f"Story number {i}: once upon a time"), sampling=text), None, lambda answer: None
        )
        for i in range(8)
    ]

    def alone() -> float:
        """Seconds of a step, of 40 behind 20 others."""
        for _ in range(20):
            generator.step()
        started = time.perf_counter()
        for _ in range(40):
            generator.step()
        return (time.perf_counter() - started) / 40

    before = alone()
    row = {"id": "one", "question": "What is this?", "image": "one", "height": 1024, "width": 1024}
    told: list = []
    asked = generator.add(bench.request(engine, row, bench.picture(row)), None, told.append)
    gaps, runs = [], engine.stats.tower_runs
    while engine.stats.tower_runs == runs:
        started = time.perf_counter()
        generator.step()
        gaps.append(time.perf_counter() - started)
    generator.cancel(asked)
    spent, after = engine.stats.seconds["tower"], alone()
    generator.cancel(*keys)
    headers = [
        "step before, ms",
        "step afterwards, ms",
        "steps while the tower ran",
        "mean gap, ms",
        "longest gap, ms",
        "gaps over 2 x --step-ms",
        "rate kept",
        "tower, s",
    ]
    print(table(headers, [[
        f"{1e3 * before:.1f}", f"{1e3 * after:.1f}", len(gaps), f"{1e3 * np.mean(gaps):.1f}", f"{1e3 * max(gaps):.1f}",
        sum(gap > 2e-3 * options.step_ms for gap in gaps), f"{(before + after) / 2 / np.mean(gaps):.2f}",
        f"{spent:.2f}",
    ]]))  # fmt: skip
    return [{"alone": compared, "before": before, "after": after, "gaps": gaps, "tower": spent}]


CASES: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "llava": llava,
    "company": company,
    "vllm": vllm,
    "nothing-shared": nothing_shared,
    "tower": tower,
    "job": job,
    "http": http,
    "shifted": shifted,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="llava")
    parser.add_argument("--data", help="folder of LLaVA-Bench (In-the-Wild)")
    parser.add_argument("--pictures", help="folder of its images")
    parser.add_argument("--questions", type=int, default=37)
    parser.add_argument("--orders", default="file,shuffled")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-round", type=int, default=0, help="of llava: the number of the first of --rounds")
    parser.add_argument("--peer", help="of vllm: the virtual environment in which vLLM is")
    parser.add_argument("--clock", choices=("wall", "process"), default="wall", help="process: where others use a core")
    parser.add_argument("--merge", help="of llava: files of --json, comma-separated, whose rounds make one table")
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="answers have that many tokens")
    parser.add_argument("--tower", choices=SHAPES, default="smolvlm-256m", help="whose shape the tower has")
    parser.add_argument("--model", choices=("smollm2-135m", "gemma3-4b"), default="smollm2-135m",
                        help="the text model; gemma3-4b has random weights, and its own tower")  # fmt: skip
    parser.add_argument("--edge", type=int, help="pixels of an image's longest edge; above a tile's it is cut")
    parser.add_argument("--layers", type=int, default=2, help="of the tower, where it is timed alone")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of others: twice that is the longest gap wanted")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    parser.add_argument("--tasks", help="of the job, comma-separated; all by default")
    add_arguments(parser)
    parser.add_argument("--guesses", type=int, default=400, help="of a stranger")
    parser.add_argument("--smoke", action="store_true", help="a few questions and tokens, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.questions, options.tokens, options.rounds = 4, 4, 1
    print(machine())
    write_json(options.json, case=options.case, found=CASES[options.case](options))


if __name__ == "__main__":
    main()
