"""Makes a model ready to run, as an LLM. The methods that run it are in `face/`."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from .api.arguments import Prompt
from .api.keywords import GenerationKeywords, ModelKeywords
from .api.numbers import NumericTasks
from .api.running import check_process
from .api.texts import Texts
from .checkpoint import Checkpoint, resolve
from .checkpoint.identity import folder_digest, model_identity
from .engine import EngineOptions, ModelEngine
from .engine.cache import RadixCache
from .engine.schedule.parts import settle_options
from .errors import InputError, warn_caller
from .model import config_from
from .model.machine import check_kv_dtype, choose_device, choose_dtype
from .spec.fields import described
from .spec.model import GROUPS, ModelSpec, model_options
from .spec.requests import Stats
from .tasks.kept import open_kept
from .tasks.make import end_ids, own_adapters
from .text import Tokenizer, tokenizer_or_none
from .worker.loading import load

__all__ = ["LLM"]


class LLM(NumericTasks, Texts):
    """An LLM is a model that is loaded and ready to run.

    model      hub id, local Hugging Face folder, .gguf file, a built-in name (`prefold models`), or a Checkpoint
    tokenizer  the checkpoint's tokenizer, where it has been loaded already; None: it is loaded here
    media      gives the rows of images their ids, where prompts are made before the LLM; None: a table of its own
    options    the fields of ModelSpec: dtype, device, threads, sharing, max_batch_rows, kv_memory, cache, adapters,
               tensor_parallel, ..., of which a list stands below. Those of looped models, and of images, are given in
               mappings: looped={"exits": "save"}, images={"mmproj": FILE}

    Raises CheckpointError where the model cannot be found or read, UnsupportedModelError (a CheckpointError) where
    prefold cannot run it, OutOfMemoryError if it does not fit (see layerwise), ForkedError in a process forked from one
    that made an LLM, and InputError for a wrong argument. `stats` adds up over all calls.
    """

    def __init__(
        self,
        model: str | Checkpoint = "smollm2-135m",
        *,
        tokenizer: Tokenizer | None = None,
        media: Any = None,
        **options: Unpack[ModelKeywords],
    ):
        super().__init__()
        check_process()
        self.options = o = model_options(options)
        self.device = choose_device(o.device)
        # Nothing is downloaded, started or set before the arguments were looked at.
        if not isinstance(model, Checkpoint):
            source: dict[str, Any] = {"revision": o.revision, "load_format": o.load_format, "mmproj": o.images.mmproj}
            model = resolve(model, **source, notify=tell)
        self.checkpoint = model.within(o.context_length)
        self.tokenizer = tokenizer_or_none(self.checkpoint) if tokenizer is None else tokenizer
        self.options = o = replace(o, adapters=own_adapters(self.checkpoint, self.tokenizer, o.adapters) or None)
        self.dtype = choose_dtype(o.dtype, self.checkpoint.config, self.device)
        o = settle_options(o, self.identity)
        config = config_from(self.checkpoint.config)
        config = config if o.images.tower else config.text
        if o.kv_dtype != "auto":
            check_kv_dtype(self.dtype, self.device)
            config = replace(config, kv_dtype=o.kv_dtype)
        config = replace(config, invariant=o.invariant)
        self._loaded = load(self.checkpoint, config, o, self.tokenizer, dtype=self.dtype, device=self.device)
        self.model, self.config, self.worker = self._loaded.model, self._loaded.config, self._loaded.worker
        self.executor = self._loaded.executor
        # In words, what computes a forward pass, how weights and K/V lie in memory, and how positions are chosen.
        rounded = "" if o.kv_dtype == "auto" else f"keys and values are kept in {o.kv_dtype}"
        self.passes = "; ".join(filter(None, (self._loaded.passes, rounded, self.config.chosen_positions)))
        eos_ids = end_ids(self.checkpoint, self.tokenizer, self.config.vocab_size)
        hosts = o.images.allow_media_host
        self.images = self.config.image_inputs(self.checkpoint, self.tokenizer, media, hosts=hosts)
        table = media if self.images is None else self.images.table
        resources = () if table is None else (table,)
        self.engine = ModelEngine(self.worker, EngineOptions.of(o, eos_ids), resources=resources)
        self.kept = open_kept(o, self.checkpoint, self.dtype, self.device, warn_caller)

    @property
    def identity(self) -> dict[str, object]:
        """Returns what the results depend on beside requests, as JSON: the model's files, the dtype, the adapters, and
        the arithmetic and the dtype of keys and values where these are not the dtype."""
        loaded = {name: folder_digest(Path(folder)) for name, folder in (self.options.adapters or {}).items()}
        settings = {"dtype": self.dtype, "adapters": loaded}
        defaults = {"arithmetic": "float", "kv_dtype": "auto", "invariant": False}
        rare = {name: (getattr(self.options, name), default) for name, default in defaults.items()}
        settings |= {name: value for name, (value, default) in rare.items() if value != default}
        return {"model": model_identity(self.checkpoint), **settings}

    def close(self) -> None:
        """Ends the thread that makes the steps, and the processes that hold parts of a split model. Nothing can be
        generated afterwards.

        `with LLM(...) as llm:` closes the LLM at its end.
        """
        self.engine.close()
        if self.kept is not None:
            self.kept.close()
        if self.images is not None:
            self.images.reader.decoder.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config, ranks = self.config, self._loaded.ranks
        split = "" if ranks == 1 else f", {ranks} ranks"
        adapters = ", ".join(self.engine.facts.adapters)
        adapters = adapters and f", adapters {adapters}"
        return (
            f"LLM({self.checkpoint.name!r}: {config.layers} layers of {config.hidden}, context"
            f" {config.max_positions:,}, {self.dtype} on {self.device}{split}{adapters})"
        )

    @property
    def stats(self) -> Stats:
        """Returns the counters of all calls so far: what was asked for, and what was computed."""
        return self.engine.stats

    @property
    def cache(self) -> RadixCache | None:
        """Returns the cache of earlier calls; None where nothing is kept. `clear` removes all that is not pinned."""
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
        """Gives up what `pin` with these arguments keeps, and returns how many leading tokens are in the cache."""
        return self._cached().unpin(*self._place(prompt, adapter, options))

    def _cached(self) -> RadixCache:
        if self.cache is None:
            remedy = 'make the LLM with cache="lru"'
            raise InputError("cache is off, so nothing can be pinned", field="cache", remedy=remedy)
        return self.cache

    def _place(
        self, prompt: Prompt, adapter: str | None, options: Mapping[str, object]
    ) -> tuple[tuple[Hashable, ...], NDArray[np.int32]]:
        return self._cached().place_of(self._request(prompt, None, adapter, options))


if LLM.__doc__ is not None:  # Python leaves docstrings out with -OO
    LLM.__doc__ += f"\n    Options:\n\n{described(ModelSpec)}\n"
    for _group, _kind in GROUPS.items():
        LLM.__doc__ += f"\n    Options of {_group}={{...}}:\n\n{described(_kind)}\n"


def tell(line: str) -> None:
    """Prints a line on standard error before something that takes long, such as a download."""
    print(f"prefold: {line}", file=sys.stderr, flush=True)
