"""Metrics of a server for Prometheus, also by the names that dashboards of vLLM read.

metrics = ServerMetrics(scheduler, "llama")
metrics.responses.labels("/v1/completions", "200").inc()
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

VLLM_NAMES = {
    "drumline_finished_choices": "vllm:request_success",
    "drumline_first_token_seconds": "vllm:time_to_first_token_seconds",
    "drumline_new_tokens": "vllm:generation_tokens",
    "drumline_pool_usage": "vllm:kv_cache_usage_perc",
    "drumline_prompt_tokens": "vllm:prompt_tokens",
    "drumline_request_seconds": "vllm:e2e_request_latency_seconds",
    "drumline_requests_running": "vllm:num_requests_running",
    "drumline_requests_waiting": "vllm:num_requests_waiting",
    "drumline_token_gap_seconds": "vllm:inter_token_latency_seconds",
}
"""By the name here, that of the same metric of `vllm serve`."""


class ServerMetrics(Collector):  # type: ignore[misc]
    """Counters and latencies of one server, in a registry of its own."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self.registry, self._scheduler = CollectorRegistry(), scheduler
        self._labels = {"model_name": model}
        text = "HTTP responses by path and status."
        self.responses = self._counter("requests", text, "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of finished prompts.")
        text = "Answers by the reason of their end."
        self.finished = self._counter("finished_choices", text, "finished_reason")
        self.first_token_s = self._latency("first_token", "Seconds to the first token.")
        self.request_s = self._latency("request", "Seconds to the last token.")
        self.token_gap_s = self._latency("token_gap", "Seconds between two tokens.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"drumline_{name}", text, labels, registry=self.registry)

    def _latency(self, name: str, text: str) -> Histogram:
        name = f"drumline_{name}_seconds"
        return Histogram(name, text, buckets=BUCKETS_S, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics, and those of VLLM_NAMES once more, with vLLM's label of the model."""
        families = [*self._counts(), *self.registry.collect()]
        yield from families
        for family in families:
            if name := VLLM_NAMES.get(family.name):
                metric = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    labels = {**sample.labels, **self._labels}
                    suffix = sample.name.removeprefix(family.name)
                    metric.samples.append(sample._replace(name=name + suffix, labels=labels))
                yield metric

    def _counts(self) -> Iterator[Metric]:
        """The scheduler's own counts, read when somebody asks for the metrics."""
        now, counter, gauge = self._scheduler, CounterMetricFamily, GaugeMetricFamily
        for kind, name, text, value in (
            (counter, "new_tokens", "Generated tokens.", now.num_new_tokens),
            (counter, "restarts", "Times that the ranks were restarted.", now.num_restarts),
            (gauge, "requests_running", "Sequences in a batch now.", now.num_running),
            (gauge, "requests_waiting", "Sequences in the queue now.", now.num_waiting),
            (gauge, "pool_usage", "Share of the pages that sequences have.", now.pool_usage),
            (gauge, "ranks_missing", "Ranks that did not come up again.", now.num_missing_ranks),
            (gauge, "largest_batch", "Most sequences of one batch so far.", now.largest_batch),
        ):
            yield kind(f"drumline_{name}", text, value=value)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format, of the type CONTENT_TYPE."""
        return bytes(generate_latest(self))
