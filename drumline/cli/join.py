"""`drumline join ADDRESS`: run on this machine what the first machine of a launch runs.

The first one says what that is only to whoever has proved the token of the launch, and is obeyed
only once it has proved it: so whoever has the token may have this machine run a command. That is
why --insecure is not for this command.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import launcher
from launcher import LaunchError
from launcher.cli import USAGE_CODE, CommandParser, endpoint_of, parse, run_command, token_to_join

JOINABLE = ("run", "serve", "generate", "auto")  # the commands that start ranks on several machines
EPILOG = """\
exit codes: 1 the launch could not be joined; 2 wrong usage; otherwise those of the command that the
first machine runs"""


def parser(prog: str = "drumline") -> argparse.ArgumentParser:
    top = CommandParser(prog=prog)
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    text = "run here what the first machine of a launch runs"
    join = commands.add_parser("join", help=text, description=text, epilog=EPILOG)
    join.add_argument(
        "address",
        type=endpoint_of,
        metavar="ADDRESS[:PORT]",
        help="of the first machine, as it printed it",
    )
    ranks = "ranks on this machine, as its command takes them; default: as many as on the first"
    join.add_argument("-n", "--ranks", metavar="N", help=ranks)
    number = "the index of this machine, from 1 on; default: as they come"
    join.add_argument("--node-rank", type=int, default=-1, metavar="N", help=number)
    token = "file with the token that the first machine has, which only you can read; default: the "
    token += "variable DRUMLINE_TOKEN, or a prompt"
    join.add_argument("--token-file", metavar="FILE", help=token)
    return top


def main(arguments: Sequence[str], prog: str = "drumline") -> int:
    """The exit code of the command that the first machine runs, run here as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parser(prog).parse_args(arguments)
    try:
        joined = _joined(options, prog)
    except LaunchError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return USAGE_CODE
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    if hasattr(joined, "nproc_per_node"):  # of the launcher's own command
        return run_command(joined, prog)
    from drumline import cli  # which imports this module, by name

    return cli.run_command(joined, prog)


def _joined(options: argparse.Namespace, prog: str) -> argparse.Namespace:
    """The options of the first machine's command, in this one's place."""
    from drumline import cli

    token = token_to_join(options)
    place = launcher.ask_to_join(options.address, token, options.node_rank)
    print(f"[launcher] {place}", file=sys.stderr, flush=True)
    words = list(place.command)
    if words[:1] == ["run"]:
        joined = parse(words, prog)
        _check_script(joined)
        joined.nproc_per_node = options.ranks or joined.nproc_per_node
        joined.rdzv_endpoint = None
    elif words[:1] and words[0] in JOINABLE:
        joined = cli.parser(prog).parse_args(words)
        joined.ranks = _number(options.ranks or joined.ranks)
    else:
        raise ValueError(
            f"the first machine runs {' '.join(words[:1]) or 'a program of its own'}, which is "
            "not a command that can be joined; start its ranks here as there."
        )
    joined.command_line, joined.token = place.command, token
    joined.node_rank, joined.nnodes = place.node_rank, place.nnodes
    joined.master_addr, joined.master_port = options.address
    return joined


def _number(ranks: str | int) -> int:
    if not str(ranks).isdecimal() or int(ranks) == 0:
        raise ValueError(f"-n {ranks}: not a number of ranks, and nothing was started")
    return int(ranks)


def _check_script(joined: argparse.Namespace) -> None:
    if not joined.module and not Path(joined.script).exists():
        raise ValueError(
            f"the first machine runs {joined.script}, and from {Path.cwd()} there is no such file "
            "on this one, so nothing was started. Copy it here, or change into its folder, and "
            "type the same again."
        )
