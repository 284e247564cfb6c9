"""LLM: a loaded model. Its methods for tasks are in `prefold.api`."""

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
    """A loaded model, ready for all tasks.

    Args:
        model: Hub id, local Hugging Face folder, .gguf file, built-in name (see `prefold models`), or Checkpoint.
        tokenizer: The checkpoint's tokenizer, if it is already loaded; None: load it.
        media: Table that assigns ids to image rows, if prompts are made before the LLM; None: make one.
        **options: The options below, such as dtype, device, threads, cache and adapters. Options of looped models and
            of images are mappings: looped={"exits": "save"}, images={"mmproj": FILE}.

    Raises:
        CheckpointError: The model cannot be found or read.
        UnsupportedModelError: prefold does not support the model. This is a CheckpointError.
        OutOfMemoryError: The model does not fit in memory; see the option `layerwise`.
        ForkedError: This process was forked from a process that had made an LLM.
        InputError: An argument is wrong.

    Example:
        >>> llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", dtype="float32")
        >>> llm.generate("The capital of France is", max_tokens=3).text
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
        # Arguments are checked before anything is downloaded or started.
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
        # For summaries: the executor of a forward pass, the formats of weights and K/V, and the choice of positions.
        rounded = "" if o.kv_dtype == "auto" else f"K/V in {o.kv_dtype}"
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
        """What results depend on besides the requests, as JSON.

        This is the model's files, the dtype, the adapters, and the options `arithmetic`, `kv_dtype` and `invariant` if
        they differ from their defaults.
        """
        loaded = {name: folder_digest(Path(folder)) for name, folder in (self.options.adapters or {}).items()}
        settings = {"dtype": self.dtype, "adapters": loaded}
        defaults = {"arithmetic": "float", "kv_dtype": "auto", "invariant": False}
        rare = {name: (getattr(self.options, name), default) for name, default in defaults.items()}
        settings |= {name: value for name, (value, default) in rare.items() if value != default}
        return {"model": model_identity(self.checkpoint), **settings}

    def close(self) -> None:
        """Stop the engine's thread and the processes of a split model. The LLM cannot be used afterwards.

        `with LLM(...) as llm:` closes the LLM at the end of the block.

        Example:
            >>> llm.close()
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
        """Counters of all calls so far: requested tokens, computed rows, seconds."""
        return self.engine.stats

    @property
    def cache(self) -> RadixCache | None:
        """The KV cache of earlier calls, or None with cache="off". Its `clear` evicts all rows that are not pinned."""
        return self.engine.cache

    def pin(self, prompt: Prompt, *, adapter: str | None = None, **options: Unpack[GenerationKeywords]) -> int:
        """Keep the computed K/V of a prompt in the cache until `unpin`.

        Args:
            prompt: A text, token ids, or a conversation.
            adapter: LoRA adapter that computed the prompt.
            **options: Options that change the rows: `salt`, the options of `chat` that format a prompt, and the options
                of looped models for blocks and exits.

        Returns:
            The number of pinned tokens: the leading tokens of the prompt that are in the cache. 0 if no call has
            computed any of them.

        Raises:
            InputError: There is no cache, or the prompt is wrong.

        Example:
            >>> llm.pin("You are a helpful assistant.")
        """
        return self._cached().pin(*self._place(prompt, adapter, options))

    def unpin(self, prompt: Prompt, *, adapter: str | None = None, **options: Unpack[GenerationKeywords]) -> int:
        """Undo a `pin` with the same arguments, so that its K/V may be evicted again.

        Returns:
            The number of leading tokens that the pin covered.

        Raises:
            InputError: There is no cache, or the prompt is wrong.

        Example:
            >>> llm.unpin("You are a helpful assistant.")
        """
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


if LLM.__doc__ is not None:  # python -OO removes docstrings
    LLM.__doc__ += f"\n    Options:\n\n{described(ModelSpec)}\n"
    for _group, _kind in GROUPS.items():
        LLM.__doc__ += f"\n    Options of {_group}={{...}}:\n\n{described(_kind)}\n"


def tell(line: str) -> None:
    """Print a line to standard error, before a download for example."""
    print(f"prefold: {line}", file=sys.stderr, flush=True)
