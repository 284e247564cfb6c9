"""A model that sees, questions about images, and who asks them: what the cases of `images.py` share."""

from __future__ import annotations

import argparse
import difflib
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import read_jsonl
from image_data import SHAPES, drawing, random_tower, rouge_l
from port import Port

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

    def similarity(self, answers: dict[str, tuple[int, ...]], rows: list[dict]) -> tuple[float, float]:
        """Returns how alike answers are to the references: difflib's ratio, and ROUGE-L."""
        texts = [self.llm.tokenizer.decode(list(answers[row["id"]])) for row in rows]
        pairs = [(text, row["reference_answer"]) for text, row in zip(texts, rows, strict=True)]
        ratios = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs]
        return sum(ratios) / len(pairs), sum(rouge_l(a, b) for a, b in pairs) / len(pairs)

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
