"""The command line.

python -m launcher run -n 4 train.py --steps 10
python -m launcher run -n 4 -m package.module
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from launcher import start
from launcher.errors import LaunchError, TargetError
from launcher.job import LOOPBACK, Job, Target, new_launch_id

USAGE_CODE = 2


def parser() -> argparse.ArgumentParser:
    """The options are few on purpose, and held by a test."""
    whole = argparse.ArgumentParser(prog="python -m launcher", allow_abbrev=False)
    commands = whole.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="start a script once per rank", allow_abbrev=False)
    run.add_argument("-n", "--nproc-per-node", default="1", metavar="N", help="ranks on this node")
    run.add_argument(
        "--launcher", default="multiprocessing", metavar="NAME", help="who starts the ranks"
    )
    run.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of nodes")
    run.add_argument("--node-rank", type=int, default=0, metavar="N", help="this node among them")
    run.add_argument(
        "--master-addr", default=LOOPBACK, metavar="ADDRESS", help="where rank 0 listens"
    )
    run.add_argument(
        "--master-port", type=int, default=0, metavar="PORT", help="chosen by launch id if 0"
    )
    run.add_argument("--launch-id", metavar="ID", help="drawn at random if not given")
    run.add_argument("--log-dir", metavar="FOLDER", help="one file per rank and stream")
    run.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end the launch after this time"
    )
    run.add_argument("--bind", action="store_true", help="pin each rank to cores of its own")
    run.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import once, before the ranks",
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help="the script is the name of a module"
    )
    run.add_argument("script", help="what each rank runs")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    return whole


def main(arguments: Sequence[str]) -> int:
    """The exit code: that of the first rank to fail, 128 and its number for a signal, 2 for wrong
    usage.
    """
    options = parser().parse_args(arguments)
    try:
        start.start(_job(options), options.launcher, **_extra(options))
    except LaunchError as error:
        print(f"[launcher] {error}", file=sys.stderr)
        return error.exit_code
    except (TargetError, ValueError) as error:
        print(f"[launcher] {error}", file=sys.stderr)
        return USAGE_CODE
    return 0


def _extra(options: argparse.Namespace) -> dict[str, bool]:
    return {"owns_process": True} if options.launcher == "multiprocessing" else {}


def _job(options: argparse.Namespace) -> Job:
    return Job(
        Target("module" if options.module else "script", options.script),
        args=tuple(options.arguments),
        nprocs=int(options.nproc_per_node),
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        launch_id=options.launch_id or new_launch_id(),
        log_dir=options.log_dir,
        timeout_s=options.timeout,
        bind=options.bind,
        preload=tuple(options.preload),
    )
