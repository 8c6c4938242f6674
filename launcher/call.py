"""`python -m launcher.call REFERENCE ARGUMENTS FOLDER`: a rank, started by an engine, that runs a
function.

It leaves the result, or the failure, in FOLDER, in a file named after its rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from launcher import detection, seat, target, values


def main(reference: str, arguments: str, folder: str) -> int:
    rank = detection.current().rank
    try:
        record: dict[str, Any] = {"result": target.find(reference)(*values.loads(arguments))}
        code = 0
        text = values.dumps(record)
    except BaseException as error:
        code = seat.exit_code(error)
        text = values.dumps({"failure": {**seat.describe(error), "rank": rank, "pid": os.getpid()}})
        print(seat.own_traceback(error), file=sys.stderr, end="")
    _leave(Path(folder), rank, text)
    return code


def _leave(folder: Path, rank: int, text: str) -> None:
    """A whole file or none, for whoever looks."""
    part = folder / f".{rank}.part"
    part.write_text(text)
    part.rename(folder / f"{rank}.json")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
