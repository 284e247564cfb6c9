"""Times questions about images: what is reused, and what the tower costs.

    python benchmarks/images.py --case llava --data FOLDER [--rounds 3] [--questions 37] [--tokens 32] [--json FILE]
    python benchmarks/images.py --case nothing-shared --data FOLDER
    python benchmarks/images.py --case job [--tasks generate,score]
    python benchmarks/images.py --case http [--guesses 400]
    python benchmarks/images.py --case tower --tower gemma3-4b --dtype bfloat16 [--layers 2] [--step-ms 100]

FOLDER has LLaVA-Bench (In-the-Wild) as dev.jsonl.gz, and the images where they may be had (`--pictures`); seeded
drawings of the listed sizes stand in for those that are missing, and the table says so.

The model has SmolLM2-135M's own text weights and, beside them, a tower of SmolVLM-256M's shape with random weights: the
time is that of a trained one, the answers have nothing to do with the pictures. Questions are asked one at a time, and
each is put to all variants in turn before the next, so that what else goes on in the machine meets them alike. Each has
an engine of its own, with nothing left from the round before:

    no reuse    nothing is kept: neither K/V nor what the tower made
    one slot    K/V of the last request alone, as a server with one slot and a prompt cache has it
    exact       the radix cache, and what the tower made
    specimen    one slot again, that matches as a port of RadixAttention did: with the images filtered out (`port.py`)

Answers are compared token for token with those of "no reuse".

    llava           the questions in file order, and shuffled
    nothing-shared  every question with an image of its own: what keys and bookkeeping cost where they save nothing
    job             records with eight example images in their shared prefix and one of their own: rows, tower runs,
                    time against sharing off, and a job that is killed and resumed
    http            64 requests about 16 images at once, by the clients of OpenAI and Anthropic; the time to the first
                    token of a second question; and what a stranger can tell of the images that others sent
    tower           a tower's layers beside transformers' and the limit of the machine (`tower.py`); and sequences that
                    generate while the tower runs: their rate, and the longest gap between two tokens
"""

from __future__ import annotations

import argparse
import difflib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import machine, median, read_jsonl, spread, table, write_json
from image_cases import http, job
from image_data import SHAPES, drawing, random_tower, rouge_l
from port import Port
from tower import compare

from prefold import LLM
from prefold.cache import CacheOptions
from prefold.engine import Engine, EngineOptions, GenerateOptions
from prefold.media import Image, TowerConfig
from prefold.media.idefics3 import Idefics3Processor
from prefold.prefix import Trie
from prefold.types import Request, Sampling
from prefold.worker.local import LocalWorker

VARIANTS = ("no reuse", "one slot", "exact", "specimen")


def bench_config(options: argparse.Namespace) -> TowerConfig:
    """Returns a tower for SmolLM2-135M."""
    return TowerConfig(kind="idefics3", merge=4, output=576, **SHAPES[options.tower])


class Bench:
    """A model that sees images, and questions about them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        torch.manual_seed(0)
        self.llm = LLM("smollm2-135m", dtype=options.dtype, device="cpu")
        config = bench_config(options)
        self.tower = random_tower(config, self.llm.dtype)
        tile, edge = config.image_size, options.edge or config.image_size
        self.edge = edge
        settings = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": tile}}
        settings["do_image_splitting"] = edge > tile
        self.processor = Idefics3Processor(config, settings)
        self.images: dict[str, Image] = {}

    def picture(self, row: dict) -> Image:
        """The image of a question, or a drawing of its size."""
        name = row["image"]
        if name not in self.images:
            path = None if self.options.pictures is None else Path(self.options.pictures) / Path(name).name
            if path is not None and path.exists():
                from prefold.media import image_of

                self.images[name] = image_of(path)
            else:
                self.images[name] = Image(drawing(name, row["height"], row["width"]))
        return self.images[name]

    def request(self, engine: Engine, row: dict, image: Image) -> Request:
        """A chat's one question, with the image before it."""
        tokenizer, processor = self.llm.tokenizer, self.processor
        layout = processor.layout(image.height, image.width)
        medium = engine.media.medium(
            processor.key(image), tiles=layout.tiles, rows_per_tile=processor.rows_per_tile, span=processor.span,
            load=lambda: processor.tiles(image),
        )  # fmt: skip
        # SmolLM2 has no tokens for images: what stands between the rows is written with its own.
        ids = medium.ids.reshape(-1, processor.rows_per_tile)
        parts = [part for part in layout.text.split(processor.image_token) if part]
        assert len(parts) == len(ids) + 1
        tokens = [tokenizer.encode("<|im_start|>user\n" + row.get("before", ""))]
        for part, rows in zip(parts, ids, strict=False):
            tokens += [tokenizer.encode(part), rows]
        tokens.append(tokenizer.encode(parts[-1] + row["question"] + "<|im_end|>\n<|im_start|>assistant\n"))
        o = self.options
        sampling = Sampling(max_tokens=o.tokens, temperature=0.2, seed=1, ignore_eos=o.ignore_eos)
        return Request(np.concatenate(tokens).astype(np.int32), sampling=sampling, media=(medium,))

    def engine(self, variant: str, longest: int, requests: int) -> Engine:
        """longest: rows of the longest request, with its answer. requests: how many there are."""
        worker = LocalWorker(self.llm.model, tower=self.tower)
        slots = longest if variant in ("one slot", "specimen") else longest * requests
        generation = GenerateOptions(
            kv_memory=(slots + 2) * worker.facts.slot_bytes,
            cache=None if variant == "no reuse" else CacheOptions(),
        )
        kept = 256 << 20 if variant == "exact" else 0
        eos = self.llm.engine.options.eos_ids
        return Engine(worker, EngineOptions(generation=generation, eos_ids=eos, media_memory=kept))


@dataclass
class Run:
    """One variant's run over the questions."""

    latency: list[float]
    first: list[float]
    answers: dict[str, tuple[int, ...]]
    tower_runs: int
    rows: int
    unique: int
    seconds: float
    overhead: float


class Asker:
    """An Asker puts questions to an engine of its own, one at a time."""

    def __init__(self, bench: Bench, variant: str, longest: int, requests: int):
        """longest: rows of the longest request, with its answer. requests: how many there are."""
        self.bench, self.variant = bench, variant
        self.engine = bench.engine(variant, longest, requests)
        self.port = Port() if variant == "specimen" else None
        self.prompts: list[tuple[int, ...]] = []
        self.out = Run([], [], {}, 0, 0, 0, 0.0, 0.0)
        # The memory of the KV store is taken when it is first needed, and by no question.
        warm = Request(np.array([1, 2, 3], np.int32), sampling=Sampling(max_tokens=2, ignore_eos=True))
        self.engine.generator.add(warm, None, lambda answer: None)
        while self.engine.generator.step():
            pass
        self._rows_before = self.engine.stats.rows_computed

    def ask(self, row: dict, image: Image) -> None:
        """Asks a question, and notes how long the answer took."""
        generator, out = self.engine.generator, self.out
        started = time.perf_counter()
        request = self.bench.request(self.engine, row, image)
        out.overhead += time.perf_counter() - started
        if self.port is not None:
            request = self.port.request(request)
        told: list = []
        key = generator.add(request, None, told.append)
        first = None
        while not told:
            generator.step()
            if first is None and (told or generator.progress([key])[key]):
                first = time.perf_counter() - started
        out.latency.append(time.perf_counter() - started)
        out.first.append(first)
        out.answers[row["id"]] = told[0][0].tokens
        self.prompts.append((*request.tokens.tolist(), *told[0][0].tokens[:-1]))
        if self.variant == "no reuse":
            self.engine.images.clear()

    def end(self) -> Run:
        """Returns what there is to say of all questions."""
        out, stats = self.out, self.engine.stats
        out.seconds = sum(out.latency)
        out.tower_runs, out.rows = stats.tower_runs, stats.rows_computed - self._rows_before
        offsets = np.cumsum([0, *map(len, self.prompts)])
        out.unique = Trie.build(np.concatenate(self.prompts).astype(np.int32), offsets).num_rows
        cache = self.engine.generator.scheduler.cache
        out.overhead += stats.seconds.get("plan", 0.0) + (0.0 if cache is None else cache.seconds)
        return out


def longest_of(bench: Bench, rows: list[dict], images: list[Image]) -> int:
    """Returns the rows of the longest request with its answer."""
    probe = Engine(LocalWorker(bench.llm.model, tower=bench.tower))
    return max(len(bench.request(probe, *one).tokens) for one in zip(rows, images, strict=True)) + bench.options.tokens


def questions(options: argparse.Namespace) -> list[dict]:
    return read_jsonl(Path(options.data) / "dev.jsonl.gz")[: options.questions]


def llava(options: argparse.Namespace) -> list[dict]:
    """The seed's table: mean latency, first tokens and similarity of each variant, in file order and shuffled."""
    bench, rows = Bench(options), questions(options)
    found, lines = [], []
    for order in options.orders.split(","):
        asked = list(rows)
        if order == "shuffled":
            random.Random(0).shuffle(asked)
        images = [bench.picture(row) for row in asked]
        longest = longest_of(bench, asked, images)
        runs: dict[str, list[Run]] = {variant: [] for variant in options.variants.split(",")}
        for number in range(options.rounds):
            # What the specimen does to answers shows in one round.
            askers = [Asker(bench, name, longest, len(asked)) for name in runs if name != "specimen" or not number]
            for row, image in zip(asked, images, strict=True):
                for asker in askers:
                    asker.ask(row, image)
                askers.append(askers.pop(0))
            for asker in askers:
                runs[asker.variant].append(asker.end())
            times = ", ".join(f"{name} {several[-1].seconds:.1f} s" for name, several in runs.items())
            print(f"  {order}, round {number + 1}: {times}", flush=True)
        plain = runs["no reuse"][0]
        for variant, several in runs.items():
            one = several[0]
            ratio = [a.seconds / b.seconds for a, b in zip(several, runs["no reuse"], strict=False)]
            slots = runs.get("one slot", runs["no reuse"])
            to_slot = [a.seconds / b.seconds for a, b in zip(several, slots, strict=False)]
            firsts = [sum(a.first) / sum(b.first) for a, b in zip(several, slots, strict=False)]
            texts = {row["id"]: bench.llm.tokenizer.decode(list(one.answers[row["id"]])) for row in asked}
            pairs = [(texts[row["id"]], row["reference_answer"]) for row in asked]
            similar = sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs) / len(pairs)
            changed = sum(one.answers[row["id"]] != plain.answers[row["id"]] for row in asked)
            mean = [sum(r.latency) / len(r.latency) for r in several]
            lines.append([
                order, variant, len(asked), f"{1e3 * median(mean):,.0f}",
                f"{1e3 * median([median(r.latency) for r in several]):,.0f}",
                f"{1e3 * median([median(r.first) for r in several]):,.0f}",
                f"{similar:.4f}", f"{sum(rouge_l(a, b) for a, b in pairs) / len(pairs):.4f}", changed, one.tower_runs,
                f"{one.rows:,}", f"{one.unique:,}", f"{median(ratio):.3f} ({spread(ratio)})",
                f"{median(to_slot):.3f} ({spread(to_slot)})", f"{median(firsts):.3f}",
            ])  # fmt: skip
            found.append({"order": order, "variant": variant, "runs": [vars(r) for r in several]})
    print(table([
        "order", "variant", "questions", "mean ms", "P50 ms", "first token, P50 ms", "similarity", "ROUGE-L",
        "answers changed", "tower runs", "rows", "unique rows", "time to no reuse", "time to one slot",
        "first token to one slot",
    ], lines))  # fmt: skip
    missing = len({row["image"] for row in rows}) if options.pictures is None else 0
    print(f"\nimages: {missing} drawings stand in for pictures; longest edge {bench.edge}, answers of at most")
    print(f"{options.tokens} tokens")
    return found


def nothing_shared(options: argparse.Namespace) -> list[dict]:
    """Every question with an image of its own, with the cache and without. Each is put to both in turn, so that what
    else goes on in the machine meets both alike."""
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
            for asker in (without, exact) if (turn + number) % 2 else (exact, without):
                asker.ask(row, image)
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
    about: their rate while the tower runs, to that before."""
    config = replace(bench_config(options), layers=options.layers)
    compared = compare(config, getattr(torch, options.dtype), rounds=options.rounds)
    print()
    bench = Bench(options)
    engine = bench.engine("exact", 3000, 9)
    generator, tokenizer = engine.generator, bench.llm.tokenizer
    text = Sampling(max_tokens=2000, ignore_eos=True)
    keys = [
        generator.add(
            Request(tokenizer.encode(f"Story number {i}: once upon a time"), sampling=text), None, lambda answer: None
        )
        for i in range(8)
    ]
    for _ in range(20):
        generator.step()
    started = time.perf_counter()
    for _ in range(40):
        generator.step()
    before = (time.perf_counter() - started) / 40
    row = {"id": "one", "question": "What is this?", "image": "one", "height": 1024, "width": 1024}
    told: list = []
    generator.add(bench.request(engine, row, bench.picture(row)), None, told.append)
    gaps, runs = [], engine.stats.tower_runs
    while engine.stats.tower_runs == runs:
        started = time.perf_counter()
        generator.step()
        gaps.append(time.perf_counter() - started)
    generator.cancel(*keys)
    spent = engine.stats.seconds["tower"]
    headers = [
        "step before, ms",
        "steps while the tower ran",
        "mean gap, ms",
        "longest gap, ms",
        "gaps over 2 x --step-ms",
        "rate kept",
        "tower, s",
    ]
    print(table(headers, [[
        f"{1e3 * before:.1f}", len(gaps), f"{1e3 * np.mean(gaps):.1f}", f"{1e3 * max(gaps):.1f}",
        sum(gap > 2e-3 * options.step_ms for gap in gaps), f"{before / np.mean(gaps):.2f}", f"{spent:.2f}",
    ]]))  # fmt: skip
    return [{"alone": compared, "before": before, "gaps": gaps, "tower": spent}]


CASES: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "llava": llava,
    "nothing-shared": nothing_shared,
    "tower": tower,
    "job": job,
    "http": http,
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
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="answers have that many tokens")
    parser.add_argument("--tower", choices=SHAPES, default="smolvlm-256m", help="whose shape the tower has")
    parser.add_argument("--edge", type=int, help="pixels of an image's longest edge; above a tile's it is cut")
    parser.add_argument("--layers", type=int, default=2, help="of the tower, where it is timed alone")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of others: twice that is the longest gap wanted")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    parser.add_argument("--tasks", help="of the job, comma-separated; all by default")
    parser.add_argument("--guesses", type=int, default=400, help="of a stranger")
    parser.add_argument("--smoke", action="store_true", help="a few questions and tokens, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.questions, options.tokens, options.rounds = 4, 4, 1
    print(machine())
    write_json(options.json, case=options.case, found=CASES[options.case](options))


if __name__ == "__main__":
    main()
