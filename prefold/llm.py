"""LLM: a model, loaded and ready to run. Its methods are in `face/`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from .cache import CacheOptions, RadixCache
from .checkpoint import Checkpoint, resolve
from .device import choose_device, choose_dtype
from .engine import Engine, EngineOptions, GenerateOptions
from .errors import InputError
from .face.arguments import Prompt
from .face.keywords import GenerationKeywords
from .face.numbers import Numbers
from .face.running import check_process
from .face.texts import Texts
from .model import config_from, load_adapter, load_model
from .model.parallel import ALONE
from .tasks.facts import generation_settings
from .text import Tokenizer, tokenizer_or_none
from .types import SHARING_MODES, Sharing, Stats
from .worker.local import LocalWorker
from .worker.team import Team

__all__ = ["LLM"]


class LLM(Numbers, Texts):
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
        load_format: Literal["auto", "dummy"] = "auto",
        revision: str | None = None,
        seed: int = 0,
    ):
        super().__init__()
        check_process()
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
            ranks = ALONE if self._team is None else self._team.ranks
            place: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "ranks": ranks}
            self.model = load_model(self.checkpoint, **place, seed=seed)
            self.config = self.model.config
            loaded = {
                name: load_adapter(folder, self.config, **place, name=name) for name, folder in (adapters or {}).items()
            }
            worker = LocalWorker(self.model, loaded)
            if self._team is not None:
                self._team.join(worker)
        except BaseException:
            if self._team is not None:
                self._team.close()
            raise
        generation = GenerateOptions(
            kv_memory=kv_memory, max_running=max_running, reserve_output=reserve_output, cache=cache_options(cache)
        )
        options = EngineOptions(
            sharing="full" if sharing == "auto" else sharing,
            max_batch_rows=max_batch_rows,
            generation=generation,
            eos_ids=generation_settings(self.checkpoint, self.tokenizer, self.config.vocab_size)[0],
            cache_prefill=cache_prefill,
        )
        self.engine = Engine(self._team or worker, options)

    def _start_ranks(self, size: int, threads: int | None, seed: int, adapters: Mapping[str, str]) -> Team | None:
        """The other ranks, on their way up, where there are any."""
        if size == 1:
            return None
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
        """End the processes that hold parts of a split model; this object cannot be used any more. Else nothing.

        `with LLM(...) as llm:` closes it at its end."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        config = self.config
        split = "" if self._team is None else f", {self._team.ranks.size} ranks"
        adapters = f", adapters {', '.join(self.engine.adapters)}" if self.engine.adapters else ""
        return (
            f"LLM({self.checkpoint.name!r}: {config.layers} layers of {config.hidden}, context"
            f" {config.max_positions:,}, {dtype} on {self.device}{split}{adapters})"
        )

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    @property
    def cache(self) -> RadixCache | None:
        """What is kept of earlier calls: `clear` empties it; None when nothing is kept."""
        return self.engine.generator.scheduler.cache

    def pin(self, prompt: Prompt, *, adapter: str | None = None, **options: Unpack[GenerationKeywords]) -> int:
        """Keep what has been computed of a prompt until `unpin`, whatever else is asked for meanwhile.

        Returns how many of its leading tokens are there and now kept: 0 for a prompt nothing of which has run. The
        prompt is a text, token ids, or a conversation; options: salt, and those of `chat` that write it. Raises
        InputError where no cache is kept, or the prompt is wrong.
        """
        return self._cached().pin(*self._place(prompt, adapter, options))

    def unpin(self, prompt: Prompt, *, adapter: str | None = None, **options: Unpack[GenerationKeywords]) -> int:
        """Let go of what `pin` with the same arguments keeps; returns how many leading tokens are there."""
        return self._cached().unpin(*self._place(prompt, adapter, options))

    def _cached(self) -> RadixCache:
        if self.cache is None:
            remedy = 'make the LLM with cache="lru"'
            raise InputError("nothing is kept between calls, so nothing can be pinned", field="cache", remedy=remedy)
        return self.cache

    def _place(
        self, prompt: Prompt, adapter: str | None, options: Mapping[str, object]
    ) -> tuple[tuple[str | None, str], NDArray[np.int32]]:
        request = self._request(prompt, None, adapter, options)
        return (request.adapter, request.salt), request.tokens


def cache_options(cache: CacheOptions | str) -> CacheOptions | None:
    if isinstance(cache, CacheOptions):
        return cache
    return None if cache == "off" else CacheOptions(policy=cache)  # type: ignore[arg-type]


def tell(line: str) -> None:
    """What takes long enough that a person wonders (a download), on standard error."""
    print(f"prefold: {line}", file=sys.stderr, flush=True)
