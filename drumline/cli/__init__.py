"""The command line: `drumline`, and `python -m drumline`.

drumline run -n 4 train.py --steps 10
drumline doctor
drumline trace out.json --png out.png
drumline check --backend ./libvendor.so -n 4
drumline plan --model DIR --memory 8GiB 8GiB 16GiB
drumline generate --model DIR -n 2 --prompt "Once upon"
drumline bench --model DIR -n 2 --batch 8
drumline serve --model DIR -n 2
drumline top
drumline auto -n 2 script.py
drumline join 10.0.0.1
drumline cache

run, doctor and trace are the launcher's own commands, check is the communicator's. A command
imports only its own modules, so that `drumline run` starts as fast as `python -m launcher run`.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

import launcher
from drumline.cli import command_options
from launcher.cli import (
    CommandParser,
    VersionAction,
    complete,
    completing_command,
    configure_logging,
)

DELEGATED = {
    "run": ("launcher.cli", "start a script once per rank"),
    "doctor": ("launcher.cli", "check this machine"),
    "trace": ("launcher.cli", "summarise, join or draw traces"),
    "join": ("drumline.cli.join", "run here what the first machine of a launch runs"),
    "cache": ("drumline.cli.cache", "list or delete weights from other machines"),
    "check": ("communicator.cli", "run the conformance check of a backend"),
}
"""Commands with a parser of their own, most of the layers below: the module of each, its help."""
DESCRIPTION = "Start ranks, check this machine, and run one model over the devices of every rank."
USER_ERRORS = ("CheckpointError", "DrumlineError", "PlanError", "RefusedUse")
INTERRUPTED_CODE = 130  # 128 + SIGINT, as shells report it
EPILOG = """\
exit codes: 0 done; 1 it could not be done, and why is printed; 2 wrong usage; 130 interrupted;
if ranks were started, that of the rank that failed first"""


def main(arguments: Sequence[str] | None = None, prog: str = "drumline") -> int:
    """Run a command; return the exit code. arguments: those of the process if not given."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if (command := completing_command()) is not None:
        complete(_parser_of(command, prog))
    if arguments and arguments[0] in DELEGATED:
        module, _ = DELEGATED[arguments[0]]
        return int(importlib.import_module(module).main(arguments, prog))
    options = parser(prog).parse_args(arguments)
    options.command_line = tuple(arguments)
    return run_command(options, prog)


def parser(prog: str = "drumline") -> argparse.ArgumentParser:
    """The parser of all commands. A test holds the list of options: they are few on purpose."""
    top = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    top.add_argument("--version", action=VersionAction, nargs=0, help="print the version")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    for name, (_, text) in DELEGATED.items():
        commands.add_parser(name, help=text, add_help=False)
    for command in command_options.COMMANDS:
        options = commands.add_parser(command.name, help=command.help, epilog=EPILOG)
        options.set_defaults(command=command)
        for names, settings in command.options:
            options.add_argument(*names, **settings)
    return top


def _parser_of(command: str, prog: str) -> argparse.ArgumentParser:
    """The parser that knows the options of this command."""
    if command in DELEGATED:
        module, _ = DELEGATED[command]
        return importlib.import_module(module).parser(prog)  # type: ignore[no-any-return]
    return parser(prog)


def run_command(options: argparse.Namespace, prog: str) -> int:
    """Run the command of the options; the exit code."""
    from coordinator import DrumlineError  # run, doctor and trace do without
    from drumline import model_packages

    # Shells start background jobs with SIGINT ignored; sent to a command, it is meant for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        configure_logging()
        model_packages.require(*options.command.packages)
        options.command.run(options)
    except (DrumlineError, launcher.LaunchInfoError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except launcher.LaunchError as error:
        print(f"{prog}: {_describe(error, options.command)}", file=sys.stderr)
        return error.exit_code or 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED_CODE
    return 0


def _describe(error: launcher.LaunchError, command: command_options.Command) -> str:
    """The error of the first failed rank alone if the user can fix it; otherwise the whole report.

    The script of `auto` is the user's, so all of its traceback matters.
    """
    first = next(iter(error.failures), None)
    if first and first.type in USER_ERRORS and command.name != "auto":
        return first.message
    return str(error)
