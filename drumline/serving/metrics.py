"""Numbers of a server, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Histogram:
    """How many durations were at most each of BOUNDS_S."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def lines(self, name: str) -> list[str]:
        found, below = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            below += count
            found.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*found, f"{name}_sum {self.total_s:g}", f"{name}_count {below}"]


class Metrics:
    """What is counted here, and what others count, who are asked when somebody reads.

    Those whose names end in _total are counters, the others gauges.
    """

    def __init__(self, others: dict[str, Callable[[], float]]) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._first, self._whole = Histogram(), Histogram()

    def requested(self, path: str, status: int) -> None:
        with self._lock:
            self._requests[path, status] += 1

    def answered(self, prompt_tokens: int, first_s: float, whole_s: float) -> None:
        """A request, and when its first token came and its last."""
        with self._lock:
            self._prompt_tokens += prompt_tokens
            self._first.add(first_s)
            self._whole.add(whole_s)

    def text(self) -> str:
        with self._lock:
            lines = ["# TYPE drumline_requests_total counter"]
            lines += [
                f'drumline_requests_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._requests.items())
            ]
            lines.append("# TYPE drumline_prompt_tokens_total counter")
            lines.append(f"drumline_prompt_tokens_total {self._prompt_tokens}")
            for name, held in (("first_token", self._first), ("request", self._whole)):
                lines.append(f"# TYPE drumline_{name}_seconds histogram")
                lines += held.lines(f"drumline_{name}_seconds")
        for name, ask in self._others.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE drumline_{name} {kind}", f"drumline_{name} {ask()}"]
        return "\n".join([*lines, ""])
