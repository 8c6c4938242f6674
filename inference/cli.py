"""The command line.

python -m inference plan --model DIR --memory 8GiB 8GiB 16GiB
python -m inference generate --model DIR -n 2 --prompt "Once upon"
python -m inference run -n 2 script.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import launcher
from inference.checkpoint import read_config
from inference.errors import InferenceError
from inference.layout import cache_nbytes, layout, model_class, skeleton, with_cache
from inference.load import checkpoint_dtype, nbytes
from inference.plan import DeviceMap, Layout, plan, readable
from inference.script import generate_text, run_script


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (InferenceError, launcher.LaunchError) as error:
        print(f"python -m inference: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1) or 1


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m inference", allow_abbrev=False)
    commands = whole.add_subparsers(required=True)
    _plan_options(commands.add_parser("plan", help="show who would hold what; loads no weight"))
    _generate_options(commands.add_parser("generate", help="generate text over several ranks"))
    _run_options(commands.add_parser("run", help="run a transformers script over several ranks"))
    return whole


def _plan_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=show_plan)
    command.add_argument("--model", type=Path, required=True, metavar="DIR")
    command.add_argument(
        "--memory", nargs="+", required=True, metavar="SIZE", help="room of each rank, as 8GiB"
    )
    command.add_argument("--ranks", type=int, metavar="N", help="so many with the same memory")
    command.add_argument("--device-map", default="auto", metavar="MAP")
    command.add_argument("--dtype", metavar="NAME")
    command.add_argument("--batch", type=int, default=1, metavar="N")
    command.add_argument("--length", type=int, default=0, metavar="TOKENS", help="cached, for each")
    command.add_argument("--bandwidth", default="20GB", metavar="SIZE", help="memory read a second")
    command.add_argument("--hop", type=float, default=100.0, metavar="MICROSECONDS")


def _generate_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=generate)
    command.add_argument("--model", required=True, metavar="DIR")
    command.add_argument("-n", "--ranks", type=int, default=1, metavar="N")
    command.add_argument("--prompt", required=True, metavar="TEXT")
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    command.add_argument("--seed", type=int, metavar="N", help="sample; greedy if not given")
    command.add_argument("--memory", nargs="+", default=[], metavar="SIZE", help="room of each")


def _run_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=run)
    command.add_argument("-n", "--ranks", type=int, default=1, metavar="N")
    command.add_argument("script", help="one that calls from_pretrained(..., device_map='auto')")
    command.add_argument("arguments", nargs=argparse.REMAINDER)


def show_plan(options: argparse.Namespace) -> int:
    """Print the device map as a picture, and what a token would cost."""
    config = read_config(options.model)
    dtype = checkpoint_dtype(options.dtype, config)
    parts = layout(skeleton(model_class(config), config, dtype))
    cache = cache_nbytes(config, dtype, options.batch, options.length)
    memory = options.memory * (options.ranks or 1) if len(options.memory) == 1 else options.memory
    room = {(rank, "cpu"): nbytes(size) for rank, size in enumerate(memory)}
    chosen = plan(with_cache(parts, cache), room, options.device_map)
    print(chosen)
    print(summary(parts, chosen, cache, options))
    return 0


def summary(parts: Layout, chosen: DeviceMap, cache: int, options: argparse.Namespace) -> str:
    """Hops, room that is left, and an upper bound of the speed: weights read once per token."""
    hops = len(chosen.ranks) if len(chosen.ranks) > 1 else 0
    left = sum(room - chosen.used(place) for place, room in chosen.room.items())
    read_s = parts.nbytes / nbytes(options.bandwidth)
    rate = options.batch / (read_s + hops * options.hop * 1e-6)
    return (
        f"{readable(parts.nbytes)} of weights, {readable(cache * len(parts.layers))} of cache "
        f"({options.batch} x {options.length} tokens), {readable(left)} left over\n"
        f"{hops} hops a token; at most {rate:.1f} tokens/s at {options.bandwidth}/s and "
        f"{options.hop:g} us a hop"
    )


def generate(options: argparse.Namespace) -> int:
    arguments = (
        options.model,
        options.prompt,
        options.max_new_tokens,
        options.seed,
        options.memory or None,
    )
    return _on_ranks(generate_text, options.ranks, arguments)


def run(options: argparse.Namespace) -> int:
    return _on_ranks(run_script, options.ranks, (options.script, options.arguments))


def _on_ranks(work: object, ranks: int, arguments: tuple[object, ...]) -> int:
    """Here if this process is a rank already, or is to be the only one; else on new ranks."""
    assert callable(work)
    if launcher.current().world_size > 1 or ranks == 1:
        work(*arguments)
    else:
        launcher.launch(work, nprocs=ranks, args=arguments)
    return 0
