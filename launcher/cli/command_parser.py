"""The parsers of all commands: errors that name the nearest option, exit codes, completion."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any

import launcher

NEAR = 0.6  # of SequenceMatcher.ratio(): as difflib.get_close_matches


class CommandParser(argparse.ArgumentParser):
    """A parser of one command: an error shows the usage of that command, and the nearest name."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = args or ()
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> Any:
        names = [name for action in self._actions for name in action.option_strings]
        words = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        super().error(message + _did_you_mean((word for word in words if word != "--"), names))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _did_you_mean([str(value)], [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, error.message + hint) from error


class VersionAction(argparse.Action):
    """`--version`: the version of the installed distribution, looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"drumline {launcher.__version__}")
        parser.exit()


def _did_you_mean(words: Iterable[str], names: Sequence[str]) -> str:
    """The name that is nearest to the first of the words that is none; empty if none is near.

    Near to a word is also a name that begins like it: --nproc-per-node to --nprocs.
    """
    from difflib import SequenceMatcher  # not needed by a launch

    for word in words:
        if word not in names:
            likeness, nearest = max(
                (SequenceMatcher(None, word, part).ratio(), name)
                for name in names
                for part in (name, name[: len(word)])
            )
            if likeness >= NEAR:
                return f" (did you mean {nearest}?)"
    return ""


def completing_command() -> str | None:
    """The command on a line that a shell completes by argcomplete; None in any other process."""
    if "_ARGCOMPLETE" not in os.environ:
        return None
    return (os.environ.get("COMP_LINE", "").split() + ["", ""])[1]


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell, and exit. Returns if argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)
