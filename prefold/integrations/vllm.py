"""A replica whose engine is vLLM's `AsyncLLM`. It receives token ids and generates tokens.

If the installed vLLM can publish the events of its prefix cache, the router follows them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from ..cluster.backends import Backend
from ..cluster.replicas import AsyncHost, ReplicaFacts, ReplicaReport, RunCall, cannot_ask, generation_stats
from ..engine.cache import CacheEvents
from ..engine.cache.events import CacheEvent, EventLog, RowsRemoved, RowsStored
from ..errors import InputError, JobError, MissingExtraError
from ..spec.job import JobSpec
from ..spec.requests import Generated, Namespace, Request, Sampling, Stats, TokenLogprobs
from ..spec.task import not_sent, sent_names
from ..trie import MEDIA_BASE, shared_by

# Fields of Sampling with the same name in vLLM.
_SAME = (*sent_names("openai", "vllm", "set"), "logprobs")
_GRAMMARS = {"json_schema": "json", "regex": "regex", "choice": "choice"}


def import_vllm() -> Any:
    """Return the module vllm. Raise MissingExtraError if it is not installed."""
    # Do not bind threads to cores: several replicas, or this process, would be bound to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
        import vllm.sampling_params
    except ImportError:
        raise MissingExtraError("vllm", "vllm", "vLLM as a replica") from None
    return vllm


def sampling_params(sampling: Sampling, with_text: bool, room: int) -> Any:
    """Return vLLM's SamplingParams. Raise InputError for features that vLLM lacks, and for values that it refuses.

    Args:
        room: number of tokens that fit after the prompt
    """
    vllm = import_vllm()
    for name in not_sent(sampling):
        raise lacks(name)
    grammar, structured = sampling.grammar, None
    if grammar is not None:
        if not with_text:
            raise lacks("a grammar for tokens without text")
        if grammar.kind == "json":
            settings: dict[str, Any] = {"json_object": True}
        elif grammar.kind in _GRAMMARS:
            settings = {_GRAMMARS[grammar.kind]: json.loads(grammar.text) if grammar.kind == "choice" else grammar.text}
        else:
            raise lacks("grammar")
        settings |= {"disable_any_whitespace": True} if grammar.compact and grammar.kind.startswith("json") else {}
        structured = settings
    values = {name: getattr(sampling, name) for name in _SAME}
    values["seed"] = None if sampling.seed is None else sampling.seed & ((1 << 63) - 1)
    try:
        return vllm.SamplingParams(
            **values,
            max_tokens=max(1, room) if sampling.max_tokens is None else sampling.max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_ids),
            logit_bias=dict(sampling.logit_bias) or None,
            structured_outputs=structured and vllm.sampling_params.StructuredOutputsParams(**structured),
            detokenize=with_text,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
    except ValueError as error:  # by vLLM's rules: n above 1 at temperature 0, top_p 0, more tokens than fit
        raise refused("the sampling options", "sampling", error) from error


def generated(sample: Any, with_text: bool, cached: int, num_logprobs: int) -> Generated:
    """Return a sample of vLLM as a Generated, without the token that ended it."""
    tokens = tuple(int(token) for token in sample.token_ids)
    has_ended = sample.finish_reason == "stop" and not isinstance(sample.stop_reason, str)
    logprobs = None
    if sample.logprobs is not None:
        pairs = zip(tokens, sample.logprobs, strict=False)
        logprobs = tuple(_logprobs(token, candidates, num_logprobs) for token, candidates in pairs)
    if has_ended:
        tokens, logprobs = tokens[:-1], None if logprobs is None else logprobs[: len(tokens) - 1]
    reason: Any = "stop" if sample.finish_reason == "stop" else "length"
    return Generated(tokens, sample.text if with_text else None, reason, sample.stop_reason, cached, logprobs)


def _logprobs(token: int, candidates: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Return the TokenLogprobs of vLLM's candidates: the `count` most likely tokens, and the chosen token."""
    best = sorted((entry.rank, id, entry.logprob) for id, entry in candidates.items() if entry.rank <= count)
    top = tuple((int(id), float(value)) for _, id, value in best)
    return TokenLogprobs(float(candidates[token].logprob), top)


def refused(part: str, field: str, error: Exception) -> InputError:
    """Return the error for a part of a request that vLLM refuses."""
    message = f"vLLM refused {part} ({type(error).__name__}: {error!s:.300})"
    return InputError(message, field=field, remedy="change it as vLLM's message says", code="vllm")


def lacks(feature: str) -> InputError:
    return cannot_ask("vLLM", feature, "with prefold (without --backend vllm)")


_SECONDS_TO_REPLAY = 2.0
_END_OF_REPLAY = (1 << 64) - 1
# The guard reads until the end of its input, which comes when the process that writes to it has ended.
_GUARD = """
import os, signal, sys
sys.stdin.read()
for pid in map(int, sys.argv[1].split()):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class VllmHost(AsyncHost):
    """A replica that runs windows on vLLM.

    Args:
        model: a folder, or a name that vLLM knows
        options: fields of vLLM's AsyncEngineArgs; `max_num_seqs` also limits the backlog
        caching: whether vLLM's prefix cache is on

    Raises:
        MissingExtraError: vLLM is not installed
        JobError: vLLM does not have one of the options
        Exception: vLLM cannot load the model; the error is vLLM's
    """

    def __init__(self, model: str, options: Mapping[str, Any], *, caching: bool = True):
        vllm = import_vllm()
        super().__init__("prefold-vllm")
        self._vllm = vllm
        self._folder = Path(tempfile.mkdtemp(prefix="prefold-vllm-"))
        self._events = _EventSockets(self._folder) if caching else None
        self._number = 0  # number of the last request
        try:
            arguments = self._engine_arguments(model, options, caching)
            before = {child.pid for child in psutil.Process().children(recursive=True)}
            self._engine = self._spawn(self._open(arguments)).result()
            self._guard = _guarded([c.pid for c in psutil.Process().children(recursive=True) if c.pid not in before])
        except BaseException:
            self._stop()
            raise
        config = self._engine.vllm_config
        self._longest = config.model_config.max_model_len
        running = config.scheduler_config.max_num_seqs
        # Requests wait in vLLM so that they can start at once when several running requests end together.
        self._most = running + max(8, running // 4)
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        identity = {"vllm": vllm.__version__, "weights": _digest(model), "dtype": dtype}
        rows = config.scheduler_config.max_num_batched_tokens
        cache = getattr(config, "cache_config", None)
        slots = (getattr(cache, "num_gpu_blocks", 0) or 0) * (getattr(cache, "block_size", 0) or 0)
        self.facts = ReplicaFacts(
            identity, rows, running, dtype=dtype, cache_rows=slots, reports_cache=caching, steps_overlap=True
        )

    def _engine_arguments(self, model: str, options: Mapping[str, Any], caching: bool) -> Any:
        arguments: dict[str, Any] = {"model": model, "enable_prefix_caching": caching, "disable_log_stats": True}
        if self._events is not None:
            from vllm.config.kv_events import KVEventsConfig

            arguments["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=self._events.endpoint,
                replay_endpoint=self._events.replay_endpoint,
            )  # fmt: skip
        if not _has_tokenizer(model):
            arguments["skip_tokenizer_init"] = True
        fields = self._vllm.AsyncEngineArgs.__dataclass_fields__
        for name in options:
            if name not in fields:
                raise JobError(f"vLLM {self._vllm.__version__} has no option {name!r}; see its AsyncEngineArgs")
        return self._vllm.AsyncEngineArgs(**arguments | dict(options))

    async def _open(self, arguments: Any) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(arguments)

    def report_anew(self) -> None:
        if self._events is not None:
            self._events.is_new = True

    def close(self) -> None:
        # Cancel first. Else vLLM's task that waits for answers takes the shutdown for a crash and reports one. If the
        # loop hangs, vLLM must still be shut down, to free its memory for another engine.
        with suppress(TimeoutError):
            self._cancel()
        self._engine.shutdown()
        self._guard.kill()
        self._guard.wait()
        self._stop()
        del self._engine  # now, because at the end of the process its destructor would lack modules that it needs

    def _stop(self) -> None:
        super().close()
        if self._events is not None:
            self._events.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _complete(self, report: ReplicaReport) -> None:
        if self._events is not None:
            report.events = self._events.drain()

    # ------------------------------------------------------------------------------------------ in the event loop's
    # thread

    def _begin(self, call: RunCall | None) -> None:
        super()._begin(call)
        if call is not None and self._events is not None:
            self._events.is_new = True  # the driver of the new run may not know the cached blocks

    def _refusal(self, call: RunCall) -> str:
        if call.readout.kind == "tokens":
            return ""
        return f"vLLM only generates text here, but was asked for {call.readout.kind!r}; leave out --backend"

    def _num_to_ask(self, call: RunCall) -> int:
        return int(len(self._tasks) < self._most)

    async def _ask(self, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        (request,) = requests
        if request.namespace.adapter:
            raise lacks("adapter")
        if int(request.tokens.max()) >= MEDIA_BASE:
            raise lacks("image")
        params = sampling_params(request.sampling or Sampling(), call.text, self._longest - len(request.tokens))
        prompt: dict[str, Any] = {"prompt_token_ids": request.tokens.tolist()}
        if request.namespace.salt:
            prompt["cache_salt"] = request.namespace.salt
        self._number += 1
        output = None
        try:
            async for latest in self._engine.generate(prompt, params, str(self._number), priority=-request.priority):
                output = latest
        except Exception as error:
            if self._engine.errored:
                raise RuntimeError(f"vLLM has died: {error}") from error
            raise refused("the prompt", "prompt", error) from error
        assert output is not None
        cached = min(output.num_cached_tokens or 0, len(request.tokens))
        samples = [generated(sample, call.text, cached, params.logprobs or 0) for sample in output.outputs]
        num_generated = sum(len(sample.token_ids) for sample in output.outputs)
        return [samples], generation_stats(len(request.tokens), num_generated, cached)


class _EventSockets:
    """prefold's ends of the two sockets for the events of vLLM's cache: live events, and replays on request."""

    def __init__(self, folder: Path):
        import zmq

        self.endpoint, self.replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/again"
        self.is_new = False
        self.blocks = BlockEvents(time.time_ns())
        self._zmq, self._context = zmq, zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)

    def drain(self) -> CacheEvents | None:
        """Return the events since the last call, or None."""
        while self._socket.poll(0):
            _, number, message = self._socket.recv_multipart()
            self._take(int.from_bytes(number, "big"), message)
        if self.is_new:
            self.is_new = False
            self.blocks.tell_anew()
        return self.blocks.drain()

    def _take(self, number: int, message: bytes) -> None:
        if self.blocks.take(number, message):
            return
        for earlier, again in self._ask_again(self.blocks.next_message):
            self.blocks.take(earlier, again)
        if not self.blocks.take(number, message):
            self.blocks.skip_to(number)
            self.blocks.take(number, message)

    def _ask_again(self, first: int) -> list[tuple[int, bytes]]:
        """Return the messages from number `first` on that vLLM still stores."""
        zmq, messages = self._zmq, []
        socket = self._context.socket(zmq.REQ)
        try:
            socket.connect(self.replay_endpoint)
            socket.send(first.to_bytes(8, "big"))
            while socket.poll(int(1000 * _SECONDS_TO_REPLAY)):
                *_, number, message = socket.recv_multipart()
                if int.from_bytes(number, "big") == _END_OF_REPLAY:
                    break
                messages.append((int.from_bytes(number, "big"), message))
        finally:
            socket.close(0)
        return messages

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


_OLD_FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")  # of events that are lists


@dataclass(slots=True)
class _Block:
    """A cached block, or the record of a removed block that has later blocks."""

    after: Hashable | None
    tokens: np.ndarray
    namespace: Hashable
    copies: int = 0  # 0: removed
    behind: int = 0  # number of blocks that follow it

    @property
    def head(self) -> Hashable:
        """Return the key that blocks share if they start with the same row."""
        return self.after, self.namespace, int(self.tokens[0])


class BlockEvents:
    """The blocks of a vLLM engine's cache. It translates changes into the router's events.

    A message is msgpack of [time, events, ...] with a number. Events are BlockStored, BlockRemoved and
    AllBlocksCleared. vLLM does not merge equal blocks: a hash that was stored twice exists until it was removed twice.
    Two blocks that follow the same block may share their first tokens, but the router's runs do not share rows. When
    such a block is removed, another block with the shared rows is reported again.

    Args:
        epoch: number of the engine's first epoch; larger after a restart. A gap in the messages starts a new epoch
    """

    def __init__(self, epoch: int = 0):
        self.next_message = 0
        self._epoch, self._log = epoch, EventLog(epoch)
        self.blocks: dict[Hashable, _Block] = {}
        self.alike: dict[Hashable, dict[Hashable, None]] = {}  # names of cached blocks, by `_Block.head`

    def take(self, number: int, message: bytes) -> bool:
        """Process a message of vLLM. Return False, and do nothing, if messages before it are missing.

        The caller then processes those first, or calls `skip_to`.
        """
        if number < self.next_message:
            return True  # it was processed before
        if number > self.next_message:
            return False
        self.next_message = number + 1
        for event in _decoded(message):
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self._clear()
            elif event.get("group_idx") not in (None, 0):
                continue  # all groups of a hybrid model have the hashes of the first group
            elif kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                for name in event["block_hashes"]:
                    self._remove(name)
        return True

    def skip_to(self, number: int) -> None:
        """Skip to a later message and forget all blocks, because the missing messages may have changed them."""
        self.next_message = number
        self._clear()

    def drain(self) -> CacheEvents | None:
        """Return the events since the last call, or None."""
        return self._log.drain()

    def tell_anew(self) -> None:
        """Start a new epoch, whose first events report all blocks, for a driver that knows none of them."""
        self._begin_epoch()
        # The dict has each block after the block that it follows, because removed blocks stay while others follow them.
        for name, block in self.blocks.items():
            self._log.add(RowsStored(name, block.after, block.tokens, block.namespace))
        for name, block in self.blocks.items():
            if not block.copies:
                self._log.add(*self._removal(name, block))

    def _clear(self) -> None:
        self.blocks, self.alike = {}, {}
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._log.begin(self._epoch)

    def _store(self, event: dict[str, Any]) -> None:
        names, size, after = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        if len(event["token_ids"]) != len(names) * size:
            return  # some of its blocks are not cached
        if after is not None and (after not in self.blocks or not self.blocks[after].copies):
            return  # the block that they follow was not reported
        tokens = np.array(event["token_ids"], np.int32).reshape(len(names), size)
        keys = (event.get("extra_keys") or [None])[0]
        namespace = _namespace(event.get("lora_name"), keys) if after is None else ()
        for name, block_tokens in zip(names, tokens, strict=True):
            block = self.blocks.get(name)
            if block is None:
                block = self.blocks[name] = _Block(after, block_tokens, namespace)
                if after is not None:
                    self.blocks[after].behind += 1
            block.copies += 1
            if block.copies == 1:
                self.alike.setdefault(block.head, {})[name] = None
                self._log.add(RowsStored(name, after, block_tokens, namespace))
            after, namespace = name, ()

    def _remove(self, name: Hashable) -> None:
        block = self.blocks.get(name)
        if block is None or not block.copies:
            return
        block.copies -= 1
        if block.copies:
            return
        del self.alike[block.head][name]
        if not self.alike[block.head]:
            del self.alike[block.head]
        self._log.add(*self._removal(name, block))
        removed: Hashable | None = name
        while removed is not None and not (block := self.blocks[removed]).copies and not block.behind:
            del self.blocks[removed]
            removed = block.after
            if removed is not None:
                self.blocks[removed].behind -= 1

    def _removal(self, name: Hashable, block: _Block) -> list[CacheEvent]:
        """Return the events of a removal. Rows that the block shares with another block stay."""
        events: list[CacheEvent] = [RowsRemoved(name)]
        others = self.alike.get(block.head)
        if others:
            tokens = block.tokens.tobytes()
            other = max(others, key=lambda other: shared_by(tokens, self.blocks[other].tokens.tobytes()))
            twin = self.blocks[other]
            events += [RowsRemoved(other), RowsStored(other, twin.after, twin.tokens, twin.namespace)]
        return events


def _namespace(adapter: str | None, keys: Any) -> Namespace:
    """Return the namespace of a first block. The salt is the text among the extra keys of its hash."""
    texts = [key for key in keys or () if isinstance(key, str)]
    if adapter is not None and adapter in texts:
        texts.remove(adapter)
    return Namespace(adapter or "", texts[0] if texts else "")


def _decoded(message: bytes) -> list[dict[str, Any]]:
    events = msgspec.msgpack.decode(message)[1]
    return [event if isinstance(event, dict) else dict(zip(_OLD_FIELDS, event, strict=False)) for event in events]


def _guarded(pids: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that kills these processes after the current one has ended, because vLLM's do not notice it."""
    numbers = " ".join(map(str, pids))
    command = [sys.executable, "-P", "-c", _GUARD, numbers]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _has_tokenizer(model: str) -> bool:
    """Return False for a folder without a tokenizer, else True."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def _digest(model: str) -> str:
    from ..checkpoint.identity import folder_digest

    return folder_digest(Path(model)) if Path(model).exists() else model


class _Vllm(Backend):
    """The backend whose replicas are `VllmHost`s."""

    where = "in vLLM"
    takes = frozenset({"backend_option", "tokenizer"})

    def refusal(self, spec: JobSpec) -> str:
        option = "--adapter" if spec.model.adapters else "--sharing mlp" if spec.model.sharing == "mlp" else ""
        return option and f"vLLM cannot be asked for {option}; leave it out, or leave out --backend vllm"

    def tokenizer(self, spec: JobSpec) -> str | None:
        return spec.fleet.tokenizer or spec.model_name

    def options(self, spec: JobSpec) -> dict[str, Any]:
        model = spec.model
        engine = {
            "dtype": model.dtype,
            "tensor_parallel_size": model.tensor_parallel,
            # vLLM's own default depends on the machine.
            "max_num_seqs": model.max_running if "max_running" in spec.given else None,
            "max_num_batched_tokens": model.max_batch_rows,
            "kv_cache_memory_bytes": model.kv_memory,
            "tokenizer": spec.fleet.tokenizer,
        }
        asked = {name: value for name, value in engine.items() if value is not None}
        place = {"device": model.device, "tensor_parallel": model.tensor_parallel}
        place |= {} if model.threads is None else {"threads": model.threads}
        return place | {"engine": asked | spec.fleet.backend_options, "caching": model.sharing != "off"}

    def host(self, model: str, options: Mapping[str, Any]) -> VllmHost:
        return VllmHost(model, options["engine"], caching=options["caching"])


VLLM = _Vllm()
