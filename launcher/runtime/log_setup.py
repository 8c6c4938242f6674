"""Logging of drumline's own processes: the command line and the ranks.

DRUMLINE_LOG_LEVEL=INFO drumline run -n 2 train.py
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from launcher.launch_info import LOG_LEVEL
from launcher.system.shadowing import PACKAGES

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class StderrHandler(logging.StreamHandler[Any]):
    """Prints to standard error as it is then, while the program has no handlers of its own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.addFilter(lambda record: not logging.getLogger().handlers)

    @property
    def stream(self) -> Any:
        return sys.stderr


def configure() -> None:
    """Let the loggers of our layers print, at the level of DRUMLINE_LOG_LEVEL.

    To be called where a process starts that is ours; the root logger is the program's. Raises
    ValueError for a level that does not exist.
    """
    level = os.environ.get(LOG_LEVEL, "").upper()
    if level and level not in LEVELS:
        raise ValueError(f"{LOG_LEVEL}={level:.99} is not a level: set one of {', '.join(LEVELS)}")
    for name in PACKAGES:
        logger = logging.getLogger(name)
        if level:
            logger.setLevel(level)
        if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
            logger.addHandler(StderrHandler())
