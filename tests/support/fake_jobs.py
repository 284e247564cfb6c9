"""An engine and a task that need no model: every result is a function of the tokens alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from prefold.engine.protocol import EngineFacts, Snapshot
from prefold.errors import InputError
from prefold.spec.requests import Generated, GenerationStats, Readout, Request, Result, Sampling, Stats
from prefold.tasks.base import Inputs, Task, Work
from prefold.tasks.results import Answer, Choice, Generation, Ranking, Relevance
from prefold.trie import LiveInput, LiveWindows
from prefold.trie.live_windows import watched

MAX_TOKENS = 200


def digest(data: bytes) -> float:
    """A number in [0, 1) that a float32 holds exactly."""
    return (zlib.crc32(data) >> 12) / 2**20


def tokens_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FakeAnswer(Relevance):
    embedding: np.ndarray

    @property
    def vectors(self) -> np.ndarray:
        return self.embedding[None]


class FakeTask(Task):
    """One request a text of the item ({"text"} or {"query", "document(s)"}); the result is a score for each."""

    def __init__(self, name: str = "embed", kind: str = "last"):
        self.name = name
        self.readout = Readout(kind)
        self.inputs = Inputs(None)
        self.prepared = 0

    def prepare(self, items: list[dict[str, Any]]) -> list[Work | InputError]:
        self.prepared += len(items)
        return [self._work(item) for item in items]

    def _work(self, item: dict[str, Any]) -> Work | InputError:
        texts = item.get("documents") or [item.get("document", item.get("text"))]
        texts = texts if isinstance(texts, list) else [texts]
        whole = [item.get("query", "") + text for text in texts]
        for i, text in enumerate(whole):
            if not 0 < len(text.encode()) <= MAX_TOKENS:
                name = f"documents[{i}]" if "documents" in item else "document" if "document" in item else "text"
                return InputError(f"{name!r} is too long", field=name, remedy="shorten it", code="too_long")
        note = {"tokens": sum(map(len, whole)), "many": "documents" in item}
        return Work([Request(tokens_of(text)) for text in whole], note)

    def finish(self, note: Any, results: list[Result]) -> Answer:
        scores = np.array([float(result.values[0]) for result in results])
        if note["many"]:
            return Ranking(scores, np.argsort(-scores, kind="stable").tolist(), num_tokens=note["tokens"])
        return FakeAnswer(float(scores[0]), note["tokens"], embedding=results[0].values)


class FakeGenerateTask(FakeTask):
    """One request an item; the result is its text, and what `FakeEngine.run` says of it."""

    def __init__(self, **sampling: Any):
        super().__init__("generate", "tokens")
        self.sampling = Sampling(**sampling)
        self.context = 1000

    def _work(self, item: dict[str, Any]) -> Work | InputError:
        work = super()._work({"text": item["prompt"]})
        if isinstance(work, InputError):
            return work
        return Work([Request(work.requests[0].tokens, sampling=self.sampling)], work.note)

    def finish(self, note: Any, results: list[list[Generated]]) -> Generation:
        (samples,) = results
        choice = Choice(text=samples[0].text, finish_reason="stop")
        return Generation((choice,), num_tokens=note["tokens"], num_generated=len(samples[0].tokens))


@dataclass
class Step:
    rows: int
    path_rows: int
    requests_done: int
    tokens_done: int
    started_at: float
    seconds: float
    running: int = 0


class FakeEngine:
    """Yields each request's digest, a window at a time in three steps; `before` is called with every request."""

    def __init__(self, sharing: str = "full", before: Any = None):
        self.facts = EngineFacts(sharing, max_rows=4096)  # type: ignore[arg-type]
        self.stats = Stats()
        self.before = before
        self.closed = 0
        self.is_ready = True

    def snapshot(self) -> Snapshot:
        return Snapshot(self.stats, is_ready=self.is_ready)

    def count(self, **counts: int) -> None:
        self.stats += Stats(**counts)

    def reset_stats(self) -> Stats:
        self.stats, before = Stats(), self.stats
        return before

    def run(
        self,
        windows: Any,
        readout: Readout,
        tokenizer: Any = None,
        *,
        on_step: Any = None,
        stopping: Any = None,
    ) -> Iterator[tuple[bytes, Result | list[Generated] | InputError]]:
        """Of text each prompt again, with its seed behind it; a prompt with "bad" in it cannot be run."""
        live = None
        if isinstance(source := windows, LiveInput):
            most, shares = min(source.max_tokens, 2 * 4096), self.facts.sharing == "full"
            options = {"share": shares, "stopping": stopping}
            live = LiveWindows(source.feed, max_tokens=source.max_tokens, most=most, **options)  # type: ignore[arg-type]
            windows = watched(live, source.see)
        try:
            for window in filter(None, windows):
                if stopping is not None and stopping():
                    return
                for i, (tag, result) in enumerate(self._window(window, on_step, stopping)):
                    if live is not None:
                        live.num_answered += 1
                    if readout.kind != "tokens":
                        yield tag, result
                        continue
                    request = window.request(i)
                    text = request.tokens.astype(np.uint8).tobytes().decode()
                    self.stats.generation = self.stats.generation or GenerationStats()
                    self.stats.generation.generated_tokens += 1
                    if "bad" in text:
                        yield tag, InputError("the grammar is wrong", field="grammar", code="bad_grammar")
                    else:
                        yield tag, [Generated((1,), f"{text}/{request.sampling.seed}", "length")]
        finally:
            self.closed += 1

    def _window(self, window: Any, on_step: Any, stopping: Any) -> Iterator[tuple[bytes, Result]]:
        count = len(window.tags)
        self.stats.tokens += len(window.tokens)
        self.stats.requests += count
        self.stats.unique_tokens += window.unique_tokens
        for group in np.array_split(np.arange(count), 3):
            if not len(group) or (stopping is not None and stopping()):
                continue
            tokens = int(window.offsets[group[-1] + 1] - window.offsets[group[0]])
            rows = window.unique_tokens * len(group) // count
            self.stats.rows_computed += rows
            self.stats.steps += 1
            if on_step:
                on_step(Step(rows, 1, len(group), tokens, self.stats.steps * 0.5, 0.4))
            done = []  # a step gives all its results at once
            for i in group:
                if self.before:
                    self.before(i)
                text = window.tokens[window.offsets[i] : window.offsets[i + 1]].astype(np.uint8).tobytes()
                done.append((window.tags[i], Result(np.array([digest(text), 0.5], np.float32))))
            yield from done


def fake_llm(**options: Any) -> Any:
    return SimpleNamespace(engine=FakeEngine(**options))
