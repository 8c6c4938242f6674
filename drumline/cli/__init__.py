"""The command line.

python -m drumline plan --model DIR --memory 8GiB 8GiB 16GiB
python -m drumline generate --model DIR -n 2 --prompt "Once upon"
python -m drumline bench --model DIR -n 2 --batch 8
python -m drumline serve --model DIR -n 2
python -m drumline run -n 2 script.py

Each command is a function of this package first. Started as ranks by torchrun, mpiexec or another
launcher, a command runs on those ranks; otherwise -n starts them here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import launcher
from drumline.checkpoint.config_files import read_config
from drumline.cli.bench import bench
from drumline.cli.generate import generate_text
from drumline.cli.run_script import run_script
from drumline.core.device_map import DeviceMap, ModelProfile, format_nbytes
from drumline.errors import DrumlineError, PlanError
from drumline.planner.cost_model import PassShape, estimate, ring_passes, uniform_speeds
from drumline.planner.model_profile import (
    build_on_meta,
    cache_nbytes,
    decode_profile,
    estimate_workspace_nbytes,
    hidden_width,
    model_class,
    profile_model,
    with_cache,
)
from drumline.planner.plan import plan
from drumline.serving.http_server import serve
from drumline.strategies.load import checkpoint_dtype, nbytes

MENDABLE = ("CheckpointError", "DrumlineError", "PlanError")
INTERRUPTED_CODE = 130  # 128 and SIGINT, as shells have it


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except DrumlineError as error:
        print(f"python -m drumline: {error}", file=sys.stderr)
        return 1
    except launcher.LaunchError as error:
        told = str(error) if options.command is run else in_short(error)
        print(f"python -m drumline: {told}", file=sys.stderr)
        return error.exit_code or 1
    except KeyboardInterrupt:
        print("python -m drumline: stopped", file=sys.stderr)
        return INTERRUPTED_CODE


def in_short(error: launcher.LaunchError) -> str:
    """What the user can mend, without the traceback of our code; other errors whole."""
    first = next(iter(error.failures), None)
    if first and first.type in MENDABLE:
        return first.message
    return str(error)


def parser() -> argparse.ArgumentParser:
    """The options are few on purpose, and held by a test."""
    whole = argparse.ArgumentParser(prog="python -m drumline", allow_abbrev=False)
    commands = whole.add_subparsers(required=True)
    _plan_options(commands.add_parser("plan", help="show who would hold what; loads no weight"))
    _generate_options(commands.add_parser("generate", help="generate text over several ranks"))
    _bench_options(commands.add_parser("bench", help="time prompts and tokens over several ranks"))
    _serve_options(commands.add_parser("serve", help="answer requests as OpenAI's API does"))
    _run_options(commands.add_parser("run", help="run a transformers script over several ranks"))
    return whole


def _plan_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=show_plan)
    command.add_argument("--model", type=Path, required=True, metavar="DIR")
    _memory_option(command, required=True)
    command.add_argument("--ranks", type=_from(1), metavar="N", help="so many with the same memory")
    command.add_argument("--device-map", default="auto", metavar="MAP")
    command.add_argument("--dtype", metavar="NAME")
    command.add_argument("--batch", type=_from(1), default=1, metavar="N")
    command.add_argument(
        "--length", type=_from(0), default=0, metavar="TOKENS", help="cached, for each"
    )
    command.add_argument(
        "--bandwidth", type=_speed, default="20GB", metavar="SIZE", help="memory read a second"
    )
    command.add_argument("--hop", type=_from(0, float), default=100.0, metavar="MICROSECONDS")


def _model_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, metavar="DIR")
    command.add_argument("-n", "--ranks", type=_from(1), default=1, metavar="N")
    _memory_option(command, required=False)


def _memory_option(command: argparse.ArgumentParser, required: bool) -> None:
    text = "room of each rank, as 8GiB; one size is that of every rank"
    command.add_argument(
        "--memory", nargs="+", required=required, type=_size, metavar="SIZE", help=text
    )


def _from(least: int, kind: type = int) -> Callable[[str], Any]:
    """The type of numbers that are not below `least`."""

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least} on")
        return value

    number.__name__ = kind.__name__
    return number


def _size(text: str) -> str:
    try:
        nbytes(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _speed(text: str) -> str:
    if nbytes(_size(text)) < 1:
        raise argparse.ArgumentTypeError(f"at {text} a second nothing is ever read")
    return text


def _seed(text: str) -> int:
    if not -(1 << 63) <= int(text) < 1 << 64:  # as torch takes them
        raise argparse.ArgumentTypeError(f"{text} has more than the 64 bits of a seed")
    return int(text)


def _port(text: str) -> int:
    if int(text) not in range(1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is no port; they end at 65535")
    return int(text)


def _generate_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=generate)
    _model_options(command)
    command.add_argument(
        "--prompt", required=True, metavar="TEXT", help="a dash reads the standard input"
    )
    command.add_argument("--max-new-tokens", type=_from(1), default=64, metavar="N")
    command.add_argument("--seed", type=_seed, metavar="N", help="sample; greedy if not given")


def _bench_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=time_model)
    _model_options(command)
    command.add_argument("--batch", type=_from(1), default=1, metavar="N")
    command.add_argument("--prompt-tokens", type=_from(1), default=128, metavar="N")
    command.add_argument("--new-tokens", type=_from(2), default=64, metavar="N")


def _serve_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=serve_model)
    _model_options(command)
    command.add_argument("--host", default="127.0.0.1", metavar="ADDRESS")
    command.add_argument("--port", type=_port, default=8000, metavar="N", help="0 takes a free one")
    command.add_argument("--api-key-file", metavar="FILE", help="holds what clients must know")
    command.add_argument("--max-length", type=_from(2), metavar="TOKENS", help="prompt and answer")
    command.add_argument("--max-running", type=_from(1), default=16, metavar="N", help="at a time")
    command.add_argument("--max-waiting", type=_from(1), default=64, metavar="N")


def _run_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=run)
    command.add_argument("-n", "--ranks", type=_from(1), default=1, metavar="N")
    command.add_argument("script", help="one that calls from_pretrained(..., device_map='auto')")
    command.add_argument("arguments", nargs=argparse.REMAINDER)


def show_plan(options: argparse.Namespace) -> int:
    """Print the device map as a picture, and what a token would cost."""
    config = read_config(options.model)
    dtype = checkpoint_dtype(options.dtype, config)
    model = build_on_meta(model_class(config), config, dtype)
    parts = profile_model(model)
    tokens = (config, dtype, options.batch, options.length)
    cache, workspace_nbytes = cache_nbytes(*tokens), estimate_workspace_nbytes(*tokens)
    memory = _memory(options, options.ranks or len(options.memory))
    room = {(rank, "cpu"): nbytes(size) for rank, size in enumerate(memory or [])}
    speeds = uniform_speeds(room, nbytes=nbytes(options.bandwidth), hop_s=options.hop * 1e-6)
    step = PassShape(options.batch, hidden_width(config), dtype.itemsize)
    whole = with_cache(parts, cache, workspace_nbytes)
    chosen = plan(whole, room, options.device_map, speeds=speeds, step=step)
    passed = decode_profile(model, whole)
    names = {part.name for part in (*passed.others, *passed.layers) if part.nbytes}
    route = [chosen.places[name][0] for name, _ in model.named_modules() if name in names]
    step = dataclasses.replace(step, ring_passes=ring_passes(route))
    rate = estimate(passed, chosen, speeds, step).tokens_a_second
    print(chosen)
    print(summary(parts, chosen, cache, step.ring_passes * len(memory or []), rate, options))
    return 0


def summary(
    parts: ModelProfile,
    chosen: DeviceMap,
    cache: int,
    hops: int,
    rate: float,
    options: argparse.Namespace,
) -> str:
    """Hops, room that is left, and an upper bound of the speed: weights and cache are read."""
    left = sum(room - chosen.used(place) for place, room in chosen.room.items())
    return (
        f"{format_nbytes(parts.nbytes)} of weights, "
        f"{format_nbytes(cache * len(parts.layers))} of cache "
        f"({options.batch} x {options.length} tokens), {format_nbytes(left)} left over\n"
        f"{hops} hops a token; at most {rate:.1f} tokens/s at {options.bandwidth}/s and "
        f"{options.hop:g} us a hop"
    )


def generate(options: argparse.Namespace) -> int:
    memory = _checked(options)
    prompt = options.prompt
    if prompt == "-" and launcher.current().rank == 0:  # which alone looks at it
        prompt = sys.stdin.read().removesuffix("\n")
    given = (options.model, prompt, options.max_new_tokens, options.seed, memory)
    return _on_ranks(generate_text, options.ranks, given)


def time_model(options: argparse.Namespace) -> int:
    memory = _checked(options)
    sizes = (options.batch, options.prompt_tokens, options.new_tokens)
    return _on_ranks(bench, options.ranks, (options.model, *sizes, memory))


def serve_model(options: argparse.Namespace) -> int:
    memory = _checked(options)
    where = (options.host, options.port, options.api_key_file)
    limits = (options.max_length, options.max_running, options.max_waiting)
    return _on_ranks(serve, options.ranks, (options.model, *where, memory, *limits))


def run(options: argparse.Namespace) -> int:
    script = Path(options.script)
    if not (script / "__main__.py" if script.is_dir() else script).exists():
        raise DrumlineError(f"{options.script} is not there, so nothing was started.")
    return _on_ranks(run_script, options.ranks, (options.script, options.arguments))


def _checked(options: argparse.Namespace) -> list[str] | None:
    """The room of every rank, if it is given; and what is wrong, before any rank is started."""
    world_size = launcher.current().world_size
    if world_size == 1 < options.ranks:
        read_config(options.model)  # on this machine, which all ranks will share
    return _memory(options, max(world_size, options.ranks))


def _memory(options: argparse.Namespace, num_ranks: int) -> list[str] | None:
    given: list[str] | None = options.memory
    if given is None or len(given) == num_ranks:
        return given
    if len(given) == 1:
        return given * num_ranks
    raise PlanError(
        f"--memory has {len(given)} sizes for {num_ranks} ranks, so it is not clear who has what; "
        "give one for each, or one for all."
    )


def _on_ranks(work: object, ranks: int, arguments: tuple[object, ...]) -> int:
    """Here if this process is a rank already, or is to be the only one; else on new ranks."""
    assert callable(work)
    if launcher.current().world_size > 1 or ranks == 1:
        work(*arguments)
    else:
        launcher.launch(work, nprocs=ranks, args=arguments, preload=["drumline.cli"])
    return 0
