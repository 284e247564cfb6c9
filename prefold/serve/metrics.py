"""What Prometheus is told: vLLM's names with our prefix, and the rows that prefold is about."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..types import GenerationStats
from .access import note

if TYPE_CHECKING:
    from .site import Site

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_log = logging.getLogger("prefold.serve")


disable_created_metrics()  # series of the times at which others began


def hits_of(stats: GenerationStats) -> int:
    """Returns how many tokens of prompts had been computed, or were in the same step, when they were needed."""
    return stats.first_admission_hits + stats.in_step_hits + stats.cross_window_hits


class Metrics:
    """Counts what happens to requests; what the engine counts is read when somebody asks."""

    def __init__(self, site: Site):
        self._site = site
        self.registry = CollectorRegistry()
        place: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "prefold:http_requests", "Requests, by face, path and status.", ["face", "path", "status"], **place
        )
        self.seconds = Histogram(
            "prefold:e2e_request_latency_seconds", "From a request to its whole answer.", buckets=_SECONDS, **place
        )
        self.first = Histogram(
            "prefold:time_to_first_token_seconds", "From a request to its first text.", buckets=_SECONDS, **place
        )
        self.between = Histogram(
            "prefold:inter_token_latency_seconds", "Between two pieces of a text.", buckets=_SECONDS, **place
        )
        self.queue = Histogram(
            "prefold:request_queue_time_seconds", "From a request to its first step.", buckets=_SECONDS, **place
        )
        self.prefix_queries = Counter(
            "prefold:prefix_cache_queries", "Tokens of prompts that were continued, by tenant.", ["tenant"], **place
        )
        self.prefix_hits = Counter(
            "prefold:prefix_cache_hits", "Those of them that were there already, by tenant.", ["tenant"], **place
        )
        self.approximate = Counter(
            "prefold:approximate_tokens", "Those that were copied from other positions, by tenant.", ["tenant"], **place
        )
        self.lag = Histogram(
            "prefold:event_loop_lag_seconds", "By how much the event loop is late.", buckets=_SECONDS, **place
        )
        self.cancelled = Counter("prefold:requests_cancelled", "Requests whose client left.", **place)
        self.registry.register(self)  # type: ignore[arg-type]

    def answered(self, face: str, path: str, response: Any) -> Any:
        """Counts a request by its response, and returns that."""
        self.requests.labels(face, path, response.status_code).inc()
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
        _log.error("a request failed", exc_info=error)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """Yields what the engine counts; prometheus-client calls it."""
        desk = self._site.desk
        if desk is None:
            return
        waiting, waiting_tokens = desk.room.waiting
        gauges = {
            "num_requests_running": ("Requests that are being computed.", desk.room.running),
            "num_requests_waiting": ("Requests that wait to be computed.", waiting),
            "num_tokens_waiting": ("Tokens of the prompts that wait.", waiting_tokens),
        }
        now = desk.engine.snapshot()
        stats = now.stats
        counts = {
            "prompt_and_generation_tokens": ("Tokens as users see them.", stats.tokens),
            "unique_rows": ("Rows of the streams: unique tokens.", stats.unique_tokens),
            "rows_computed": ("Rows that went through the model.", stats.rows_computed),
            "steps": ("Forward passes.", stats.steps),
            "tower_runs": ("Images that were encoded.", stats.tower_runs),
        }
        if stats.generation is not None:
            found = stats.generation
            counts |= {
                "generation_tokens": ("Tokens generated.", found.generated_tokens),
                "num_preemptions": ("Sequences taken out because memory was full.", found.preemptions),
            }
            used = now.used_slots / max(1, now.slots)
            gauges["kv_cache_usage_perc"] = ("Share of the KV store that is in use, 0 to 1.", used)
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"prefold:{name}", what, value)
        for name, (what, value) in counts.items():
            yield CounterMetricFamily(f"prefold:{name}", what, value)
        parts = CounterMetricFamily(
            "prefold:engine_seconds", "Seconds of the engine's parts, which may overlap.", labels=["part"]
        )
        for part, seconds in list(stats.seconds.items()):
            parts.add_metric([part], seconds)
        if stats.generation is not None and now.cache_seconds is not None:
            parts.add_metric(["cache"], now.cache_seconds)
        yield parts
