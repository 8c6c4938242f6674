"""Records the work of each pipeline stage, and its waits, for a trace or a viewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import launcher


def trace_stage(stage: Any) -> None:
    """Note each program that this rank runs, and its waits for the stage before it."""
    for viewer in _viewers(stage.ring):
        viewer.follow(stage, {"_reply": "stage"}, "work", stage=stage.rank)
        viewer.follow(stage.ring, {"receive": "wait for the stage before"}, "wait")


def trace_driver(model: Any, driver: Any) -> None:
    """Note each pass of the model, and the master's waits for what it has sent round the ring."""
    for viewer in _viewers(driver.ring):
        viewer.follow(model, {"forward": "stage"}, "work", stage=0)
        viewer.follow(driver, {"exchange": "wait for the other stages"}, "wait")


def _viewers(ring: Any) -> Sequence[launcher.Recorder | launcher.LiveCalls]:
    """The viewer for those who look; and the recorder of a traced launch, which is closed with the
    ring."""
    recorder, close = launcher.recorder(ring.coor.info), ring.close
    if recorder is None:
        return [ring.coor.live_calls]

    def both(*how: Any) -> None:
        close(*how)
        recorder.close()

    ring.close = both
    return [ring.coor.live_calls, recorder]
