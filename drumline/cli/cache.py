"""`drumline cache`: the weights that came from other machines and are kept on this one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from drumline.checkpoint.disk_cache.weight_cache import CachedCheckpoint, WeightCache
from drumline.core.device_map import format_nbytes
from launcher.cli import CommandParser


def parser(prog: str = "drumline") -> argparse.ArgumentParser:
    top = CommandParser(prog=prog)
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    text = "list or delete the weights that came from other machines and are kept on this one"
    cache = commands.add_parser("cache", help=text, description=text)
    clear = "delete all of them, except what a launch is loading from now"
    cache.add_argument("--clear", action="store_true", help=clear)
    return top


def main(arguments: Sequence[str], prog: str = "drumline") -> int:
    """List the cache, or clear it first; always 0."""
    options = parser(prog).parse_args(arguments)
    cache = WeightCache()
    if options.clear:
        print(f"{format_nbytes(cache.clear())} deleted")
    kept = cache.checkpoints()
    for checkpoint in reversed(kept):
        print(_line(checkpoint))
    nbytes = sum(checkpoint.nbytes for checkpoint in kept)
    limit = format_nbytes(cache.limit_nbytes)
    print(f"{format_nbytes(nbytes)} of at most {limit} in {cache.folder}")
    return 0


def _line(checkpoint: CachedCheckpoint) -> str:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.last_used))
    in_use = ", in use now" if checkpoint.is_in_use else ""
    return f"{format_nbytes(checkpoint.nbytes):>10}  {day}  {checkpoint.name}{in_use}"
