"""Makes a model ready to run, as an LLM. The methods that run it are in `face/`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Never, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from .cache import POLICIES, CacheOptions, RadixCache
from .checkpoint import Checkpoint, resolve
from .checkpoint.identity import folder_digest, model_identity
from .device import choose_device, choose_dtype
from .engine import MEDIA_MEMORY, Engine, EngineOptions, GenerateOptions
from .errors import InputError
from .face.arguments import Prompt
from .face.keywords import GenerationKeywords
from .face.numbers import NumericTasks
from .face.running import check_process
from .face.texts import Texts
from .images.fetch import MediaHosts
from .images.items import image_inputs
from .images.reading import Reader
from .images.table import MediaTable
from .model import config_from, load_adapter, load_model
from .model.parallel import ALONE
from .options import check_options
from .shifted.measured import permitted
from .tasks.make import generation_settings
from .text import Tokenizer, tokenizer_or_none
from .types import SHARING_MODES, Sharing, Stats
from .worker.local import LocalWorker
from .worker.protocol import parts_of
from .worker.team import Team

__all__ = ["LLM"]


class LLM(NumericTasks, Texts):
    """An LLM is a model that is loaded and ready to run.

    model           hub id, local Hugging Face folder, .gguf file, a built-in name (`prefold models`), or a Checkpoint
    tokenizer       the checkpoint's tokenizer, where it has been loaded already; None: it is loaded here
    dtype           "float32", "bfloat16", "float16", or "auto": the type that the checkpoint is stored in, where the
                    device computes natively in it, else float32
    device          "cpu", "cuda", "cuda:1", ..., or "auto": a GPU when there is one
    threads         CPU threads of each rank; None: as many as torch chooses, divided among the ranks
    sharing         "full": a shared prefix is computed once; "mlp": everything but attention is shared; "off"; or
                    "auto", which is "full" as far as the threshold allows
    sharing_threshold   of sharing "auto", above 0, at most 1: prompts whose numbers are read together are computed as
                    with "off" where their unique tokens are a larger share of their tokens, and that was measured to
                    take less time. "auto": never, as full costs nothing where nothing is shared
    max_batch_rows  rows of a step, at most; None: 4,096 on a CPU, on a GPU what its free memory takes, and where text
                    is generated fewer once that is found to be faster
    kv_memory       bytes of K/V for generation; None: half of the free memory, on a CPU at most 4 GiB
    max_running     how many sequences generate at once, at most
    reserve_output  set aside memory for a whole output where max_tokens is given. Otherwise an output may be
                    interrupted when memory runs out, and is then computed again
    cache           how K/V are kept between calls of `generate`: "lru", "lfu", "priority", a CacheOptions, or "off"
    cache_prefill   whether `embed` (of last tokens), `rerank` and `classify` (with labels of one token, or a head) use
                    and fill the cache of `generate` too, which pays where later calls begin as earlier ones did
    adapters        LoRA adapters that calls may name, {name: PEFT folder}
    images          whether the tower of a model that sees images is loaded. False: it takes text alone, and the tower's
                    memory is free for other things
    media_memory    bytes of the rows of images that are kept for others who ask about the same image, once the model's
                    tower has made them
    mmproj          the GGUF file of the tower that belongs to a GGUF file
    allow_media_host   hosts from which images are fetched over https, where they are given by address
    media           gives the rows of images their ids, where prompts are made before the LLM; None: a table of its own
    tensor_parallel how many ranks the model is split over: processes of this machine, on GPUs one each. `close` ends
                    them
    exits           of a looped model. "read": its rows make all visits, whichever they are read after. "save": they
                    leave, and compute and store no more; deeper visits see the K/V of their last visit to a block.
                    "project": they see K/V made of the state that it left with. Requests may then give routes
    refill          where rows leave, whether others come into their places at once
    group           which rows make a step together then: those whose next "block" is the same, or whose "template" is
    step_visits     the most visits that rows make one after another in a step then, where nobody has a prompt to
                    compute; it changes no result
    decode_graphs   whether steps that only decode are replayed as captured CUDA graphs, which saves launching their
                    kernels one by one. Experimental; on one GPU, without adapters
    load_format     "auto", or "dummy" for random weights of the model's shapes
    revision        the branch, tag or commit of a hub id
    seed            of the random weights of load_format="dummy"

    Raises CheckpointError where the model cannot be found or read, UnsupportedModelError (a CheckpointError) where
    prefold cannot run it, OutOfMemoryError where it does not fit, ForkedError in a process forked from one that made
    an LLM, and InputError for a wrong argument. `stats` adds up over all calls.
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
        sharing_threshold: float | Literal["auto"] = "auto",
        max_batch_rows: int | None = None,
        kv_memory: int | None = None,
        max_running: int = 256,
        reserve_output: bool = True,
        cache: CacheOptions | str = "lru",
        cache_prefill: bool = False,
        adapters: Mapping[str, str] | None = None,
        images: bool = True,
        media_memory: int = MEDIA_MEMORY,
        mmproj: str | None = None,
        allow_media_host: Collection[str] = (),
        media: MediaTable | None = None,
        tensor_parallel: int = 1,
        exits: Literal["read", "save", "project"] = "read",
        refill: bool = True,
        group: Literal["block", "template"] = "block",
        step_visits: int = 2,
        decode_graphs: bool = False,
        load_format: Literal["auto", "dummy"] = "auto",
        revision: str | None = None,
        seed: int = 0,
        **unknown: Never,
    ):
        super().__init__()
        check_process()
        check_options("LLM", unknown, [*signature(type(self)).parameters][:-1])
        if sharing != "auto" and sharing not in SHARING_MODES:
            raise InputError(f"sharing is {sharing!r}", field="sharing", remedy=f"use auto, {', '.join(SHARING_MODES)}")
        if sharing_threshold != "auto":
            check_threshold(sharing, sharing_threshold)
        if max_batch_rows is not None and max_batch_rows < 1:
            raise InputError(f"max_batch_rows is {max_batch_rows}", field="max_batch_rows", remedy="use 1 or more")
        if threads is not None and threads < 1:
            raise InputError(f"threads is {threads}", field="threads", remedy="use 1 or more")
        if media_memory < 0:
            raise InputError(f"media_memory is {media_memory}", field="media_memory", remedy="use 0 or more")
        if tensor_parallel < 1:
            raise InputError(f"tensor_parallel is {tensor_parallel}", field="tensor_parallel", remedy="use 1 or more")
        generation = GenerateOptions(
            kv_memory=kv_memory,
            max_running=max_running,
            reserve_output=reserve_output,
            cache=cache_options(cache),
            exits=exits,
            refill=refill,
            group=group,
            step_visits=step_visits,
        )
        self.device = choose_device(device)
        if decode_graphs and (self.device.type != "cuda" or tensor_parallel > 1 or adapters):
            message = "decode_graphs is for one GPU, and a model without adapters"
            raise InputError(message, field="decode_graphs", remedy="leave it out")
        # Nothing is downloaded, started or set before the arguments were looked at.
        if threads is not None:
            torch.set_num_threads(threads)
        if not isinstance(model, Checkpoint):
            model = resolve(model, revision=revision, load_format=load_format, mmproj=mmproj, notify=tell)
        self.checkpoint = model
        self.tokenizer = tokenizer_or_none(model) if tokenizer is None else tokenizer
        self.dtype = choose_dtype(dtype, self.checkpoint.config, self.device)
        self._adapters = dict(adapters or {})
        generation = replace(generation, cache=permitted(generation.cache, self.identity))
        self._team = self._start_ranks(tensor_parallel, threads, seed, adapters or {}, images)
        try:
            ranks = ALONE if self._team is None else self._team.ranks
            place: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "ranks": ranks}
            config = config_from(self.checkpoint.config)
            self.config = config if images else config.text
            self.model = load_model(self.checkpoint, **place, seed=seed, config=self.config)
            self.config = self.model.config
            parts = parts_of(self.model, self.checkpoint, seed)
            loaded = {
                name: load_adapter(folder, self.config, **place, name=name) for name, folder in (adapters or {}).items()
            }
            worker = LocalWorker(self.model, loaded, graphs=decode_graphs, parts=parts)
            if self._team is not None:
                self._team.join(worker)
        except BaseException:
            if self._team is not None:
                self._team.close()
            raise
        options = EngineOptions(
            sharing="full" if sharing == "auto" else sharing,
            sharing_threshold=1.0 if sharing_threshold == "auto" else float(sharing_threshold),
            max_batch_rows=max_batch_rows,
            generation=generation,
            eos_ids=generation_settings(self.checkpoint, self.tokenizer, self.config.vocab_size)[0],
            cache_prefill=cache_prefill,
            media_memory=media_memory,
        )
        self.engine = Engine(self._team or worker, options, media=media)
        reader = Reader(hosts=MediaHosts(frozenset(allow_media_host)))
        self.images = image_inputs(self.checkpoint, self.config, self.tokenizer, self.engine.media, reader)

    def _start_ranks(
        self, size: int, threads: int | None, seed: int, adapters: Mapping[str, str], images: bool
    ) -> Team | None:
        """Starts the processes of the other ranks and returns them as a team; None where one process has the model."""
        if size == 1:
            return None
        if self.device.type == "cuda":
            self.device = torch.device("cuda", 0)
        elif threads is None:
            threads = max(1, torch.get_num_threads() // size)
            torch.set_num_threads(threads)
        config = config_from(self.checkpoint.config)
        return Team(
            self.checkpoint,
            config if images else config.text,
            size=size,
            dtype=self.dtype,
            device=self.device,
            threads=threads or torch.get_num_threads(),
            seed=seed,
            adapters=adapters,
        )

    @property
    def identity(self) -> dict[str, object]:
        """Returns what the results depend on beside requests, as JSON: the model's files, the dtype, the adapters."""
        loaded = {name: folder_digest(Path(folder)) for name, folder in self._adapters.items()}
        dtype = str(self.dtype).removeprefix("torch.")
        return {"model": model_identity(self.checkpoint), "dtype": dtype, "adapters": loaded}

    def close(self) -> None:
        """Ends the thread that makes the steps, and the processes that hold parts of a split model. Nothing can be
        generated afterwards.

        `with LLM(...) as llm:` closes the LLM at its end.
        """
        self.engine.close()
        if self.images is not None:
            self.images.reader.decoder.close()

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
        """Returns the counters of all calls so far: what was asked for, and what was computed."""
        return self.engine.stats

    @property
    def media(self) -> MediaTable:
        """Returns the table that gives the rows of images their ids."""
        return self.engine.media

    @property
    def cache(self) -> RadixCache | None:
        """Returns the cache of earlier calls, None when nothing is kept. Its `clear` forgets all that is not pinned."""
        return self.engine.cache

    def pin(self, prompt: Prompt, *, adapter: str | None = None, **options: Unpack[GenerationKeywords]) -> int:
        """Keeps what has been computed of a prompt until `unpin`, and returns how many of its tokens that is.

        These are the prompt's leading tokens that are in the cache: 0 where no call has computed any of them. The
        prompt is a text, token ids, or a conversation. Options are `salt`, those of `chat` that write a prompt, and of
        looped models those that say which blocks rows visit and when they leave.
        Raises InputError where there is no cache, or the prompt is wrong.
        """
        return self._cached().pin(*self._place(prompt, adapter, options))

    def unpin(self, prompt: Prompt, *, adapter: str | None = None, **options: Unpack[GenerationKeywords]) -> int:
        """Lets go of what `pin` with the same arguments keeps; returns how many leading tokens are in the cache."""
        return self._cached().unpin(*self._place(prompt, adapter, options))

    def _cached(self) -> RadixCache:
        if self.cache is None:
            remedy = 'make the LLM with cache="lru"'
            raise InputError("cache is off, so nothing can be pinned", field="cache", remedy=remedy)
        return self.cache

    def _place(
        self, prompt: Prompt, adapter: str | None, options: Mapping[str, object]
    ) -> tuple[tuple[Hashable, ...], NDArray[np.int32]]:
        request = self._request(prompt, None, adapter, options)
        return self.engine.namespace_of(request), request.tokens


def check_threshold(sharing: str, threshold: float) -> None:
    """Raises InputError for a sharing_threshold that is no share, or is given with another sharing than auto."""
    field = "sharing_threshold"
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        remedy = 'give "auto", or a number above 0 and at most 1'
        raise InputError(f"sharing_threshold is {threshold!r}", field=field, remedy=remedy)
    if sharing != "auto":
        message = f"sharing_threshold says when prefixes are shared, and sharing is {sharing!r} in any case"
        raise InputError(message, field=field, remedy='leave one of them out, or use sharing "auto"')


def cache_options(cache: CacheOptions | str) -> CacheOptions | None:
    """Returns the options that the argument `cache` stands for; None for "off". Raises InputError for other words."""
    if isinstance(cache, CacheOptions):
        return cache
    if cache not in ("off", *POLICIES):
        remedy = f"use off, {', '.join(POLICIES)}, or CacheOptions"
        raise InputError(f"cache is {cache!r}", field="cache", remedy=remedy)
    return None if cache == "off" else CacheOptions(policy=cache)  # type: ignore[arg-type]


def tell(line: str) -> None:
    """Prints what takes long enough that a person wonders, such as a download, on standard error."""
    print(f"prefold: {line}", file=sys.stderr, flush=True)
