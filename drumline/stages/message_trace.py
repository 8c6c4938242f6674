"""What a traced launch shows of a pipeline: the work of each stage, and what it waits for."""

from __future__ import annotations

from typing import Any

import launcher


def stage(stage: Any) -> None:
    """Note each program that this rank runs, and its waits for the stage before it."""
    noting = _until_closed(stage.ring)
    if noting is not None:
        noting.follow(stage, {"_reply": "stage"}, "work", stage=stage.rank)
        noting.follow(stage.ring, {"receive": "wait for the stage before"}, "wait")


def master(model: Any, session: Any) -> None:
    """Note each pass of the model, and the master's waits for what it has sent round the ring."""
    noting = _until_closed(session.ring)
    if noting is not None:
        noting.follow(model, {"forward": "stage"}, "work", stage=0)
        noting.follow(session, {"exchange": "wait for the other stages"}, "wait")


def _until_closed(ring: Any) -> launcher.Recorder | None:
    """A recorder, if the launch is traced, that is closed with the ring."""
    noting = launcher.recorder(ring.coor.info)
    if noting is not None:
        close = ring.close

        def both(*how: Any) -> None:
            close(*how)
            noting.close()

        ring.close = both
    return noting
