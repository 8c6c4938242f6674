"""The command line: run the conformance check of a backend.

python -m communicator check --backend ./libvendor.so -n 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from communicator import conformance
from communicator.errors import Unsupported
from launcher import LaunchError, launch
from launcher.cli import CommandParser, VersionAction

PROG = "python -m communicator"
CONFORMING, NOT_CONFORMING, CANNOT_RUN = 0, 1, 2
EPILOG = "exit codes: 0 the backend conforms; 1 it does not; 2 it cannot run, or wrong usage"


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The options are few on purpose, and held by a test."""
    top = CommandParser(prog=prog)
    top.add_argument("--version", action=VersionAction, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    check = commands.add_parser("check", help="run the conformance check", epilog=EPILOG)
    check.add_argument(
        "--backend", metavar="NAME", help="a name, or the path of a library; default: the best"
    )
    ranks_help = "ranks; default: %(default)s"
    check.add_argument("-n", dest="nprocs", type=num_ranks, default=2, metavar="N", help=ranks_help)
    check.add_argument(
        "--launcher",
        metavar="NAME",
        default="multiprocessing",
        help="what starts the ranks, as `drumline run --launcher`; default: %(default)s",
    )
    check.add_argument(
        "--markdown", action="store_true", help="print a table of the results, for a page of them"
    )
    return top


def main(arguments: Sequence[str], prog: str = PROG) -> int:
    """Print every case of the check. 0 if the backend conforms, 1 if not, 2 if it cannot run."""
    options = parser(prog).parse_args(arguments)
    try:
        arguments_of_rank = (options.backend, options.markdown)
        results = launch(
            report_on_rank, options.nprocs, launcher=options.launcher, args=arguments_of_rank
        )
    except LaunchError as error:
        print(error, file=sys.stderr)
        return NOT_CONFORMING
    except ValueError as error:  # no such launcher, or one that cannot start here
        print(f"{prog}: {error}", file=sys.stderr)
        return CANNOT_RUN
    text, code = results[0]
    print(text, file=sys.stderr if code == CANNOT_RUN else sys.stdout)
    return int(code)


def num_ranks(text: str) -> int:
    """A number of ranks. Raises ValueError, which argparse turns into wrong usage."""
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} ranks")
    return number


def report_on_rank(backend: str | None, as_table: bool = False) -> tuple[str, int]:
    """The report as text or as a table, and the exit code. Collective."""
    try:
        report = conformance.check_backend(backend)
    except Unsupported as error:
        return str(error), CANNOT_RUN
    text = "\n".join([*map(str, report.having(conformance.PASSED)), str(report)])
    return report.table() if as_table else text, CONFORMING if report.ok else NOT_CONFORMING
