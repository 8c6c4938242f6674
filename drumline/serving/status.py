"""The state of a server as its page shows it: layers, load, ranks, requests.

report = StatusReport(scheduler)
report.sample()
body = report.to_json()
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import numpy as np

from drumline.serving.scheduler import Scheduler

SAMPLE_S, NUM_SAMPLES = 1.0, 180
NUM_LATENCIES = 512  # of the last requests
NUM_REQUESTS = 32  # that are listed
PERCENTILES = (50, 90, 99)


class StatusReport:
    """Collects the load over the last minutes, and describes the server. Thread-safe."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self._latencies: deque[tuple[float, float]] = deque(maxlen=NUM_LATENCIES)
        self._began_s = self._sampled_s = time.monotonic()
        self._num_tokens = scheduler.num_new_tokens

    def sample(self) -> None:
        """Note the load since the last sample, if that was SAMPLE_S ago."""
        now = time.monotonic()
        if (elapsed_s := now - self._sampled_s) < SAMPLE_S:
            return
        num_tokens, scheduler = self._scheduler.num_new_tokens, self._scheduler
        rate = round((num_tokens - self._num_tokens) / elapsed_s, 2)
        counts = {name: getattr(scheduler, name) for name in ("num_running", "num_waiting")}
        self._samples.append({"tokens_per_s": rate, **counts})
        self._sampled_s, self._num_tokens = now, num_tokens

    def observe(self, first_token_s: float, request_s: float) -> None:
        """Note the latencies of a request that has ended."""
        self._latencies.append((first_token_s, request_s))

    def to_json(self) -> str:
        """The description, for the page's script."""
        return json.dumps(
            {
                "uptime_s": round(time.monotonic() - self._began_s, 1),
                "device_map": self._scheduler.device_map,
                "ranks": [self._rank(peer) for peer in self._scheduler.peers],
                "samples": list(self._samples),
                "latency": self._percentiles(),
                "requests": [
                    {
                        "prompt": len(item.prompt),
                        "new": len(item.new_tokens),
                        "of": item.params.max_tokens,
                        "is_running": is_running,
                    }
                    for item, is_running in self._scheduler.unfinished()[:NUM_REQUESTS]
                ],
            }
        )

    def _rank(self, peer: dict[str, Any]) -> dict[str, Any]:
        usual = "restarting" if self._scheduler.is_restarting else "alive"
        failed = (each.text for each in self._scheduler.failures if each.rank == peer["rank"])
        return {**peer, "state": next(failed, usual)}

    def _percentiles(self) -> dict[str, dict[str, float]]:
        """Seconds to the first token and to the last, of the last requests."""
        columns = zip(*list(self._latencies), strict=True)
        return {
            name: {
                f"p{n}": round(float(np.percentile(values, n, method="inverted_cdf")), 4)
                for n in PERCENTILES
            }
            for name, values in zip(("first_token_s", "request_s"), columns, strict=False)
        }
