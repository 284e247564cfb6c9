"""LLM: the Python face. Text or token ids in, NumPy arrays and plain objects out, in the order given."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .cache import CacheOptions, RadixCache
from .checkpoint import Checkpoint, resolve
from .device import choose_device, choose_dtype
from .engine import Engine, GenerateOptions
from .engine.service import Service
from .errors import InputError
from .model import config_from, load_adapter, load_model
from .tasks import Task, make_task
from .tasks.facts import generation_settings
from .tasks.run import calibrated, finish_items, run_works
from .text import Tokenizer, tokenizer_or_none
from .types import SHARING_MODES, Generated, GenerateRequest, Sharing, Stats
from .worker.budget import batch_rows
from .worker.team import Solo, Team

__all__ = ["LLM", "Classification", "Piece", "Ranking", "Score"]

Text = str | Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Ranking:
    """scores: of each document, in the order given, in [0, 1]; order: their indices, best first, `top_n` of them."""

    scores: np.ndarray
    order: list[int]


@dataclass(frozen=True, slots=True)
class Classification:
    """The most probable label, and every label's probability."""

    label: str
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True)
class Score:
    """logprob: of the whole continuation (natural logarithm); logprobs: of each of its tokens;
    greedy: whether every token is the model's first choice."""

    logprob: float
    logprobs: np.ndarray
    greedy: bool


class LLM:
    """A model, ready to run.

    model           hub id, local Hugging Face folder, .gguf file, a built-in name (`prefold models`), or a Checkpoint
    tokenizer       the checkpoint's, where it has been loaded already
    dtype           "float32", "bfloat16", "float16", or "auto": what the checkpoint is stored in, where the
                    device computes natively in it, else float32
    device          "cpu", "cuda", "cuda:1", ..., or "auto": a GPU when there is one
    threads         CPU threads, of each rank; None: torch's own choice, divided among the ranks
    sharing         "full", "mlp", "off" or "auto" (full: it has not been measured to cost)
    max_batch_rows  rows of one step; None: 4,096 on a CPU, on a GPU what its free memory takes
    kv_memory       bytes of K/V for generation; None: half of the free memory, on a CPU at most 4 GiB
    max_running     sequences that generate at once
    reserve_output  set aside room for a whole output when max_tokens is given (else an output may be interrupted, and
                    computed again, when memory runs out)
    cache           keep K/V between calls of `generate`: "lru", "lfu", "priority", a CacheOptions, or "off"
    cache_prefill   `embed` (of last tokens), `rerank`, `classify` (labels of one token, or a head) use and fill the
                    cache of `generate` too: for calls that come again and again with what they begin with
    adapters        LoRA adapters for generation, {name: PEFT folder}
    tensor_parallel ranks the model is split over: processes of this machine, on GPUs one each. `close` ends them
    load_format     "auto", or "dummy" for random weights of the model's geometry
    revision        of a hub id

    Raises CheckpointError, UnsupportedModelError, OutOfMemoryError, InputError. `stats` adds up over calls.
    """

    def __init__(
        self,
        model: str | Checkpoint = "smollm2-135m",
        *,
        tokenizer: Tokenizer | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        sharing: Sharing | str = "auto",
        max_batch_rows: int | None = None,
        kv_memory: int | None = None,
        max_running: int = 256,
        reserve_output: bool = True,
        cache: CacheOptions | str = "lru",
        cache_prefill: bool = False,
        adapters: Mapping[str, str] | None = None,
        tensor_parallel: int = 1,
        load_format: str = "auto",
        revision: str | None = None,
        seed: int = 0,
    ):
        if sharing != "auto" and sharing not in SHARING_MODES:
            raise InputError(f"sharing is {sharing!r}", field="sharing", remedy=f"use auto, {', '.join(SHARING_MODES)}")
        if max_batch_rows is not None and max_batch_rows < 1:
            raise InputError(f"max_batch_rows is {max_batch_rows}", field="max_batch_rows", remedy="use 1 or more")
        if threads is not None:
            if threads < 1:
                raise InputError(f"threads is {threads}", field="threads", remedy="use 1 or more")
            torch.set_num_threads(threads)
        if tensor_parallel < 1:
            raise InputError(f"tensor_parallel is {tensor_parallel}", field="tensor_parallel", remedy="use 1 or more")
        if not isinstance(model, Checkpoint):
            model = resolve(model, revision=revision, load_format=load_format, notify=tell)
        self.checkpoint = model
        self.tokenizer = tokenizer_or_none(model) if tokenizer is None else tokenizer
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.checkpoint.config, self.device)
        self._team = self._start_ranks(tensor_parallel, threads, seed, adapters or {})
        try:
            place: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "ranks": self._team.ranks}
            self.model = load_model(self.checkpoint, **place, seed=seed)
            self.config = self.model.config
            loaded = {
                name: load_adapter(folder, self.config, **place, name=name) for name, folder in (adapters or {}).items()
            }
            self._team.loaded()
        except BaseException:
            self._team.close()
            raise
        self.engine = Engine(
            self.model,
            sharing="full" if sharing == "auto" else sharing,
            max_batch_rows=max_batch_rows or batch_rows(self.model),
            generation=GenerateOptions(
                kv_memory=kv_memory,
                max_running=max_running,
                reserve_output=reserve_output,
                cache=cache_options(cache),
            ),
            eos_ids=generation_settings(self.checkpoint, self.tokenizer)[0],
            adapters=loaded,
            team=self._team,
            cache_prefill=cache_prefill,
        )

    def _start_ranks(self, size: int, threads: int | None, seed: int, adapters: Mapping[str, str]) -> Solo:
        """The other ranks, on their way up, where there are any."""
        if size == 1:
            return Solo()
        if self.device.type == "cuda":
            self.device = torch.device("cuda", 0)
        elif threads is None:
            threads = max(1, torch.get_num_threads() // size)
            torch.set_num_threads(threads)
        return Team(
            self.checkpoint,
            config_from(self.checkpoint.config),
            size=size,
            dtype=self.dtype,
            device=self.device,
            threads=threads or torch.get_num_threads(),
            seed=seed,
            adapters=adapters,
        )

    def close(self) -> None:
        """End the processes that hold parts of a split model; this object cannot be used any more. Else nothing."""
        self._team.close()

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    def embed(self, texts: Text | Sequence[Text], **options: Any) -> np.ndarray:
        """Embeddings, float32 [n, dim] (or [dim] for one text).

        Options: pooling ("last", "mean", "first"), normalize, dimensions (kept before normalising), prompt,
        prompt_name, instruction, max_length, truncate; by default what the checkpoint says. Raises InputError
        naming the text that cannot be embedded.
        """
        items, single = as_items(texts)
        lines = self.run(self.task("embed", **options), [{"text": text} for text in items])
        vectors = (
            np.stack([line["embedding"] for line in lines]) if lines else np.empty((0, self.config.hidden), np.float32)
        )
        return vectors[0] if single else vectors

    def rerank(self, query: Text, documents: Sequence[Text], *, top_n: int | None = None, **options: Any) -> Ranking:
        """How well each document answers the query.

        Options: instruction, template, words, raw_scores, max_length, truncate (documents only). Any causal model
        answers yes or no after the Qwen3 reranker's prompt; a checkpoint with a head of one label uses that.
        """
        item = {"query": query, "documents": list(documents), "top_n": top_n}
        line = self.run(self.task("rerank", **options), [item])[0]
        return Ranking(np.asarray(line["scores"]), list(line["order"]))

    def classify(
        self, texts: Text | Sequence[Text], labels: Sequence[str] | Mapping[str, str] | None = None, **options: Any
    ) -> list[Classification] | Classification:
        """The label of each text: by label likelihoods after a shared prompt, or by the checkpoint's head.

        Options: instructions, examples (pairs of text and label), template, separator, normalization
        ("tokens", "bytes"), calibrate (contextual calibration, Zhao et al. 2021), max_length, truncate.
        """
        items, single = as_items(texts)
        task = self.calibrated(self.task("classify", labels=labels, **options))
        lines = self.run(task, [{"text": text} for text in items])
        found = [Classification(line["label"], line["probabilities"]) for line in lines]
        return found[0] if single else found

    def score(
        self, prompts: Text | Sequence[Text], continuations: Text | Sequence[Text] | None = None, **options: Any
    ) -> list[Score] | Score:
        """Log-probability of each continuation after its prompt; without continuations, of each whole text (rolling).

        Options: prefix_token (id that stands for an empty prompt), max_length, truncate (left of the prompt).
        """
        items, single = as_items(prompts)
        if continuations is None:
            records = [{"text": text} for text in items]
        else:
            wanted, _ = as_items(continuations)
            if len(wanted) != len(items):
                raise InputError(
                    f"{len(items)} prompts and {len(wanted)} continuations",
                    field="continuations",
                    remedy="give one continuation a prompt",
                )
            records = [{"prompt": p, "continuation": c} for p, c in zip(items, wanted, strict=True)]
        lines = self.run(self.task("score", **options), records)
        found = [Score(line["logprob"], np.asarray(line["logprobs"], np.float32), line["greedy"]) for line in lines]
        return found[0] if single else found

    def generate(
        self, prompts: Text | Sequence[Text], **options: Any
    ) -> Generated | list[Generated] | list[list[Generated]]:
        """Continuations: a Generated a prompt (one for one prompt), lists of them with n > 1.

        Options: the fields of Sampling (max_tokens, temperature, top_p, stop, seed, n, logprobs, ...; greedy and at
        most 256 tokens by default), response_format-like grammars as grammar={"json_schema": ...}, {"regex": ...},
        {"choice": [...]}, {"lark": ...}; adapter, salt, priority, truncate. Raises InputError naming the prompt that
        cannot be continued.
        """
        items, single = as_items(prompts)
        return self._generate(items, single, options)

    def chat(self, messages: Sequence[Any], **options: Any) -> Generated | list[Generated] | list[list[Generated]]:
        """`generate` for one conversation ([{"role": ..., "content": ...}, ...]) or a list of them, in the checkpoint's
        chat template. Further options: system, tools, chat_template, chat_template_kwargs."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats = [messages] if single else list(messages)
        return self._generate([{"messages": chat} for chat in chats], single, options)

    def _generate(self, items: list[Any], single: bool, options: dict[str, Any]) -> Any:
        task = self.task("generate", **options)
        works = checked(task.prepare(items))
        answers = checked([answer for (answer,) in run_works(self.engine, task, works)])  # type: ignore[misc]
        found = [answer if len(answer) > 1 else answer[0] for answer in answers]
        return found[0] if single else found

    def stream(self, prompt: Any, **options: Any) -> Iterator[Piece]:
        """The text of one prompt, or conversation, as it is made; options as for `generate`. A piece a sample and step
        at most; the last piece of a sample carries its Generated. Left early, the request is cancelled."""
        request = self._request(prompt, options)
        generator, pieces = self.engine.generator, deque[Any]()
        key = generator.add(
            request, self.tokenizer, pieces.append, lambda sample, text: pieces.append(Piece(sample, text))
        )
        try:
            while True:
                while pieces:
                    piece = pieces.popleft()
                    if isinstance(piece, Piece):
                        yield piece
                    else:
                        key = None
                        yield from (Piece(i, "", one) for i, one in enumerate(samples_of(piece)))
                        return
                generator.step()
        finally:
            if key is not None:
                generator.cancel(key)

    async def agenerate(self, prompt: Any, **options: Any) -> Generated | list[Generated]:
        """`generate` for one prompt, or conversation, from an event loop; calls that wait at once run together."""
        request = self._request(prompt, options)
        async for event in self._service.stream(request, self.tokenizer, text=False):
            if isinstance(event, list):
                return event if len(event) > 1 else event[0]
        raise AssertionError("a request ended without an answer")

    async def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Piece]:
        """`stream` from an event loop."""
        request = self._request(prompt, options)
        async for event in self._service.stream(request, self.tokenizer):
            if isinstance(event, list):
                for i, one in enumerate(event):
                    yield Piece(i, "", one)
            else:
                yield Piece(*event)

    @cached_property
    def _service(self) -> Service:
        return Service(self.engine.generator)

    def _request(self, prompt: Any, options: dict[str, Any]) -> GenerateRequest:
        task = self.task("generate", **options)
        return checked(task.prepare([prompt]))[0].requests[0]

    @property
    def cache(self) -> RadixCache | None:
        """What is kept of earlier calls: `pin`, `unpin`, `clear`; None when nothing is."""
        return self.engine.generator.scheduler.cache

    def task(self, name: str, **options: Any) -> Task:
        """The task `name` as this checkpoint wants it; see `prefold.tasks.make_task`."""
        if name == "generate":
            options = {"adapters": tuple(self.engine.adapters), **options}
        return make_task(name, self.checkpoint, self.tokenizer, **options)

    def calibrated(self, task: Any) -> Any:
        """A classification task that has seen what the model says of content-free texts, if it asks for that."""
        return calibrated(self.engine, task)

    def run(self, task: Task, items: Iterable[Any]) -> list[dict[str, Any]]:
        """Run a task over items; one dict an item, in their order. Raises the first item's InputError."""
        works = checked(task.prepare(list(items)))
        return checked(finish_items(task, works, run_works(self.engine, task, works)))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more text of a sample; `done` with its last piece, whose text is empty."""

    sample: int
    text: str
    done: Generated | None = None


def checked(found: list[Any]) -> list[Any]:
    """What was found, item by item. Raises the InputError of the first item that has one, with its number."""
    for number, one in enumerate(found):
        if isinstance(one, InputError):
            raise InputError(f"item {number}: {one}", field=one.field, code=one.code) from one
    return found


def samples_of(answer: list[Generated] | InputError) -> list[Generated]:
    if isinstance(answer, InputError):
        raise answer
    return answer


def cache_options(cache: CacheOptions | str) -> CacheOptions | None:
    if isinstance(cache, CacheOptions):
        return cache
    return None if cache == "off" else CacheOptions(policy=cache)  # type: ignore[arg-type]


def tell(line: str) -> None:
    """What takes long enough that a person wonders (a download), on standard error."""
    print(f"prefold: {line}", file=sys.stderr, flush=True)


def as_items(texts: Any) -> tuple[list[Any], bool]:
    """A list of texts, and whether one text (a string, or a list of token ids) was given."""
    if isinstance(texts, str):
        return [texts], True
    items = list(texts)
    if items and all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items):
        return [items], True
    return items, False
