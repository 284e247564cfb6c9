"""Times questions about images: what is reused, and what the tower costs.

    python benchmarks/images.py --case llava --data FOLDER [--rounds 3] [--questions 37] [--tokens 32] [--json FILE]
    python benchmarks/images.py --case nothing-shared --data FOLDER
    python benchmarks/images.py --case others

FOLDER has LLaVA-Bench (In-the-Wild) as dev.jsonl.gz, and the images where they may be had (`--pictures`); seeded
drawings of the listed sizes stand in for those that are missing, and the table says so.

The model has SmolLM2-135M's own text weights and, beside them, a tower of SmolVLM-256M's shape with random weights: the
time is that of a trained one, the answers have nothing to do with the pictures. Questions are asked one at a time. The
variants take turns within a round, each in an engine of its own with nothing left from the round before:

    no reuse    nothing is kept: neither K/V nor what the tower made
    one slot    K/V of the last request alone, as a server with one slot and a prompt cache has it
    exact       the radix cache, and what the tower made

Answers are compared token for token with those of "no reuse".

    llava           the questions in file order, and shuffled
    nothing-shared  every question with an image of its own: what keys and bookkeeping cost where they save nothing
    others          sequences that generate while the tower runs: their rate, and the longest gap between two tokens
"""

from __future__ import annotations

import argparse
import difflib
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import machine, median, read_jsonl, spread, table, write_json

from prefold import LLM
from prefold.cache import CacheOptions
from prefold.engine import Engine, EngineOptions, GenerateOptions
from prefold.media import Image, TowerConfig
from prefold.media.idefics3 import Idefics3Processor
from prefold.model import Tower
from prefold.prefix import Trie
from prefold.types import Request, Sampling
from prefold.worker.local import LocalWorker

# SmolVLM-256M's.
SHAPE = {"hidden": 768, "layers": 12, "heads": 12, "intermediate": 3072, "image_size": 512, "patch_size": 16}
VARIANTS = ("no reuse", "one slot", "exact")


class Bench:
    """A model that sees images, and questions about them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        torch.manual_seed(0)
        self.llm = LLM("smollm2-135m", dtype=options.dtype, device="cpu")
        config = TowerConfig(kind="idefics3", merge=4, output=self.llm.config.hidden, **SHAPE)
        self.tower = random_tower(config, self.llm.dtype)
        size = {"longest_edge": options.edge}
        settings = {"size": size, "max_image_size": {"longest_edge": 512}, "do_image_splitting": options.edge > 512}
        self.processor = Idefics3Processor(config, settings)
        self.images: dict[str, Image] = {}
        self.seconds_of_keys = 0.0

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
        started = time.perf_counter()
        layout = processor.layout(image.height, image.width)
        medium = engine.media.medium(
            processor.key(image), tiles=layout.tiles, rows_per_tile=processor.rows_per_tile, span=processor.span,
            load=lambda: processor.tiles(image),
        )  # fmt: skip
        self.seconds_of_keys += time.perf_counter() - started
        # SmolLM2 has no tokens for images: what stands between the rows is written with its own.
        ids = medium.ids.reshape(-1, processor.rows_per_tile)
        parts = [part for part in layout.text.split(processor.image_token) if part]
        assert len(parts) == len(ids) + 1
        tokens = [tokenizer.encode("<|im_start|>user\n")]
        for part, rows in zip(parts, ids, strict=False):
            tokens += [tokenizer.encode(part), rows]
        tokens.append(tokenizer.encode(parts[-1] + row["question"] + "<|im_end|>\n<|im_start|>assistant\n"))
        o = self.options
        sampling = Sampling(max_tokens=o.tokens, temperature=0.2, seed=1, ignore_eos=o.ignore_eos)
        return Request(np.concatenate(tokens).astype(np.int32), sampling=sampling, media=(medium,))

    def engine(self, variant: str, longest: int) -> Engine:
        """longest: rows of the longest request, with its answer."""
        worker = LocalWorker(self.llm.model, tower=self.tower)
        slots = longest if variant == "one slot" else 60_000
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


def run(bench: Bench, variant: str, rows: list[dict], images: list[Image]) -> Run:
    """Asks the questions, one at a time."""
    probe = Engine(LocalWorker(bench.llm.model, tower=bench.tower))
    longest = max(len(bench.request(probe, r, i).tokens) for r, i in zip(rows, images, strict=True))
    engine = bench.engine(variant, longest + bench.options.tokens)
    generator = engine.generator
    out = Run([], [], {}, 0, 0, 0, 0.0, 0.0)
    prompts, bench.seconds_of_keys = [], 0.0
    began = time.perf_counter()
    for row, image in zip(rows, images, strict=True):
        started = time.perf_counter()
        request = bench.request(engine, row, image)
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
        prompts.append((*request.tokens.tolist(), *told[0][0].tokens[:-1]))
        if variant == "no reuse":
            engine.images.clear()
    out.seconds = time.perf_counter() - began
    stats = engine.stats
    out.tower_runs, out.rows = stats.tower_runs, stats.rows_computed
    offsets = np.cumsum([0, *map(len, prompts)])
    out.unique = Trie.build(np.concatenate(prompts).astype(np.int32), offsets).num_rows
    cache = generator.scheduler.cache
    out.overhead = bench.seconds_of_keys + stats.seconds.get("plan", 0.0) + (0.0 if cache is None else cache.seconds)
    return out


def random_tower(config: TowerConfig, dtype: torch.dtype) -> Tower:
    """A tower with random weights, packed as one that is loaded."""
    from prefold.model.layers import Linear

    tower = Tower(config, dtype=dtype, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[1] ** 0.5)
    for module in tower.modules():
        if isinstance(module, Linear):
            module.pack()
    return tower.eval()


def drawing(name: str, height: int, width: int) -> np.ndarray:
    """A picture of a size, a function of its name: waves of three colours, uint8 [height, width, 3]."""
    rng = np.random.default_rng(list(name.encode()))
    down, across = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = rng.uniform(0.005, 0.1, (3, 2)).astype(np.float32)
    return np.stack([(np.sin(a * down + b * across) * 120 + 128).astype(np.uint8) for a, b in waves], -1)


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1: of the longest common subsequence of words (Lin 2004)."""
    a, b = answer.lower().split(), reference.lower().split()
    lengths = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, lengths[j] = lengths[j], before + 1 if word == other else max(lengths[j], lengths[j - 1])
    common = lengths[-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0


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
        runs: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
        for number in range(options.rounds):
            for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                runs[variant].append(run(bench, variant, asked, [bench.picture(row) for row in asked]))
                print(f"  {order}, round {number + 1}, {variant}: {runs[variant][-1].seconds:.1f} s", flush=True)
        plain = runs["no reuse"][0]
        for variant, several in runs.items():
            one = several[0]
            ratio = [a.seconds / b.seconds for a, b in zip(several, runs["no reuse"], strict=True)]
            to_slot = [a.seconds / b.seconds for a, b in zip(several, runs["one slot"], strict=True)]
            firsts = [median(a.first) / median(b.first) for a, b in zip(several, runs["one slot"], strict=True)]
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
        "order", "variant", "questions", "mean ms", "P50 ms", "first token ms", "similarity", "ROUGE-L",
        "answers changed", "tower runs", "rows", "unique rows", "time to no reuse", "time to one slot",
        "first token to one slot",
    ], lines))  # fmt: skip
    missing = len({row["image"] for row in rows}) if options.pictures is None else 0
    print(f"\nimages: {missing} drawings stand in for pictures; longest edge {options.edge}, answers of at most")
    print(f"{options.tokens} tokens")
    return found


def nothing_shared(options: argparse.Namespace) -> list[dict]:
    """Every question with an image of its own, with the cache and without."""
    bench, rows = Bench(options), questions(options)
    images = [
        Image(drawing(f"{row['id']}", row["height"] // 4, row["width"] // 4)) for row in rows
    ]  # fmt: skip
    ratios, overheads, found = [], [], []
    for number in range(options.rounds):
        pair = {}
        for variant in ("no reuse", "exact") if number % 2 else ("exact", "no reuse"):
            pair[variant] = run(bench, variant, rows, images)
        ratios.append(pair["exact"].seconds / pair["no reuse"].seconds)
        overheads.append(pair["exact"].overhead / pair["exact"].seconds)
        found.append({variant: one.seconds for variant, one in pair.items()})
        print(f"  round {number + 1}: {ratios[-1]:.4f}, keys and bookkeeping {overheads[-1]:.2%}", flush=True)
    half = 1.96 * float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    print(table(["questions", "rounds", "time with the cache to without", "keys, planning and bookkeeping"], [[
        len(rows), len(ratios), f"{np.mean(ratios):.4f} ± {half:.4f}", f"{median(overheads):.2%}",
    ]]))  # fmt: skip
    return found


def others(options: argparse.Namespace) -> list[dict]:
    """Eight sequences generate; then an image is asked about. Their rate while the tower runs, to that before."""
    bench = Bench(options)
    engine = bench.engine("exact", 4096)
    generator, tokenizer = engine.generator, bench.llm.tokenizer
    text = Sampling(max_tokens=2000, ignore_eos=True)
    keys = [
        generator.add(Request(tokenizer.encode(f"Story number {i}: once upon a time"), sampling=text), None, print)
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
    tower = engine.stats.seconds["tower"]
    headers = [
        "step before, ms",
        "steps while the tower ran",
        "mean gap, ms",
        "longest gap, ms",
        "rate kept",
        "tower, s",
    ]
    print(table(headers, [[
        f"{1e3 * before:.1f}", len(gaps), f"{1e3 * np.mean(gaps):.1f}", f"{1e3 * max(gaps):.1f}",
        f"{before / np.mean(gaps):.2f}", f"{tower:.2f}",
    ]]))  # fmt: skip
    return [{"before": before, "gaps": gaps, "tower": tower}]


CASES = {"llava": llava, "nothing-shared": nothing_shared, "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="llava")
    parser.add_argument("--data", help="folder of LLaVA-Bench (In-the-Wild)")
    parser.add_argument("--pictures", help="folder of its images")
    parser.add_argument("--questions", type=int, default=37)
    parser.add_argument("--orders", default="file,shuffled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="answers have that many tokens")
    parser.add_argument("--edge", type=int, default=512, help="pixels of an image's longest edge; above 512 it is cut")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(machine())
    write_json(options.json, case=options.case, found=CASES[options.case](options))


if __name__ == "__main__":
    main()
