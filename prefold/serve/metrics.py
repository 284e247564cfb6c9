"""The metrics for Prometheus, with vLLM's names and prefold's prefix, and the access log, which has a line for each
request without prompts, answers and keys."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..engine.meter import StepInfo
from ..report.page import merged
from ..types import GenerationStats

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
log = logging.getLogger("prefold.serve")


disable_created_metrics()  # series of creation times, which are of no use


def hits_of(stats: GenerationStats) -> int:
    """Returns how many tokens of prompts were computed before they were needed, or for another request's step."""
    return stats.first_admission_hits + stats.in_step_hits + stats.cross_window_hits


class Metrics:
    """A Metrics counts requests; the counts of the engine are read when metrics are scraped.

    handler  returns the RequestHandler; None until the model is loaded
    """

    def __init__(self, handler: Callable[[], Any]):
        self._handler = handler
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prefold:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"prefold:{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

        self.requests = counter("http_requests", "Requests, by face, path and status.", "face", "path", "status")
        self.seconds = histogram("e2e_request_latency", "From a request to its whole answer.")
        self.first = histogram("time_to_first_token", "From a request to its first text.")
        self.between = histogram("inter_token_latency", "Between two pieces of a text.")
        self.queue = histogram("request_queue_time", "From a request to its first step.")
        tokens = "Tokens of prompts that were continued, by tenant."
        self.prefix_queries = counter("prefix_cache_queries", tokens, "tenant")
        self.prefix_hits = counter("prefix_cache_hits", "Those of them that were there already, by tenant.", "tenant")
        help_copied = "Those that were copied from other positions, by tenant."
        self.approximate = counter("approximate_tokens", help_copied, "tenant")
        self.lag = histogram("event_loop_lag", "By how much the event loop is late.")
        self.cancelled = counter("requests_cancelled", "Requests whose client left.")
        self.registry.register(self)

    def answered(self, dialect: str, path: str, response: Any) -> Any:
        """Counts a request by its response, and returns that."""
        self.requests.labels(dialect, path, response.status_code).inc()
        if response.status_code == 499:
            self.cancelled.inc()
        return response

    def prompt(self, tenant: str | None, result: Mapping[str, Any]) -> None:
        """Counts the tokens of a prompt that was continued, by the result of its item."""
        note(completion=result["num_generated"])
        self.prefix_queries.labels(tenant or "").inc(result["num_tokens"])
        self.prefix_hits.labels(tenant or "").inc(result["cached_tokens"])
        self.approximate.labels(tenant or "").inc(result.get("approximate_tokens", 0))

    def log(self, error: Exception) -> None:
        """Writes an error of the server to its log, without anything of the request."""
        log.error("a request failed", exc_info=error)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """Yields what the engine counts; prometheus-client calls it."""
        handler = self._handler()
        if handler is None:
            return
        waiting, waiting_tokens = handler.backpressure.waiting
        gauges = {
            "num_requests_running": ("Requests that are being computed.", handler.backpressure.running),
            "num_requests_waiting": ("Requests that wait to be computed.", waiting),
            "num_tokens_waiting": ("Tokens of the prompts that wait.", waiting_tokens),
        }
        now = handler.engine.snapshot()
        stats = now.stats
        counts = {
            "prompt_and_generation_tokens": ("Tokens as users see them.", stats.tokens),
            "unique_rows": ("Rows of the streams: unique tokens.", stats.unique_tokens),
            "rows_computed": ("Rows that went through the model.", stats.rows_computed),
            "steps": ("Forward passes.", stats.steps),
            "tower_runs": ("Images that were encoded.", stats.tower_runs),
        }
        if stats.generation is not None:
            texts = stats.generation
            counts |= {
                "generation_tokens": ("Tokens generated.", texts.generated_tokens),
                "num_preemptions": ("Sequences taken out because memory was full.", texts.preemptions),
            }
            share = now.used_slots / max(1, now.slots)
            gauges["kv_cache_usage_perc"] = ("Share of the KV store that is in use, 0 to 1.", share)
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"prefold:{name}", meaning, value)
        for name, (meaning, value) in counts.items():
            yield CounterMetricFamily(f"prefold:{name}", meaning, value)
        parts = CounterMetricFamily(
            "prefold:engine_seconds", "Seconds of the engine's parts, which may overlap.", labels=["part"]
        )
        for part, seconds in list(stats.seconds.items()):
            parts.add_metric([part], seconds)
        if stats.generation is not None and now.cache_seconds is not None:
            parts.add_metric(["cache"], now.cache_seconds)
        yield parts


LONGEST_PATH = 200
LEFT = 499  # nginx's status for a client that left before its response was completely sent
_access_log = logging.getLogger("prefold.access")
_notes: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


def note(**counts: int) -> None:
    """Adds token counts to the access log's line for the present request."""
    if (notes := _notes.get()) is not None:
        for name, count in counts.items():
            notes[name] = notes.get(name, 0) + count


def log_refusal(status: int) -> None:
    """Logs a request that was refused before its path was read."""
    _access_log.info("access method=- path=- status=%d tenant=- ms=- prompt_tokens=- completion_tokens=-", status)


class AccessLog:
    """An AccessLog is an ASGI application that logs each request of another application after its response."""

    def __init__(self, app: Any):
        self._app = app

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
            tenant = scope.get("tenant")
            _access_log.info(
                "access method=%s path=%s status=%d tenant=%s ms=%.0f prompt_tokens=%s completion_tokens=%s",
                scope["method"],
                quote(scope["raw_path"], safe="/%:@!$&'()*+,;=~")[:LONGEST_PATH],  # no line of the client's making
                status if is_whole else LEFT,
                "-" if tenant is None else json.dumps(tenant),
                1e3 * (time.perf_counter() - started_at),
                notes.get("prompt", "-"),
                notes.get("completion", "-"),
            )


STEPS, SHOWN_SECONDS, BINS = 4096, 300.0, 240


class StepWatch:
    """A StepWatch records the last steps of an engine: (start, seconds, 1, rows, path rows, running sequences)."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS)

    def note(self, step: StepInfo) -> None:
        """Records a step."""
        self._steps.append((step.started_at, step.seconds, 1, step.rows, step.path_rows, step.running))

    def bins(self) -> list[list[float]]:
        """Returns the steps of the last minutes, with neighbours merged; their start is relative to now, in seconds."""
        now = time.perf_counter()
        steps = np.array([step for step in list(self._steps) if step[0] > now - SHOWN_SECONDS]).reshape(-1, 6)
        steps[:, 0] -= now
        return [[float(f"{value:.6g}") for value in entry] for entry in merged(steps, BINS).tolist()]
