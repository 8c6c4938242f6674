"""torchrun without its report of failed ranks: our launcher reports each failure once.

python -m launcher.external.torchrun_main FOLDER OPTIONS... -m launcher.external.rank_main ...
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from pathlib import Path

from launcher.system import stop_signals


def main(folder: str, *arguments: str) -> int:
    """The exit code. A rank that has left no record in FOLDER is reported as torchrun does."""
    # Until torchrun has its own handlers, the stop signals end this process: there is no rank yet,
    # and KeyboardInterrupt in the middle of an import is nothing to show.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop_signals.unblock()
    torchrun = importlib.import_module("torch.distributed.run")
    multiprocessing = importlib.import_module("torch.distributed.elastic.multiprocessing")
    logging.disable(logging.ERROR)  # its lines on ranks that failed, or are ended for it
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except multiprocessing.errors.ChildFailedError as error:
        if not all(Path(folder, f"{rank}.json").exists() for rank in error.failures):
            print(error.format_msg(), file=sys.stderr)
        return 1
    except multiprocessing.SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
