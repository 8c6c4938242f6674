"""Records the work of each pipeline stage, and its waits, in a traced launch."""

from __future__ import annotations

from typing import Any

import launcher


def trace_stage(stage: Any) -> None:
    """Note each program that this rank runs, and its waits for the stage before it."""
    recorder = _recorder_closed_with(stage.ring)
    if recorder is not None:
        recorder.follow(stage, {"_reply": "stage"}, "work", stage=stage.rank)
        recorder.follow(stage.ring, {"receive": "wait for the stage before"}, "wait")


def trace_driver(model: Any, driver: Any) -> None:
    """Note each pass of the model, and the master's waits for what it has sent round the ring."""
    recorder = _recorder_closed_with(driver.ring)
    if recorder is not None:
        recorder.follow(model, {"forward": "stage"}, "work", stage=0)
        recorder.follow(driver, {"exchange": "wait for the other stages"}, "wait")


def _recorder_closed_with(ring: Any) -> launcher.Recorder | None:
    """A recorder, if the launch is traced, that is closed with the ring."""
    recorder = launcher.recorder(ring.coor.info)
    if recorder is not None:
        close = ring.close

        def both(*how: Any) -> None:
            close(*how)
            recorder.close()

        ring.close = both
    return recorder
