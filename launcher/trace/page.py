"""A trace as an HTML page of its own, which any browser opens without another program or host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.trace.plot import COLOURS
from launcher.trace.recorder import rank_name
from launcher.trace.summary import spans_by_thread

TEMPLATE = Path(__file__).with_name("trace_page.html")


def write_page(trace: dict[str, Any], page: Path) -> None:
    """Write the page. Raises ValueError for a trace without spans, OSError if it cannot."""
    threads = spans_by_thread(trace)
    if not threads:
        raise ValueError("the trace has no spans, so there is nothing to show")
    start = min(span.event["ts"] for spans in threads.values() for span in spans)
    rows = [
        {
            "name": rank_name(rank) + f", thread {thread}" * bool(thread),
            "spans": [
                {
                    "name": span.event["name"],
                    "kind": span.kind,
                    "ts": span.event["ts"] - start,
                    "dur": span.event["dur"],
                    "args": span.event.get("args", {}),
                }
                for span in spans
            ],
        }
        for (rank, thread), spans in threads.items()
    ]
    data = json.dumps({"rows": rows, "colours": COLOURS}).replace("<", "\\u003c")
    page.write_text(TEMPLATE.read_text().replace("/*DATA*/", data))
