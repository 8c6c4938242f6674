"""The state of a server as its page shows it: layers, load, ranks, requests.

report = StatusReport(model.device_map, scheduler, peers)
report.sample()
body = report.to_json()
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from coordinator import Peer, RankFailure
from drumline.core.device_map import DeviceMap
from drumline.serving.scheduler import Scheduler

SAMPLE_S, NUM_SAMPLES = 1.0, 180
NUM_LATENCIES = 512  # of the last requests
NUM_REQUESTS = 32  # that are listed
PERCENTILES = (50, 90, 99)


class StatusReport:
    """Collects the load over the last minutes, and describes the server. Thread-safe."""

    def __init__(
        self, device_map: DeviceMap | None, scheduler: Scheduler, peers: Sequence[Peer] = ()
    ) -> None:
        self.device_map, self.peers, self._scheduler = device_map, peers, scheduler
        self.failures: list[RankFailure] = []
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
                "device_map": self.device_map and json.loads(self.device_map.to_json()),
                "ranks": [self._rank(peer) for peer in self.peers],
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

    def _rank(self, peer: Peer) -> dict[str, Any]:
        failed = [failure for failure in self.failures if failure.rank == peer.rank]
        state = "restarting" if self._scheduler.is_restarting else "alive"
        state = failed[0].text if failed else state
        return {"rank": peer.rank, "host": peer.host, "pid": peer.pid, "state": state}

    def _percentiles(self) -> dict[str, dict[str, float]]:
        """Seconds to the first token and to the last, of the last requests."""
        columns = zip(*list(self._latencies), strict=True)
        return {
            name: {f"p{percent}": _percentile(sorted(values), percent) for percent in PERCENTILES}
            for name, values in zip(("first_token_s", "request_s"), columns, strict=False)
        }


def _percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of them do not exceed. values: sorted, not empty."""
    return round(values[max(-(-len(values) * percent // 100) - 1, 0)], 4)
