"""Metrics for Prometheus, with vLLM's names, labels and buckets and the prefix `prefold:`, and the access log. The
access log has one line per request, and never contains prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter as TallyCounter
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .. import __version__
from ..engine.handles import Handle
from ..engine.meter import StepInfo
from ..jobs.report.page import merged
from ..spec.requests import Generated, GenerationStats, shown
from ..tasks.results import Generation

# vLLM's buckets in seconds: the time of a request, until its first token, and between two tokens. Some buckets below
# vLLM's lowest are added for small models.
_REQUEST = (
    0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)  # fmt: skip
_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
_BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
# vLLM's buckets: the tokens of a request, and the tokens of a step.
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM's names for why a request ended: a stop, max_tokens, a client that disconnected, an error.
_REASONS = ("stop", "length", "abort", "error")
log = logging.getLogger("prefold.serve")


disable_created_metrics()  # nothing reads the series of creation times


def hits_of(stats: GenerationStats) -> int:
    """Return how many prompt tokens were already computed, or shared with another prompt of the same step."""
    return stats.first_admission_hits + stats.in_step_hits + stats.cross_window_hits


class Sizes:
    """A histogram of whole numbers. Noting one is cheap, because buckets are made when metrics are scraped."""

    def __init__(self, name: str, text: str, bounds: Sequence[int], registry: CollectorRegistry):
        self._name, self._text, self._bounds = name, text, bounds
        self._counts: TallyCounter[int] = TallyCounter()  # {number: occurrences}
        registry.register(self)

    def note(self, *sizes: int) -> None:
        """Count these numbers."""
        self._counts.update(sizes)

    def collect(self) -> Iterator[Any]:
        """Yield the histogram. prometheus-client calls this."""
        counts = sorted(self._counts.copy().items())
        sizes = np.array([size for size, _ in counts], np.int64)
        totals = np.cumsum([0, *(count for _, count in counts)])
        below = totals[np.searchsorted(sizes, self._bounds, side="right")]
        buckets = [(floatToGoString(bound), int(total)) for bound, total in zip(self._bounds, below, strict=True)]
        total = sum(size * count for size, count in counts)
        yield HistogramMetricFamily(self._name, self._text, [*buckets, ("+Inf", int(totals[-1]))], total)


class Metrics:
    """The metrics of a server. The engine's own counts are read when metrics are scraped.

    Args:
        handler: returns the RequestHandler; None until the model is loaded
    """

    def __init__(self, handler: Callable[[], Any]):
        self._handler = handler
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, processor time, open files

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prefold:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _REQUEST) -> Histogram:
            return Histogram(f"prefold:{name}_seconds", text, buckets=buckets, registry=self.registry)

        def sizes(name: str, text: str, bounds: Sequence[int] = _TOKENS) -> Sizes:
            return Sizes(f"prefold:{name}", text, bounds, self.registry)

        self.requests = counter("http_requests", "Requests by API, path and status.", "face", "path", "status")
        self.seconds = histogram("e2e_request_latency", "Time from a request to its complete answer.")
        self.first = histogram("time_to_first_token", "Time from a request to its first token.", _FIRST)
        self.between = histogram("inter_token_latency", "Time between two pieces of a streamed text.", _BETWEEN)
        self.queue = histogram("request_queue_time", "Time from a request to its first step.")
        help_prefill = "Time from a prompt's first step to its first token or its answer."
        self.prefill = histogram("request_prefill_time", help_prefill)
        self.decode = histogram("request_decode_time", "Time from the first token of a text to the last.")
        help_each = "Average time between two tokens of a text."
        self.each_token = histogram("request_time_per_output_token", help_each, _BETWEEN)
        self.success = counter("request_success", "Prompts that ended, by finish reason.", "finished_reason")
        for reason in _REASONS:
            self.success.labels(reason)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of answered prompts.")
        self.prompt_sizes = sizes("request_prompt_tokens", "Tokens of a prompt.")
        self.text_sizes = sizes("request_generation_tokens", "Tokens generated for a prompt.")
        help_longest = "Tokens of the longest text generated for a prompt."
        self.longest_sizes = sizes("request_max_num_generation_tokens", help_longest)
        self.step_sizes = sizes("iteration_tokens_total", "Rows of a step.", _STEP_TOKENS)
        tokens = "Prompt tokens of generation requests, by tenant."
        self.prefix_queries = counter("prefix_cache_queries", tokens, "tenant")
        help_hits = "Prompt tokens of generation requests that were cached, by tenant."
        self.prefix_hits = counter("prefix_cache_hits", help_hits, "tenant")
        help_copied = "Prompt tokens that were copied from other positions, by tenant."
        self.approximate = counter("approximate_tokens", help_copied, "tenant")
        self.lag = histogram("event_loop_lag", "Delay of the event loop.")
        self.cancelled = counter("requests_cancelled", "Requests whose client disconnected.")
        self.registry.register(self)

    def answered(self, dialect: str, path: str, response: Any) -> Any:
        """Count a request by its response, and return the response."""
        self.requests.labels(dialect, path, response.status_code).inc()
        if response.status_code == 499:
            self.cancelled.inc()
        return response

    def continued(self, handle: Handle, samples: Sequence[Generated], answer: Generation) -> None:
        """Count a prompt for which texts were generated.

        Args:
            samples: the texts
            answer: to the prompt's item
        """
        tenant, longest = handle.owner.tenant, max(len(sample.tokens) for sample in samples)
        note(completion=answer.num_generated)
        self.prefix_queries.labels(tenant or "").inc(answer.num_tokens)
        self.prefix_hits.labels(tenant or "").inc(answer.cached_tokens)
        self.approximate.labels(tenant or "").inc(answer.approximate_tokens or 0)
        self.prompt_tokens.inc(answer.num_tokens)
        self.prompt_sizes.note(answer.num_tokens)
        self.text_sizes.note(answer.num_generated)
        self.longest_sizes.note(longest)
        for sample in samples:
            self.success.labels(sample.finish_reason).inc()
        if handle.first_at is not None:
            seconds = time.perf_counter() - handle.first_at
            self.decode.observe(seconds)
            if longest > 1:
                self.each_token.observe(seconds / (longest - 1))

    def read(self, sizes: Sequence[int]) -> None:
        """Count prompts with numeric read-outs.

        Args:
            sizes: the number of tokens of each prompt
        """
        self.prompt_tokens.inc(sum(sizes))
        self.prompt_sizes.note(*sizes)
        self.success.labels("stop").inc(len(sizes))

    def log(self, error: Exception) -> None:
        """Write an error of the server to its log, without any content of the request."""
        log.error("a request failed", exc_info=error)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, with vLLM's labels for model and engine."""
        handler = self._handler()
        labels = {} if handler is None else {"model_name": handler.names[0], "engine": "0"}

        class Labelled(Collector):
            def collect(self) -> Iterator[Any]:
                for family in registry.collect():
                    family.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]
                    yield family

        registry = self.registry
        return generate_latest(Labelled())

    def collect(self) -> Iterator[Any]:
        """Yield the engine's counts. prometheus-client calls this."""
        handler = self._handler()
        build = GaugeMetricFamily("prefold:build_info", "The version of prefold.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        if handler is None:
            return
        waiting, waiting_tokens = handler.backpressure.waiting
        gauges = {
            "num_requests_running": (
                "Requests that are being computed or about to be.",
                handler.backpressure.running,
            ),
            "num_requests_waiting": ("Requests that wait to be computed.", waiting),
            "num_tokens_waiting": ("Prompt tokens of the requests that wait.", waiting_tokens),
        }
        now = handler.engine.snapshot()
        stats = now.stats
        counts = {
            "prompt_and_generation_tokens": ("Tokens of prompts and of generated texts.", stats.tokens),
            "unique_rows": ("Rows of the streams: unique tokens.", stats.unique_tokens),
            "rows_computed": ("Rows that the model computed.", stats.rows_computed),
            "steps": ("Forward passes.", stats.steps),
        }
        counts |= {counter.name: (counter.metric, count) for counter, count in shown(stats) if counter.metric}
        if stats.generation is not None:
            texts = stats.generation
            counts |= {
                "generation_tokens": ("Tokens generated.", texts.generated_tokens),
                "num_preemptions": ("Sequences preempted because the KV store was full.", texts.preemptions),
            }
            share = now.used_slots / max(1, now.slots)
            gauges["kv_cache_usage_perc"] = ("Used share of the KV store, 0 to 1.", share)
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"prefold:{name}", meaning, value)
        for name, (meaning, value) in counts.items():
            yield CounterMetricFamily(f"prefold:{name}", meaning, value)
        parts = CounterMetricFamily(
            "prefold:engine_seconds", "Seconds by part of the engine. Parts may overlap.", labels=["part"]
        )
        for part, seconds in list(stats.seconds.items()):
            parts.add_metric([part], seconds)
        if stats.generation is not None and now.cache_seconds is not None:
            parts.add_metric(["cache"], now.cache_seconds)
        yield parts


LONGEST_PATH = 200
LEFT = 499  # nginx's status for a client that disconnected before its response was completely sent
PROBES = ("/health", "/healthz", "/livez", "/metrics", "/ping", "/readyz")
_FIELDS = ("method", "path", "status", "tenant", "ms", "prompt_tokens", "completion_tokens", "request_id")
_access_log = logging.getLogger("prefold.access")
_notes: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


def note(**counts: int) -> None:
    """Add token counts to the access log's line for the present request."""
    if (notes := _notes.get()) is not None:
        for name, count in counts.items():
            notes[name] = notes.get(name, 0) + count


class AccessLog:
    """An ASGI application that logs each request of another application after its response."""

    def __init__(self, app: Any, *, as_json: bool = False, probes: bool = True):
        """Wrap an application.

        Args:
            as_json: whether a line is a JSON object
            probes: whether requests for health and metrics are logged
        """
        self._app, self._as_json, self._left_out = app, as_json, () if probes else PROBES

    def refused(self, status: int) -> None:
        """Log a request that was refused before its path was read."""
        self._write(status=status)

    def _write(self, **known: Any) -> None:
        """Write a line. An unknown field is "-", in JSON null."""
        fields = dict.fromkeys(_FIELDS) | known
        if self._as_json:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            _access_log.info("%s", json.dumps({"time": now} | fields, ensure_ascii=False))
            return
        if fields["tenant"] is not None:
            fields["tenant"] = json.dumps(fields["tenant"])
        line = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
        _access_log.info("access %s", line)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, is_whole, started_at, notes = 0, False, time.perf_counter(), dict[str, Any]()

        async def sent(message: Any) -> None:
            nonlocal status, is_whole
            await send(message)
            status = message.get("status", status)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        token = _notes.set(notes)
        try:
            await self._app(scope, receive, sent)
        finally:
            _notes.reset(token)
            if scope["path"] not in self._left_out or 400 <= status < 500:
                path = quote(scope["raw_path"], safe="/%:@!$&'()*+,;=~")  # a path must not add lines to the log
                self._write(
                    method=scope["method"],
                    path=path[:LONGEST_PATH],
                    status=status if is_whole else LEFT,
                    tenant=scope.get("tenant"),
                    ms=round(1e3 * (time.perf_counter() - started_at)),
                    prompt_tokens=notes.get("prompt"),
                    completion_tokens=notes.get("completion"),
                    request_id=scope.get("request_id"),
                )


STEPS, SHOWN_SECONDS, BINS = 4096, 300.0, 240


class StepWatch:
    """The last steps of an engine, as (start, seconds, 1, rows, path rows, running sequences)."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS)

    def note(self, step: StepInfo) -> None:
        self._steps.append((step.started_at, step.seconds, 1, step.rows, step.path_rows, step.running))

    def bins(self) -> list[list[float]]:
        """Return the steps of the last minutes.

        Neighbours are merged, and start times are relative to now, in seconds.
        """
        now = time.perf_counter()
        steps = np.array([step for step in list(self._steps) if step[0] > now - SHOWN_SECONDS]).reshape(-1, 6)
        steps[:, 0] -= now
        return [[float(f"{value:.6g}") for value in entry] for entry in merged(steps, BINS).tolist()]
