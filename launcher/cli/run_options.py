"""The options of `run`, and where they end and the script's arguments begin."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launcher import ports, registry
from launcher.authentication import launch_token
from launcher.authentication.launch_token import LaunchToken
from launcher.job import LOOPBACK, Job
from launcher.launch_info import MAX_PORT, number
from launcher.system import host_addresses
from launcher.system.host_addresses import endpoint

OPTIONS_WITHOUT_VALUE = (
    "--", "-h", "--help", "-m", "--module", "--bind", "--dry-run", "--encrypt",
    "--standalone", "--insecure",
)  # fmt: skip
TOKEN_OPTIONS: dict[str, dict[str, str]] = {
    "--token-file": {
        "metavar": "FILE",
        "help": "file with the token of a launch over several nodes, that only you can read; on "
        "the first node a new one is written into a FILE that is not there; default: the variable "
        "DRUMLINE_TOKEN, or the terminal",
    },
    "--insecure": {
        "action": "store_true",
        "help": "let whoever reaches the port of a launch over several nodes become a rank of it",
    },
}
EPILOG = """\
torchrun's spellings are accepted too: --nproc_per_node, --node_rank, --rdzv_endpoint and so on.

exit codes:
  0      every rank ended well
  1-255  that of the rank that failed first; 128 + N if signal N killed it
  2      wrong usage; no rank was started
  124    not over after --timeout
  130    Ctrl-C (143: SIGTERM)

DRUMLINE_LOG_LEVEL=INFO (or DEBUG, WARNING, ERROR) sets what is logged; default: WARNING."""


def add_options(run: argparse.ArgumentParser) -> None:
    """The options of `run`. A test holds the list: they are few on purpose."""
    run.epilog = EPILOG
    run.add_argument(
        "-n",
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="ranks on this node: a number, cpu (one per core), gpu (one per GPU), or auto (gpu if "
        "there is one, otherwise cpu); default: %(default)s",
    )
    launcher_option = run.add_argument(
        "--launcher",
        default="multiprocessing",
        metavar="NAME",
        help=f"{', '.join(registry.BUILT_IN)}, or an installed one; default: %(default)s",
    )
    launcher_option.completer = lambda **_: registry.BUILT_IN  # type: ignore[attr-defined]
    _add_nodes(run)
    run.add_argument(
        "--log-dir", metavar="FOLDER", help="write a file per rank and stream; default: none"
    )
    timeout_help = "end the launch after SECONDS; default: never"
    run.add_argument("--timeout", type=float, metavar="SECONDS", help=timeout_help)
    run.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all ranks again after a failure, at most N times; default: %(default)s",
    )
    run.add_argument("--patience", **PATIENCE_OPTION)
    bind_help = "pin each rank to its own cores; OMP_NUM_THREADS is their number in local launches"
    run.add_argument("--bind", action="store_true", help=bind_help)
    encrypt_help = "encrypt traffic between ranks (not shared memory; NCCL, gloo, MPI cannot)"
    run.add_argument("--encrypt", action="store_true", help=encrypt_help)
    preload_help = "import once, before the ranks are forked; default: by the script; '' for none"
    run.add_argument("--preload", action="append", metavar="MODULE", help=preload_help)
    trace_help = "record a timeline of every rank; default: none"
    run.add_argument("--trace", metavar="FILE", help=trace_help)
    run.add_argument("--dry-run", action="store_true", help="show what would be started")
    module_help = "run a module, not a script"
    run.add_argument("-m", "--module", action="store_true", help=module_help)
    run.add_argument("script", help="the script, or with -m the module, to run")
    rest = run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else a missing script reads as if arguments were missing too


def _add_nodes(run: argparse.ArgumentParser) -> None:
    """Options for several nodes; those of torchrun that change nothing here are not shown."""
    for name, default, text in (
        ("--nnodes", 1, "number of nodes"),
        ("--node-rank", 0, "the index of this node"),
    ):
        text += "; default: %(default)s"
        run.add_argument(name, type=int, default=default, metavar="N", help=text)
    run.add_argument(
        "--master-addr",
        metavar="ADDRESS",
        help=f"address of rank 0; default: {LOOPBACK}, or of several nodes that of the first "
        "one's default route",
    )
    run.add_argument(
        "--master-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of rank 0; default: by launch id, and where nodes meet the same one always",
    )
    run.add_argument(
        "--rdzv-endpoint", type=endpoint_of, metavar="HOST:PORT", help="both in one; default: none"
    )
    for name, settings in TOKEN_OPTIONS.items():
        run.add_argument(name, **settings)  # type: ignore[arg-type]
    launch_id_help = "name of the launch; default: random, or that of the first node"
    run.add_argument("--launch-id", "--rdzv-id", metavar="ID", help=launch_id_help)
    run.add_argument("--rdzv-backend", choices=("c10d", "static"), help=argparse.SUPPRESS)
    run.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts")
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number(text)


PATIENCE_OPTION: dict[str, Any] = {
    "type": _seconds,
    "metavar": "SECONDS",
    "help": "for how long a silent rank or host, such as a suspended laptop, is borne; the same on "
    "every node; default: the variable DRUMLINE_PATIENCE, or 1.25 to 5 by what is silent",
}


def endpoint_of(text: str) -> tuple[str, int]:
    """The address and port of "host:port"; port 0 if there is none, as in "fd00::5"."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or host_addresses.is_ipv6(text):
        host, port = text, "0"
    host, is_number = host.strip("[]"), port.isascii() and port.isdigit()
    if not (host and is_number and int(port) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words up to the script, with torchrun's underscores as dashes; and the script's own.

    argparse would drop a `--` among the script's.
    """
    index = 1
    while index < len(arguments) and arguments[index].startswith("-"):
        is_alone = _stands_alone(_dashed(arguments[index])) or _is_option(arguments[index + 1 :])
        index += 1 if is_alone else 2
    words = [_dashed(word) for word in arguments[:index]] + list(arguments[index : index + 1])
    return words, list(arguments[index + 1 :])


def _dashed(word: str) -> str:
    """--node_rank=1 as --node-rank=1."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def _is_option(words: Sequence[str]) -> bool:
    """True if the first of the words, if there is one, can only be an option, unlike -1."""
    return bool(words) and words[0].startswith("-") and words[0].lstrip("-")[:1].isalpha()


def _stands_alone(word: str) -> bool:
    """True if no value of this option follows as another word, as in `-n2` but not in `-n 2`."""
    has_value = "=" in word if word.startswith("--") else len(word) > 2
    return word in OPTIONS_WITHOUT_VALUE or has_value


def with_token(job: Job, options: argparse.Namespace) -> Job:
    """The job of several nodes with its token; on the first node also with its address, and the
    command for those that join it, which have that command, too.

    options: token, of one that was read before, or as of TOKEN_OPTIONS; command_line, master_addr
    and rdzv_endpoint. Raises ValueError without a token, or where this node has several
    addresses and no default route.
    """
    is_given = options.master_addr or getattr(options, "rdzv_endpoint", None)
    if job.node_rank == 0:
        address = job.master_addr if is_given else _address_for_others()
        job = replace(job, master_addr=address)
    elif not is_given:
        raise ValueError(f"node {job.node_rank} needs --master-addr ADDRESS, of the first node")
    port = job.master_port or ports.NODES_PORT
    place = job.master_addr if port == ports.NODES_PORT else endpoint(job.master_addr, port)
    token, command = getattr(options, "token", None), options.command_line
    if token is None:  # what it runs was not told to it by the first
        command = command if job.node_rank == 0 else ()
        token = launch_token.of_node(
            job.node_rank == 0, options.token_file, options.insecure, f"drumline join {place}"
        )
    return replace(job, token=token, command=command)


def _address_for_others() -> str:
    """The address of this node on its default route, or its only one."""
    addresses = host_addresses.routable_addresses()
    families = [*map(host_addresses.is_ipv6, addresses)]
    if not families or families.count(families[0]) > 1:
        raise ValueError(
            f"this first node has {len(addresses)} addresses, of which the others must reach one, "
            f"so nothing was started: name it by --master-addr ADDRESS "
            f"({', '.join(addresses) or 'none is up'})."
        )
    return addresses[0]


def token_to_join(options: argparse.Namespace) -> LaunchToken:
    """The token of a launch that runs elsewhere. There is no going without: it gives commands."""
    return launch_token.of_node(False, options.token_file, is_insecure=None)
