"""The command line: does a backend do what a communicator must?

python -m communicator check --backend ./libvendor.so -n 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from communicator import conformance
from communicator.base import Communicator
from communicator.errors import Unsupported
from coordinator import Coordinator
from launcher import LaunchError, launch

PROG = "python -m communicator"
CONFORMING, NOT_CONFORMING, CANNOT_RUN = 0, 1, 2
TIMEOUT_S = 60.0  # of one call: a backend that hangs is told on after this time


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The options are few on purpose, and held by a test."""
    whole = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="run the conformance check", allow_abbrev=False)
    check.add_argument(
        "--backend", metavar="NAME", help="a name, or the path of a library; the best if not given"
    )
    check.add_argument("-n", dest="nprocs", type=count, default=2, metavar="N", help="ranks")
    check.add_argument(
        "--launcher",
        metavar="NAME",
        default="multiprocessing",
        help="who starts the ranks, as in `python -m launcher run`; threads are quickest",
    )
    return whole


def main(arguments: Sequence[str], prog: str = PROG) -> int:
    """Print every case of the check. 0 if the backend conforms, 1 if not, 2 if it cannot run."""
    options = parser(prog).parse_args(arguments)
    try:
        found = launch(rank, options.nprocs, launcher=options.launcher, args=(options.backend,))
    except LaunchError as error:
        print(error, file=sys.stderr)
        return NOT_CONFORMING
    except ValueError as error:  # no such launcher, or one that cannot start here
        print(f"{prog}: {error}", file=sys.stderr)
        return CANNOT_RUN
    text, code = found[0]
    print(text, file=sys.stderr if code == CANNOT_RUN else sys.stdout)
    return int(code)


def count(text: str) -> int:
    """A number of ranks. Raises ValueError, which argparse turns into wrong usage."""
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} ranks")
    return number


def rank(backend: str | None) -> tuple[str, int]:
    """One rank of the check: the report as text, and the exit code."""
    try:
        with Coordinator(timeout_s=TIMEOUT_S) as coor, Communicator(coor, backend) as comm:
            report = conformance.check(comm)
            coor.barrier()  # nobody closes while others still compare
    except Unsupported as error:
        return str(error), CANNOT_RUN
    text = "\n".join([*map(str, report.having(conformance.PASSED)), str(report)])
    return text, CONFORMING if report.ok else NOT_CONFORMING
