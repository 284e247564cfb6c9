"""A model that sees, questions about images, and who asks them: what the cases of `images.py` share."""

from __future__ import annotations

import argparse
import difflib
import time
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import read_jsonl
from image_data import GEMMA3_4B, SHAPES, drawing, random_model, random_tower, rouge_l
from port import Port

from prefold import LLM
from prefold.cache import CacheOptions
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.images.config import TowerConfig
from prefold.images.decode import Image
from prefold.images.families import tower_of
from prefold.images.processor import Gemma3Processor, Idefics3Processor, Processor
from prefold.images.scheduler import ImageScheduler
from prefold.images.worker import image_part
from prefold.model import config_from
from prefold.prefix import Trie
from prefold.types import Request, Sampling
from prefold.worker.local import LocalWorker

VARIANTS = ("no reuse", "one slot", "exact", "specimen")


def bench_config(options: argparse.Namespace) -> TowerConfig:
    """Returns the tower of Gemma 3 4B, or one for SmolLM2-135M."""
    if options.model == "gemma3-4b":
        found = tower_of(config_from(GEMMA3_4B))
        assert found is not None
        return found
    return TowerConfig(kind="idefics3", merge=4, output=576, **SHAPES[options.tower])


class Bench:
    """A model that sees images, and questions about them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        torch.manual_seed(0)
        llm = LLM("smollm2-135m", dtype=options.dtype, device="cpu")
        self.model, self.tokenizer, self.eos = llm.model, llm.tokenizer, llm.engine.facts.options.eos_ids
        config = bench_config(options)
        tile, edge = config.image_size, options.edge or config.image_size
        self.processor: Processor
        if config.kind == "gemma3":
            self.model = random_model(config_from(GEMMA3_4B), llm.dtype)
            self.processor = Gemma3Processor(config, {"size": {"height": tile, "width": tile}})
        else:
            settings = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": tile}}
            settings["do_image_splitting"] = edge > tile
            self.processor = Idefics3Processor(config, settings)
        self.tower = random_tower(config, llm.dtype)
        self.edge = edge
        self.images: dict[str, Image] = {}

    def picture(self, row: dict) -> Image:
        """The image of a question, or a drawing of its size."""
        name = row["image"]
        if name not in self.images:
            path = None if self.options.pictures is None else Path(self.options.pictures) / Path(name).name
            if path is not None and path.exists():
                from prefold.images.decode import image_of

                self.images[name] = image_of(path)
            else:
                self.images[name] = Image(drawing(name, row["height"], row["width"]))
        return self.images[name]

    def request(self, engine: ModelEngine, row: dict, image: Image) -> Request:
        """A chat's one question, with the image before it."""
        tokenizer, processor = self.tokenizer, self.processor
        layout = processor.layout(image.height, image.width)
        medium = engine.part(ImageScheduler).media.medium(
            processor.key(image.digest), tiles=layout.tiles, rows_per_tile=processor.rows_per_tile, span=processor.span,
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
        known = self.tokenizer.vocab_size  # a model with random weights may have more
        texts = [self.tokenizer.decode([token for token in answers[row["id"]] if token < known]) for row in rows]
        pairs = [(text, row["reference_answer"]) for text, row in zip(texts, rows, strict=True)]
        ratios = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs]
        return sum(ratios) / len(pairs), sum(rouge_l(a, b) for a, b in pairs) / len(pairs)

    def engine(self, variant: str, longest: int, requests: int) -> ModelEngine:
        """longest: rows of the longest request, with its answer. requests: how many there are."""
        worker = LocalWorker(self.model, parts=[image_part(self.tower)])
        slots = longest if variant in ("one slot", "specimen") else longest * requests
        generation = GenerateOptions(
            kv_memory=(slots + 2) * worker.facts.slot_bytes,
            cache=None if variant == "no reuse" else CacheOptions(),
        )
        kept = 256 << 20 if variant == "exact" else 0
        return ModelEngine(
            worker, EngineOptions(generation=generation, eos_ids=self.eos, images={"media_memory": kept})
        )


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
        self._clock = time.process_time if bench.options.clock == "process" else time.perf_counter
        self.prompts: list[tuple[int, ...]] = []
        self._row: dict = {}
        self._request: Request | None = None
        self._key: Hashable = None
        self._told: list = []
        self._first: float | None = None  # seconds until the first token
        self._spent = 0.0
        self.out = Run([], [], {}, 0, 0, 0, 0.0, 0.0)
        # The memory of the KV store is taken when it is first needed, and by no question.
        warm = Request(np.array([1, 2, 3], np.int32), sampling=Sampling(max_tokens=2, ignore_eos=True))
        self.engine.generator.add(warm, None, lambda answer: None)
        while self.engine.generator.step():
            pass
        self._rows_before = self.engine.stats.rows_computed

    def ask(self, row: dict, image: Image) -> None:
        """Asks a question. The answer comes with steps."""
        started = self._clock()
        request = self.bench.request(self.engine, row, image)
        self.out.overhead += self._clock() - started
        if self.port is not None:
            request = self.port.request(request)
        self._row, self._request, self._told, self._first = row, request, [], None
        self._key = self.engine.generator.add(request, None, self._told.append)
        self._spent = self._clock() - started

    def step(self) -> bool:
        """Makes one step, and notes how long it took. Returns whether the answer is there."""
        generator, out, told = self.engine.generator, self.out, self._told
        started = self._clock()
        generator.step()
        if self._first is None and (told or generator.progress([self._key])[self._key]):
            self._first = self._spent + self._clock() - started
        self._spent += self._clock() - started
        if not told:
            return False
        out.latency.append(self._spent)
        out.first.append(self._first)
        out.answers[self._row["id"]] = told[0][0].tokens
        answer = told[0][0]
        # The last token is no row where nothing was read from it; what ended an answer was.
        rows = answer.tokens if answer.finish_reason == "stop" else answer.tokens[:-1]
        self.prompts.append((*self._request.tokens.tolist(), *rows))
        if self.variant == "no reuse":
            self.engine.part(ImageScheduler).clear()
        return True

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


def ask_all(askers: list[Asker], row: dict, image: Image) -> None:
    """Puts a question to all askers, whose steps are then made in turn, so that what else goes on in the machine meets
    them alike. An asker's time is that of its own steps."""
    for asker in askers:
        asker.ask(row, image)
    going = list(askers)
    while going:
        going = [asker for asker in going if not asker.step()]


def longest_of(bench: Bench, rows: list[dict], images: list[Image]) -> int:
    """Returns the rows of the longest request with its answer."""
    probe = ModelEngine(LocalWorker(bench.model, parts=[image_part(bench.tower)]))
    return max(len(bench.request(probe, *one).tokens) for one in zip(rows, images, strict=True)) + bench.options.tokens


def questions(options: argparse.Namespace) -> list[dict]:
    return read_jsonl(Path(options.data) / "dev.jsonl.gz")[: options.questions]
