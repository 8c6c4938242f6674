"""Metrics of a server for Prometheus.

metrics = ServerMetrics(scheduler)
metrics.observe_response("/v1/completions", 200)
body = metrics.exposition()
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from drumline.serving.scheduler import Scheduler

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class SchedulerCollector(Collector):  # type: ignore[misc]
    """The scheduler's own counts, read when somebody asks for the metrics."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler = self.scheduler
        yield CounterMetricFamily(
            "drumline_new_tokens", "Generated tokens.", value=scheduler.num_new_tokens
        )
        yield CounterMetricFamily(
            "drumline_restarts",
            "Times that the ranks were restarted.",
            value=scheduler.num_restarts,
        )
        for name, text, value in (
            ("requests_running", "Sequences in a batch now.", scheduler.num_running),
            ("requests_waiting", "Sequences in the queue now.", scheduler.num_waiting),
            ("ranks_missing", "Ranks that did not come up again.", scheduler.num_missing_ranks),
            ("largest_batch", "Most sequences of one batch so far.", scheduler.largest_batch),
        ):
            yield GaugeMetricFamily(f"drumline_{name}", text, value=value)


class ServerMetrics:
    """Counters and latencies of one server, in a registry of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SchedulerCollector(scheduler))
        self._responses = Counter(
            "drumline_requests",
            "HTTP responses by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "drumline_prompt_tokens", "Tokens of finished prompts.", registry=self.registry
        )
        self._first_token_s = self._latency("first_token", "Seconds to the first token.")
        self._request_s = self._latency("request", "Seconds to the last token.")

    def _latency(self, name: str, text: str) -> Histogram:
        name = f"drumline_{name}_seconds"
        return Histogram(name, text, buckets=BUCKETS_S, registry=self.registry)

    def observe_response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def observe_completion(
        self, prompt_tokens: int, first_token_s: float, request_s: float
    ) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token_s.observe(first_token_s)
        self._request_s.observe(request_s)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format, of the type CONTENT_TYPE."""
        return bytes(generate_latest(self.registry))
